"""The real Fourier transform of blocks, and of chosen coefficients of them, by FFT or as a matrix product.

The orthonormal real Fourier basis (`jnp.fft.rfft(..., norm="ortho")` defines it: its cosines and sines, in order of
frequency) turns a block of length `b` into `b` real coefficients; a spectrum of them is Hermitian by construction.

    coefficient  0         1, 2          3, 4          ...  b - 1 (b even)
    frequency    0 (mean)  1 (cos, sin)  2 (cos, sin)       b / 2

`index`, int32 `[..., m, k]`, names `k` coefficients: one row for all blocks (`m = 1`) or one for each (`m = n`).
Letters: `n` blocks of length `b`, `c` entries across: `[..., n, b, c]`.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from spectra_optax.codecs.blocks import product

_LARGEST_MATMUL = 512  # above it the FFT's n log n wins over the matrix product

Index = jax.Array | np.ndarray  # int32 [..., m, k]; NumPy's where the program knows it
Lowering = Literal["auto", "fft", "matmul"]


def basis(block: int) -> np.ndarray:
    """The orthonormal real Fourier basis, float32 `[b, b]`, one coefficient a row, in order of frequency."""
    spectrum = np.fft.rfft(np.eye(block), axis=0, norm="ortho")
    parts = np.concatenate([spectrum.real, spectrum.imag]) * _weights(block, like=spectrum.real)
    return parts[_parts(block)].astype(np.float32)


def frequency(index: np.ndarray) -> np.ndarray:
    """The frequency that a coefficient belongs to."""
    return (index + 1) // 2


def analyse(blocks: jax.Array, index: Index, lowering: Lowering) -> jax.Array:
    """The kept coefficients `[..., n, k, c]` of blocks `[..., n, b, c]`; `index` is int32 `[..., m, k]`."""
    block = blocks.shape[-2]
    if not uses_fft(lowering, block):
        return product(_kept_basis(index, block), blocks)
    return jnp.take_along_axis(_transform(blocks), _batched(index, blocks.ndim - 1)[..., None], axis=-2)


def synthesise(coefficients: jax.Array, index: Index, block: int, lowering: Lowering) -> jax.Array:
    """Blocks `[..., n, b, c]` with the coefficients `[..., n, k, c]` and no others: the adjoint of `analyse`."""
    if not uses_fft(lowering, block):
        return product(jnp.swapaxes(_kept_basis(index, block), -1, -2), coefficients)
    every = jnp.arange(block, dtype=jnp.int32)[None]
    return _inverse_transform(carry_over(coefficients, index, every))


def carry_over(coefficients: jax.Array, old: Index, new: Index) -> jax.Array:
    """Coefficients `[..., n, k, c]` of the mask `old` moved to the mask `new`: survivors bit for bit, newcomers 0."""
    old, new = (_batched(index, coefficients.ndim - 1) for index in (old, new))
    same = new[..., :, None] == old[..., None, :]  # [..., m, k new, k old]
    moved = jnp.take_along_axis(coefficients, jnp.argmax(same, axis=-1)[..., None], axis=-2)
    return jnp.where(jnp.any(same, axis=-1)[..., None], moved, jnp.zeros_like(moved))


def uses_fft(lowering: Lowering, block: int) -> bool:
    """Whether blocks of this length are transformed by `jnp.fft`."""
    return lowering == "fft" or (lowering == "auto" and block > _LARGEST_MATMUL)


def _batched(index: Index, ndim: int) -> jax.Array:
    """An index with leading axes of length 1 for the batch axes that it lacks."""
    return jnp.expand_dims(jnp.asarray(index), tuple(range(ndim - index.ndim)))


def _kept_basis(index: Index, block: int) -> jax.Array:
    """The kept rows of the basis, `[..., m, k, b]`; a one-hot product, because a gather would not shard."""
    if isinstance(index, np.ndarray):
        return jnp.asarray(basis(block)[index])
    chosen = jax.nn.one_hot(index, block, dtype=jnp.float32)
    return jnp.matmul(chosen, basis(block), precision="highest")


def _transform(blocks: jax.Array) -> jax.Array:
    """All coefficients of blocks `[..., n, b, c]`, by FFT."""
    if jnp.iscomplexobj(blocks):
        return jax.lax.complex(_transform(blocks.real), _transform(blocks.imag))
    block = blocks.shape[-2]
    spectrum = jnp.fft.rfft(blocks, axis=-2, norm="ortho")
    parts = jnp.concatenate([spectrum.real, spectrum.imag], axis=-2) * _weights(block, like=blocks)
    return jnp.take(parts, _parts(block), axis=-2)


def _inverse_transform(coefficients: jax.Array) -> jax.Array:
    """The inverse of `_transform`."""
    if jnp.iscomplexobj(coefficients):
        return jax.lax.complex(_inverse_transform(coefficients.real), _inverse_transform(coefficients.imag))
    block = coefficients.shape[-2]
    places = np.full(2 * (block // 2 + 1), block)  # of each part; the imaginary parts of mean and Nyquist are 0
    places[_parts(block)] = np.arange(block)
    padded = jnp.concatenate([coefficients, jnp.zeros_like(coefficients[..., :1, :])], axis=-2)
    parts = jnp.take(padded, places, axis=-2) / _weights(block, like=coefficients)
    real, imaginary = jnp.split(parts, 2, axis=-2)
    return jnp.fft.irfft(jax.lax.complex(real, imaginary), n=block, axis=-2, norm="ortho")


def _parts(block: int) -> np.ndarray:
    """Where coefficient `j` stands among the real parts of all frequencies, followed by the imaginary ones."""
    j = np.arange(block)
    return np.where((j % 2 == 1) | (j == 0), frequency(j), block // 2 + 1 + frequency(j))


def _weights(block: int, *, like: jax.Array | np.ndarray) -> np.ndarray:
    """Turns real and imaginary parts into coefficients of unit vectors: a pair of frequencies shares its energy."""
    frequencies = np.arange(block // 2 + 1)
    pair = np.where((frequencies == 0) | (2 * frequencies == block), 1.0, np.sqrt(2.0))
    column = np.concatenate([pair, pair]).astype(like.dtype)[:, None]
    return np.expand_dims(column, tuple(range(like.ndim - 2)))
