"""Converted states stand for the same moments: against NumPy, bit for bit where they can be, and in training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

from spectra_optax import (
    Companded,
    FullMomentum,
    LeafRules,
    Spectrum,
    Wavelet,
    compress_state,
    convert_state,
    flash_adamw,
    flash_lion,
    foam_adamw,
    gwt_adafactor,
    gwt_adamw,
    in_wavelet_subspace,
    master_weights,
    scale_by_foam,
    scale_by_gwt,
    spectra_adamw,
    split_master_weights,
    with_master_weights,
)
from spectra_optax.lift import named

SMALL = LeafRules(min_dim=4)
COUNT, B2 = 37, 0.98
SHAPES = {"kernel": (16, 12), "embedding": (8, 12), "stack": {"kernel": (2, 13, 8)}, "bias": (5,)}
PARAMS = jax.tree.map(lambda shape: jnp.ones(shape), SHAPES, is_leaf=lambda node: isinstance(node, tuple))
NEAREST = {"mu": Companded(rounding="nearest"), "nu": Companded("unsigned")}


def noise(seed, scale=1.0, params=PARAMS):
    leaves, treedef = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    draw = lambda x: jnp.asarray(scale * rng.standard_normal(x.shape) * np.exp(rng.standard_normal(x.shape)), "float32")
    return treedef.unflatten([draw(x) for x in leaves])


def running(dense, params=PARAMS, count=COUNT):
    """A state of Optax's as after `count` steps."""

    def fill(node):
        if isinstance(node, optax.ScaleByAdamState):
            mu, nu = noise(1, 0.01, params), jax.tree.map(jnp.square, noise(2, 0.05, params))
            return optax.ScaleByAdamState(jnp.int32(count), mu, nu)
        return optax.ScaleByScheduleState(jnp.int32(count)) if isinstance(node, optax.ScaleByScheduleState) else node

    is_one = lambda node: isinstance(node, optax.ScaleByAdamState | optax.ScaleByScheduleState)
    return jax.tree.map(fill, dense.init(params), is_leaf=is_one)


ADAMW = optax.adamw(1e-3, b2=B2)
STATE = running(ADAMW)
MU, NU = (dict(named(tree)) for tree in (STATE[0].mu, STATE[0].nu))


def held(state, kind, field):
    """Arrays of a field by path, of all nodes of a type."""
    is_one = lambda node: type(node).__name__ == kind
    return dict(
        x for node in jax.tree.leaves(state, is_leaf=is_one) if is_one(node) for x in named(getattr(node, field))
    )


