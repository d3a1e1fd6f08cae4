"""The optimizers that can be asked for by name.

Each entry takes `(learning_rate, *, b1, b2, weight_decay, mask)`, as `optax.adamw` does, and uses what it has use for.
"""

import functools
import inspect
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from spectra_optax import (
    Companded,
    FullMomentum,
    Spectrum,
    Wavelet,
    compress_state,
    flash_adam,
    flash_adamw,
    flash_lion,
    flash_sgd,
    foam_adamw,
    gwt_adafactor,
    gwt_adamw,
    spectra_adamw,
    split_master_weights,
)

MakeOptimizer = Callable[..., optax.GradientTransformation]
EIGHT_BITS = "8bit_"
# What Optax's states call their averages of gradients, and of squares.
SIGNED, UNSIGNED = ("mu", "trace", "m", "v", "m1", "m2"), ("nu", "nu_max", "n")


def adapted(factory: MakeOptimizer) -> MakeOptimizer:
    """A factory called with the hyperparameters that it takes; momentum is `b1` by another name."""
    accepted = inspect.signature(factory).parameters

    def make(learning_rate, *, b1, b2, weight_decay, mask):
        given = {"b1": b1, "b2": b2, "weight_decay": weight_decay, "mask": mask}
        if "b1" not in accepted:
            given["momentum"] = b1
        return factory(learning_rate, **{name: value for name, value in given.items() if name in accepted})

    return make


def in_8_bits(factory: MakeOptimizer) -> MakeOptimizer:
    """The same optimizer with every average in its state companded."""

    def make(*args, **kwargs):
        inner = factory(*args, **kwargs)
        state = jax.eval_shape(inner.init, jnp.zeros([]))
        has = lambda name: bool(optax.tree.get_all_with_path(state, name))
        signed = {name: Companded() for name in SIGNED if has(name)}
        unsigned = {name: Companded("unsigned") for name in UNSIGNED if has(name)}
        return compress_state(inner, **signed, **unsigned)

    return make


@functools.cache
def completing_weights(factory: MakeOptimizer) -> MakeOptimizer:
    """The same optimizer for 16-bit weights: in `split_master_weights`, unless it completes them by itself."""

    def make(*args, **kwargs):
        inner = factory(*args, **kwargs)
        state = jax.eval_shape(inner.init, jnp.zeros([], jnp.bfloat16))
        return inner if optax.tree.get_all_with_path(state, "correction") else split_master_weights(inner)

    return make


def adafactor(learning_rate, *, weight_decay, mask, min_dim: int = 128) -> optax.GradientTransformation:
    """`optax.adafactor` without momentum, but with AdamW's weight decay, so that the two can be compared."""
    return optax.chain(
        optax.scale_by_factored_rms(min_dim_size_to_factor=min_dim),
        optax.clip_by_block_rms(1.0),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


def _split_spectra_adamw(learning_rate, *, b1, b2, weight_decay, mask) -> optax.GradientTransformation:
    return split_master_weights(spectra_adamw(learning_rate, b1, b2, weight_decay=weight_decay, mask=mask))


def _foam_in_8_bits(learning_rate, *, b1, b2, weight_decay, mask) -> optax.GradientTransformation:
    inner = foam_adamw(learning_rate, b1, b2, weight_decay=weight_decay, mask=mask)
    return compress_state(inner, mu=Companded(), nu=Companded("unsigned"))


OPTIMIZERS = {
    "adamw": optax.adamw,
    "spectra_adamw": spectra_adamw,
    "spectra_adamw_full": functools.partial(spectra_adamw, momentum=FullMomentum()),
    "spectra_adamw_bfloat16": functools.partial(spectra_adamw, momentum=Spectrum()),
    "spectra_adamw_split": _split_spectra_adamw,
    "gwt_adamw": gwt_adamw,
    "gwt_adamw_level3": functools.partial(gwt_adamw, wavelet=Wavelet(level=3)),
    "gwt_adafactor": gwt_adafactor,
    "foam_adamw": foam_adamw,
    "foam_adamw_8bit": _foam_in_8_bits,
    "flash_adamw": flash_adamw,
    "flash_adam": flash_adam,
    "flash_lion": flash_lion,
    "flash_sgd": flash_sgd,
    "adafactor": adafactor,
}
NAMES = f"{', '.join(OPTIMIZERS)}, the name of any of Optax's, or that after {EIGHT_BITS!r} for a compressed state"


@functools.cache  # equal factories share a compiled step
def optimizer_named(name: str) -> MakeOptimizer:
    """The factory called `name`, or a `ValueError` that lists the accepted names."""
    if name in OPTIMIZERS:
        return adapted(OPTIMIZERS[name])
    plain = name.removeprefix(EIGHT_BITS)
    factory = getattr(optax, plain, None) or getattr(optax.contrib, plain, None)
    takes_rate = callable(factory) and "learning_rate" in inspect.signature(factory).parameters
    if not takes_rate:
        raise ValueError(f"optimizer must be one of {NAMES}; got {name!r}")
    return in_8_bits(adapted(factory)) if name.startswith(EIGHT_BITS) else adapted(factory)
