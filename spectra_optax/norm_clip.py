"""Clipping by the global norm for a step that never holds all gradients at once.

    g <- g max_norm / norm   where norm >= max_norm

The norm is over all gradients, and the first update is made before the last gradient exists. `ExactClip` goes through
the layers backwards twice, first for the norm. `LaggedClip` takes the norm of the step before, for free: a single large
gradient passes, and the step after it is clipped instead.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spectra_optax import arguments


@dataclasses.dataclass(frozen=True)
class ExactClip:
    """Names clipping by the global norm of this step's gradients, at the cost of a second backward pass.

    Attributes:
      max_norm: the largest norm that passes unchanged, above 0.
    """

    max_norm: float

    def __post_init__(self):
        """Checks the settings."""
        arguments.positive("max_norm", self.max_norm)


class LaggedClipState(NamedTuple):
    """State of a step with `LaggedClip`."""

    norm: jax.Array  # float32 [], of the last step's gradients; 0 before the first
    inner_state: Any  # the optimizer's


@dataclasses.dataclass(frozen=True)
class LaggedClip:
    """Names clipping by the global norm of the last step's gradients, which costs nothing; the first is not clipped.

    Attributes:
      max_norm: the largest norm that passes unchanged, above 0.
    """

    max_norm: float

    def __post_init__(self):
        """Checks the settings."""
        arguments.positive("max_norm", self.max_norm)

    def init(self, inner_state: Any) -> LaggedClipState:
        """The state of the step, around the optimizer's own."""
        return LaggedClipState(jnp.zeros([], jnp.float32), inner_state)


Clip = ExactClip | LaggedClip


def squares(gradients: Any) -> jax.Array:
    """The sum of all squared magnitudes, float32 `[]`."""
    wide = lambda g: jnp.abs(g).astype(jnp.float32)
    return sum((jnp.sum(jnp.square(wide(g))) for g in jax.tree.leaves(gradients)), jnp.zeros([], jnp.float32))


def clipped(gradients: Any, norm: jax.Array, max_norm: float) -> Any:
    """Gradients scaled as `optax.clip_by_global_norm` scales them."""
    scaled = lambda g: jnp.where(norm < max_norm, g, (g / norm.astype(g.dtype)) * max_norm)
    return jax.tree.map(scaled, gradients)