def equal(actual, desired):
    assert jax.tree.structure(actual) == jax.tree.structure(desired)
    for (path, a), (_, b) in zip(named(actual), named(desired), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        np.testing.assert_array_equal(a, b, err_msg=path)


def factored(nu):
    """NumPy's: the root of the second moment that row and column means stand for, corrected for its bias."""
    nu = np.asarray(nu, np.float64)
    row, col = nu.mean(-1, keepdims=True), nu.mean(-2, keepdims=True)
    return np.sqrt(row * col / row.mean(-2, keepdims=True) / (1 - B2**COUNT))


def normalised(path):
    """NumPy's: what momentum after normalising would be."""
    u = np.asarray(MU[path], np.float64) / factored(NU[path])
    u = np.clip(u, -1 / np.sqrt(1 - B2), 1 / np.sqrt(1 - B2))
    return u / np.maximum(1, np.sqrt(np.mean(u**2, axis=(-2, -1), keepdims=True)))


def test_codes_are_those_of_encoding():
    compact = compress_state(ADAMW, leaves=SMALL, **NEAREST)
    state = convert_state(ADAMW, compact, STATE, PARAMS)
    for path in ("kernel", "embedding", "stack/kernel"):
        leaf = SMALL.leaf(path, MU[path].shape, "float32")
        mu = NEAREST["mu"].encode(leaf, MU[path], jnp.int32(COUNT))
        nu = NEAREST["nu"].encode(leaf, NU[path], jnp.int32(COUNT))
        codes = np.where(nu["codes"] == 0, 0, mu["codes"])
        for field, desired in (("mu", mu | {"codes": codes}), ("nu", nu)):
            for name in ("codes", "scales"):
                got = dict(named(getattr(state.inner_state[0], field)[name]))[path]
                np.testing.assert_array_equal(got, desired[name])
    np.testing.assert_array_equal(state.inner_state[0].mu["dense"]["bias"], MU["bias"])
    assert (int(state.step), int(state.inner_state[0].count)) == (COUNT, COUNT)


FORMS = {
    "compress_state": compress_state(ADAMW, leaves=SMALL, **NEAREST),
    "gwt": gwt_adamw(1e-3, b2=B2, wavelet=Wavelet(level=2), leaves=SMALL),
    "foam": foam_adamw(1e-3, b2=B2, wavelet=Wavelet(level=2), leaves=SMALL),
    "codes of foam": compress_state(foam_adamw(1e-3, b2=B2, wavelet=Wavelet(level=1), leaves=SMALL), **NEAREST),
    "subspace": optax.chain(in_wavelet_subspace(optax.scale_by_adam(b2=B2), leaves=SMALL), optax.scale(-1e-3)),
}


@pytest.mark.parametrize("name", FORMS)
def test_what_a_form_holds_comes_back_bit_for_bit(name):
    tx = FORMS[name]
    state = convert_state(ADAMW, tx, STATE, PARAMS)
    back = convert_state(tx, ADAMW, state, PARAMS)
    equal(convert_state(ADAMW, tx, back, PARAMS), state)
    equal(convert_state(tx, tx, state, PARAMS), state)
    assert int(back[0].count) == COUNT
    np.testing.assert_array_equal(back[0].nu["bias"], NU["bias"])


def test_decoded_moments_are_those_that_the_inner_transformation_sees():
    seen = []
    spy = optax.GradientTransformation(ADAMW.init, lambda u, s, p=None: (seen.append(s), ADAMW.update(u, s, p))[1])
    tx = compress_state(spy, leaves=SMALL, mu=Companded(), nu=Companded("unsigned"))
    state = convert_state(ADAMW, tx, STATE, PARAMS)
    tx.update(PARAMS, state, PARAMS)
    desired = seen[-1]
    equal(convert_state(tx, ADAMW, state, PARAMS), desired)


@pytest.mark.parametrize("path", ["kernel", "embedding", "stack/kernel"])
def test_spectra_adamw_against_numpy(path):
    spectrum = Spectrum(keep=0.5, block=4, dtype="float32")
    tx = spectra_adamw(1e-3, b2=B2, momentum=spectrum, leaves=SMALL)
    state = convert_state(ADAMW, tx, STATE, PARAMS)
    row, col = (held(state, "FactoredRmsState", f"rms_{x}")[path] for x in ("row", "col"))
    np.testing.assert_allclose(row, np.sqrt(np.mean(NU[path], -1)), rtol=2e-6)
    np.testing.assert_allclose(col, np.sqrt(np.mean(NU[path], -2)), rtol=2e-6)
    axis = -1 if path == "embedding" else -2
    u = np.moveaxis(normalised(path), axis, -2)
    blocks = np.pad(u, [(0, 0)] * (u.ndim - 2) + [(0, -u.shape[-2] % 4), (0, 0)])
    blocks = blocks.reshape(*u.shape[:-2], -1, 4, u.shape[-1])
    spectra = np.fft.rfft(blocks, axis=-2, norm="ortho")
    kept = np.stack([spectra[..., 0, :].real, np.sqrt(2) * spectra[..., 1, :].real], axis=-2)
    kept = np.moveaxis(kept.reshape(*u.shape[:-2], -1, u.shape[-1]), -2, axis)
    np.testing.assert_allclose(held(state, "SpectralMomentumState", "mu")[path], kept, rtol=2e-4, atol=2e-6)
    assert {int(x) for x in jax.tree.leaves(state) if x.ndim == 0 and x.dtype == "int32"} == {COUNT}


def test_momentum_that_is_held_whole_comes_back():
    tx = spectra_adamw(1e-3, b2=B2, momentum=FullMomentum(), leaves=SMALL)
    state = convert_state(ADAMW, tx, STATE, PARAMS)
    back = convert_state(tx, ADAMW, state, PARAMS)
    for path in ("kernel", "embedding", "stack/kernel"):
        np.testing.assert_allclose(held(state, "EmaState", "ema")[path], normalised(path), rtol=2e-5, atol=1e-7)
        nu = factored(NU[path]) ** 2 * (1 - B2**COUNT)
        np.testing.assert_allclose(dict(named(back[0].nu))[path], nu, rtol=2e-5)
        np.testing.assert_allclose(
            dict(named(back[0].mu))[path], normalised(path) * factored(NU[path]), rtol=5e-5, atol=1e-8
        )
    again = convert_state(ADAMW, tx, back, PARAMS)
    for (_, a), (path, b) in zip(named(again), named(state), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-7, err_msg=path)


def test_the_largest_number_and_size_of_a_normalised_average():
    mu = {"kernel": jnp.zeros((8, 8)).at[0, 0].set(1.0)}
    nu = {"kernel": jnp.full((8, 8), 1e-6)}
    dense = (optax.ScaleByAdamState(jnp.int32(COUNT), mu, nu), *ADAMW.init(mu)[1:])
    tx = spectra_adamw(1e-3, b2=B2, momentum=FullMomentum(), leaves=SMALL)
    ema = held(convert_state(ADAMW, tx, dense, mu), "EmaState", "ema")["kernel"]
    np.testing.assert_allclose(ema[0, 0], 1 / np.sqrt(1 - B2), rtol=1e-5)  # 7.07: its matrix's size is 0.88
    bold = jax.tree.map(lambda x: jnp.full_like(x, 1.0), mu)
    ema = held(convert_state(ADAMW, tx, (dense[0]._replace(mu=bold), *dense[1:]), mu), "EmaState", "ema")["kernel"]
    np.testing.assert_allclose(ema, 1.0, rtol=1e-5)


@pytest.mark.parametrize("mask", ["lowpass", "random", "energy", "topk"])
def test_kept_coefficients_of_every_mask_come_back(mask):
    tx = spectra_adamw(1e-3, b2=B2, momentum=Spectrum(keep=0.5, block=4, mask=mask, dtype="float32"), leaves=SMALL)
    state = convert_state(ADAMW, tx, STATE, PARAMS)
    again = convert_state(tx, tx, state, PARAMS)
    mu, other = (held(s, "SpectralMomentumState", "mu") for s in (state, again))
    for path in ("kernel", "embedding"):  # of a padded block, what stands beyond the end is lost
        np.testing.assert_allclose(other[path], mu[path], rtol=1e-5, atol=1e-6)
    if mask == "energy":
        blocks = normalised("kernel").reshape(4, 4, 12)
        power = np.abs(np.fft.rfft(blocks, axis=-2, norm="ortho")) ** 2
        mean = power.mean(axis=(0, 2))  # of a coefficient: a pair of them has twice a frequency's
        best = [c for _, c in sorted((-mean[(c + 1) // 2], c) for c in range(4))][:2]
        np.testing.assert_array_equal(held(state, "SpectralMomentumState", "index")["kernel"], [sorted(best)])


def neighbours(x, axis, level):
    """NumPy's: sums of `2^level` neighbours, zeros beyond the end."""
    x = np.moveaxis(np.asarray(x, np.float64), axis, -1)
    size = 2**level
    x = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % size)])
    return np.moveaxis(x.reshape(*x.shape[:-1], -1, size).sum(-1), -1, axis)


@pytest.mark.parametrize("level", [1, 2])
def test_wavelet_moments_against_numpy(level):
    gwt, foam = (f(wavelet=Wavelet(level=level), leaves=SMALL) for f in (scale_by_gwt, scale_by_foam))
    short, folded = (convert_state(ADAMW, tx, STATE, PARAMS) for tx in (gwt, foam))
    for path in MU:
        if path == "bias":
            np.testing.assert_array_equal(short.mu["bias"], MU["bias"])
            continue
        axis = -1 if path == "embedding" else -2
        sums = functools.partial(neighbours, axis=axis, level=level)
        mu, nu, ones = sums(MU[path]), sums(NU[path]), sums(np.ones_like(MU[path]))
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7)
        close(dict(named(short.mu))[path], mu * 2 ** (-level / 2))
        close(dict(named(short.nu))[path], nu * 2.0**-level)
        close(dict(named(folded.mu))[path], mu / ones)
        close(dict(named(folded.nu))[path], nu / ones)


def test_second_moments_of_approximations_of_noise():
    """Of gradients that are independent, `nu` of the approximation is what averaging its squares would have given."""
    tx, params = scale_by_gwt(Wavelet("db2", level=2), b2=0.999, leaves=SMALL), {"kernel": jnp.zeros((64, 8))}
    dense = optax.scale_by_adam(b2=0.999)
    sizes = np.repeat(np.exp(np.random.default_rng(0).standard_normal((1, 8))), 64, axis=0)

    def step(states, key):
        g = {"kernel": jax.random.normal(key, (64, 8)) * sizes}
        return tuple(t.update(g, s)[1] for t, s in zip((dense, tx), states, strict=True)), None

    keys = jax.random.split(jax.random.key(0), 2000)
    (full, own), _ = jax.jit(lambda s: jax.lax.scan(step, s, keys))((dense.init(params), tx.init(params)))
    converted = convert_state(dense, tx, full, params)
    inner = slice(2, 16)  # blocks beyond the ends see zeros too
    ratio = np.asarray(converted.nu["kernel"] / own.nu["kernel"])[inner]
    # An average of squares has a relative deviation of sqrt(2 (1 - b2) / (1 + b2)), 0.03; 4 of both.
    assert np.all(np.abs(ratio - 1) < 0.18)
    np.testing.assert_allclose(converted.mu["kernel"], own.mu["kernel"], atol=1e-5)


def test_adafactor_in_a_subspace():
    tx = gwt_adafactor(1e-3, b2=B2, leaves=SMALL)
    state = convert_state(ADAMW, tx, STATE, PARAMS)
    near = neighbours(normalised("kernel"), -2, 2) / 2
    np.testing.assert_allclose(held(state, "EmaState", "ema")["kernel"], near, rtol=2e-4, atol=2e-6)
    mu = convert_state(tx, ADAMW, state, PARAMS)[0].mu["kernel"]
    np.testing.assert_allclose(mu, np.repeat(near, 4, axis=0) / 2 * factored(NU["kernel"]), rtol=2e-4, atol=1e-7)


def test_codes_of_a_normalised_average():
    tx = compress_state(
        spectra_adamw(1e-3, b2=B2, momentum=FullMomentum(), leaves=SMALL), ema=Companded(), leaves=SMALL
    )
    spy = convert_state(
        tx,
        spectra_adamw(1e-3, b2=B2, momentum=FullMomentum(), leaves=SMALL),
        convert_state(ADAMW, tx, STATE, PARAMS),
        PARAMS,
    )
    for path, ema in held(spy, "EmaState", "ema").items():
        # Codes are fourth roots: neighbours are at most 4 / 127 of the largest apart.
        assert np.max(np.abs(ema - normalised(path))) <= 4 / 127 * np.max(np.abs(normalised(path)))


def test_published_limiter_goes_on_from_the_norm_of_the_moments():
    tx = scale_by_gwt(mode="reference", eps=1e-6, leaves=SMALL)
    state = convert_state(ADAMW, tx, STATE, PARAMS)
    u = np.asarray(state.mu["kernel"]) / (np.sqrt(state.nu["kernel"]) + 1e-6)
    np.testing.assert_allclose(state.norm["kernel"], np.linalg.norm(u), rtol=1e-5)


def test_counts_and_schedules_go_on():
    rate = optax.linear_schedule(1.0, 0.0, 100)
    source = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=B2))
    state = running(source)
    for target in (flash_adamw(rate, b2=B2), spectra_adamw(rate, b2=B2), gwt_adamw(rate, b2=B2)):
        counts = [x for x in jax.tree.leaves(convert_state(source, target, state, PARAMS)) if x.dtype == "int32"]
        assert {int(x) for x in counts if x.ndim == 0} == {COUNT}
    plain = running(optax.adam(1e-3))  # has no schedule
    new = convert_state(optax.adam(1e-3), optax.adamw(rate), plain, PARAMS)
    assert int(new[2].count) == COUNT


