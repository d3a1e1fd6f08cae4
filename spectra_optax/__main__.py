"""`python -m spectra_optax` is the command `spectra-optax`."""

from spectra_optax.cli import main

main()
