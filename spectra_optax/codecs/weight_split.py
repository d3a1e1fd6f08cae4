"""A float32 weight as a 16-bit weight and a small integer: what the 16 bits leave out, by integer arithmetic on bits.

    |weight|   = B, an integer whose upper half is the 16-bit float's own bits and whose lower half divides its ULP
    high       = (B + 2^15) >> 16, the nearest 16-bit float, ties away from zero
    correction = B - (high << 16), in [-2^15, 2^15)

bfloat16 is the upper half of float32, so there B is the bits of |weight|. float16 has three bits more in its fraction:
B is `(bits - (112 << 23)) << 3` from 2^-14 up, where it is normal, and `round(|weight| 2^40)` below, which meet there.
For 24 bits B is first rounded to a multiple of 256, to the nearest one or at random without bias, and the correction
drops its last 8 bits. Whatever the pair, splitting what it stands for and joining again gives the same weight.

Bytes per parameter: 2 and 1 (24 bits) or 2 (32 bits), where a float32 master and its 16-bit copy take 6. Error: none at
32 bits in bfloat16, and none in float16 from 2^-17 up; at 24 bits half of `2^-8` ULP of the 16-bit float. Weights that
are too large for 16 bits stop at the largest pair.

Source: Gonzalez Ortiz et al. 2026 (arXiv:2602.23349) have the idea, with float arithmetic that is not always exact.
"""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

Bits = Literal[24, 32]
CORRECTION_DTYPES: dict[Bits, Any] = {24: jnp.dtype(jnp.int8), 32: jnp.dtype(jnp.int16)}
BITS: dict[Any, Bits] = {dtype: bits for bits, dtype in CORRECTION_DTYPES.items()}

# Bits of infinity; one below is the largest finite number, anything above is not a number.
_INFINITY = {jnp.dtype(jnp.bfloat16): 0x7F80, jnp.dtype(jnp.float16): 0x7C00}
_NAN = 0x7FC0  # in either
_INFINITY_F32 = 0x7F800000
_NAN_F32 = 0x7FC00000
_SIGN_F32 = -0x80000000

_F16_NORMAL = 113 << 23  # float32's bits of 2^-14, the smallest normal float16
_F16_BEYOND = 143 << 23  # of 2^16, above every float16


def is_narrow(dtype: jax.typing.DTypeLike) -> bool:
    """Whether weights of this dtype can be one half of a split: bfloat16 and float16."""
    return jnp.dtype(dtype) in _INFINITY


def pattern(x: Any) -> jax.Array:
    """The bits of a 16-bit float, uint16."""
    return jax.lax.bitcast_convert_type(x, jnp.uint16)


@functools.partial(jax.jit, static_argnames=("dtype", "bits"))
def split(
    weight: jax.Array, dtype: jax.typing.DTypeLike, bits: Bits, noise: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Splits a weight into its nearest 16-bit float and a correction; elementwise, any shape.

    Zero keeps its sign. What is infinite or not a number is held by the 16-bit float, with a correction of 0. A
    negative weight that rounds to 0 is held as +0 with a negative correction: adding +0 would turn -0 into +0.

    Args:
      weight: float32.
      dtype: bfloat16 or float16.
      bits: 24 for a correction in int8, 32 for one in int16.
      noise: uniform bits, uint32 of the weight's shape, to round to 24 bits at random; None rounds to the nearest.

    Returns:
      The 16-bit weight and its correction, both of the weight's shape.

    Raises:
      TypeError: if the weight is not float32.

    Example:
      >>> import jax.numpy as jnp
      >>> from spectra_optax.codecs import weight_split
      >>> high, correction = weight_split.split(jnp.float32(1.001), jnp.bfloat16, bits=32)
      >>> print(high, correction, weight_split.join(high, correction))
      1 8389 1.001
    """
    if weight.dtype != jnp.float32:
        raise TypeError(f"weight must be float32, got {weight.dtype}.")
    infinity = _INFINITY[jnp.dtype(dtype)]
    whole = jax.lax.bitcast_convert_type(weight, jnp.int32)
    negative, magnitude = whole < 0, whole & 0x7FFFFFFF
    extended = _extended(magnitude, dtype)
    if bits == 24:
        up = 0x80 if noise is None else (noise >> 24).astype(jnp.int32)
        extended = (extended + up) & ~0xFF
    high = jnp.minimum((extended + 0x8000) >> 16, infinity - 1)
    low = jnp.clip(extended - (high << 16), -0x8000, 0x7FFF)
    vanishes = (high == 0) & (low != 0)
    low = jnp.where(vanishes & negative, -low, low)

    is_finite = magnitude < _INFINITY_F32
    high = jnp.where(is_finite, high, jnp.where(magnitude > _INFINITY_F32, _NAN, infinity))
    high = jnp.where(negative & ~vanishes, high | 0x8000, high)
    low = jnp.where(is_finite, low if bits == 32 else low >> 8, 0)
    high = jax.lax.bitcast_convert_type(high.astype(jnp.uint16), jnp.dtype(dtype))
    return high, low.astype(CORRECTION_DTYPES[bits])


@jax.jit
def join(high: jax.Array, correction: jax.Array) -> jax.Array:
    """The float32 weight that a 16-bit weight and its correction (int8 or int16) stand for; elementwise, any shape."""
    if correction.dtype not in BITS:
        raise TypeError(f"correction must be int8 or int16, got {correction.dtype}.")
    infinity = _INFINITY[jnp.dtype(high.dtype)]
    whole = pattern(high).astype(jnp.int32)
    narrow = whole & 0x7FFF
    low = correction.astype(jnp.int32)
    extended = (narrow << 16) + (low if BITS[correction.dtype] == 32 else low << 8)
    negative = (whole > 0x7FFF) ^ (extended < 0)  # a negative correction of zero crosses it
    magnitude = _magnitude(jnp.abs(extended), high.dtype)
    magnitude = jnp.where(narrow < infinity, magnitude, jnp.where(narrow > infinity, _NAN_F32, _INFINITY_F32))
    return jax.lax.bitcast_convert_type(jnp.where(negative, magnitude | _SIGN_F32, magnitude), jnp.float32)


def _extended(magnitude: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """B, int32 below 2^31 - 2^16, of float32's bits without the sign."""
    if jnp.dtype(dtype) == jnp.bfloat16:
        return jnp.minimum(magnitude, _INFINITY_F32)
    normal = (jnp.clip(magnitude, _F16_NORMAL, _F16_BEYOND) - (_F16_NORMAL - (1 << 23))) << 3
    # Subnormal numbers of float16 are normal in float32: no flush to zero reaches what does not round to zero anyway.
    small = jax.lax.bitcast_convert_type(jnp.minimum(magnitude, _F16_NORMAL), jnp.float32)
    fixed = jax.lax.round(small * 2.0**40).astype(jnp.int32)
    return jnp.where(magnitude < _F16_NORMAL, fixed, normal)


def _magnitude(extended: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """float32's bits, without the sign, of what B stands for, as far as float32 can tell."""
    if jnp.dtype(dtype) == jnp.bfloat16:
        return extended
    normal = (extended >> 3) + (_F16_NORMAL - (1 << 23))
    fixed = jax.lax.bitcast_convert_type(extended.astype(jnp.float32) * 2.0**-40, jnp.int32)
    return jnp.where(extended < 1 << 26, fixed, normal)
