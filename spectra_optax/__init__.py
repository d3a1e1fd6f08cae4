"""Optimizers for JAX that train as well as AdamW in a fraction of its memory, as ordinary Optax transformations."""

from importlib.metadata import version

from spectra_optax.checkpoints import check_stored_state as check_stored_state
from spectra_optax.checkpoints import checkpoint_contents as checkpoint_contents
from spectra_optax.codecs.codec import Codec as Codec
from spectra_optax.codecs.companding import Companded as Companded
from spectra_optax.codecs.factored import Factored as Factored
from spectra_optax.codecs.spectrum import Spectrum as Spectrum
from spectra_optax.codecs.wavelet import Wavelet as Wavelet
from spectra_optax.conversion import convert_state as convert_state
from spectra_optax.flash import flash_adam as flash_adam
from spectra_optax.flash import flash_adamw as flash_adamw
from spectra_optax.flash import flash_lion as flash_lion
from spectra_optax.flash import flash_sgd as flash_sgd
from spectra_optax.fused_step import fused_step as fused_step
from spectra_optax.gradient_release import gradient_release as gradient_release
from spectra_optax.health import state_health as state_health
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
from spectra_optax.norm_clip import ExactClip as ExactClip
from spectra_optax.norm_clip import LaggedClip as LaggedClip
from spectra_optax.norm_clip import LaggedClipState as LaggedClipState
from spectra_optax.optimizers import FullMomentum as FullMomentum
from spectra_optax.optimizers import spectra_adamw as spectra_adamw
from spectra_optax.planning import plan as plan
from spectra_optax.state_layout import state_sharding as state_sharding
from spectra_optax.transforms.block_clip import clip_by_block_rms as clip_by_block_rms
from spectra_optax.transforms.compress_state import CompressedState as CompressedState
from spectra_optax.transforms.compress_state import compress_state as compress_state
from spectra_optax.transforms.factored_rms import (
    FactoredRmsState as FactoredRmsState,
)
from spectra_optax.transforms.factored_rms import (
    scale_by_factored_rms as scale_by_factored_rms,
)
from spectra_optax.transforms.folded_adam import FoamState as FoamState
from spectra_optax.transforms.folded_adam import scale_by_foam as scale_by_foam
from spectra_optax.transforms.spectral_momentum import (
    SpectralMomentumState as SpectralMomentumState,
)
from spectra_optax.transforms.spectral_momentum import (
    scale_by_spectral_momentum as scale_by_spectral_momentum,
)
from spectra_optax.transforms.split_weights import SplitWeightsState as SplitWeightsState
from spectra_optax.transforms.split_weights import master_weights as master_weights
from spectra_optax.transforms.split_weights import split_master_weights as split_master_weights
from spectra_optax.transforms.split_weights import with_master_weights as with_master_weights
from spectra_optax.transforms.wavelet_adam import GwtState as GwtState
from spectra_optax.transforms.wavelet_adam import scale_by_gwt as scale_by_gwt
from spectra_optax.transforms.wavelet_subspace import WaveletSubspaceState as WaveletSubspaceState
from spectra_optax.transforms.wavelet_subspace import in_wavelet_subspace as in_wavelet_subspace
from spectra_optax.wavelets import foam_adamw as foam_adamw
from spectra_optax.wavelets import gwt_adafactor as gwt_adafactor
from spectra_optax.wavelets import gwt_adamw as gwt_adamw

__version__ = version("spectra-optax")
