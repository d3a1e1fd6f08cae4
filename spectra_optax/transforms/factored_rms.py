"""Divides a gradient by the root of its factored second moment.

    nu   <- b2 nu + (1 - b2) |g|^2,  held as the means of its rows and columns
    nu_ij ~ row_i col_j / mean(row)
    u    <- g / sqrt(nu / (1 - b2^t)),  |u| at most 1 / sqrt(1 - b2)

The bound is Adam's own: a full `nu` is never below `(1 - b2) |g|^2`, the last gradient's share of it, while the product
of a small row and a small column can be. A leaf that is no matrix keeps its full second moment.

State: `4 (r + c)` bytes for a matrix `[r, c]` (0.0015 bytes per parameter at 8192 x 4096), 4 bytes per parameter
for a dense leaf. Source: Shazeer & Stern 2018 (arXiv:1804.04235).
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spectra_optax import arguments
from spectra_optax.arguments import Scalar
from spectra_optax.codecs import factored
from spectra_optax.leaves import Leaf, LeafRules
from spectra_optax.lift import lift
from spectra_optax.lifted_readings import ArrayReading, lifted
from spectra_optax.readings import ADAM, EMA, Numbers, Parts, counted, readable
from spectra_optax.sharding import Slot, slot
from spectra_optax.transforms.block_clip import excess, squares


class FactoredRmsState(NamedTuple):
    """State of `scale_by_factored_rms`; every array is float32 whatever the gradients' dtype."""

    count: jax.Array  # int32 []
    rms_row: Any  # [..., r] root of the averaged mean square of each row
    rms_col: Any  # [..., c] the same of each column
    rms: Any  # the parameter's shape: root of the averaged square, of dense leaves
    settings: jax.Array  # uint8 [n], what the state was built with


def _slots(leaf: Leaf) -> dict[str, Slot]:
    if leaf.is_matrix:
        return factored.Factored().slots(leaf)
    return {} if leaf.kind == "empty" else {"rms": slot(leaf.shape, jnp.float32, range(len(leaf.shape)))}


class Factors(NamedTuple):
    """What a matrix `[..., r, c]` of gradients is multiplied by."""

    row: jax.Array  # [..., r, 1]
    col: jax.Array  # [..., 1, c]


def factors(row, col, unbias: jax.Array, b2: jax.Array, eps: jax.Array, rms_row, rms_col):
    """The factors for gradients of these root mean squares, and the new statistics."""
    row, col = factored.average(rms_row, row, b2), factored.average(rms_col, col, b2)
    return _inverse(unbias, row, col, eps), {"rms_row": row, "rms_col": col}


def _inverse(unbias: jax.Array, row: jax.Array, col: jax.Array, eps: jax.Array) -> Factors:
    inverse_row, inverse_col = factored.inverse_root(row, col, eps)
    return Factors((unbias * inverse_row)[..., None], inverse_col[..., None, :])


def scaled(x: jax.Array, by: Factors, b2: jax.Array) -> jax.Array:
    """Normalised gradients."""
    return bounded(x * by.row * by.col, jax.lax.rsqrt(1.0 - b2))


def unbiasing(count: jax.Array, b2: jax.Array) -> jax.Array:
    """The root of the share of an average that was filled after `count` steps."""
    return jnp.sqrt(1.0 - b2**count)


def _matrix(leaf: Leaf, unbias: jax.Array, g: jax.Array, b2: jax.Array, eps: jax.Array, rms_row, rms_col):
    x = leaf.to_matrix(g)
    by, statistics = factors(*factored.row_col_rms(x), unbias, b2, eps, rms_row, rms_col)
    return leaf.from_matrix(scaled(x, by, b2)), statistics


def _dense(unbias: jax.Array, g: jax.Array, b2: jax.Array, eps: jax.Array, rms: jax.Array):
    rms = factored.average(rms, jnp.abs(g).astype(jnp.float32), b2)
    return g * (unbias * _inverse_dense(rms, eps)), {"rms": rms}


def _inverse_dense(rms: jax.Array, eps: jax.Array) -> jax.Array:
    # Over the last axis only: biases of stacked layers are vectors of their own.
    size = factored.rms(rms, -1, keepdims=True) if rms.ndim else rms
    return factored.reciprocal(rms + eps * size)


def bounded(u: jax.Array, bound: jax.Array) -> jax.Array:
    """Numbers of at most this magnitude, complex ones of their own direction."""
    if jnp.iscomplexobj(u):
        return u * (bound / jnp.maximum(jnp.abs(u), bound))
    return jnp.clip(u, -bound, bound)


@functools.partial(jax.jit, static_argnames="leaf")
def _step(leaf: Leaf, count: jax.Array, g: jax.Array, *, b2: Scalar, eps: Scalar, **held: jax.Array):
    if leaf.kind == "empty":
        return g, held
    b2, eps = jnp.asarray(b2, jnp.float32), jnp.asarray(eps, jnp.float32)
    unbias = unbiasing(count, b2)
    return _matrix(leaf, unbias, g, b2, eps, **held) if leaf.is_matrix else _dense(unbias, g, b2, eps, **held)


