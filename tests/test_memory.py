"""Bytes of a state, against arithmetic and against the arrays themselves."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from spectra_optax import (
    Companded,
    FullMomentum,
    LeafRules,
    Spectrum,
    compress_state,
    memory_table,
    spectra_adamw,
    state_bytes,
)

MATRIX = {"kernel": jax.ShapeDtypeStruct((8192, 4096), jnp.float32)}
MIB = 2**20


@pytest.mark.parametrize(
    ("momentum", "mib", "per_parameter"),
    [
        (FullMomentum(), 128.16, 4.005),
        (Spectrum(), 16.06, 0.6),
        (Spectrum(keep=1 / 8), 8.06, 0.3),
        (Spectrum(values=Companded()), 8.56, 0.27),
    ],
)
def test_state_of_a_large_matrix(momentum, mib, per_parameter):
    assert round(state_bytes(optax.adamw(1e-3), MATRIX) / MIB, 2) == 256.00
    found = state_bytes(spectra_adamw(1e-3, momentum=momentum), MATRIX)
    assert found <= mib * MIB
    assert found <= per_parameter * 8192 * 4096


def test_a_table_counts_every_byte_once():
    params = {
        "emb": {"embedding": jnp.ones((1000, 64))},
        "count": jnp.ones((40, 48)),  # a parameter named like a field of the state
        "bias": jnp.ones(3),
    }
    tx = spectra_adamw(1e-3, momentum=Spectrum(mask="energy"))
    table = memory_table(tx, params)
    assert table.bytes == state_bytes(tx, params) == sum(x.nbytes for x in jax.tree.leaves(tx.init(params)))
    rows = {row.path: row for row in table.rows}
    factored, energies = 4 * (1000 + 64), 4 * 33
    assert rows["emb/embedding"].bytes == factored + 2 * 1000 * 16 + 4 * 16 + energies
    assert rows["count"].bytes == 4 * (40 + 48) + 2 * 10 * 48 + 4 * 10 + 4 * 21
    assert rows["bias"].bytes == rows["bias"].reference == 24


def test_a_table_says_why():
    params = {"head": jnp.ones((64, 64)), "thin": jnp.ones((64, 8)), "stack": jnp.ones((3, 64, 64))}
    tx = spectra_adamw(1e-3, leaves=LeafRules(dense=lambda path: path == "head"))
    reasons = {row.path: row.reason for row in memory_table(tx, params).rows}
    assert reasons == {
        "head": "dense: named by the rules",
        "thin": "dense: side 8 is below min_dim 32",
        "stack": "matrix 64 x 64 in a batch of 3",
    }


def test_any_optimizer_and_any_boxes_can_be_counted():
    params = nnx.state(nnx.Linear(64, 128, rngs=nnx.Rngs(0)), nnx.Param)
    for tx in (optax.adafactor(1e-3), optax.contrib.muon(1e-3), optax.sgd(1e-3, momentum=0.9), spectra_adamw(1e-3)):
        table = memory_table(tx, params)
        assert table.bytes == state_bytes(tx, params)
        assert [row.path for row in table.rows] == ["bias", "kernel"]


@pytest.mark.parametrize(
    "tx",
    [
        optax.lbfgs(),
        optax.sm3(1e-3),
        optax.flatten(optax.adam(1e-3)),
        optax.lookahead(optax.sgd(1e-3, momentum=0.9), 5, 0.5),
        compress_state(optax.adam(1e-3), mu=Companded(), nu=Companded("unsigned")),
    ],
)
def test_whatever_the_state_looks_like_every_byte_is_counted(tx):
    params = {"a/b": jnp.ones((64, 64)), "a": {"b": jnp.ones((64, 32))}}
    arguments = optax.LookaheadParams.init_synced(params) if tx.init.__qualname__.startswith("lookahead") else params
    assert memory_table(tx, arguments).bytes == state_bytes(tx, arguments)


def test_one_array_is_a_leaf():
    table = memory_table(optax.adam(1e-3), jnp.ones((64, 64)))
    assert table.shared == 4
    assert [row.bytes for row in table.rows] == [2 * 4 * 64 * 64]


def test_a_table_asked_for_twice_says_the_same():
    tx = spectra_adamw(1e-3)
    assert state_bytes(tx, MATRIX) == memory_table(tx, MATRIX).bytes
    assert memory_table(tx, MATRIX).rows[0].reason == "matrix 8192 x 4096"


def test_a_table_is_text():
    text = str(memory_table(spectra_adamw(1e-3), MATRIX))
    assert "268,435,456" in text
    assert "0.267 bytes per parameter" in text
