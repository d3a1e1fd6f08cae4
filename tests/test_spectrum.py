"""The block Fourier codec against `numpy.fft`, for every block length and mask."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectra_optax import Companded, Spectrum
from spectra_optax.codecs import fourier
from spectra_optax.codecs.spectrum import energies, strongest

analyse = jax.jit(fourier.analyse, static_argnames="lowering")
synthesise = jax.jit(fourier.synthesise, static_argnames=("block", "lowering"))

BLOCKS = [2, 3, 4, 5, 7, 16, 64]
LOWERINGS = ["fft", "matmul"]


def full_spectrum(coefficients, index, block):
    """The complex spectrum `[b, c]` of one block, all frequencies of it, from kept coefficients `[k, c]`."""
    every = np.zeros((block, coefficients.shape[-1]))
    every[np.asarray(index)] = coefficients
    return np.fft.fft(fourier.basis(block).T @ every, axis=0, norm="ortho")


@pytest.mark.parametrize("block", BLOCKS)
def test_basis_is_orthonormal_and_numpys(block):
    basis = fourier.basis(block).astype(np.float64)
    np.testing.assert_allclose(basis @ basis.T, np.eye(block), atol=1e-6)
    x = np.random.default_rng(0).normal(size=block)
    energy = np.square(np.abs(np.fft.fft(x, norm="ortho")))
    of_frequency = np.zeros(block // 2 + 1)
    np.add.at(of_frequency, fourier.frequency(np.arange(block)), np.square(basis @ x))
    folded = [energy[f] + (energy[-f] if 0 < f < block / 2 else 0) for f in range(block // 2 + 1)]
    np.testing.assert_allclose(of_frequency, folded, rtol=1e-5)


@pytest.mark.parametrize("lowering", LOWERINGS)
@pytest.mark.parametrize("block", BLOCKS)
def test_all_coefficients_reconstruct(key, block, lowering):
    blocks = jax.random.normal(key, (2, 3, block, 5))
    index = jnp.arange(block)[None]
    again = synthesise(analyse(blocks, index, lowering), index, block, lowering)
    np.testing.assert_allclose(again, blocks, atol=3e-6)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("mask", ["lowpass", "random"])
@pytest.mark.parametrize("block", BLOCKS)
def test_lowerings_agree(key, block, mask, dtype):
    blocks = jax.random.normal(key, (3, block, 5), dtype)
    spectrum = Spectrum(keep=0.4, block=block, mask=mask)
    index = jnp.asarray(spectrum.first_index(spectrum.layout(block)))[None]
    kept = analyse(blocks, index, "fft")
    np.testing.assert_allclose(kept, analyse(blocks, index, "matmul"), atol=3e-6)
    np.testing.assert_allclose(*(synthesise(kept, index, block, lowering) for lowering in LOWERINGS), atol=3e-6)


@pytest.mark.parametrize("lowering", LOWERINGS)
def test_lowpass_is_numpys_lowpass(key, lowering):
    """An odd number of coefficients is the mean and pairs of cosine and sine: a truncated `rfft`."""
    blocks = np.asarray(jax.random.normal(key, (1, 16, 4)))
    index = jnp.arange(7)[None]
    low = synthesise(analyse(jnp.asarray(blocks), index, lowering), index, 16, lowering)
    truncated = np.fft.rfft(blocks, axis=-2)
    truncated[:, 4:] = 0
    np.testing.assert_allclose(low, np.fft.irfft(truncated, n=16, axis=-2), atol=1e-6)


@pytest.mark.parametrize("block", BLOCKS)
def test_spectra_are_hermitian(key, block):
    spectrum = Spectrum(keep=0.5, block=block, mask="random", seed=3)
    index = spectrum.first_index(spectrum.layout(block))
    kept = analyse(jax.random.normal(key, (1, block, 4)), index[None], spectrum)[0]
    whole = full_spectrum(kept, index, block)
    np.testing.assert_allclose(whole, np.conj(np.roll(whole[::-1], 1, axis=0)), atol=1e-5)


@hypothesis.given(st.integers(1, 400), st.integers(2, 64), st.sampled_from([-2, -1]))
@hypothesis.settings(deadline=None, max_examples=20)
def test_split_and_join_are_inverse(length, block, axis):
    layout = Spectrum(block=block).layout(length)
    assert layout.count * layout.block - length < layout.block
    assert layout.block <= max(block, 1)
    assert length <= block or layout.block > (block - 1) // 2
    shape = (2, length, 3) if axis == -2 else (2, 3, length)
    x = np.arange(6 * length, dtype=np.float32).reshape(shape)
    blocks = layout.split(jnp.asarray(x), axis)
    assert blocks.shape == (2, layout.count, layout.block, 3)
    np.testing.assert_array_equal(layout.join(blocks, axis), x)


@pytest.mark.parametrize(
    ("length", "block", "count"), [(128, 64, 2), (100, 50, 2), (97, 64, 2), (96, 48, 2), (40, 40, 1), (1000, 50, 20)]
)
def test_blocks_are_even_where_the_length_allows(length, block, count):
    layout = Spectrum(block=64).layout(length)
    assert (layout.block, layout.count) == (block, count)


@pytest.mark.parametrize("keep", [0.01, 0.125, 0.25, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("length", [1, 2, 7, 64, 97, 256])
def test_kept_coefficients_are_the_share_asked_for(keep, length):
    layout = Spectrum(keep=keep).layout(length)
    assert layout.kept == max(1, round(keep * layout.block))
    assert layout.coefficients.length == layout.count * layout.kept


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("own", [False, True])
def test_a_mask_change_keeps_survivors_bit_for_bit(key, own, dtype):
    drawn = np.random.default_rng(0)
    blocks, block, kept = 4, 16, 6
    draw = lambda: np.stack([np.sort(drawn.choice(block, kept, False)) for _ in range(blocks if own else 1)])
    old, new = draw(), draw()
    coefficients = jax.random.normal(key, (blocks, kept, 5)).astype(dtype).at[0, 0].set(-0.0)
    moved = jax.jit(fourier.carry_over)(coefficients, jnp.asarray(old), jnp.asarray(new))
    assert moved.dtype == coefficients.dtype
    for n in range(blocks):
        before, after = old[n if own else 0].tolist(), new[n if own else 0].tolist()
        for place, coefficient in enumerate(after):
            if coefficient in before:
                expected = coefficients[n, before.index(coefficient)]
            else:
                expected = jnp.zeros_like(coefficients[n, 0])
            assert np.asarray(moved[n, place]).tobytes() == np.asarray(expected).tobytes()


def test_energies_are_those_of_numpy(key):
    blocks = jax.random.normal(key, (3, 16, 7))
    energy = np.square(np.abs(np.fft.rfft(np.asarray(blocks), axis=-2, norm="ortho")))
    for mask, over in (("energy", (0, 2)), ("topk", (2,))):
        spectrum = Spectrum(block=16, mask=mask)
        got = energies(blocks, spectrum.layout(48), spectrum)
        np.testing.assert_allclose(got, np.atleast_2d(energy.mean(over)), rtol=1e-4)


def test_strongest_takes_whole_frequencies_in_order():
    layout = Spectrum(block=8, keep=5 / 8).layout(8)
    energy = jnp.asarray([[1.0, 9.0, 3.0, 8.0, 2.0]])
    np.testing.assert_array_equal(strongest(energy, layout), [[1, 2, 3, 5, 6]])


@pytest.mark.parametrize(
    "settings",
    [
        {"keep": 0},
        {"keep": 1.5},
        {"keep": float("nan")},
        {"block": 1},
        {"mask": "highpass"},
        {"lowering": "dct"},
        {"dtype": "int8"},
        {"refresh": 5},
        {"mask": "energy", "refresh": 0},
        {"mask": "random", "seed": -1},
        {"mask": "energy", "seed": 1},
        {"values": Companded(), "dtype": "float32"},
        {"values": Companded("unsigned")},
    ],
)
def test_bad_settings_name_the_argument(settings):
    with pytest.raises(ValueError, match=list(settings)[-1]):
        Spectrum(**settings)


@pytest.mark.parametrize(
    "settings",
    [{"values": "int8"}, {"block": 2.5}, {"mask": "energy", "refresh": 1.5}, {"mask": "random", "seed": "a"}],
)
def test_settings_of_the_wrong_type(settings):
    with pytest.raises(TypeError, match=list(settings)[-1]):
        Spectrum(**settings)
