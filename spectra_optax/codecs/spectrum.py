"""A matrix as the kept coefficients of a Fourier transform of its blocks.

One axis of a matrix is cut into blocks of length `b`; each block is transformed by the orthonormal real Fourier basis
(`jnp.fft.rfft(..., norm="ortho")` defines it: its cosines and sines, in order of frequency) and `k` of its `b`
coefficients are kept. A spectrum of real coefficients is Hermitian by construction.

    coefficient  0         1, 2          3, 4          ...  b - 1 (b even)
    frequency    0 (mean)  1 (cos, sin)  2 (cos, sin)       b / 2

Which coefficients are kept is an integer array `index` `[..., m, k]` beside them: one row for all blocks of a matrix
(`m = 1`) or one for each (`m = n`, the number of blocks). The state names its own frequencies.

Bytes per parameter: `keep` times the bytes of one coefficient. Letters: `n` blocks of length `b`, `k` kept, `c` entries
across: `[..., n, b, c]`. A matrix that is cut along its last axis is transposed on the way in and out.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from spectra_optax import arguments, sharding

MASKS = ("lowpass", "energy", "topk", "random")
_DYNAMIC = ("energy", "topk")
_REFRESH = 10
_LARGEST_MATMUL = 512  # above it the FFT's n log n wins over the matrix product

Index = jax.Array | np.ndarray  # int32 [..., m, k]; NumPy's where the program knows it


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """Names a spectral form of momentum: which coefficients of which blocks are kept, and how.

    Attributes:
      keep: share of the coefficients that is kept, in (0, 1].
      block: length of the blocks, at least 2. An axis shorter than that is one block; an axis that it does not divide
        takes its largest divisor of at least half the length, or ends in a block padded with zeros.
      mask: "lowpass" keeps the lowest frequencies; "energy" keeps those that had the most energy in the recent past,
        the same for all blocks of a matrix; "topk" lets each block choose; "random" draws them once.
      refresh: for "energy" and "topk", the number of steps between two choices (10 if None).
      dtype: of the coefficients: "bfloat16", "float16" or "float32" (complex parameters: complex64).
      seed: for "random", of the draw (0 if None).
      lowering: "fft" computes with `jnp.fft`, "matmul" with the same basis as a matrix; "auto" takes the faster.
        XLA gathers a sharded FFT on jax before 0.12; the product stays where its operands are.

    Example:
      >>> from spectra_optax import Spectrum
      >>> Spectrum(keep=0.5, mask="energy")
      Spectrum(keep=0.5, block=64, mask='energy', refresh=10, dtype='bfloat16', seed=None, lowering='auto')
      >>> Spectrum(keep=2)
      Traceback (most recent call last):
      ValueError: keep must lie in (0, 1], got 2.
    """

    keep: float = 0.25
    block: int = 64
    mask: Literal["lowpass", "energy", "topk", "random"] = "lowpass"
    refresh: int | None = None
    dtype: str = "bfloat16"
    seed: int | None = None
    lowering: Literal["auto", "fft", "matmul"] = "auto"

    def __post_init__(self):
        """Checks the settings and fills in those that depend on others."""
        if not 0.0 < self.keep <= 1.0:
            raise ValueError(f"keep must lie in (0, 1], got {self.keep!r}.")
        arguments.instance("block", self.block, int)
        if self.block < 2:
            raise ValueError(f"block must be at least 2, got {self.block!r}.")
        arguments.choice("mask", self.mask, MASKS)
        arguments.choice("lowering", self.lowering, ("auto", "fft", "matmul"))
        arguments.choice("dtype", jnp.dtype(self.dtype).name, ("bfloat16", "float16", "float32"))
        object.__setattr__(self, "dtype", jnp.dtype(self.dtype).name)
        self._only_for("refresh", _DYNAMIC, default=_REFRESH, smallest=1)
        self._only_for("seed", ("random",), default=0, smallest=0)

    def _only_for(self, name: str, masks: tuple[str, ...], *, default: int, smallest: int) -> None:
        value = getattr(self, name)
        if self.mask not in masks:
            if value is not None:
                raise ValueError(f"{name}={value!r} has no effect with mask={self.mask!r}; it belongs to {masks}.")
            return
        value = default if value is None else value
        arguments.instance(name, value, int)
        if value < smallest:
            raise ValueError(f"{name} must be at least {smallest}, got {value!r}.")
        object.__setattr__(self, name, value)

    @property
    def period(self) -> int:
        """Steps between two choices of a mask that follows the gradients."""
        return self.refresh or _REFRESH

    @property
    def is_dynamic(self) -> bool:
        """Whether the mask follows the gradients."""
        return self.mask in _DYNAMIC

    @property
    def is_stored(self) -> bool:
        """Whether only the state knows the mask; the low-pass mask is a constant of the program."""
        return self.mask != "lowpass"

    def layout(self, length: int) -> "Layout":
        """How an axis of this length is cut and how many coefficients of each block are kept."""
        block = _block_length(length, self.block)
        return Layout(length, block, -(-length // block), max(1, round(self.keep * block)))

    def first_index(self, layout: "Layout") -> np.ndarray:
        """The mask to start with, int32 `[k]`, ascending."""
        if self.mask == "random":
            drawn = np.random.default_rng(self.seed).choice(layout.block, layout.kept, replace=False)
            return np.sort(drawn).astype(np.int32)
        return np.arange(layout.kept, dtype=np.int32)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one axis of a matrix is cut: `length` into `count` blocks of `block`, `kept` coefficients of each."""

    length: int
    block: int
    count: int
    kept: int

    @property
    def frequencies(self) -> int:
        """How many frequencies a block has."""
        return self.block // 2 + 1

    @property
    def coefficients(self) -> "Layout":
        """The layout of the kept coefficients, which stand where the axis stood."""
        return Layout(self.count * self.kept, self.kept, self.count, self.kept)

    def split(self, x: jax.Array, axis: int) -> jax.Array:
        """Cuts axis -2 or -1 of `[..., r, c]` into blocks `[..., n, b, across]`; the last is padded with zeros."""
        x = sharding.undivided(x, axis, self.count if x.shape[axis] % self.count == 0 else 1)
        x = x if axis == -2 else jnp.swapaxes(x, -1, -2)
        *batch, length, across = x.shape
        missing = self.count * self.block - length
        x = jnp.pad(x, [(0, 0)] * len(batch) + [(0, missing), (0, 0)]) if missing else x
        return x.reshape(*batch, self.count, self.block, across)

    def join(self, blocks: jax.Array, axis: int) -> jax.Array:
        """The inverse of `split`."""
        *batch, count, block, across = blocks.shape
        x = blocks.reshape(*batch, count * block, across)
        x = jax.lax.slice_in_dim(x, 0, self.length, axis=-2) if count * block != self.length else x
        return x if axis == -2 else jnp.swapaxes(x, -1, -2)


