"""Settings every test runs under: eight CPU devices, strict shapes, no tolerated warnings, one fixed seed."""

import os

# Both are read once, when JAX first looks for devices, so they come before its import.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture
def key():
    return jax.random.key(0)
