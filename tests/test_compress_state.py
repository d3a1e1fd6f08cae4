"""`compress_state` around Optax's own optimizers: they train as their dense selves do, in the bytes promised."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from sklearn.datasets import load_digits

from spectra_optax import (
    Companded,
    Factored,
    Spectrum,
    compress_state,
)

SIGNED, UNSIGNED = Companded(), Companded("unsigned")
SECOND, BOTH = {"nu": UNSIGNED}, {"mu": SIGNED, "nu": UNSIGNED}
STEPS = 150

# name: (optimizer, the fields that are compressed)
OPTAX = {
    "sgd momentum": (optax.sgd(0.1, momentum=0.9), {"trace": SIGNED}),
    "sgd nesterov": (optax.sgd(0.1, momentum=0.9, nesterov=True), {"trace": SIGNED}),
    "adam": (optax.adam(3e-3), BOTH),
    "adamw": (optax.adamw(3e-3, weight_decay=0.1), BOTH),
    "nadam": (optax.nadam(3e-3), BOTH),
    "radam": (optax.radam(3e-3), BOTH),
    "adabelief": (optax.adabelief(3e-3), BOTH),
    "adan": (optax.adan(3e-3), {"m": SIGNED, "v": SIGNED, "n": UNSIGNED}),
    "lion": (optax.lion(2e-3), {"mu": SIGNED}),
    "rmsprop": (optax.rmsprop(1e-3, momentum=0.9), {"nu": UNSIGNED, "trace": SIGNED}),
    "yogi": (optax.yogi(3e-3), BOTH),
    "lamb": (optax.lamb(1e-2), BOTH),
    "ademamix": (optax.contrib.ademamix(1e-3), {"m1": SIGNED, "m2": SIGNED, "nu": UNSIGNED}),
    "adopt": (optax.contrib.adopt(3e-3), BOTH),
    "muon": (optax.contrib.muon(1e-2), BOTH),
    "schedule_free": (optax.contrib.schedule_free_adamw(1e-2, warmup_steps=10), SECOND),
    "amsgrad": (optax.amsgrad(3e-3), BOTH | {"nu_max": UNSIGNED}),
    "sgd spectral": (optax.sgd(0.1, momentum=0.9), {"trace": Spectrum(keep=0.5, values=SIGNED)}),
    "adam factored": (optax.adam(3e-3), {"nu": Factored()}),
    "adam 4 bits": (optax.adam(3e-3), {"nu": Companded("unsigned", bits=4, rounding="stochastic")}),
    "adam powers of two": (
        optax.adam(3e-3),
        {
            "mu": Companded(scale="power_of_two"),
            "nu": Companded("unsigned", scale="power_of_two", rounding="stochastic"),
        },
    ),
}


@functools.cache
def digits():
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    x = jnp.asarray(data.data[order], jnp.float32) / 16.0
    return x, jnp.asarray(data.target[order])


def network(key):
    first, second, third = jax.random.split(key, 3)
    return {
        "in": {"kernel": jax.random.normal(first, (64, 96)) / 8, "bias": jnp.zeros(96)},
        "mid": {"kernel": jax.random.normal(second, (96, 64)) / 10, "bias": jnp.zeros(64)},
        "out": {"kernel": jax.random.normal(third, (64, 10)) / 8, "bias": jnp.zeros(10)},
    }


def loss_of(params, x, y):
    for name in ("in", "mid"):
        x = jax.nn.relu(x @ params[name]["kernel"] + params[name]["bias"][None])
    logits = x @ params["out"]["kernel"] + params["out"]["bias"][None]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, y))


SEEDS = 3


def trained(tx):
    """Final losses on the last 300 digits, one a seed of weights and batches."""
    x, y = digits()

    def run(key):
        def step(carry, key):
            params, state = carry
            rows = jax.random.randint(key, (64,), 0, 1497)
            gradient = jax.grad(loss_of)(params, x[rows], y[rows])
            updates, state = tx.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), None

        params = network(key)
        (params, _), _ = jax.lax.scan(step, (params, tx.init(params)), jax.random.split(key, STEPS))
        return loss_of(params, x[1497:], y[1497:])

    return np.asarray(jax.jit(functools.partial(jax.lax.map, run))(jax.random.split(jax.random.key(0), SEEDS)))


@pytest.mark.parametrize("name", OPTAX)
def test_trains_as_its_dense_self(name):
    """The loss ends within the spread of the dense optimizer's own seeds, which is what a batch order changes."""
    inner, codecs = OPTAX[name]
    dense, compact = trained(inner), trained(compress_state(inner, **codecs))
    assert dense.max() < 0.8, dense  # it learns at all: 2.3 at the start
    assert compact.mean() <= dense.mean() + max(dense.std(ddof=1), 0.02), (compact, dense)
