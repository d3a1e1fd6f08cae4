"""Which compiler a program is written for: the one of this process, or the one that it is compiled for elsewhere."""

import contextlib
import contextvars
from collections.abc import Generator

import jax

_target: contextvars.ContextVar[str | None] = contextvars.ContextVar("target", default=None)


def name() -> str:
    """Its name: "cpu", "gpu" or "tpu"."""
    return _target.get() or jax.default_backend()


def devices() -> int:
    """How many there are for a program that does not say; elsewhere it must say."""
    return 1 if _target.get() else jax.device_count()


def runs_kernels() -> bool:
    """Whether the platform needs kernels: XLA's passes suffice elsewhere."""
    return name() == "tpu"


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
