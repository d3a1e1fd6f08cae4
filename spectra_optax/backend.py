"""Which compiler a program is written for: the one of this process, or the one that it is compiled for elsewhere."""

import contextlib
import contextvars
import functools
import importlib.util
import os
from collections.abc import Generator
from typing import Literal

import jax

OFF = "SPECTRA_OPTAX_KERNELS"  # environment variable; "off" leaves every step to XLA
_OLDEST = 8.0  # compute capability of NVIDIA's GPUs that Triton compiles for
_target: contextvars.ContextVar[str | None] = contextvars.ContextVar("target", default=None)


def name() -> str:
    """Its name: "cpu", "gpu" or "tpu"."""
    return _target.get() or jax.default_backend()


def devices() -> int:
    """How many there are for a program that does not say; elsewhere it must say."""
    return 1 if _target.get() else jax.device_count()


def kernels() -> Literal["tpu", "gpu"] | None:
    """The platform whose kernels matrices are run on; None where XLA's passes suffice, or there is no compiler."""
    if os.environ.get(OFF) == "off":
        return None
    match name():
        case "tpu":
            return "tpu"
        case "gpu" if _has_triton() and (_target.get() or _is_recent()):
            return "gpu"
    return None


@functools.cache
def _has_triton() -> bool:
    """Whether this JAX has Pallas's compiler for GPUs, which is to leave it some day."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


@functools.cache
def _is_recent() -> bool:
    """Whether this process's GPUs are NVIDIA's from Ampere on."""
    try:
        return all(float(device.compute_capability) >= _OLDEST for device in jax.local_devices())
    except (AttributeError, ValueError):  # AMD's are called gfx90a and the like
        return False


@contextlib.contextmanager
def compiling_for(backend: str) -> Generator[None]:
    """Traces what is in the context for another backend; JAX's traces for this one are forgotten, and those for it."""
    token = _target.set(backend)
    jax.clear_caches()
    try:
        yield
    finally:
        _target.reset(token)
        jax.clear_caches()
