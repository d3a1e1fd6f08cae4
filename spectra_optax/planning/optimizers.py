"""The optimizers that a plan knows by name, with the dtype that parameters have under them.

Those in bfloat16 keep what completes their weights in the state: `split_master_weights`, which the flash ones contain.
"""

from collections.abc import Callable
from typing import NamedTuple

import optax

from spectra_optax.flash import flash_adamw, flash_lion
from spectra_optax.optimizers import spectra_adamw
from spectra_optax.transforms.split_weights import split_master_weights
from spectra_optax.wavelets import foam_adamw, gwt_adafactor, gwt_adamw

_RATE = 1e-3  # moves no byte


class Choice(NamedTuple):
    """An optimizer by name."""

    dtype: str
    make: Callable[[], optax.GradientTransformation]


class Released(NamedTuple):
    """An optimizer in a step that updates each layer as soon as its gradient is known, as `gradient_release` builds.

    Attributes:
      optimizer: a name, or an Optax transformation.
    """

    optimizer: str | optax.GradientTransformation


OPTIMIZERS = {
    "adamw": Choice("float32", lambda: optax.adamw(_RATE)),
    "adafactor": Choice("float32", lambda: optax.adafactor(_RATE)),
    "lion": Choice("float32", lambda: optax.lion(_RATE)),
    "spectra_adamw": Choice("bfloat16", lambda: split_master_weights(spectra_adamw(_RATE))),
    "flash_adamw": Choice("bfloat16", lambda: flash_adamw(_RATE)),
    "flash_lion": Choice("bfloat16", lambda: flash_lion(_RATE)),
    "gwt_adamw": Choice("bfloat16", lambda: split_master_weights(gwt_adamw(_RATE))),
    "gwt_adafactor": Choice("bfloat16", lambda: split_master_weights(gwt_adafactor(_RATE))),
    "foam_adamw": Choice("bfloat16", lambda: split_master_weights(foam_adamw(_RATE))),
}


def optimizer_named(name: str) -> Choice:
    """An optimizer by name.

    Raises:
      ValueError: if there is none of that name.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {name!r}.")
    return OPTIMIZERS[name]
