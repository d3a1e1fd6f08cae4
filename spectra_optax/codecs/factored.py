"""A matrix of second moments from its row and column means: `[r, c]` numbers in `r + c`.

For a nonnegative matrix `V`, `V ~ row col^T / mean(row)` with `row` and `col` the means over columns and rows is the
rank-1 approximation of least generalised Kullback-Leibler divergence (Shazeer & Stern 2018, arXiv:1804.04235). Both
means are linear in `V`, so an average of them over time is the average of `V`, factored.

Everything is held as a **root** mean square, which has the range of the gradients themselves: 1e-20 squared is no
float32, and neither is 1e20 squared.

Bytes per parameter: `4 (r + c) / (r c)`. Shapes: `[..., r, c]`, leading axes are batches.
"""

import jax
import jax.numpy as jnp

_SMALLEST, _LARGEST = 1e-20, 1e28  # mean squares between these lose nothing in float32


def row_col_rms(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Root mean squares of each row `[..., r]` and of each column `[..., c]` of `x` `[..., r, c]`, in float32.

    Exact to rounding for entries of any float32 magnitude. Matrices are first scaled by a power of two, which is exact,
    but only where squares would leave the range of float32: usually `x` is read once.
    """
    row, col = _mean_squares(x)
    total = jnp.mean(row, axis=-1)
    in_range = jnp.all((total > _SMALLEST) & (total < _LARGEST))
    return jax.lax.cond(in_range, lambda _: (jnp.sqrt(row), jnp.sqrt(col)), _scaled_rms, x)


def rms(x: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """Root mean square over axes, which stay with length 1, without leaving the range of `x`."""
    largest = jnp.max(jnp.abs(x), axis=axis, keepdims=True)
    scaled = x / jnp.where(largest > 0, largest, 1.0)
    return largest * jnp.sqrt(jnp.mean(jnp.square(scaled), axis=axis, keepdims=True))


def average(old: jax.Array, new: jax.Array, decay: jax.Array) -> jax.Array:
    """The root of an exponential average of squares: `sqrt(decay old^2 + (1 - decay) new^2)`."""
    return jnp.hypot(jnp.sqrt(decay) * old, jnp.sqrt(1.0 - decay) * new)


def inverse_root(row: jax.Array, col: jax.Array, eps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Row and column factors of `1 / sqrt(V)`, `V = row^2 col^2 / mean(row^2)`, from root mean squares.

    `eps` is relative: it is added to rows and columns in units of the matrix's own root mean square, so that the result
    does not depend on the gradients' scale. A matrix of zeros has factors 0.
    """
    total = rms(row, -1)
    return reciprocal(row + eps * total), reciprocal(col * reciprocal(total) + eps * (total > 0))


def reciprocal(x: jax.Array) -> jax.Array:
    """`1 / x` for positive `x`, 0 for 0."""
    return jnp.where(x > 0, 1.0 / jnp.where(x > 0, x, 1.0), 0.0)


def _mean_squares(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    squares = jnp.real(x * jnp.conj(x)) if jnp.iscomplexobj(x) else jnp.square(x)
    return tuple(jnp.mean(squares, axis=axis).astype(jnp.float32) for axis in (-1, -2))


def _scaled_rms(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    largest = jnp.max(jnp.abs(x), axis=(-2, -1), keepdims=True).astype(jnp.float32)
    exponent = jnp.clip(jnp.frexp(largest)[1], -126, 126)  # 2^exponent and its inverse are normal numbers
    row, col = _mean_squares(x * jnp.ldexp(jnp.ones_like(largest), -exponent).astype(largest.dtype))
    scale = jnp.ldexp(jnp.ones_like(largest), exponent)[..., 0]
    return jnp.sqrt(row) * scale, jnp.sqrt(col) * scale
