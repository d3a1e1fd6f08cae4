"""One level of an orthogonal wavelet transform, in both directions, as matrix products of blocks of rows.

    a_k = sum_j low_j x_(2k+1-j),   d_k = sum_j high_j x_(2k+1-j),   j = 0 .. f - 1

Output rows of a block of `b` rows need the block and the last `f - 2` rows of the block before it, so a level is two
products with constant matrices, whatever the length; its inverse is their transposes. The filters of wavelets other
than Haar's are those of PyWavelets, which must be installed for them.
"""

import functools
import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np

from spectra_optax.codecs.blocks import Layout, product

_FAMILIES = ("db", "sym", "coif")  # PyWavelets also calls "dmey" orthogonal, which it is to 1 %
_BLOCK = 32  # the least number of rows


@functools.cache
def low_pass(kind: str) -> tuple[float, ...]:
    """The decomposition low-pass filter of an orthogonal wavelet.

    Raises:
      ValueError: if there is no such wavelet, or PyWavelets is needed for it and not installed.
    """
    if kind in ("haar", "db1"):
        return (math.sqrt(0.5),) * 2
    try:
        pywt = importlib.import_module("pywt")
    except ImportError:
        raise ValueError(
            f"kind must be 'haar', or an orthogonal wavelet of PyWavelets where that is installed, got {kind!r}: "
            "pip install PyWavelets."
        ) from None
    known = [name for family in _FAMILIES for name in pywt.wavelist(family)]
    if kind not in known:
        raise ValueError(f"kind must be 'haar' or one of {', '.join(known)}, got {kind!r}.")
    return tuple(pywt.Wavelet(kind).dec_lo)


def analyse(x: jax.Array, kind: str) -> tuple[jax.Array, jax.Array]:
    """One level along axis -2: approximation and details."""
    own, before = _matrices(kind)
    rows, halo = own.shape[0], before.shape[1]
    length = (x.shape[-2] + halo + 1) // 2
    half = Layout(length, rows // 2, -(-2 * length // rows), rows // 2)
    blocks = Layout(x.shape[-2], rows, half.count, rows).split(x, -2)
    out = product(own.astype(x.real.dtype), blocks)
    if halo:
        ends = _shifted(blocks[..., rows - halo :, :], 1)
        out += product(before.astype(x.real.dtype), ends)
    return half.join(out[..., : rows // 2, :], -2), half.join(out[..., rows // 2 :, :], -2)


def synthesise(a: jax.Array, d: jax.Array, n: int, kind: str) -> jax.Array:
    """The transpose of `analyse`, `n` rows."""
    own, before = _matrices(kind)
    rows, halo = own.shape[0], before.shape[1]
    a = jax.lax.slice_in_dim(a, 0, d.shape[-2], axis=-2)  # a longer one comes from a level with an odd length
    half = Layout(d.shape[-2], rows // 2, -(-2 * d.shape[-2] // rows), rows // 2)
    blocks = jnp.concatenate([half.split(a, -2), half.split(d, -2)], axis=-2)
    out = product(own.T.astype(a.real.dtype), blocks)
    if halo:
        ends = _shifted(product(before.T.astype(a.real.dtype), blocks), -1)
        out += jnp.pad(ends, [(0, 0)] * (ends.ndim - 2) + [(rows - halo, 0), (0, 0)])
    return Layout(n, rows, half.count, rows).join(out, -2)


def _shifted(blocks: jax.Array, by: int) -> jax.Array:
    """Blocks `[..., m, b, c]` moved by one along their axis, which begins or ends with zeros then."""
    padding = [(0, 0)] * (blocks.ndim - 3) + [(1, 0) if by > 0 else (0, 1), (0, 0), (0, 0)]
    moved = blocks[..., :-1, :, :] if by > 0 else blocks[..., 1:, :, :]
    return jnp.pad(moved, padding)


@functools.cache
def _matrices(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """One level of a block of rows as `[b, b]`, approximation first, and what the rows before it add, `[b, f - 2]`."""
    low = np.array(low_pass(kind))
    high = low[::-1] * np.where(np.arange(len(low)) % 2 == 0, -1.0, 1.0)
    halo, block = len(low) - 2, max(_BLOCK, -(-len(low) // 16) * 16)
    whole = np.zeros((block, halo + block))
    for k in range(block // 2):
        whole[k, 2 * k : 2 * k + len(low)] = low[::-1]
        whole[block // 2 + k, 2 * k : 2 * k + len(low)] = high[::-1]
    return whole[:, halo:], whole[:, :halo]
