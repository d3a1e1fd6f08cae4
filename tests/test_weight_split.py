"""The split of float32 weights: exact against integers of NumPy, over every exponent, and the same in any mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spectra_optax.codecs import weight_split
from spectra_optax.codecs.weight_split import CORRECTION_DTYPES, join, split

DTYPES = ["bfloat16", "float16"]
INFINITY = {"bfloat16": 0x7F80, "float16": 0x7C00}
BEYOND = {"bfloat16": 0x7F7F8000, "float16": 0x477FF000}  # the smallest float32 that is nearer to infinity in 16 bits
KINDS = [(dtype, bits) for dtype in DTYPES for bits in (24, 32)]
every_kind = pytest.mark.parametrize(("dtype", "bits"), KINDS)


def bits_of(x):
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.itemsize])


def as_f32(patterns):
    return np.asarray(patterns, np.uint32).view(np.float32)


def ladder(dtype=None, bits=32, per_binade=64):
    """Float32 patterns of both signs: ends and random insides of every binade; all, or those that fit the split."""
    fraction = np.random.default_rng(0).integers(0, 1 << 23, (256, per_binade), dtype=np.uint32)
    ends = np.array([0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0x7F7FFF, 0x7F8000, 0x7FFFFF], np.uint32)
    fraction = np.concatenate([fraction, np.broadcast_to(ends, (256, len(ends)))], axis=1)
    magnitude = (np.arange(256, dtype=np.uint32)[:, None] << 23 | fraction).ravel()
    if dtype is not None:
        magnitude = magnitude[magnitude < BEYOND[dtype] - (128 if bits == 24 else 0)]
    return np.concatenate([magnitude, magnitude | np.uint32(1 << 31)])


def oracle(patterns, dtype, bits):
    """What a split stands for, by exact arithmetic: the value in units of 2^-16 ULP, rounded half away from zero."""
    x = np.abs(as_f32(patterns)).astype(np.float64)
    lowest = {"bfloat16": -126, "float16": -14}[dtype]
    fraction = {"bfloat16": 7, "float16": 10}[dtype]
    exponent = np.maximum(np.frexp(x)[1] - 1, lowest)
    steps = np.floor(np.ldexp(x, fraction + 16 - exponent) + 0.5)  # of 2^-16 ULP; exact in float64
    if bits == 24:
        steps = np.floor(steps / 256 + 0.5) * 256
    return np.copysign(np.ldexp(steps, exponent - fraction - 16), as_f32(patterns)).astype(np.float32)


# ---------------------------------------------------------------------------------------------------------------------
# Values
# ---------------------------------------------------------------------------------------------------------------------


@every_kind
def test_a_split_stands_for_the_nearest_number_of_its_grid(dtype, bits):
    patterns = ladder(dtype, bits)
    weight = join(*split(jnp.asarray(as_f32(patterns)), dtype, bits))
    np.testing.assert_array_equal(bits_of(weight), bits_of(oracle(patterns, dtype, bits)))


@every_kind
def test_the_16_bit_half_is_nearest_to_the_weight(dtype, bits):
    patterns = ladder(dtype, bits)
    weight = as_f32(patterns).astype(np.float64)
    high = np.asarray(split(jnp.asarray(as_f32(patterns)), dtype, bits)[0])
    cast = weight.astype(np.float32).astype(high.dtype).astype(np.float64)  # NumPy's own: ties to even
    ours = np.abs(high.astype(np.float64) - weight)
    # Rounding to the correction's grid first can turn what lies within half of its step of a tie.
    slack = {("bfloat16", 32): 0.0, ("float16", 32): 2.0**-15}.get((dtype, bits), 2.0**-7)
    assert (ours <= np.abs(cast - weight) * (1.0 + slack)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_24_bits_err_by_half_a_step(dtype):
    patterns = ladder(dtype, 24)
    found = bits_of(join(*split(jnp.asarray(as_f32(patterns)), dtype, 24)))
    ulps = np.abs(found.astype(np.int64) - patterns.astype(np.int64))
    if dtype == "bfloat16":
        assert ulps.max() == 128
    else:
        normal = (patterns & 0x7FFFFFFF) >= 113 << 23
        assert ulps[normal].max() == 16
        error = np.abs(as_f32(found).astype(np.float64) - as_f32(patterns).astype(np.float64))
        assert 2.0**-33 <= error[~normal].max() <= 2.0**-33 + 2.0**-41


SPECIAL = {
    "zero": 0x00000000,
    "minus zero": 0x80000000,
    "infinity": 0x7F800000,
    "minus infinity": 0xFF800000,
    "one": 0x3F800000,
    "minus 65280": 0xC77F0000,
}


@pytest.mark.parametrize("name", SPECIAL)
@every_kind
def test_special_values_keep_every_bit(dtype, bits, name):
    weight = jnp.asarray(as_f32(SPECIAL[name]))
    high, correction = split(weight, dtype, bits)
    assert correction == 0
    assert high.astype(jnp.float32) == weight
    assert bits_of(join(high, correction)) == SPECIAL[name]


@pytest.mark.parametrize("pattern", [0x7F800001, 0x7FC00000, 0xFFFFFFFF, 0xFF800001])
@every_kind
def test_not_a_number_stays_none(dtype, bits, pattern):
    high, correction = split(jnp.asarray(as_f32(pattern)), dtype, bits)
    assert jnp.isnan(high)
    assert jnp.isnan(join(high, correction))
    assert correction == 0


@every_kind
def test_a_correction_beside_infinity_is_ignored(dtype, bits):
    corrections = jnp.asarray([-128, -1, 1, 127], CORRECTION_DTYPES[bits])
    assert jnp.isposinf(join(jnp.full(4, jnp.inf, dtype), corrections)).all()
    assert jnp.isnan(join(jnp.full(4, jnp.nan, dtype), corrections)).all()


@pytest.mark.parametrize("sign", [1, -1])
@every_kind
def test_too_large_weights_stop_at_the_largest_pair(dtype, bits, sign):
    largest = as_f32([BEYOND[dtype], BEYOND[dtype] + 77, 0x7F7FFFFF]) * np.float32(sign)
    high, correction = split(jnp.asarray(largest), dtype, bits)
    np.testing.assert_array_equal(bits_of(high) & 0x7FFF, INFINITY[dtype] - 1)
    np.testing.assert_array_equal(correction, np.iinfo(correction.dtype).max)
    assert (np.sign(np.asarray(join(high, correction))) == sign).all()


@every_kind
def test_what_is_below_half_the_smallest_number_is_held_beside_plus_zero(dtype, bits):
    smallest = 2.0**-133 if dtype == "bfloat16" else 2.0**-24
    weight = jnp.asarray(np.array([0.25, -0.25, 0.5, -0.5]) * smallest, jnp.float32)
    high, correction = split(weight, dtype, bits)
    np.testing.assert_array_equal(bits_of(high), [0, 0, 1, 0x8001])
    unit = {24: 1, 32: 256}[bits]
    np.testing.assert_array_equal(correction, np.array([64, -64, -128, -128]) * unit)
    np.testing.assert_array_equal(bits_of(join(high, correction)), bits_of(weight))


# ---------------------------------------------------------------------------------------------------------------------
# Every pair, every number
# ---------------------------------------------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("dtype", "bits"))
def _is_stable(high, correction, dtype, bits):
    weight = join(jax.lax.bitcast_convert_type(high, jnp.dtype(dtype)), correction)
    again = join(*split(weight, dtype, bits))
    same = jax.lax.bitcast_convert_type(weight, jnp.int32) == jax.lax.bitcast_convert_type(again, jnp.int32)
    return same & jnp.isfinite(weight)


@functools.partial(jax.jit, static_argnames=("dtype", "bits"))
def count_unstable(dtype, bits):
    """How many pairs of a finite 16-bit float and any correction stand for what is split and joined to another."""
    each = 1 << (16 if bits == 32 else 8)
    corrections = (jnp.arange(each, dtype=jnp.int32) - each // 2).astype(CORRECTION_DTYPES[bits])

    def body(i, bad):
        high = jnp.where(i < INFINITY[dtype], i, i - INFINITY[dtype] + 0x8000)
        high = jnp.full(each, high).astype(jnp.uint16)
        return bad + jnp.sum(~_is_stable(high, corrections, dtype, bits)).astype(jnp.uint32)

    return jax.lax.fori_loop(0, 2 * INFINITY[dtype], body, jnp.uint32(0))


@every_kind
def test_every_pair_is_stable(dtype, bits):
    assert count_unstable(dtype, bits) == 0


@jax.jit
def count_lossy():
    """How many float32 numbers 32 bits in bfloat16 change, of all that fit."""
    lower = jnp.arange(1 << 16, dtype=jnp.uint32)

    def body(upper, bad):
        pattern = (upper.astype(jnp.uint32) << 16) + lower
        weight = join(*split(jax.lax.bitcast_convert_type(pattern, jnp.float32), "bfloat16", 32))
        changed = jax.lax.bitcast_convert_type(weight, jnp.uint32) != pattern
        return bad + jnp.sum(changed & (pattern & 0x7FFFFFFF < BEYOND["bfloat16"])).astype(jnp.uint32)

    return jax.lax.fori_loop(0, 1 << 16, body, jnp.uint32(0))


def test_32_bits_in_bfloat16_lose_nothing():
    assert count_lossy() == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_16_bits_need_no_correction(dtype):
    patterns = np.arange(1 << 16, dtype=np.uint16)
    patterns = patterns[(patterns & 0x7FFF) < INFINITY[dtype]]
    given = jax.lax.bitcast_convert_type(jnp.asarray(patterns), jnp.dtype(dtype))
    weight = join(given, jnp.zeros(given.shape, jnp.int16))
    np.testing.assert_array_equal(np.asarray(weight), np.asarray(given).astype(np.float32))
    high, correction = split(weight, dtype, 32)
    np.testing.assert_array_equal(bits_of(high), patterns)
    assert not correction.any()


# ---------------------------------------------------------------------------------------------------------------------
# Stochastic rounding
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_on_the_grid_noise_changes_nothing(dtype):
    patterns = ladder(dtype, 24)
    on_grid = join(*split(jnp.asarray(as_f32(patterns)), dtype, 24))
    for noise in (0, 0x80000000, 0xFFFFFFFF):
        weight = join(*split(on_grid, dtype, 24, jnp.full(patterns.shape, noise, jnp.uint32)))
        np.testing.assert_array_equal(bits_of(weight), bits_of(on_grid))


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_has_no_bias(dtype):
    """Over all 256 values of the noise, the mean is the weight itself, exactly."""
    patterns = ladder(dtype, 24, per_binade=8)
    patterns = patterns[patterns & 0x7FFFFFFF < BEYOND[dtype] - 256]
    noise = jnp.asarray(np.arange(256, dtype=np.uint32) << 24 | 0xABCDEF)[:, None]
    weight = jnp.asarray(as_f32(patterns))[None, :]
    drawn = jax.jit(lambda w, n: join(*split(w, dtype, 24, n)))(weight, noise)
    mean = np.asarray(drawn).astype(np.float64).mean(axis=0)
    exact = oracle(patterns, dtype, 32).astype(np.float64)
    np.testing.assert_array_equal(mean, exact)


# ---------------------------------------------------------------------------------------------------------------------
# Shapes, modes, arguments
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 5)])
@every_kind
def test_any_shape(key, dtype, bits, shape):
    weight = jax.random.normal(key, shape)
    high, correction = split(weight, dtype, bits)
    assert (high.shape, high.dtype) == (shape, jnp.dtype(dtype))
    assert (correction.shape, correction.dtype) == (shape, CORRECTION_DTYPES[bits])
    np.testing.assert_allclose(join(high, correction), weight, rtol=1.6e-5)


@every_kind
def test_op_by_op_and_x64_give_the_same_bits(dtype, bits):
    weight = jnp.asarray(as_f32(ladder(per_binade=4)))
    noise = None if bits == 32 else jnp.arange(weight.size, dtype=jnp.uint32) * jnp.uint32(0x9E3779B1)
    expected = split(weight, dtype, bits, noise)
    expected = (*expected, join(*expected))
    with jax.disable_jit():
        eager = split(weight, dtype, bits, noise)
        eager = (*eager, join(*eager))
    with jax.enable_x64(True):
        wide = split(weight, dtype, bits, noise)
        wide = (*wide, join(*wide))
    for one, two, three in zip(expected, eager, wide, strict=True):
        assert one.dtype == two.dtype == three.dtype
        np.testing.assert_array_equal(bits_of(one), bits_of(two))
        np.testing.assert_array_equal(bits_of(one), bits_of(three))


@every_kind
@given(st.integers(0, 0xFF7FFFFF), st.integers(0, 0xFFFFFFFF))
@settings(max_examples=60, deadline=None)
def test_any_weight_any_noise(dtype, bits, pattern, noise):
    weight = jnp.asarray(as_f32(pattern))
    high, correction = split(weight, dtype, bits, None if bits == 32 else jnp.uint32(noise))
    held = join(high, correction)
    assert bool(jnp.isfinite(held)) == bool(jnp.isfinite(weight))
    if pattern & 0x7FFFFFFF < BEYOND[dtype] - 256:
        tolerance = 2.0**-15 if bits == 24 else 2.0**-23
        smallest = {"bfloat16": 2.0**-141, "float16": 2.0**-32}[dtype]
        exact, ours = np.float64(as_f32(pattern)), np.float64(held)
        assert abs(ours - exact) <= max(tolerance * abs(exact), smallest)
    again = join(*split(held, dtype, bits))
    assert bits_of(again) == bits_of(held) or bool(jnp.isnan(held))


def test_other_dtypes_are_refused():
    with pytest.raises(TypeError, match="float32, got bfloat16"):
        split(jnp.ones(3, jnp.bfloat16), jnp.bfloat16, 32)
    with pytest.raises(TypeError, match="int8 or int16, got float32"):
        join(jnp.ones(3, jnp.bfloat16), jnp.ones(3))


def test_which_dtypes_are_narrow():
    dtypes = ("bfloat16", "float16", "float32", "float64", "complex64", "int16", "float8_e4m3fn")
    assert [d for d in dtypes if weight_split.is_narrow(d)] == ["bfloat16", "float16"]
