"""A matrix of second moments from its row and column means: `[r, c]` numbers in `r + c`.

For a nonnegative matrix `V`, `V ~ row col^T / mean(row)` with `row` and `col` the means over columns and rows is the
rank-1 approximation of least generalised Kullback-Leibler divergence (Shazeer & Stern 2018, arXiv:1804.04235). Both
means are linear in `V`, so an average of them over time is the average of `V`, factored.

Everything is held as a **root** mean square, which has the range of the gradients themselves: 1e-20 squared is no
float32, and neither is 1e20 squared.

Bytes per parameter: `4 (r + c) / (r c)`. Shapes: `[..., r, c]`, leading axes are batches.
"""

import dataclasses
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from spectra_optax.leaves import Leaf
from spectra_optax.sharding import Slot, slot

ROW_SCALE, COL_SCALE = 2.0**40, 2.0**41  # that differ: XLA would compute the squares once for both and store them
_LARGE = 1e30  # far enough from the largest float32 for a sum below it to be complete
_TINY = 2.0**-126  # the smallest float32 that is not flushed to 0


@dataclasses.dataclass(frozen=True)
class Factored:
    """Names the factored form of second moments: root mean squares of rows and columns.

    As the form of Adam's `nu` it holds exactly the statistics of `scale_by_factored_rms`, because averages of rows and
    columns are linear; the update itself is divided by the new `nu`, in which the latest gradient is not factored yet.
    """

    @property
    def sign(self) -> Literal["unsigned"]:
        """Second moments are never below 0."""
        return "unsigned"

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays that hold a leaf."""
        return ("rms_row", "rms_col")

    def slots(self, leaf: Leaf) -> dict[str, Slot]:
        """The arrays that hold a matrix leaf."""
        (*batch, r, c), (*along, row, col) = leaf.matrix_shape, leaf.matrix_axes
        return {
            "rms_row": slot((*batch, r), jnp.float32, (*along, row)),
            "rms_col": slot((*batch, c), jnp.float32, (*along, col)),
        }

    def encode(self, leaf: Leaf, x: jax.Array, count: jax.Array) -> dict[str, jax.Array]:
        """The arrays for `x`, float32 of the leaf's shape and not below 0."""
        del count
        row, col = row_col_rms(leaf.to_matrix(jnp.sqrt(x)))
        return {"rms_row": row, "rms_col": col}

    def decode(self, leaf: Leaf, arrays: Mapping[str, jax.Array]) -> jax.Array:
        """The product of rows and columns, float32 of the leaf's shape."""
        row, col = arrays["rms_row"], arrays["rms_col"]
        row = row * reciprocal(rms(row, -1, keepdims=True))
        return leaf.from_matrix(jnp.square(row[..., :, None] * col[..., None, :]))


def row_col_rms(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Root mean squares of each row `[..., r]` and of each column `[..., c]` of `x` `[..., r, c]`, in float32."""
    return rms(x, -1, scale=ROW_SCALE), rms(x, -2, scale=COL_SCALE)


def rms(x: jax.Array, axis: int | tuple[int, ...], *, keepdims: bool = False, scale: float = ROW_SCALE) -> jax.Array:
    """Root mean square over axes, in float32, exact to rounding for magnitudes from 1e-28 to 1e28.

    Squares are taken of `x` scaled up and scaled down, in one pass, by powers of two; the sum that stayed in the range
    of float32 counts.
    """
    up, down = (jnp.mean(y, axis=axis, keepdims=keepdims).astype(jnp.float32) for y in squares(x, scale))
    return root(up, down, scale)


def squares(x: jax.Array, scale: float) -> tuple[jax.Array, jax.Array]:
    """Squares of `x` scaled up, and scaled down."""
    return jnp.square(_size(x) * scale), jnp.square(_size(x) * (1.0 / scale))


def _size(x: jax.Array) -> jax.Array:
    """What has the squares of `x`; real numbers as they are, because XLA would store the magnitudes for all sums."""
    return jnp.abs(x) if jnp.iscomplexobj(x) else x


def _total(row: jax.Array) -> jax.Array:
    """`rms(row, -1)` with its two sums in one reduction: XLA's CPU compiler makes fewer kernels of it."""
    up, down = jnp.mean(jnp.square(jnp.stack([row * ROW_SCALE, row * (1.0 / ROW_SCALE)])), axis=-1)
    return root(up, down, ROW_SCALE)


def root(up: jax.Array, down: jax.Array, scale: float) -> jax.Array:
    """The root mean square from that of numbers scaled up and that of numbers scaled down."""
    complete = up < _LARGE
    return jnp.sqrt(jnp.where(complete, up, down)) * jnp.where(complete, 1.0 / scale, scale)


def average(old: jax.Array, new: jax.Array, decay: jax.Array) -> jax.Array:
    """The root of an exponential average of squares: `sqrt(decay old^2 + (1 - decay) new^2)`."""
    return jnp.hypot(jnp.sqrt(decay) * old, jnp.sqrt(1.0 - decay) * new)


def inverse_root(row: jax.Array, col: jax.Array, eps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Row and column factors of `1 / sqrt(V)`, `V = row^2 col^2 / mean(row^2)`, from root mean squares.

    `eps` is relative: it is added to rows and columns in units of the matrix's own root mean square, so that the result
    does not depend on the gradients' scale. A matrix of zeros has a product of factors 0.
    """
    total = _total(row)[..., None]
    return 1.0 / jnp.maximum(row + eps * total, _TINY), total / jnp.maximum(col + eps * total, _TINY)


def reciprocal(x: jax.Array) -> jax.Array:
    """`1 / x` for positive `x`, 0 for 0."""
    return jnp.where(x > 0, 1.0 / jnp.where(x > 0, x, 1.0), 0.0)