def test_through_wrappers():
    is_masked = lambda node: isinstance(node, optax.MaskedNode)
    kernels = lambda params: {k: "far" if k == "bias" else "near" for k in params}
    source = optax.partition({"near": ADAMW, "far": optax.adam(1e-3, b2=B2)}, kernels)
    state = running(ADAMW)
    parted = source.init(PARAMS)
    for label in ("near", "far"):
        at = parted.inner_states[label].inner_state
        keep = lambda tree, like: {k: like[k] if is_masked(like[k]) else tree[k] for k in tree}
        adam = optax.ScaleByAdamState(jnp.int32(COUNT), keep(state[0].mu, at[0].mu), keep(state[0].nu, at[0].nu))
        parted.inner_states[label] = parted.inner_states[label]._replace(inner_state=(adam, *at[1:]))
    inject = optax.inject_hyperparams(spectra_adamw, static_args="leaves", hyperparam_dtype=jnp.float32)
    plain = spectra_adamw(1e-3, b2=B2, leaves=SMALL)
    desired = convert_state(ADAMW, plain, STATE, PARAMS)
    injected = convert_state(source, inject(1e-3, b2=B2, leaves=SMALL), parted, PARAMS)
    equal(injected.inner_state, desired)
    assert int(injected.count) == COUNT
    np.testing.assert_allclose(injected.hyperparams["b2"], B2, rtol=1e-6)
    several = convert_state(ADAMW, optax.MultiSteps(optax.apply_if_finite(plain, 3), 4), STATE, PARAMS)
    equal(several.inner_opt_state.inner_state, desired)
    assert (int(several.mini_step), int(several.inner_opt_state.total_notfinite)) == (0, 0)


