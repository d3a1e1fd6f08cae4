"""Bytes per parameter while training, by what holds them, from shapes alone.

python examples/benchmarks/bytes_per_parameter.py
"""

import jax
import jax.numpy as jnp
import optax
from rich.console import Console
from rich.table import Table

from spectra_optax import (
    Companded,
    FullMomentum,
    Spectrum,
    Wavelet,
    compress_state,
    flash_adamw,
    flash_lion,
    foam_adamw,
    gwt_adafactor,
    gwt_adamw,
    spectra_adamw,
    split_master_weights,
    state_bytes,
)

ROWS, COLS = 8192, 4096
BFLOAT16 = Spectrum()  # its coefficients

# name: (optimizer, dtype of weights and gradients)
OPTIMIZERS = {
    "optax.adamw": (optax.adamw(1e-3), "float32"),
    "optax.adafactor, no momentum": (optax.adafactor(1e-3), "float32"),
    "compress_state(optax.adamw)": (
        compress_state(optax.adamw(1e-3), mu=Companded(), nu=Companded("unsigned")),
        "float32",
    ),
    "compress_state(optax.adamw, nu 4 bits)": (
        compress_state(optax.adamw(1e-3), mu=Companded(), nu=Companded("unsigned", bits=4)),
        "float32",
    ),
    "spectra_adamw, FullMomentum()": (spectra_adamw(1e-3, momentum=FullMomentum()), "float32"),
    "spectra_adamw": (spectra_adamw(1e-3), "float32"),
    "spectra_adamw, Spectrum()": (spectra_adamw(1e-3, momentum=BFLOAT16), "float32"),
    "gwt_adamw, foam_adamw": (gwt_adamw(1e-3), "float32"),
    "gwt_adamw, Wavelet(level=3)": (gwt_adamw(1e-3, wavelet=Wavelet(level=3)), "float32"),
    "gwt_adafactor": (gwt_adafactor(1e-3), "float32"),
    "compress_state(foam_adamw)": (
        compress_state(foam_adamw(1e-3), mu=Companded(), nu=Companded("unsigned")),
        "float32",
    ),
    "flash_adamw": (flash_adamw(1e-3), "bfloat16"),
    "flash_sgd, flash_lion": (flash_lion(1e-3), "bfloat16"),
    "split_master_weights(compress_state(foam_adamw))": (
        split_master_weights(compress_state(foam_adamw(1e-3), mu=Companded(), nu=Companded("unsigned"))),
        "bfloat16",
    ),
    "split_master_weights(spectra_adamw)": (split_master_weights(spectra_adamw(1e-3)), "bfloat16"),
    "split_master_weights(spectra_adamw), Spectrum()": (
        split_master_weights(spectra_adamw(1e-3, momentum=BFLOAT16)),
        "bfloat16",
    ),
}


def main() -> None:
    """Prints a table for one large matrix."""
    table = Table("optimizer", "weights", "correction", "gradient", "state", "together")
    for name, (tx, dtype) in OPTIMIZERS.items():
        params = {"kernel": jax.ShapeDtypeStruct((ROWS, COLS), dtype)}
        numbers = ROWS * COLS
        width = jnp.dtype(dtype).itemsize
        state = jax.eval_shape(tx.init, params)
        correction = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(getattr(state, "correction", ()))) / numbers
        held = state_bytes(tx, params) / numbers - correction
        cells = (width, correction, width, held, width + correction + width + held)
        table.add_row(name, *(f"{cell:.3f}".rstrip("0").rstrip(".") for cell in cells))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
