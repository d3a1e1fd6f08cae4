"""The factored second moment against NumPy in float64, at every magnitude."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectra_optax import LeafRules, scale_by_factored_rms
from spectra_optax.codecs import factored

SMALL = LeafRules(min_dim=2)


def oracle(gradients, b2, eps):
    """Updates of one matrix by the formula, in float64."""
    row, col, updates = 0.0, 0.0, []
    for t, g in enumerate(np.asarray(gradients, np.float64), 1):
        row = b2 * row + (1 - b2) * np.square(g).mean(-1)
        col = b2 * col + (1 - b2) * np.square(g).mean(-2)
        total = np.sqrt(row.mean())
        r, c = np.sqrt(row) + eps * total, np.sqrt(col) / total + eps
        u = g * np.sqrt(1 - b2**t) / (r[:, None] * c)
        updates.append(np.clip(u, -1 / np.sqrt(1 - b2), 1 / np.sqrt(1 - b2)))
    return np.stack(updates)


def run(tx, gradients):
    """Updates of a sequence of gradients `[t, ...]` of one leaf, and the last state."""

    def step(state, g):
        u, state = tx.update(g, state)
        return state, u

    state, updates = jax.jit(
        lambda gradients: jax.lax.scan(step, tx.init(jax.tree.map(lambda g: g[0], gradients)), gradients)
    )(gradients)
    return updates, state


@pytest.mark.parametrize("shape", [(5, 7), (2, 9), (32, 2), (64, 128)])
@pytest.mark.parametrize("b2", [0.0, 0.9, 0.999])
def test_equals_the_formula(key, shape, b2):
    gradients = jax.random.normal(key, (6, *shape)) * jnp.linspace(0.1, 3, shape[1])[None, None]
    updates, _ = run(scale_by_factored_rms(b2, leaves=SMALL), gradients)
    np.testing.assert_allclose(updates, oracle(gradients, b2, 1e-8), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-20, 1e-12, 1e-6, 1e6, 1e12, 1e20])
def test_updates_do_not_depend_on_the_gradients_scale(key, scale):
    gradients = jax.random.normal(key, (4, 16, 24))
    tx = scale_by_factored_rms(0.99, leaves=SMALL)
    np.testing.assert_allclose(run(tx, gradients * scale)[0], run(tx, gradients)[0], rtol=3e-5, atol=1e-6)


def test_rms_is_exact_over_the_whole_range(key):
    x = jax.random.normal(key, (3, 50, 70))
    for exponent in range(-28, 29, 4):
        scaled = x * 10.0**exponent
        expected = np.sqrt(np.square(np.asarray(scaled, np.float64)).mean(-1))
        np.testing.assert_allclose(factored.rms(scaled, -1), expected, rtol=1e-5)


@hypothesis.settings(deadline=None)
@hypothesis.given(st.just(0.0) | st.floats(1e-6, 0.9999), st.floats(0, 1e30), st.floats(0, 1e30))
def test_average_is_the_root_of_an_average_of_squares(decay, old, new):
    expected = np.sqrt(np.float64(decay) * np.float64(old) ** 2 + (1 - np.float64(decay)) * np.float64(new) ** 2)
    got = factored.average(jnp.float32(old), jnp.float32(new), jnp.float32(decay))
    # 1 - decay in float32 is off by up to 2^-24, relative to at least 1e-4.
    np.testing.assert_allclose(got, expected, rtol=4e-4, atol=1e-37)


@pytest.mark.parametrize("zero", ["leaf", "row", "column", "always"])
def test_zeros_are_harmless(key, zero):
    gradients = jax.random.normal(key, (3, 8, 6))
    where = {"leaf": (1,), "row": (slice(None), 2), "column": (slice(None), slice(None), 3), "always": ...}[zero]
    gradients = gradients.at[where].set(0.0)
    updates, state = run(scale_by_factored_rms(0.9, leaves=SMALL), gradients)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves((updates, state.rms_row, state.rms_col)))
    np.testing.assert_array_equal(jnp.where(gradients == 0, updates, 0.0), jnp.zeros_like(updates))
    if zero != "always":
        assert float(jnp.abs(updates[0 if zero == "leaf" else 1]).mean()) > 0.3


def test_an_isolated_entry_is_bounded_as_in_adam():
    """In an empty row and an empty column the rank-1 estimate is far too small for the entry itself."""
    g = jnp.ones((64, 64)).at[0].set(0).at[:, 0].set(0).at[0, 0].set(1e-3)
    updates, _ = run(scale_by_factored_rms(0.99, leaves=SMALL), g[None])
    assert float(updates.max()) <= 10.0 * (1 + 1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "complex64"])
def test_statistics_are_float32_and_updates_keep_the_dtype(key, dtype):
    g = jax.random.normal(key, (1, 32, 48), "complex64" if dtype == "complex64" else "float32").astype(dtype)
    updates, state = run(scale_by_factored_rms(leaves=SMALL), g)
    assert (state.rms_row.dtype, state.rms_col.dtype, updates.dtype) == (jnp.float32, jnp.float32, g.dtype)
    assert 0.8 < float(jnp.abs(updates.astype("complex64")).mean()) < 1.05


def test_complex_updates_keep_the_phase(key):
    g = jax.random.normal(key, (1, 8, 8), "complex64")
    updates, _ = run(scale_by_factored_rms(leaves=SMALL), g)
    np.testing.assert_allclose(jnp.angle(updates), jnp.angle(g), atol=1e-5)


def test_dense_leaves_keep_a_full_second_moment(key):
    gradients = jax.random.normal(key, (5, 7))
    updates, state = run(scale_by_factored_rms(0.9), gradients)
    nu = sum(0.1 * 0.9 ** (4 - i) * np.square(np.asarray(g, np.float64)) for i, g in enumerate(gradients))
    np.testing.assert_allclose(state.rms, np.sqrt(nu), rtol=1e-5)
    np.testing.assert_allclose(updates[-1], gradients[-1] / np.sqrt(nu / (1 - 0.9**5)), rtol=1e-5)


def test_stacked_layers_do_not_mix(key):
    gradients = jax.random.normal(key, (2, 3, 8, 6)) * jnp.asarray([1e-6, 1.0, 1e6])[None, :, None, None]
    tx = scale_by_factored_rms(leaves=SMALL)
    slices = jnp.stack([run(tx, gradients[:, i])[0] for i in range(3)], axis=1)
    np.testing.assert_array_equal(run(tx, gradients)[0], slices)


def test_other_axes_can_be_the_matrix(key):
    g = jax.random.normal(key, (1, 12, 4, 5))
    heads = LeafRules(min_dim=2, axes=lambda path, shape: ((0,), (1, 2)))
    updates, state = run(scale_by_factored_rms(leaves=heads), g)
    flat, _ = run(scale_by_factored_rms(leaves=SMALL), g.reshape(1, 12, 20))
    np.testing.assert_array_equal(updates, flat.reshape(1, 12, 4, 5))
    assert (state.rms_row.shape, state.rms_col.shape) == ((12,), (20,))


@pytest.mark.parametrize(("b2", "eps"), [(1.0, 1e-8), (-0.1, 1e-8), (float("nan"), 1e-8), (0.9, 0.0)])
def test_bad_arguments(b2, eps):
    with pytest.raises(ValueError, match=r"b2 must lie|eps must be"):
        scale_by_factored_rms(b2, eps)
