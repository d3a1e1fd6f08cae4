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
    LeafRules,
    Spectrum,
    compress_state,
    memory_table,
    scale_by_factored_rms,
    state_bytes,
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
    "adam 4 bits": (optax.adam(3e-3), {"nu": Companded("unsigned", bits=4)}),
    "adam powers of two": (
        optax.adam(3e-3),
        {
            "mu": Companded(scale="power_of_two"),
            "nu": Companded("unsigned", scale="power_of_two"),
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


QUICK = ("adamw", "lion")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in OPTAX])
def test_trains_as_its_dense_self(name):
    """The loss ends within the spread of the dense optimizer's own seeds, which is what a batch order changes."""
    inner, codecs = OPTAX[name]
    dense, compact = trained(inner), trained(compress_state(inner, **codecs))
    assert dense.max() < 0.8, dense  # it learns at all: 2.3 at the start
    assert compact.mean() <= dense.mean() + max(dense.std(ddof=1), 0.02), (compact, dense)


def test_bytes_are_those_of_the_codecs():
    params = {"kernel": jax.ShapeDtypeStruct((8192, 4096), jnp.float32)}
    n, adam = 8192 * 4096, optax.scale_by_adam()
    expected = {
        1 + 4 / 64 + 1 + 4 / 64: BOTH,
        1 + 1 / 64 + 4: {"mu": Companded(scale="power_of_two")},
        4 + 0.5 + 4 / 64: {"nu": Companded("unsigned", bits=4)},
        4 + 4 * (8192 + 4096) / n: {"nu": Factored()},
    }
    for per_parameter, codecs in expected.items():
        found = state_bytes(compress_state(adam, **codecs), params)
        assert 0 <= found - per_parameter * n < 1000  # counts and settings


def test_factored_nu_is_the_statistic_of_the_factored_rule():
    tx, rule = compress_state(optax.scale_by_rms(0.9), nu=Factored()), scale_by_factored_rms(0.9)
    params = {"kernel": jnp.ones((48, 40))}

    @jax.jit
    def run(key):
        def step(states, key):
            g = {"kernel": jax.random.normal(key, (48, 40)) * jnp.arange(1.0, 41.0)[None]}
            return tuple(t.update(g, s, params)[1] for t, s in zip((tx, rule), states, strict=True)), None

        return jax.lax.scan(step, (tx.init(params), rule.init(params)), jax.random.split(key, 20))[0]

    ours, theirs = run(jax.random.key(0))
    nu = optax.tree.get(ours, "nu")
    for name in ("rms_row", "rms_col"):
        np.testing.assert_allclose(nu[name]["kernel"], getattr(theirs, name)["kernel"], rtol=1e-5)


def test_leaves_named_small_or_complex_stay_dense():
    params = {
        "embedding": jnp.ones((64, 48)),
        "head": jnp.ones((48, 64)),
        "bias": jnp.ones(64),
        "thin": jnp.ones((64, 8)),
        "complex": jnp.ones((64, 64), jnp.complex64),
    }
    rules = LeafRules(dense=lambda path: path == "head")
    state = compress_state(optax.adam(1e-3), leaves=rules, **BOTH).init(params)
    nu = optax.tree.get(state, "nu")
    held = {name for name, x in nu["codes"].items() if not isinstance(x, optax.MaskedNode)}
    assert held == {"embedding"}
    for name in params.keys() - held:
        assert nu["dense"][name].shape == params[name].shape


def run_adam(tx, gradients):
    """Updates of every step, for `gradients` `[t, r, c]`."""
    params = {"kernel": jnp.zeros(gradients.shape[1:])}

    @jax.jit
    def run(gradients):
        def step(state, g):
            updates, state = tx.update({"kernel": g}, state, params)
            return state, updates["kernel"]

        return jax.lax.scan(step, tx.init(params), gradients)[1]

    return np.asarray(run(gradients))


def test_a_coordinate_without_gradient_never_moves():
    """Also beside neighbours of its group that are huge."""
    gradients = 1e3 * jax.random.normal(jax.random.key(0), (100, 64, 32))
    updates = run_adam(compress_state(optax.scale_by_adam(), **BOTH), gradients.at[:, 5].set(0.0))
    assert not updates[:, 5].any()


