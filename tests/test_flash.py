"""FlashOptim's optimizers: bytes, checkpoints, and their drift from float32 beside that of the published forms."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest

from spectra_optax import (
    Companded,
    Spectrum,
    compress_state,
    flash_adam,
    flash_adamw,
    flash_lion,
    flash_sgd,
    master_weights,
    spectra_adamw,
    split_master_weights,
    state_bytes,
    with_master_weights,
)

FLASH = {
    "adamw": (flash_adamw(1e-3, weight_decay=0.1), optax.adamw(1e-3, weight_decay=0.1)),
    "adam": (flash_adam(1e-3), optax.adam(1e-3)),
    "sgd": (flash_sgd(1e-1, momentum=0.9), optax.sgd(1e-1, momentum=0.9)),
    "nesterov": (flash_sgd(1e-1, momentum=0.9, nesterov=True), optax.sgd(1e-1, momentum=0.9, nesterov=True)),
    "lion": (flash_lion(1e-4, weight_decay=0.1), optax.lion(1e-4, weight_decay=0.1)),
}


@pytest.mark.parametrize(
    ("tx", "largest"),
    [
        (flash_adamw(1e-3), 7.13),
        (flash_adam(1e-3), 7.13),
        (flash_sgd(1e-3, momentum=0.9), 6.07),
        (flash_lion(1e-3), 6.07),
        (split_master_weights(spectra_adamw(1e-3, momentum=Spectrum(values=Companded()))), 5.35),
    ],
)
def test_training_bytes_per_parameter(tx, largest):
    """Weights, correction, 16-bit gradient and state."""
    params = {"kernel": jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16)}
    assert 2 + 2 + state_bytes(tx, params) / (8192 * 4096) <= largest


def test_companded_spectrum_bytes():
    params = {"kernel": jax.ShapeDtypeStruct((8192, 4096), jnp.float32)}
    found = state_bytes(spectra_adamw(1e-3, momentum=Spectrum(values=Companded())), params)
    assert found / (8192 * 4096) <= 0.35


def steps_of(tx):
    @jax.jit
    def step(params, state, gradient):
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state

    return step


def make_master(shape=(96, 70)):
    return {"kernel": jax.random.normal(jax.random.key(0), shape), "bias": jnp.ones(shape[1])}


def gradients_of(master, t):
    key = jax.random.fold_in(jax.random.key(1), t)
    return jax.tree.map(lambda x: (0.3 + jax.random.normal(key, x.shape)).astype(jnp.bfloat16), master)


@pytest.mark.parametrize("name", FLASH)
def test_weights_follow_float32(name):
    """After 50 steps on bfloat16 weights, within a few percent of where float32 went, and much closer than bfloat16."""
    flash, dense = FLASH[name]
    master = make_master()
    params, state = with_master_weights(master, *_started(flash, master))
    expected, dense_state = master, dense.init(master)
    flash_step, dense_step = steps_of(flash), steps_of(dense)
    for t in range(50):
        gradient = gradients_of(master, t)
        params, state = flash_step(params, state, gradient)
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), gradient)
        expected, dense_state = dense_step(expected, dense_state, wide)
    for found, right, start in zip(
        *map(jax.tree.leaves, (master_weights(params, state), expected, master)), strict=True
    ):
        assert jnp.linalg.norm(found - right) <= 0.04 * jnp.linalg.norm(right - start)


def _started(tx, master):
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), master)
    return params, tx.init(params)


def test_float32_parameters_keep_only_their_moments_compact():
    params = {"kernel": jnp.ones((64, 64))}
    updates, state = flash_adamw(1e-3).update(params, flash_adamw(1e-3).init(params), params)
    assert updates["kernel"].dtype == jnp.float32
    assert isinstance(state.correction["kernel"], optax.MaskedNode)


def test_a_checkpoint_is_small_exact_and_resumes_exactly(tmp_path):
    master = make_master((1024, 1024))
    tx = flash_adamw(1e-3)
    step = steps_of(tx)
    now = with_master_weights(master, *_started(tx, master))
    for t in range(3):
        now = step(*now, gradients_of(master, t))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "last", now)
        checkpointer.wait_until_finished()
        shapes = jax.eval_shape(lambda: _started(tx, master))
        back = checkpointer.restore(tmp_path / "last", shapes)
    on_disk = sum(file.stat().st_size for file in (tmp_path / "last").rglob("*") if file.is_file())
    assert on_disk / sum(x.size for x in jax.tree.leaves(master)) <= 5.2
    _assert_same_bits(back, now)
    _assert_same_bits(step(*back, gradients_of(master, 3)), step(*now, gradients_of(master, 3)))


def _assert_same_bits(one, two):
    assert jax.tree.structure(one) == jax.tree.structure(two)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_checkpoint_of_other_settings_is_refused():
    params = {"kernel": jnp.ones((64, 64), jnp.bfloat16)}
    inner = optax.adamw(1e-3)
    ours = split_master_weights(compress_state(inner, mu=Companded(), nu=Companded("unsigned")))
    other = split_master_weights(compress_state(inner, mu=Companded(group=32), nu=Companded("unsigned")))
    with pytest.raises(ValueError, match="other settings"):
        other.update(params, ours.init(params), params)
    with pytest.raises(ValueError, match="other settings"):
        split_master_weights(inner, bits=32).update(params, split_master_weights(inner).init(params), params)


# ---------------------------------------------------------------------------------------------------------------------
# Drift
# ---------------------------------------------------------------------------------------------------------------------

# b2, deviation of the logarithm of the gradients' sizes, share of the steps with a gradient, unit
CASES = {
    "b2 .999, sizes e^.5": (0.999, 0.5, 1.0, 1.0),
    "b2 .999, sizes e^1": (0.999, 1.0, 1.0, 1.0),
    "b2 .999, sizes e^1, 5 % of the steps": (0.999, 1.0, 0.05, 1.0),
    "b2 .999, sizes e^1, unit 1e-6": (0.999, 1.0, 1.0, 1e-6),
    "b2 .95, sizes e^1": (0.95, 1.0, 1.0, 1.0),
    "b2 .95, sizes e^1, 5 % of the steps": (0.95, 1.0, 0.05, 1.0),
    "b2 .95, sizes e^2": (0.95, 2.0, 1.0, 1.0),
}


def _groups(x, size):
    return x.reshape(-1, size, x.shape[-1])


def published(mu, nu):
    """FlashOptim: groups of 32, float16 scales, softsign and square root, codes of `nu` that may be 0."""
    m, r = _groups(mu, 32), jnp.sqrt(_groups(nu, 32))
    scale = jnp.maximum(jnp.max(jnp.abs(m), 1, keepdims=True), 1e-12)
    code = jnp.floor(127 * (2 * m / scale) / (1 + jnp.abs(m / scale)) + 0.5) / 127
    m = code / (2 - jnp.abs(code)) * scale.astype(jnp.float16)
    scale = jnp.maximum(jnp.max(r, 1, keepdims=True), 1e-12)
    r = jnp.floor(255 * r / scale + 0.5) / 255 * scale.astype(jnp.float16)
    return m.reshape(mu.shape), jnp.square(r).reshape(nu.shape)


def best_known(mu, nu):
    """The best replacement known before: groups of 64, float32 scales, square and fourth roots, codes from 1."""
    m, v = _groups(mu, 64), _groups(nu, 64)
    scale = jnp.max(jnp.abs(m), 1, keepdims=True)
    code = jnp.floor(127 * jnp.sqrt(jnp.abs(m) / jnp.where(scale > 0, scale, 1)) + 0.5) / 127
    m = jnp.sign(m) * jnp.square(code) * scale
    scale = jnp.max(v, 1, keepdims=True)
    code = jnp.floor(255 * (v / jnp.where(scale > 0, scale, 1)) ** 0.25 + 0.5)
    v = jnp.where(v > 0, (jnp.maximum(code, 1) / 255) ** 4, 0) * scale
    return jnp.where(v > 0, m, 0).reshape(mu.shape), v.reshape(nu.shape)


def adam(encode, b2, gradients):
    """The sum of Adam's updates over `gradients` `[t, r, c]`, its moments rounded by `encode` after every step."""

    def step(carry, item):
        mu, nu, total = carry
        t, g = item
        mu, nu = 0.9 * mu + 0.1 * g, b2 * nu + (1 - b2) * g * g
        total = total + mu / (1 - 0.9**t) / (jnp.sqrt(nu / (1 - b2**t)) + 1e-8)
        return (*encode(mu, nu), total), None

    zeros = jnp.zeros(gradients.shape[1:])
    return jax.lax.scan(step, (zeros, zeros, zeros), (jnp.arange(1.0, len(gradients) + 1), gradients))[0][2]


