"""Finished optimizers, each a chain of the transformations below it.

SpectraAdamW on matrices, bytes of state per parameter in brackets:

    g -> g / sqrt(nu), nu factored      [4 (r + c) / (r c)]
      -> clipped to a root mean square of 1
      -> spectral momentum              [0.5 at a quarter of the coefficients in bfloat16]

The order matters: momentum that is lossy must come after the division by `sqrt(nu)`. Dense leaves are Adam in float32.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import optax

from spectra_optax import arguments
from spectra_optax.arguments import Scalar
from spectra_optax.codecs.spectrum import Spectrum
from spectra_optax.leaves import LeafRules
from spectra_optax.lift import aligned_mask, in_float32, labels
from spectra_optax.transforms.block_clip import clip_by_block_rms
from spectra_optax.transforms.factored_rms import scale_by_factored_rms
from spectra_optax.transforms.spectral_momentum import scale_by_spectral_momentum


# Frequencies without momentum pass at a quarter of its gain, so the best learning rate would be twice AdamW's. With this
# scale it is AdamW's own.
_SPECTRAL_SCALE = 2.0


@dataclasses.dataclass(frozen=True)
class FullMomentum:
    """Names momentum that is held whole: one number per parameter.

    Attributes:
      dtype: of the momentum: "float32", "bfloat16" or "float16".
    """

    dtype: str = "float32"

    def __post_init__(self):
        """Checks the settings."""
        arguments.choice("dtype", jnp.dtype(self.dtype).name, ("float32", "bfloat16", "float16"))
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)


def spectra_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    weight_decay: Scalar = 1e-4,
    mask: Any = None,
    momentum: Spectrum | FullMomentum = Spectrum(),
    leaves: LeafRules = LeafRules(),
) -> optax.GradientTransformationExtraArgs:
    """doc"""
    arguments.instance("momentum", momentum, Spectrum, FullMomentum)
    arguments.instance("leaves", leaves, LeafRules)
    b1, b2 = arguments.decay_rate("b1", b1), arguments.decay_rate("b2", b2)
    if isinstance(momentum, Spectrum):
        average = optax.chain(
            scale_by_spectral_momentum(b1, spectrum=momentum, leaves=leaves), optax.scale(_SPECTRAL_SCALE)
        )
    else:
        average = optax.ema(b1, accumulator_dtype=momentum.dtype)
    compact = optax.chain(scale_by_factored_rms(b2, eps, leaves=leaves), clip_by_block_rms(1.0, leaves=leaves), average)
    rules = {
        "matrix": compact,
        "embedding": compact,
        "dense": optax.scale_by_adam(b1, b2, eps),
        "empty": optax.identity(),
    }
    return in_float32(
        optax.chain(
            optax.partition(rules, labels(leaves)),
            optax.add_decayed_weights(weight_decay, aligned_mask(mask)),
            optax.scale_by_learning_rate(learning_rate),
        )
    )
