"""Whether a model trains on a TPU slice or a GPU, and with how much memory per chip, before anything is rented."""

from spectra_optax.planning.decoder import Decoder as Decoder
from spectra_optax.planning.optimizers import Released as Released
from spectra_optax.planning.plans import Plan as Plan
from spectra_optax.planning.plans import plan as plan
from spectra_optax.planning.presets import PRESETS as PRESETS
from spectra_optax.planning.presets import read_config as read_config
from spectra_optax.planning.training import Parts as Parts
from spectra_optax.planning.training import Trainable as Trainable