@functools.cache
def drifts(case):
    """Distances from float32's Adam after 1200 steps, as shares of the way it went: ours, published, best known."""
    b2, spread, density, unit = CASES[case]
    tx = compress_state(optax.scale_by_adam(0.9, b2), mu=Companded(), nu=Companded("unsigned"))

    @jax.jit
    def run(key):
        sizes, noise, mask = jax.random.split(key, 3)
        shape = (1200, 64, 64)
        gradients = unit * jnp.exp(spread * jax.random.normal(sizes, shape[1:]))[None]
        gradients *= 0.1 + jax.random.normal(noise, shape)
        gradients *= jax.random.uniform(mask, shape) < density

        def step(carry, g):
            state, total = carry
            updates, state = tx.update({"w": g}, state)
            return (state, total + updates["w"]), None

        start = (tx.init({"w": gradients[0]}), jnp.zeros(shape[1:]))
        ours = jax.lax.scan(step, start, gradients)[0][1]
        exact = adam(lambda mu, nu: (mu, nu), b2, gradients)
        others = (adam(encode, b2, gradients) for encode in (published, best_known))
        return [jnp.linalg.norm(x - exact) / jnp.linalg.norm(exact) for x in (ours, *others)]

    return np.asarray([run(jax.random.key(seed)) for seed in range(3)]).mean(axis=0)


# Where ours drifts more, 2.5 and 0.2 %: stochastic rounding of a momentum costs that, and lets it come to rest.
ABOVE = {"b2 .999, sizes e^.5": 1.03, "b2 .999, sizes e^1, unit 1e-6": 1.005}


@pytest.mark.parametrize("case", CASES)
def test_drift_is_at_most_that_of_the_best_form_known(case):
    ours, _, best = drifts(case)
    assert ours <= ABOVE.get(case, 1.0) * best, (ours, best)


def test_drift_where_the_published_form_diverges():
    ours, theirs, _ = drifts("b2 .999, sizes e^1, 5 % of the steps")
    assert theirs > 10
    assert ours < 0.05


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: flash_adamw(1e-3, b1=1.0), "b1"),
        (lambda: flash_adam(1e-3, eps=0.0), "eps"),
        (lambda: flash_sgd(1e-3, momentum=1.0), "momentum"),
        (lambda: flash_sgd(1e-3, nesterov=True), "nesterov"),
        (lambda: flash_sgd(1e-3, mask=lambda p: p), "mask"),
        (lambda: flash_lion(1e-3, b2=-0.1), "b2"),
    ],
)
def test_bad_input(make, match):
    with pytest.raises(ValueError, match=match):
        make()