def basis(block: int) -> np.ndarray:
    """The orthonormal real Fourier basis, float32 `[b, b]`, one coefficient a row, in order of frequency."""
    spectrum = np.fft.rfft(np.eye(block), axis=0, norm="ortho")
    parts = np.concatenate([spectrum.real, spectrum.imag]) * _weights(block, like=spectrum.real)
    return parts[_parts(block)].astype(np.float32)


def frequency(index: np.ndarray) -> np.ndarray:
    """The frequency that a coefficient belongs to."""
    return (index + 1) // 2


def analyse(blocks: jax.Array, index: Index, spectrum: Spectrum) -> jax.Array:
    """The kept coefficients `[..., n, k, c]` of blocks `[..., n, b, c]`; `index` is int32 `[..., m, k]`."""
    block = blocks.shape[-2]
    if not _uses_fft(spectrum, block):
        return _product(_kept_basis(index, block), blocks)
    return jnp.take_along_axis(_transform(blocks), _batched(index, blocks.ndim - 1)[..., None], axis=-2)


def synthesise(coefficients: jax.Array, index: Index, block: int, spectrum: Spectrum) -> jax.Array:
    """Blocks `[..., n, b, c]` with the coefficients `[..., n, k, c]` and no others: the adjoint of `analyse`."""
    if not _uses_fft(spectrum, block):
        return _product(jnp.swapaxes(_kept_basis(index, block), -1, -2), coefficients)
    every = jnp.arange(block, dtype=jnp.int32)[None]
    return _inverse_transform(carry_over(coefficients, index, every))