def test_split_weights():
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)
    master = noise(3, 1.0)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), master)
    tx = split_master_weights(spectra_adamw(1e-3, b2=B2, leaves=SMALL))
    state = convert_state(ADAMW, tx, STATE, PARAMS, target_params=narrow)
    equal(state.inner_state, convert_state(ADAMW, spectra_adamw(1e-3, b2=B2, leaves=SMALL), STATE, PARAMS))
    assert int(state.step) == COUNT
    assert {x.dtype.name for x in jax.tree.leaves(state.correction)} == {"int8"}
    narrow, state = with_master_weights(master, narrow, state)
    again = convert_state(tx, split_master_weights(gwt_adamw(1e-3, b2=B2, leaves=SMALL)), state, narrow)
    equal(again.correction, state.correction)
    weights = master_weights(narrow, state)
    equal(convert_state(tx, ADAMW, state, narrow, target_params=weights)[0].mu["bias"], MU["bias"])
    with pytest.raises(ValueError, match=r"SplitWeightsState.correction of 'bias' is int8\[5\], but .* int16\[5\]"):
        convert_state(tx, split_master_weights(spectra_adamw(1e-3), bits=32), state, narrow)


def test_other_rules_by_their_own_type():
    lion, compact = optax.lion(1e-4), flash_lion(1e-4, leaves=SMALL)
    state = lion.init(PARAMS)
    state = (state[0]._replace(count=jnp.int32(COUNT), mu=noise(1)), *state[1:])
    new = convert_state(lion, compact, state, PARAMS)
    assert int(new.inner_state.step) == COUNT
    back = convert_state(compact, lion, new, PARAMS)
    # Codes are fourth roots: neighbours are at most 4 / 127 of the largest apart.
    for (_, a), (_, b) in zip(named(back[0].mu), named(state[0].mu), strict=True):
        assert np.max(np.abs(a - b)) <= 4 / 127 * np.max(np.abs(b))
    with pytest.raises(ValueError, match=r"ScaleByLionState.mu of .*; it tells|ScaleByLionState.mu of"):
        convert_state(ADAMW, compact, STATE, PARAMS)


