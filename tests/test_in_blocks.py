"""Gradients are cut into blocks first on TPUs: another program, the same numbers."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spectra_optax import Companded, compress_state, spectra_adamw

SHAPES = {"kernel": (2, 128, 48), "embedding": (96, 64)}
ADAMW_8_BITS = compress_state(optax.adamw(1e-2), mu=Companded(), nu=Companded("unsigned"))


def _trained(tx):
    rng = np.random.default_rng(0)
    draw = lambda: {name: jnp.asarray(rng.normal(size=shape), "float32") for name, shape in SHAPES.items()}
    params = draw()
    state, update = tx.init(params), jax.jit(tx.update)
    for _ in range(3):
        updates, state = update(draw(), state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("tx", [ADAMW_8_BITS, spectra_adamw(1e-2)])
def test_the_cut_for_tpus_changes_no_number(tx, monkeypatch):
    plain = _trained(tx)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    jax.clear_caches()  # of what was traced without the cut
    chex.assert_trees_all_close(_trained(tx), plain, rtol=1e-6, atol=1e-6)
    jax.clear_caches()


@pytest.mark.parametrize(
    ("name", "shape", "cuts"),
    [("kernel", (128, 48), 1), ("embedding", (96, 64), 1), ("ragged", (130, 33), 0), ("bias", (7,), 0)],
)
def test_gradients_are_cut_where_blocks_fill_them(name, shape, cuts, monkeypatch):
    params = {name: jnp.ones(shape, "bfloat16")}
    for backend, expected in (("cpu", 0), ("tpu", cuts)):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        tx = spectra_adamw(1e-2)  # built anew, or JAX remembers its program
        program = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
        assert str(program).count("optimization_barrier") == expected
