"""Clips the root mean square of each matrix.

    u <- u / max(1, rms(u) / threshold)

Each matrix `[r, c]` of a leaf `[..., r, c]` is a block of its own: layers that are stacked in one leaf never scale each
other, where `optax.clip_by_block_rms` takes the whole leaf. No state. Source: Shazeer & Stern 2018, section 6
(arXiv:1804.04235).
"""

import functools

import jax
import jax.numpy as jnp
import optax

from spectra_optax import arguments
from spectra_optax.arguments import Scalar
from spectra_optax.leaves import Leaf, LeafRules
from spectra_optax.lift import lift_stateless

_DOWN = 2.0**-32  # squares are taken this far down: only sizes from 1 threshold up matter, and those reach far


@functools.partial(jax.jit, static_argnames="leaf")
def _clip(leaf: Leaf, u: jax.Array, *, threshold: Scalar) -> jax.Array:
    if not leaf.is_matrix:
        return u
    x = leaf.to_matrix(u)
    return leaf.from_matrix(x / excess(jnp.mean(squares(x, threshold), axis=(-2, -1), keepdims=True)))


def squares(x: jax.Array, threshold: Scalar) -> jax.Array:
    """Squares relative to that of the threshold, far down."""
    return jnp.square(jnp.abs(x) * (_DOWN / threshold))


def excess(mean: jax.Array) -> jax.Array:
    """By how many times a root mean square exceeds the threshold, from 1, given the mean of `squares`."""
    return jnp.maximum(1.0, jnp.sqrt(mean) / _DOWN)


def clip_by_block_rms(
    threshold: Scalar = 1.0, *, leaves: LeafRules = LeafRules()
) -> optax.GradientTransformationExtraArgs:
    """Scales every matrix whose root mean square exceeds a threshold down to it.

    Args:
      threshold: the largest root mean square that passes unchanged, above 0.
      leaves: which leaves are matrices; the others pass unchanged.

    Returns:
      A stateless Optax transformation.

    Raises:
      ValueError: if `threshold` is not above 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from spectra_optax import clip_by_block_rms
      >>> stacked = jnp.stack([jnp.full((32, 32), 0.5), jnp.full((32, 32), 8.0)])
      >>> tx = clip_by_block_rms(1.0)
      >>> updates, _ = tx.update({"kernel": stacked}, tx.init({"kernel": stacked}))
      >>> print(updates["kernel"][:, 0, 0])
      [0.5 1. ]

    References:
      Shazeer and Stern, Adafactor, 2018: https://arxiv.org/abs/1804.04235
    """
    return lift_stateless(functools.partial(_clip, threshold=arguments.positive("threshold", threshold)), leaves)