def test_history_and_then_silence_comes_to_rest():
    """A coordinate with history, 1000 zero gradients, neighbours a hundred times larger: no code it could stick to."""
    gradients = jax.random.normal(jax.random.key(0), (1010, 64, 32))
    gradients = gradients.at[:, :5].set(0.01 * gradients[:, :5]).at[10:, :5].set(0.0)
    dense = run_adam(optax.scale_by_adam(), gradients)[10:, :5]
    compact = run_adam(compress_state(optax.scale_by_adam(), **BOTH), gradients)[10:, :5]
    assert np.abs(compact).max() <= 3 * np.abs(dense).max()
    assert not compact[-500:].any()
    stuck = {"mu": Companded(rounding="nearest"), "nu": UNSIGNED}
    drifting = run_adam(compress_state(optax.scale_by_adam(), **stuck), gradients)[10:, :5]
    assert np.abs(drifting[-500:].sum(axis=0)).max() > 0.05  # and it would never end


@pytest.mark.parametrize("size", [1e-3, 1e-5, 3e-6, 1e-6, 1e-7])
@pytest.mark.parametrize("b2", [0.95, 0.999])
def test_update_size_does_not_depend_on_the_gradients_unit(size, b2):
    """The root mean square of updates is within 2 % of float32's, where half-precision scales are off by 8 times."""
    gradients = size * (0.1 + jax.random.normal(jax.random.key(0), (1000, 64, 32)))
    dense, compact = (
        np.sqrt(np.mean(run_adam(tx, gradients)[-100:] ** 2))
        for tx in (optax.scale_by_adam(b2=b2), compress_state(optax.scale_by_adam(b2=b2), **BOTH))
    )
    np.testing.assert_allclose(compact, dense, rtol=0.02)


def test_bfloat16_gradients_are_averaged_in_float32():
    tx = compress_state(optax.scale_by_adam(b2=0.99), **BOTH)
    params = {"kernel": jnp.ones((64, 64), jnp.bfloat16)}
    step = jax.jit(lambda state: tx.update(params, state, params))
    state = tx.init(params)
    for _ in range(3):
        updates, state = step(state)
    assert updates["kernel"].dtype == jnp.bfloat16
    scales = optax.tree.get(state, "nu")["scales"]["kernel"]
    assert scales.dtype == jnp.float32
    np.testing.assert_allclose(scales, 1 - 0.99**3, rtol=1e-5)


def test_init_builds_no_full_state():
    """Not even for a moment: the compiled `init` needs less than one float32 copy of the parameters."""
    tx = compress_state(optax.adam(1e-3), **BOTH)
    params = {"kernel": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
    memory = jax.jit(tx.init).lower(params).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 2**20


def test_what_does_not_start_at_zero_starts_right():
    """Yogi's second moment starts at 1e-6, not at 0."""
    state = compress_state(optax.yogi(1e-3), nu=UNSIGNED).init({"kernel": jnp.ones((64, 64))})
    nu = optax.tree.get(state, "nu")
    np.testing.assert_allclose(nu["scales"]["kernel"], 1e-6, rtol=1e-6)
    assert (nu["codes"]["kernel"] == 255).all()


ADAM, SGD = optax.adam(1e-3), optax.sgd(1e-3, momentum=0.9)
BAD = {
    "nothing named": (ADAM, {}, ValueError, "at least one field"),
    "no such field": (ADAM, {"trace": SIGNED}, ValueError, "no field 'trace'; its fields are mu, nu"),
    "signs for a second moment": (ADAM, {"nu": SIGNED}, ValueError, "nu is unsigned"),
    "no signs for a first": (ADAM, {"mu": UNSIGNED}, ValueError, "mu is signed"),
    "a spectrum that is divided": (ADAM, {"mu": Spectrum()}, ValueError, "spectra_adamw normalises first"),
    "a mask that follows": (SGD, {"trace": Spectrum(mask="energy")}, ValueError, "lowpass"),
    "no codec": (ADAM, {"mu": "int8"}, TypeError, "mu must be a Codec"),
    "no transformation": (optax.adam, {"mu": SIGNED}, TypeError, "inner must be"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    inner, codecs, error, match = BAD[case]
    with pytest.raises(error, match=match):
        compress_state(inner, **codecs).init({"kernel": jnp.ones((64, 64))})


def test_a_state_of_other_codecs_is_refused():
    params = {"kernel": jnp.ones((64, 64))}
    state = compress_state(ADAM, nu=UNSIGNED).init(params)
    for other in (Companded("unsigned", group=32), Companded("unsigned", scale="power_of_two")):
        with pytest.raises(ValueError, match="group 64"):
            compress_state(ADAM, nu=other).update(params, state, params)
    with pytest.raises(ValueError, match="CompressedState"):
        compress_state(ADAM, nu=UNSIGNED).update(params, ADAM.init(params), params)


def test_the_table_says_what_is_held():
    rows = memory_table(compress_state(ADAM, **BOTH), {"kernel": jnp.ones((64, 64))}).rows
    assert rows[0].bytes == 2 * (64 * 64 + 4 * 64)
    assert rows[0].reason == "matrix 64 x 64"
