"""Finished optimizers against what is written in their papers, computed in NumPy's float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from spectra_optax import FullMomentum, LeafRules, Spectrum, spectra_adamw

STEPS, RATE, B1, B2, EPS, DECAY = 6, 0.01, 0.9, 0.95, 1e-3, 0.1
HYPERPARAMETERS = {"b1": B1, "b2": B2, "eps": EPS, "weight_decay": DECAY}


def gradients(shape, seed=0):
    """Gradients of rows and columns of very different sizes, with a signal that stays."""
    draw = np.random.default_rng(seed)
    size = np.exp(draw.standard_normal((shape[0], 1))) * np.exp(draw.standard_normal(shape[1]))
    signal = draw.standard_normal(shape)
    return [(size * (signal + draw.standard_normal(shape))).astype(np.float32) for _ in range(STEPS)]


def run(tx, param, grads):
    @jax.jit
    def step(param, state, g):
        updates, state = tx.update({"w": g}, state, {"w": param})
        return optax.apply_updates({"w": param}, updates)["w"], state

    state = tx.init({"w": param})
    for g in grads:
        param, state = step(param, state, g)
    return param


def normalised(grads):
    """`g / sqrt(nu)`, `nu` from row and column means; within Adam's bound, then to a root mean square of 1."""
    row, col, outputs = 0.0, 0.0, []
    for t, g in enumerate(grads, 1):
        g = g.astype(np.float64)
        row = B2 * row + (1 - B2) * np.mean(g**2, axis=1)
        col = B2 * col + (1 - B2) * np.mean(g**2, axis=0)
        # eps is a share of the matrix's own root mean square, in rows and columns each.
        rms = np.sqrt(np.mean(row))
        root = np.outer(np.sqrt(row) + EPS * rms, np.sqrt(col) / rms + EPS)
        u = np.clip(np.sqrt(1 - B2**t) * g / root, -1 / np.sqrt(1 - B2), 1 / np.sqrt(1 - B2))
        outputs.append(u / max(1.0, np.sqrt(np.mean(u**2))))
    return outputs


def lowpass(u, block, kept):
    """The lowest frequencies of blocks of rows, for an odd number of kept coefficients."""
    spectrum = np.fft.rfft(u.reshape(-1, block, u.shape[1]), axis=1)
    spectrum[:, (kept + 1) // 2 :] = 0
    return np.fft.irfft(spectrum, n=block, axis=1).reshape(u.shape)


def test_spectral_momentum_is_the_paper():
    shape, block, kept = (48, 40), 16, 5
    grads, param = gradients(shape), np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    expected, mu = param.astype(np.float64), 0.0
    for t, u in enumerate(normalised(grads), 1):
        low = lowpass(u, block, kept)
        mu = B1 * mu + (1 - B1) * low
        noise = np.sqrt((1 - B1) * (1 + B1**t) / ((1 + B1) * (1 - B1**t)))
        step = (mu / (1 - B1**t) + noise * (u - low)) / np.sqrt(kept / block)
        expected = expected - RATE * (step + DECAY * expected)
    momentum = Spectrum(keep=kept / block, block=block, dtype="float32")
    found = run(spectra_adamw(RATE, momentum=momentum, **HYPERPARAMETERS), param, grads)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_full_momentum_is_the_paper():
    grads, param = gradients((48, 40)), np.random.default_rng(1).standard_normal((48, 40)).astype(np.float32)
    expected, mu = param.astype(np.float64), 0.0
    for t, u in enumerate(normalised(grads), 1):
        mu = B1 * mu + (1 - B1) * u
        expected = expected - RATE * (mu / (1 - B1**t) + DECAY * expected)
    for momentum in (FullMomentum(), Spectrum(keep=1, dtype="float32")):
        found = run(spectra_adamw(RATE, momentum=momentum, **HYPERPARAMETERS), param, grads)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("leaves", [LeafRules(), LeafRules(dense=lambda path: True)])
def test_dense_leaves_are_optax_adamw(dtype, leaves):
    shape = (48, 40) if leaves.dense else (40,)
    grads, param = gradients((48, 40)), np.random.default_rng(1).standard_normal(shape).astype(dtype)
    grads = [(g if leaves.dense else g[0]).astype(dtype) * (1 + 1j if dtype == "complex64" else 1) for g in grads]
    ours = run(spectra_adamw(RATE, leaves=leaves, **HYPERPARAMETERS), param, grads)
    theirs = run(optax.adamw(RATE, **HYPERPARAMETERS), param, grads)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_complex_numbers_keep_their_imaginary_part(dtype):
    param, g = np.ones((64, 64), np.complex64), np.full((64, 64), 1 + 2j, np.complex64)
    found = run(spectra_adamw(RATE, momentum=FullMomentum(dtype), weight_decay=0.0), param, [g] * STEPS) - param
    np.testing.assert_allclose(found.imag, 2 * found.real, rtol=1e-5)


@pytest.mark.parametrize("decay", [0.9, 0.99, 0.999])
def test_momentum_in_bfloat16_does_not_stall(decay):
    """Rounded to the nearest bfloat16, an average stops a few percent short of a constant, or at a quarter of it."""
    tx = spectra_adamw(1.0, b1=decay, momentum=Spectrum(keep=0.5), weight_decay=0.0)

    @jax.jit
    def last(param):
        step = lambda state, _: (tx.update({"w": jnp.ones_like(param)}, state, {"w": param})[1], None)
        return jax.lax.scan(step, tx.init({"w": param}), length=int(10 / (1 - decay)))[0]

    state = last(jnp.ones((64, 64)))
    mu = optax.tree.get_all_with_path(state, "mu")
    kernel = next(value["w"] for _, value in mu if not isinstance(value["w"], optax.MaskedNode))
    np.testing.assert_allclose(np.asarray(kernel, np.float32)[0], 8.0, rtol=0.01)  # the mean of a block of 64 ones
