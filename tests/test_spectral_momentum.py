"""Spectral momentum: equal to `optax.ema` where it keeps everything, matched noise elsewhere, masks that follow."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spectra_optax import LeafRules, Spectrum, scale_by_spectral_momentum

SMALL = LeafRules(min_dim=2)
MASKS = ["lowpass", "random", "energy", "topk"]


def run(tx, gradients):
    """Updates of a sequence of gradients `[t, ...]` of one leaf, and the last state."""

    def step(state, g):
        u, state = tx.update(g, state)
        return state, u

    state, updates = jax.jit(
        lambda gradients: jax.lax.scan(step, tx.init(jax.tree.map(lambda g: g[0], gradients)), gradients)
    )(gradients)
    return updates, state


@pytest.mark.parametrize("shape", [(13, 5), (97, 3), (2, 3, 24, 4)])
@pytest.mark.parametrize("lowering", ["fft", "matmul"])
@pytest.mark.parametrize("mask", MASKS)
def test_keeping_everything_is_ema(key, mask, lowering, shape):
    gradients = jax.random.normal(key, (12, *shape))
    spectrum = Spectrum(keep=1, block=8, mask=mask, dtype="float32", lowering=lowering)
    outputs, _ = run(scale_by_spectral_momentum(0.8, spectrum=spectrum, leaves=SMALL), gradients)
    np.testing.assert_allclose(outputs, run(optax.ema(0.8), gradients)[0], atol=3e-6)


@pytest.mark.parametrize("mask", MASKS)
def test_without_decay_nothing_changes(key, mask):
    gradients = jax.random.normal(key, (3, 32, 6))
    outputs, _ = run(scale_by_spectral_momentum(0.0, spectrum=Spectrum(mask=mask), leaves=SMALL), gradients)
    np.testing.assert_allclose(outputs, gradients, atol=1e-5)


@pytest.mark.parametrize("mask", MASKS)
def test_white_noise_is_scaled_alike_inside_and_outside_the_mask(key, mask):
    """Root mean square `sqrt((1 - b1) / (1 + b1))` in the long run; 1 at the first step."""
    gradients = jax.random.normal(key, (60, 256, 64))
    spectrum = Spectrum(mask=mask, **({"refresh": 1000} if mask in ("energy", "topk") else {}))
    outputs, _ = run(scale_by_spectral_momentum(0.9, spectrum=spectrum, leaves=SMALL), gradients)
    sizes = jnp.sqrt(jnp.mean(jnp.square(outputs), axis=(1, 2)))
    np.testing.assert_allclose(sizes[0], 1.0, atol=0.01)
    t = np.arange(1, 61)
    expected = np.sqrt((1 - 0.9) * (1 + 0.9**t) / ((1 + 0.9) * (1 - 0.9**t)))
    np.testing.assert_allclose(sizes, expected, rtol=0.03)


def test_a_constant_passes_whole_inside_the_mask_and_at_a_quarter_outside():
    n = np.arange(64)
    slow, fast = np.cos(2 * np.pi * 2 * n / 64), np.cos(2 * np.pi * 20 * n / 64)
    gradients = jnp.asarray(np.repeat((slow + fast)[None, :, None], 8, axis=2), jnp.float32)
    tx = scale_by_spectral_momentum(0.9, spectrum=Spectrum(dtype="float32"), leaves=SMALL)
    outputs, _ = run(tx, jnp.broadcast_to(gradients, (200, 64, 8)))
    expected = slow + np.sqrt(0.1 / 1.9) * fast
    np.testing.assert_allclose(outputs[-1][:, 0], expected, atol=1e-4)


@pytest.mark.parametrize("mask", ["energy", "topk"])
def test_the_mask_follows_a_signal_that_moves(key, mask):
    """First frequencies 20 to 23 carry the signal, then 5 to 8; noise is everywhere."""
    n = np.arange(64)
    tones = lambda frequencies: sum(np.cos(2 * np.pi * f * n / 64 + f) for f in frequencies)[None, :, None]
    noise = jax.random.normal(key, (160, 64, 32))
    first, second = range(20, 24), range(5, 9)
    gradients = noise.at[:80].add(tones(first)).at[80:].add(tones(second))
    spectrum = Spectrum(keep=8 / 64, mask=mask, refresh=5)
    tx = scale_by_spectral_momentum(0.9, spectrum=spectrum, leaves=SMALL)
    state = tx.init(gradients[0])
    step = jax.jit(tx.update)
    for t, g in enumerate(gradients):
        _, state = step(g, state)
        if t == 79:
            assert set(np.unique((np.asarray(state.index) + 1) // 2)) == set(first)
    assert set(np.unique((np.asarray(state.index) + 1) // 2)) == set(second)


def test_topk_lets_every_block_choose(key):
    n = np.arange(16)
    tone = lambda f: np.cos(2 * np.pi * f * n / 16)
    gradient = jnp.asarray(np.concatenate([tone(1), tone(6)])[:, None] * np.ones(4), jnp.float32)
    tx = scale_by_spectral_momentum(spectrum=Spectrum(keep=2 / 16, block=16, mask="topk"), leaves=SMALL)
    _, state = run(tx, gradient[None])
    np.testing.assert_array_equal(state.index, [[1, 2], [11, 12]])


@pytest.mark.parametrize("mask", MASKS)
def test_an_embedding_row_without_gradient_never_moves(key, mask):
    gradients = jax.random.normal(key, (8, 40, 32)).at[:, 7].set(0.0)
    tx = scale_by_spectral_momentum(spectrum=Spectrum(block=16, mask=mask), leaves=SMALL)
    updates, state = run(tx, {"embedding": gradients})
    np.testing.assert_array_equal(updates["embedding"][:, 7], np.zeros((8, 32)))
    assert (np.abs(updates["embedding"][:, 6]).max(axis=-1) > 0).all()
    assert state.mu["embedding"].shape == (40, 8)


def test_rows_named_as_embeddings_are_embeddings(key):
    rules = LeafRules(min_dim=2, embedding=lambda path: path == "table")
    tx = scale_by_spectral_momentum(leaves=rules)
    state = tx.init({"table": jnp.zeros((128, 64)), "kernel": jnp.zeros((128, 64))})
    assert (state.mu["table"].shape, state.mu["kernel"].shape) == ((128, 16), (32, 64))


@pytest.mark.parametrize("mask", MASKS)
def test_stacked_layers_do_not_mix(key, mask):
    gradients = jax.random.normal(key, (3, 4, 24, 6)) * jnp.asarray([1e-3, 1.0, 2.0, 1e3])[None, :, None, None]
    tx = scale_by_spectral_momentum(spectrum=Spectrum(block=8, mask=mask), leaves=SMALL)
    slices = jnp.stack([run(tx, gradients[:, i])[0] for i in range(4)], axis=1)
    np.testing.assert_allclose(run(tx, gradients)[0], slices, rtol=1e-6)


def test_dense_leaves_get_an_ordinary_average(key):
    gradients = jax.random.normal(key, (5, 9))
    outputs, _ = run(scale_by_spectral_momentum(0.9), gradients)
    np.testing.assert_allclose(outputs, run(optax.ema(0.9), gradients)[0], rtol=1e-6)


def test_one_bad_update_reaches_its_blocks_only(key):
    """The documented reach: the kept frequencies of one column of one block."""
    gradients = jax.random.normal(key, (2, 32, 6)).at[0, 3, 2].set(jnp.nan)
    tx = scale_by_spectral_momentum(spectrum=Spectrum(block=16), leaves=SMALL)
    outputs, _ = run(tx, gradients)
    bad = np.isnan(np.asarray(outputs[1]))
    assert bad[:16, 2].all()
    assert bad.sum() == 16


@pytest.mark.parametrize(
    "other",
    [
        Spectrum(keep=0.5),
        Spectrum(block=8),
        Spectrum(dtype="float32"),
        Spectrum(mask="random"),
        Spectrum(mask="energy"),
        Spectrum(mask="topk"),
    ],
)
def test_a_state_of_other_settings_is_refused_even_under_jit(other):
    params = {"kernel": jnp.ones((64, 32))}
    state = scale_by_spectral_momentum().init(params)
    with pytest.raises(ValueError, match="other settings"):
        jax.jit(scale_by_spectral_momentum(spectrum=other).update)(params, state)


def test_a_state_of_another_seed_is_refused():
    params = {"kernel": jnp.ones((64, 32))}
    state = scale_by_spectral_momentum(spectrum=Spectrum(mask="random", seed=1)).init(params)
    with pytest.raises(ValueError, match=r"seed=2.*seed=1"):
        scale_by_spectral_momentum(spectrum=Spectrum(mask="random", seed=2)).update(params, state)


@pytest.mark.parametrize("decay", [1.0, -0.1, 1.5])
def test_bad_decay(decay):
    with pytest.raises(ValueError, match="decay must lie"):
        scale_by_spectral_momentum(decay)


def test_spectrum_of_the_wrong_type():
    with pytest.raises(TypeError, match="spectrum must be a Spectrum"):
        scale_by_spectral_momentum(spectrum=0.25)
