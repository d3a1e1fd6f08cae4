"""Companded codes: golden tables, every code, derived error bounds, awkward lengths, what rounding does over time."""

import functools

import hypothesis
import hypothesis.extra.numpy as hnp
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spectra_optax import Companded
from spectra_optax.codecs.rounding import random_bits

SIGNED, NEAREST, UNSIGNED, FOUR = (
    Companded(),
    Companded(rounding="nearest"),
    Companded("unsigned"),
    Companded("unsigned", bits=4),
)
FORMS = {
    "signed": SIGNED,
    "signed, nearest": NEAREST,
    "unsigned": UNSIGNED,
    "4 bits": FOUR,
    "signed, powers of two": Companded(scale="power_of_two"),
    "unsigned, powers of two": Companded("unsigned", scale="power_of_two"),
    "4 bits, powers of two": Companded("unsigned", bits=4, scale="power_of_two"),
}
any_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


@functools.partial(jax.jit, static_argnames=("form", "cut"))
def encode(form, x, count=0, cut=-2):
    return form.encode_array(form.layout(x.shape[cut]), jnp.asarray(x), cut, jnp.asarray(count, jnp.int32))


@functools.partial(jax.jit, static_argnames=("form", "length", "cut"))
def decode(form, arrays, length, cut=-2):
    return form.decode_array(form.layout(length), arrays, cut)


def again(form, x, count=0, cut=-2):
    return np.asarray(decode(form, encode(form, x, count, cut), x.shape[cut], cut))


def numbers(shape, form, seed=0):
    """Log-normal magnitudes over many decades, with signs where there are any."""
    draw = np.random.default_rng(seed)
    x = np.exp(3 * draw.standard_normal(shape)).astype(np.float32)
    return x if form.sign == "unsigned" else x * draw.choice(np.float32([-1, 1]), shape)


def steps(form):
    """The number of steps from 0 to the largest code."""
    return 16 if form.bits == 4 else 127 if form.sign == "signed" else 255


@pytest.mark.parametrize("form", [NEAREST, UNSIGNED])
def test_golden_table(form):
    """Every code decodes to the fourth power of its share, and is the code of what it decodes to."""
    codes = np.arange(-127, 128, dtype=np.int8) if form.sign == "signed" else np.arange(256).astype(np.uint8)
    scale = np.float32(3.0)
    groups = np.stack([codes, np.full_like(codes, codes[-1])])  # each beside the largest, in a group of two
    pairs = Companded(form.sign, group=2, rounding="nearest")
    arrays = {"codes": groups, "scales": np.full((1, codes.size), scale)}
    x = np.asarray(decode(pairs, arrays, 2))
    share = np.abs(codes.astype(np.float64)) / steps(form)
    np.testing.assert_allclose(x[0], np.sign(codes) * scale * share**4, rtol=1e-6)
    assert x[0][codes == 0] == 0
    assert x[0][-1] == scale
    assert (np.diff(x[0]) > 0).all()
    held = encode(pairs, x)
    np.testing.assert_array_equal(held["codes"], groups)
    np.testing.assert_array_equal(held["scales"], arrays["scales"])


def test_golden_table_of_four_bits():
    codes = np.arange(16).astype(np.uint8)
    arrays = {"codes": (codes | 15 << 4)[None], "scales": np.full((1, 16), np.float32(3.0))}
    pairs = Companded("unsigned", bits=4, group=2)
    x = np.asarray(decode(pairs, arrays, 2))
    np.testing.assert_allclose(x[0], 3.0 * ((codes + 1) / 16) ** 4, rtol=1e-6)
    np.testing.assert_array_equal(x[1], 3.0)
    np.testing.assert_array_equal(encode(pairs, x)["codes"], arrays["codes"])