@pytest.mark.slow
def test_jit_and_devices():
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    place = lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec()))
    params, state = jax.tree.map(place, (PARAMS, STATE))
    for tx in (spectra_adamw(1e-3, b2=B2, leaves=SMALL), flash_adamw(1e-3, b2=B2, leaves=SMALL)):
        desired = convert_state(ADAMW, tx, STATE, PARAMS)
        compiled = jax.jit(functools.partial(convert_state, ADAMW, tx))(state, params)
        for (path, a), (_, b) in zip(named(compiled), named(desired), strict=True):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_allclose(a.astype("float32"), b.astype("float32"), rtol=1e-5, atol=1, err_msg=path)
        placed = convert_state(ADAMW, tx, state, params)
        for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(tx.init(params)), strict=True):
            assert a.sharding == b.sharding


def test_states_that_do_not_match_are_refused():
    tx = spectra_adamw(1e-3, leaves=SMALL)
    momentum = optax.sgd(0.1, momentum=0.9)
    with pytest.raises(ValueError, match=r"ScaleByAdamState.mu of 'bias', .* tells TraceState.trace"):
        convert_state(momentum, foam_adamw(1e-3, leaves=SMALL), momentum.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match=r"ScaleByAdanState.*Accepted are states of the same type, and for"):
        convert_state(ADAMW, compress_state(optax.adan(1e-3), m=Companded()), STATE, PARAMS)
    with pytest.raises(ValueError, match="state and a state of source do not match"):
        convert_state(tx, ADAMW, STATE, PARAMS)
    with pytest.raises(ValueError, match="built under other settings"):
        convert_state(
            spectra_adamw(1e-3, momentum=Spectrum(seed=1, mask="random"), leaves=SMALL),
            tx,
            spectra_adamw(1e-3, momentum=Spectrum(seed=2, mask="random"), leaves=SMALL).init(PARAMS),
            PARAMS,
        )
    with pytest.raises(ValueError, match="target_params and params do not match"):
        convert_state(ADAMW, tx, STATE, PARAMS, target_params={"kernel": jnp.ones((16, 12))})
    twice = optax.chain(optax.scale_by_adam(), optax.scale_by_adam())
    with pytest.raises(ValueError, match="more than once"):
        convert_state(twice, tx, twice.init(PARAMS), PARAMS)


