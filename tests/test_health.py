"""Telemetry against states whose answer is known by hand, for every public optimizer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spectra_optax import (
    Companded,
    FullMomentum,
    LeafRules,
    compress_state,
    flash_adamw,
    flash_lion,
    flash_sgd,
    foam_adamw,
    gwt_adafactor,
    gwt_adamw,
    spectra_adamw,
    split_master_weights,
    state_health,
)

SMALL = LeafRules(min_dim=4)
PARAMS = {"kernel": jnp.ones((8, 4)), "bias": jnp.ones(4)}
CODES = compress_state(
    optax.adamw(1e-3), leaves=SMALL, mu=Companded(group=4, scale="power_of_two"), nu=Companded("unsigned", group=4)
)
OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "codes": CODES,
    "flash_adamw": flash_adamw(1e-3, leaves=SMALL),
    "flash_lion": flash_lion(1e-3, leaves=SMALL),
    "flash_sgd": flash_sgd(1e-3, momentum=0.9, leaves=SMALL),
    "spectra_adamw": spectra_adamw(1e-3, leaves=SMALL),
    "spectra_adamw, full": spectra_adamw(1e-3, momentum=FullMomentum("bfloat16"), leaves=SMALL),
    "gwt_adamw": gwt_adamw(1e-3, leaves=SMALL),
    "gwt_adafactor": gwt_adafactor(1e-3, leaves=SMALL),
    "foam_adamw": foam_adamw(1e-3, leaves=SMALL),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fresh_state_is_all_zeros_and_finite(name):
    tx = OPTIMIZERS[name]
    health = state_health(tx, tx.init(PARAMS), PARAMS)
    assert health.pop("nonfinite") == 0
    for key, value in health.items():
        leaf, measure = key.split("/")[0], key.split("/")[-1]
        assert leaf in PARAMS
        assert value == (1 if measure == "zeros" else 0), key
    assert {key.split("/")[0] for key in health} == set(PARAMS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_one_gradient_that_is_not_finite_is_seen(name):
    tx = OPTIMIZERS[name]
    gradients = jax.tree.map(jnp.ones_like, PARAMS) | {"bias": jnp.array([1.0, 1.0, jnp.nan, 1.0])}
    _, state = jax.jit(tx.update)(gradients, tx.init(PARAMS), PARAMS)
    health = jax.jit(functools.partial(state_health, tx))(state, PARAMS)
    held = {key: int(x) for key, x in health.items() if key.endswith("nonfinite") and x and "/" in key}
    assert set(held.values()) == {1}
    assert all(key.startswith("bias/") for key in held)
    assert health["nonfinite"] == len(held)


def test_scales_and_codes_by_hand():
    """Groups of 4 along the rows of an 8 x 4 matrix: 2 x 4 scales."""
    state = CODES.init(PARAMS)
    adam = state.inner_state[0]
    mu = adam.mu | {
        "scales": adam.mu["scales"] | {"kernel": jnp.array([[127, -126, 0, 5], [-127, -128, 3, 3]], "int8")},
        "codes": adam.mu["codes"] | {"kernel": jnp.zeros((8, 4), "int8").at[:2].set(7)},
    }
    largest, smallest = float(jnp.finfo("float32").max), float(jnp.finfo("float32").tiny)
    nu = adam.nu | {
        "scales": adam.nu["scales"]
        | {"kernel": jnp.array([[0.0, smallest, largest, 1.0], [jnp.inf, jnp.nan, 1.0, 0.0]])},
        "codes": adam.nu["codes"] | {"kernel": jnp.ones((8, 4), "uint8")},
    }
    state = state._replace(inner_state=(adam._replace(mu=mu, nu=nu), *state.inner_state[1:]))
    health = {key: float(x) for key, x in state_health(CODES, state, PARAMS).items() if not key.startswith("bias")}
    assert health == {
        "nonfinite": 3,
        "kernel/mu/codes/zeros": 24 / 32,
        "kernel/mu/scales/zeros": 1 / 8,
        "kernel/mu/scales/saturated": 2 / 8,
        "kernel/mu/scales/nonfinite": 1,
        "kernel/nu/codes/zeros": 0,
        "kernel/nu/scales/zeros": 2 / 8,
        "kernel/nu/scales/saturated": 2 / 8,
        "kernel/nu/scales/nonfinite": 2,
    }


def test_corrections_and_bare_parameters():
    params = jnp.ones((8, 4), jnp.bfloat16)
    tx = split_master_weights(optax.sgd(1e-3))
    state = tx.init(params)
    state = state._replace(correction=state.correction.at[0].set(1))
    assert {key: float(x) for key, x in state_health(tx, state, params).items()} == {
        "nonfinite": 0,
        "correction/zeros": 7 / 8,
    }


def test_updates_against_the_dense_optimizer():
    rng = np.random.default_rng(0)
    gradients = jax.tree.map(lambda p: jnp.asarray(rng.standard_normal(p.shape), "float32"), PARAMS)
    dense = optax.adamw(1e-3, b2=0.99)
    for tx, low, high in (
        (dense, 1.0, 1.0),
        (optax.chain(dense, optax.scale(3.0)), 3.0, 3.0),
        (flash_adamw(1e-3, b2=0.99, leaves=SMALL), 0.97, 1.03),
    ):
        _, state = tx.update(gradients, tx.init(PARAMS), PARAMS)
        health = state_health(tx, state, PARAMS, gradients=gradients, reference=dense)
        for leaf in PARAMS:
            assert low - 1e-5 <= health[f"{leaf}/update_ratio"] <= high + 1e-5
    still = jax.tree.map(jnp.zeros_like, PARAMS)
    plain = optax.adam(1e-3)
    health = state_health(plain, plain.init(PARAMS), PARAMS, gradients=still, reference=plain)
    assert health["kernel/update_ratio"] == 1
    frozen = optax.chain(plain, optax.scale(0.0))
    health = state_health(frozen, frozen.init(PARAMS), PARAMS, gradients=gradients, reference=plain)
    assert health["kernel/update_ratio"] == 0


def test_what_is_refused():
    tx = OPTIMIZERS["spectra_adamw"]
    with pytest.raises(ValueError, match="only together"):
        state_health(tx, tx.init(PARAMS), PARAMS, gradients=PARAMS)
    with pytest.raises(ValueError, match="state and a state of tx do not match"):
        state_health(tx, OPTIMIZERS["gwt_adamw"].init(PARAMS), PARAMS)