@any_form
@pytest.mark.parametrize("cut", [-2, -1])
@pytest.mark.parametrize("length", [1, 2, 7, 63, 64, 65, 100, 127, 192])
def test_fourth_roots_are_within_a_code(form, length, cut):
    x = numbers((2, length, 3) if cut == -2 else (2, 3, length), form, seed=length)
    held = encode(form, x, cut=cut)
    y = np.asarray(decode(form, held, length, cut))
    top = jax.tree.map(np.asarray, held) | {
        "codes": np.full_like(held["codes"], 255 if form.bits == 4 else steps(form))
    }
    largest = np.asarray(decode(form, top, length, cut)).astype(np.float64)
    assert (largest >= np.abs(x) * (1 - 1e-6)).all()
    assert (np.abs(y) > 0).all() or form.sign == "signed"
    assert (np.sign(y) * np.sign(x) >= 0).all()
    root, found = (np.abs(x) / largest) ** 0.25, (np.abs(y) / largest) ** 0.25
    code = (0.5 if not form.is_stochastic else 1.0) / steps(form)
    # What is not 0 is never rounded to 0, which may lift it by a whole code.
    allowed = np.where((form.sign == "unsigned") & (root < 1 / steps(form)), 1 / steps(form), code)
    assert (np.abs(found - root) <= allowed + 1e-6).all()


@pytest.mark.parametrize("length", [64, 65, 100, 127])
def test_groups_share_a_scale_and_the_tail_has_its_own(length):
    x = np.ones((length, 1), np.float32)
    x[-1] = 1e-3
    scales = np.asarray(encode(SIGNED, x)["scales"])[:, 0]
    tail = {64: 64, 65: 1, 100: 50, 127: 63}[length]  # 100 is two groups of 50
    assert scales[-1] == (np.float32(1e-3) if tail == 1 else 1.0)
    assert (scales[:-1] == 1.0).all()


@pytest.mark.parametrize("form", [f for f in FORMS.values() if not f.is_stochastic])
def test_encoding_what_was_decoded_changes_nothing(form):
    x = numbers((192, 5), form)
    held = encode(form, x)
    second = encode(form, np.asarray(decode(form, held, 192)))
    for name in ("codes", "scales"):
        np.testing.assert_array_equal(second[name], held[name])


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_zeros_stay_zero_and_nothing_else_does(form):
    x = np.zeros((128, 2), np.float32)
    assert not again(form, x).any()
    x[3] = 1.0
    x[70] = 1e-37
    y = again(form, x)
    assert (y[3] == 1).all()
    assert (y[70] > 0).all()
    if form.bits == 8:
        assert not y[:3].any()
        assert not y[4:70].any()


@any_form
@pytest.mark.parametrize("exponent", [-90, -20, 0, 66, 110])
def test_codes_do_not_depend_on_the_unit(form, exponent):
    x = numbers((64, 3), form)
    held, unit = encode(form, x), encode(form, x * np.float32(2.0**exponent))
    np.testing.assert_array_equal(unit["codes"], held["codes"])
    np.testing.assert_array_equal(
        decode(form, unit, 64), np.asarray(decode(form, held, 64)) * np.float32(2.0**exponent)
    )


@any_form
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_stays_so_within_its_group(form, bad):
    x = numbers((128, 2), form)
    x[5, 0] = bad
    y = again(form, x)
    assert not np.isfinite(y[5, 0])
    np.testing.assert_array_equal(y[:, 1], again(form, x[:, 1:])[:, 0] if not form.is_stochastic else y[:, 1])
    assert np.isfinite(y[64:]).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("shape", [(64, 64), (2, 64, 33), (128, 256)])
def test_one_number_that_is_not_finite_marks_its_group_in_every_shape(shape, bad):
    x = np.ones(shape, np.float32)
    x[..., 7, :] = bad
    for sign in ("signed", "unsigned"):
        scales = encode(Companded(sign), x)["scales"]
        assert not np.isfinite(scales[..., 0, :]).any()
        assert np.isfinite(scales[..., 1:, :]).all()