def energies(blocks: jax.Array, layout: Layout, spectrum: Spectrum) -> jax.Array:
    """Mean energy of each frequency, float32: `[..., 1, f]` over all blocks, or `[..., n, f]` if each chooses."""
    every = jnp.arange(layout.block, dtype=jnp.int32)[None]
    energy = jnp.square(jnp.abs(analyse(blocks, every, spectrum)))
    energy = jnp.mean(energy if spectrum.mask == "topk" else jnp.mean(energy, axis=-3, keepdims=True), axis=-1)
    members = np.expand_dims(
        frequency(np.arange(layout.block)) == np.arange(layout.frequencies)[:, None], tuple(range(energy.ndim - 1))
    )
    sums = jnp.sum(jnp.where(members, energy[..., None, :], 0.0), axis=-1)
    return (sums / members.sum(axis=-1)).astype(jnp.float32)


def strongest(energy: jax.Array, layout: Layout) -> jax.Array:
    """The `k` coefficients whose frequencies have the most energy: int32 `[..., m, k]`, ascending."""
    of_coefficients = jnp.take(energy, frequency(np.arange(layout.block)), axis=-1)
    return jnp.sort(jax.lax.top_k(of_coefficients, layout.kept)[1], axis=-1).astype(jnp.int32)


def carry_over(coefficients: jax.Array, old: Index, new: Index) -> jax.Array:
    """Coefficients `[..., n, k, c]` of the mask `old` moved to the mask `new`: survivors bit for bit, newcomers 0."""
    old, new = (_batched(index, coefficients.ndim - 1) for index in (old, new))
    same = new[..., :, None] == old[..., None, :]  # [..., m, k new, k old]
    moved = jnp.take_along_axis(coefficients, jnp.argmax(same, axis=-1)[..., None], axis=-2)
    return jnp.where(jnp.any(same, axis=-1)[..., None], moved, jnp.zeros_like(moved))


def _block_length(length: int, block: int) -> int:
    if length <= block:
        return length
    return next((b for b in range(block, (block - 1) // 2, -1) if length % b == 0), block)


def _uses_fft(spectrum: Spectrum, block: int) -> bool:
    return spectrum.lowering == "fft" or (spectrum.lowering == "auto" and block > _LARGEST_MATMUL)


def _batched(index: Index, ndim: int) -> jax.Array:
    """An index with leading axes of length 1 for the batch axes that it lacks."""
    return jnp.expand_dims(jnp.asarray(index), tuple(range(ndim - index.ndim)))


def _kept_basis(index: Index, block: int) -> jax.Array:
    """The kept rows of the basis, `[..., m, k, b]`; a one-hot product, because a gather would not shard."""
    if isinstance(index, np.ndarray):
        return jnp.asarray(basis(block)[index])
    chosen = jax.nn.one_hot(index, block, dtype=jnp.float32)
    return jnp.matmul(chosen, basis(block), precision="highest")


def _product(matrices: jax.Array, blocks: jax.Array) -> jax.Array:
    """`[..., m, p, q] @ [..., n, q, c]`, as `n` separate products: their operands need no transposition."""
    shape = (*blocks.shape[:-2], *matrices.shape[-2:])
    spread = sharding.like(jnp.broadcast_to(matrices, shape), blocks, range(blocks.ndim - 2))
    return jnp.matmul(spread, blocks, precision="highest")


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
