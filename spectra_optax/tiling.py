"""Optax transformations that know how to run part by part, and do so where the platform asks for it.

On TPUs XLA makes a pass of its own for every change of shape, so a state in blocks costs several times AdamW's traffic
there, and on GPUs for every product and every maximum; run on tiles it costs one pass.
"""

import optax

from spectra_optax import backend
from spectra_optax.locality import Local
from spectra_optax.parts import in_parts


class Tiled(optax.GradientTransformationExtraArgs):
    """An Optax transformation that can run on tiles of matrices.

    Attributes:
      plain: the same transformation without kernels.
      local: how it looks on tiles.
    """

    plain: optax.GradientTransformationExtraArgs
    local: Local | None = None


def tiled(plain: optax.GradientTransformation, local: Local) -> Tiled:
    """A transformation that runs on tiles where the platform asks for it."""
    plain = optax.with_extra_args_support(plain)

    def update(updates, state, params=None, **extra_args):
        if extra_args or params is None or not _helps(local):
            return plain.update(updates, state, params, **extra_args)
        return in_parts(plain, local, updates, state, params, apply=False)

    made = Tiled(plain.init, update)
    made.plain, made.local = plain, local
    return made


def _helps(local: Local) -> bool:
    """Whether a kernel is worth writing an update that XLA, on GPUs, would use where it computes it."""
    return backend.kernels() == "tpu" or (backend.kernels() == "gpu" and local.prepared is not None)


def local_of(tx: optax.GradientTransformation) -> Local | None:
    """How a transformation looks on tiles, if it is known."""
    return tx.local if isinstance(tx, Tiled) else None


def untiled(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """A transformation without kernels, for a place inside another one."""
    return tx.plain if isinstance(tx, Tiled) and tx.local is not None else tx