# ---------------------------------------------------------------------------------------------------------------------
# In training
# ---------------------------------------------------------------------------------------------------------------------

RATE, SWITCH, AFTER = 3e-3, 100, 5


@functools.cache
def digits():
    data = load_digits()
    return np.asarray((data.data - data.data.mean(0)) / 8, np.float32), data.target


def network():
    rng = np.random.default_rng(0)
    shapes = {"first": (64, 64), "second": (64, 64), "third": (64, 10)}
    draw = lambda s: {"kernel": jnp.asarray(rng.standard_normal(s) / np.sqrt(s[0]), "float32"), "bias": jnp.zeros(s[1])}
    return {name: draw(shape) for name, shape in shapes.items()}


def loss(params, x, y):
    for name in ("first", "second"):
        x = jax.nn.relu(x @ params[name]["kernel"] + params[name]["bias"][None])
    logits = x @ params["third"]["kernel"] + params["third"]["bias"][None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def trainer(tx, steps):
    """`(params, state, first step) -> (params, state, the loss on all digits after each step)`."""

    def step(carry, i):
        params, state = carry
        x, y = map(jnp.asarray, digits())
        rows = jax.random.randint(jax.random.fold_in(jax.random.key(5), i), (32,), 0, len(x))
        updates, state = tx.update(jax.grad(loss)(params, x[rows], y[rows]), state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), loss(params, x, y)

    def train(params, state, first):
        (params, state), losses = jax.lax.scan(step, (params, state), first + jnp.arange(steps))
        return params, state, losses

    return jax.jit(train)


@pytest.mark.slow
def test_a_switch_with_its_moments_loses_less_than_one_without():
    """Losses on all digits 1 to 5 steps after AdamW is followed by another, as distances from AdamW's own."""
    dense = optax.adamw(RATE, b2=0.99)
    params, state, _ = trainer(dense, SWITCH)(network(), dense.init(network()), 0)
    continued = trainer(dense, AFTER)(params, state, SWITCH)[2]
    targets = {
        "flash_adamw": flash_adamw(RATE, b2=0.99),
        "spectra_adamw": spectra_adamw(RATE, b2=0.99),
        "spectra_adamw, full": spectra_adamw(RATE, b2=0.99, momentum=FullMomentum()),
        "gwt_adamw": gwt_adamw(4 * RATE, b2=0.99),
        "foam_adamw": foam_adamw(4 * RATE, b2=0.99),
    }
    for name, tx in targets.items():
        train = trainer(tx, AFTER)
        kept = train(params, convert_state(dense, tx, state, params), SWITCH)[2]
        lost = train(params, tx.init(params), SWITCH)[2]
        distance = [float(jnp.mean(jnp.abs(losses - continued))) for losses in (kept, lost)]
        print(f"{name:20} with its moments {distance[0]:.5f}, without {distance[1]:.5f}")
        assert distance[0] < distance[1] / 2, name
