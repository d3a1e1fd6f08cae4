"""Optimizers for JAX that train as well as AdamW in a fraction of its memory, as ordinary Optax transformations."""

from importlib.metadata import version

from spectra_optax.codecs.codec import Codec as Codec
from spectra_optax.codecs.companding import Companded as Companded
from spectra_optax.codecs.factored import Factored as Factored
from spectra_optax.codecs.spectrum import Spectrum as Spectrum
from spectra_optax.leaves import LeafRules as LeafRules
from spectra_optax.memory import (
    MemoryRow as MemoryRow,
)
from spectra_optax.memory import (
    MemoryTable as MemoryTable,
)
from spectra_optax.memory import (
    memory_table as memory_table,
)
from spectra_optax.memory import (
    state_bytes as state_bytes,
)
from spectra_optax.optimizers import FullMomentum as FullMomentum
from spectra_optax.optimizers import spectra_adamw as spectra_adamw
from spectra_optax.transforms.block_clip import clip_by_block_rms as clip_by_block_rms
from spectra_optax.transforms.compress_state import CompressedState as CompressedState
from spectra_optax.transforms.compress_state import compress_state as compress_state
from spectra_optax.transforms.factored_rms import (
    FactoredRmsState as FactoredRmsState,
)
from spectra_optax.transforms.factored_rms import (
    scale_by_factored_rms as scale_by_factored_rms,
)
from spectra_optax.transforms.spectral_momentum import (
    SpectralMomentumState as SpectralMomentumState,
)
from spectra_optax.transforms.spectral_momentum import (
    scale_by_spectral_momentum as scale_by_spectral_momentum,
)

__version__ = version("spectra-optax")