@any_form
def test_stacked_is_each_alone(form):
    x = numbers((3, 70, 4), form)
    stacked = encode(form, x, 5)
    for i in range(3):
        alone = encode(form, x[i], 5)
        for name in ("codes", "scales"):
            np.testing.assert_array_equal(stacked[name][i], alone[name])


@hypothesis.given(
    hnp.arrays(np.float32, st.tuples(st.just(66), st.just(2)), elements=st.floats(0, 2.0**100, width=32)),
    st.sampled_from(["signed", "unsigned"]),
)
@hypothesis.settings(max_examples=50, deadline=None)
def test_order_is_kept(x, sign):
    """A monotone code: within a group the larger number has the code that is not smaller."""
    y = again(Companded(sign, rounding="nearest"), x)
    for group in (slice(0, 33), slice(33, 66)):
        order = np.argsort(x[group], axis=0, kind="stable")
        assert (np.diff(np.take_along_axis(y[group], order, axis=0), axis=0) >= 0).all()


def test_stochastic_rounding_is_unbiased_over_time():
    """Over t steps the share of roundings up is the fraction, to O(log t / t)."""
    form = Companded("unsigned", rounding="stochastic")
    fractions = np.linspace(0.02, 0.98, 63, dtype=np.float32)
    root = np.concatenate([(100 + fractions) / 255, np.float32([1])])
    x = np.tile(root[:, None] ** 4, (1, 5))

    @jax.jit
    def mean_code(x):
        codes = jax.lax.map(lambda t: encode(form, x, t)["codes"].astype(jnp.float32), jnp.arange(1, 1001))
        return jnp.mean(codes, axis=0)

    np.testing.assert_allclose(mean_code(x)[:-1], np.tile(100 + fractions[:, None], (1, 5)), atol=0.01)


@pytest.mark.parametrize("decay", [0.99, 0.999])
@pytest.mark.parametrize(
    "form", [UNSIGNED, Companded("unsigned", scale="power_of_two", rounding="stochastic")], ids=["f32", "powers of two"]
)
def test_an_average_follows_a_drop(form, decay):
    """After gradients fall tenfold, `nu` falls a hundredfold within 8 time constants, as in float32."""
    spread = np.exp(np.random.default_rng(0).standard_normal((64, 4))).astype(np.float32)

    @jax.jit
    def run(start, target):
        def step(held, t):
            new = decay * decode(form, held, 64) + (1 - decay) * target
            return encode(form, new, t), None

        steps = jnp.arange(1, int(8 / (1 - decay)))
        return decode(form, jax.lax.scan(step, encode(form, start), steps)[0], 64)

    np.testing.assert_allclose(run(spread, spread / 100), spread / 100, rtol=0.15)


def test_random_bits_are_uniform_and_new_each_step():
    x = jnp.zeros((64, 96))
    bits = jax.jit(lambda t: random_bits(x, t, 0))
    first, second = (np.asarray(bits(jnp.int32(t))) / 2**32 for t in (1, 2))
    for values in (first, second):
        counts = np.histogram(values, 32, (0, 1))[0]
        np.testing.assert_allclose(counts, 64 * 96 / 32, rtol=0.1)
    assert (first != second).all()
    salted = np.asarray(random_bits(x, jnp.int32(1), 1)) / 2**32
    assert (first != salted).all()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"sign": "positive"}, "sign must be one of"),
        ({"bits": 5}, "bits must be 8"),
        ({"bits": 4}, "sign='unsigned'"),
        ({"group": 1}, "group must be at least 2"),
        ({"rounding": "up"}, "rounding must be one of"),
        ({"scale": "float16"}, "scale must be one of"),
        ({"sign": "unsigned", "scale": "power_of_two", "rounding": "nearest"}, "stochastic"),
    ],
)
def test_bad_settings(settings, match):
    with pytest.raises(ValueError, match=match):
        Companded(**settings)


def test_settings_of_the_wrong_type():
    with pytest.raises(TypeError, match="group must be an integer"):
        Companded(group=64.0)
