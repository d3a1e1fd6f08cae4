"""The optimizers that can be asked for by name.

Each entry takes `(learning_rate, *, b1, b2, weight_decay, mask)`, as `optax.adamw` does.
"""

from functools import partial

import optax

from spectra_optax import FullMomentum, spectra_adamw


def _adafactor(learning_rate, *, b1, b2, weight_decay, mask) -> optax.GradientTransformation:
    """`optax.adafactor` without momentum, but with AdamW's weight decay, so that the two can be compared."""
    del b1, b2  # No momentum, and the decay of its second moment has a schedule of its own.
    return optax.chain(
        optax.scale_by_factored_rms(),
        optax.clip_by_block_rms(1.0),
        optax.add_decayed_weights(weight_decay, mask),
        optax.scale_by_learning_rate(learning_rate),
    )


OPTIMIZERS = {
    "adamw": optax.adamw,
    "spectra_adamw": spectra_adamw,
    "spectra_adamw_full": partial(spectra_adamw, momentum=FullMomentum()),
    "adafactor": _adafactor,
}


def optimizer_named(name: str):
    """The factory called `name`, or a `ValueError` that lists the accepted names."""
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}")
    return OPTIMIZERS[name]