def _second_moment(leaf: Leaf, numbers: Numbers, held: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    return (factored.Factored().decode(leaf, held) if leaf.is_matrix else jnp.square(held["rms"]),)


def _statistics(leaf: Leaf, numbers: Numbers, count: jax.Array, nu: jax.Array) -> dict[str, jax.Array]:
    nu = jnp.real(nu)
    return factored.Factored().encode(leaf, nu, count) if leaf.is_matrix else {"rms": jnp.sqrt(nu)}


def _averages(leaf: Leaf, found: Parts, numbers: Numbers) -> Parts:
    """The average of normalised gradients from that of gradients, or the reverse."""
    ema, mu, nu = (EMA, "ema", leaf.path), (ADAM, "mu", leaf.path), (ADAM, "nu", leaf.path)
    if nu not in found or (mu in found) == (ema in found):
        return {}
    old, new, rule = (mu, ema, _normalised) if mu in found else (ema, mu, _denormalised)
    count = counted(found, FactoredRmsState.__name__, jnp.zeros([], jnp.int32))
    return {new: lambda: rule(leaf, numbers, count, found[old](), found[nu]())}


@functools.partial(jax.jit, static_argnames="leaf")
def _normalised(leaf: Leaf, numbers: Numbers, count: jax.Array, mu: jax.Array, nu: jax.Array) -> jax.Array:
    """An average of gradients as one of normalised gradients, as if `nu` had been the same all along."""
    by = _divisor(leaf, numbers, count, nu)
    if not leaf.is_matrix:
        return mu * by.row
    u = scaled(leaf.to_matrix(mu), by, numbers["b2"])
    return leaf.from_matrix(u / excess(jnp.mean(squares(u, 1.0), axis=(-2, -1), keepdims=True)))


@functools.partial(jax.jit, static_argnames="leaf")
def _denormalised(leaf: Leaf, numbers: Numbers, count: jax.Array, ema: jax.Array, nu: jax.Array) -> jax.Array:
    by = _divisor(leaf, numbers, count, nu)
    root = factored.reciprocal(by.row) * factored.reciprocal(by.col)
    return leaf.from_matrix(leaf.to_matrix(ema) * root) if leaf.is_matrix else ema * root


def _divisor(leaf: Leaf, numbers: Numbers, count: jax.Array, nu: jax.Array) -> Factors:
    """The factors that a second moment, not yet corrected for its bias, stands for; of a dense leaf all in one."""
    held, unbias = _statistics(leaf, numbers, count, nu), unbiasing(count, numbers["b2"])
    if leaf.is_matrix:
        return _inverse(unbias, held["rms_row"], held["rms_col"], numbers["eps"])
    return Factors(unbias * _inverse_dense(held["rms"], numbers["eps"]), jnp.ones([]))


_READING = ArrayReading(((ADAM, "nu"),), _second_moment, _statistics)


def scale_by_factored_rms(
    b2: Scalar = 0.999, eps: Scalar = 1e-8, *, leaves: LeafRules = LeafRules()
) -> optax.GradientTransformationExtraArgs:
    """Divides gradients by the root of a second moment that is held as row and column means.

    Each matrix `[r, c]` of a leaf `[..., r, c]` has its own; leading axes are batches. Statistics are float32 and
    survive gradients of any magnitude from 1e-20 to 1e20, and zeros: a gradient of 0 gives an update of 0. One gradient
    that is not finite makes its whole matrix, and the statistics, not finite: guard with `optax.apply_if_finite`.

    Args:
      b2: decay of the second moment, in [0, 1); bias-corrected.
      eps: added to the denominator, in units of the matrix's (or the vector's) own root mean square.
      leaves: which leaves are matrices.

    Returns:
      An Optax transformation with state `FactoredRmsState`. Its updates have the gradients' dtype and are at most
      `1 / sqrt(1 - b2)` in magnitude.

    Raises:
      ValueError: if `b2` is outside [0, 1) or `eps` is not above 0.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from spectra_optax import scale_by_factored_rms
      >>> params = {"kernel": jnp.ones((64, 128))}
      >>> tx = scale_by_factored_rms(b2=0.99)
      >>> state = tx.init(params)
      >>> state.rms_row["kernel"].shape, state.rms_col["kernel"].shape
      ((64,), (128,))
      >>> updates, state = tx.update({"kernel": jnp.full((64, 128), 1e-20)}, state)
      >>> print(f"{updates['kernel'].mean():.3f}")
      1.000

    References:
      Shazeer and Stern, Adafactor, 2018: https://arxiv.org/abs/1804.04235
    """
    b2, eps = arguments.decay_rate("b2", b2), arguments.positive("eps", eps)
    tx = lift(FactoredRmsState, _slots, functools.partial(_step, b2=b2, eps=eps), leaves, "factored_rms")
    return readable(tx, lifted(FactoredRmsState, leaves, _READING, _averages), b2=b2, eps=eps)
