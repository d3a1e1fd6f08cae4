"""Optimizers for JAX that train as well as AdamW in a fraction of its memory, as ordinary Optax transformations."""

from importlib.metadata import version

from spectra_optax.codecs.spectrum import Spectrum as Spectrum
from spectra_optax.leaves import LeafRules as LeafRules
from spectra_optax.memory import (
    MemoryRow as MemoryRow,
    MemoryTable as MemoryTable,
    memory_table as memory_table,
    state_bytes as state_bytes,
)
from spectra_optax.optimizers import FullMomentum as FullMomentum, spectra_adamw as spectra_adamw
from spectra_optax.transforms.block_clip import clip_by_block_rms as clip_by_block_rms
from spectra_optax.transforms.factored_rms import (
    FactoredRmsState as FactoredRmsState,
    scale_by_factored_rms as scale_by_factored_rms,
)
from spectra_optax.transforms.spectral_momentum import (
    SpectralMomentumState as SpectralMomentumState,
    scale_by_spectral_momentum as scale_by_spectral_momentum,
)

__version__ = version("spectra-optax")
