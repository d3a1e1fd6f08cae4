"""Split master weights: the training of float32 weights, bit for bit, from 16-bit parameters."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from spectra_optax import memory_table, state_bytes
from spectra_optax.codecs.weight_split import join, split
from spectra_optax.transforms.split_weights import (
    SplitWeightsState,
    master_weights,
    split_leaves,
    split_master_weights,
    with_master_weights,
)

DTYPES = ["bfloat16", "float16"]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_width = pytest.mark.parametrize("bits", [24, 32])
INNER = {
    "adamw": optax.adamw(1e-2, weight_decay=0.1),
    "sgd": optax.sgd(1e-2, momentum=0.9),
    "lion": optax.lion(1e-3, weight_decay=0.1),
}


def bits_of(x):
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[x.itemsize])


def assert_same_bits(actual, desired):
    assert jax.tree.structure(actual) == jax.tree.structure(desired)
    for a, d in zip(jax.tree.leaves(actual), jax.tree.leaves(desired), strict=True):
        assert a.dtype == d.dtype
        np.testing.assert_array_equal(bits_of(a), bits_of(d))


def steps(tx, params, gradients, state=None):
    """One step per gradient; the update is compiled, its application is not."""
    state, update = tx.init(params) if state is None else state, jax.jit(tx.update)
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


def start(tx, master, dtype):
    """Parameters and state that stand for float32 weights."""
    params = jax.tree.map(lambda w: w.astype(dtype), master)
    return with_master_weights(master, params, tx.init(params))


def make_tree(dtype="bfloat16"):
    key = jax.random.key(3)
    return {
        "narrow": jax.random.normal(key, (8, 6), dtype),
        "scalar": jnp.asarray(1.5, dtype),
        "wide": jax.random.normal(key, (5,)),
        "complex": jax.random.normal(key, (3,), jnp.complex64),
        "empty": jnp.zeros((0, 3), dtype),
    }


# ---------------------------------------------------------------------------------------------------------------------
# Training
# ---------------------------------------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("name", INNER)
def test_32_bits_train_as_float32_does_bit_for_bit(key, name, dtype):
    """Compiled step by step; in one program XLA contracts the multiplication by the learning rate into the addition."""
    master, gradients = jax.random.normal(key, (40, 8)), jax.random.normal(jax.random.key(1), (50, 40, 8))
    expected, inner_state = steps(INNER[name], master, gradients)
    tx = split_master_weights(INNER[name], bits=32)
    params, state = start(tx, master, dtype)
    params, state = steps(tx, params, gradients, state)
    assert params.dtype == jnp.dtype(dtype)
    assert_same_bits(master_weights(params, state), expected)
    assert_same_bits(state.inner_state, inner_state)


@every_dtype
@every_width
def test_in_one_compiled_loop_it_trains_as_float32_does(key, dtype, bits):
    master, gradients = jax.random.normal(key, (40, 8)), jax.random.normal(jax.random.key(1), (50, 40, 8))

    def train(tx, params, state):
        def step(carry, gradient):
            params, state = carry
            updates, state = tx.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.jit(lambda *carry: jax.lax.scan(step, carry, gradients)[0], donate_argnums=(0, 1))(params, state)

    inner, tx = INNER["adamw"], split_master_weights(INNER["adamw"], bits)
    params, state = train(tx, *start(tx, master, dtype))
    expected, _ = train(inner, jnp.copy(master), inner.init(master))
    # 50 roundings of weights below 4: by half a float32 ULP in either training, or by one step of 256 ULP.
    np.testing.assert_allclose(
        master_weights(params, state), expected, rtol=0, atol=50 * {24: 256, 32: 1}[bits] * 2.0**-22
    )


@every_dtype
@every_width
def test_nothing_moves_without_a_learning_rate(dtype, bits):
    pattern = np.random.default_rng(0).integers(0, 1 << 32, 4096, dtype=np.uint32)
    exponent = {"bfloat16": (1, 254), "float16": (102, 141)}[dtype]  # float16's subnormal numbers included
    kept = (pattern >> 23 & 0xFF >= exponent[0]) & (pattern >> 23 & 0xFF <= exponent[1])
    master = jnp.asarray(np.concatenate([pattern[kept].view(np.float32), [0.0, -0.0]]))
    tx = split_master_weights(optax.adamw(0.0), bits)
    params, state = start(tx, master, dtype)

    @jax.jit
    def run(params, state):
        def step(carry, key):
            params, state = carry
            updates, state = tx.update(jax.random.normal(key, master.shape), state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, state), jax.random.split(jax.random.key(0), 300))[0]

    new_params, new_state = run(params, state)
    assert_same_bits((new_params, new_state.correction), (params, state.correction))
    assert new_state.step == 300


@pytest.mark.parametrize("rounding", ["stochastic", "nearest"])
def test_updates_below_a_step_of_the_grid(rounding):
    """A weight of 1 and updates of 1e-7: 2 float32 ULP, of the 256 in a step of the 24-bit grid."""
    n, count = 4096, 1000
    tx = split_master_weights(optax.sgd(1e-7), rounding=rounding)
    params = jnp.ones((64, n // 64), jnp.bfloat16)
    params, state = jax.jit(lambda p: jax.lax.fori_loop(0, count, functools.partial(_one_step, tx), (p, tx.init(p))))(
        params
    )
    moved = (1.0 - np.asarray(master_weights(params, state), np.float64)) * 2.0**24
    if rounding == "nearest":
        assert (moved == 0).all()
    else:
        # Independent draws of probability 2/256 would give the mean this deviation; four of it are allowed.
        deviation = 256 * np.sqrt(count * (2 / 256) * (254 / 256) / n)
        np.testing.assert_allclose(moved.mean(), 2 * count, atol=4 * deviation)
        np.testing.assert_array_equal(moved % 256, 0)


def _one_step(tx, _, carry):
    params, state = carry
    updates, state = tx.update(jnp.ones_like(params), state, params)
    return optax.apply_updates(params, updates), state


@every_width
def test_float32_gradients_are_not_rounded(bits):
    params = jnp.ones((4,), jnp.bfloat16)
    gradient = jnp.full((4,), 1.0 + 2.0**-20)
    seen = []
    spy = optax.stateless(lambda g, w: seen.append((g, w)) or g)
    tx = split_master_weights(spy, bits)
    tx.update(gradient, tx.init(params), params)
    (g, w), = seen  # fmt: skip
    assert (g.dtype, w.dtype) == (jnp.float32, jnp.float32)
    np.testing.assert_array_equal(g, gradient)


# ---------------------------------------------------------------------------------------------------------------------
# What the update promises
# ---------------------------------------------------------------------------------------------------------------------


def extremes(dtype):
    """Pairs of float32 weights, before and after a step, up to the ends of the 16-bit range and across zero."""
    largest, smallest = {"bfloat16": (1e38, 1e-37), "float16": (65504.0, 6e-8)}[dtype]
    some = np.array([0.0, -0.0, 1.0, 1.001, -1.999, 300.7, largest, -largest, smallest, -smallest, 3e-3, -7e-3])
    grown = np.geomspace(smallest, largest, 50) * np.where(np.arange(50) % 2, -1.0, 1.0)
    some = np.concatenate([some, grown]).astype(np.float32)
    before, after = np.meshgrid(some, some)
    return jnp.asarray(before.ravel()), jnp.asarray(after.ravel())


def jump():
    """A transformation that is told the update."""
    return optax.GradientTransformationExtraArgs(
        lambda params: optax.EmptyState(), lambda g, state, params=None, *, change, **_: (change, state)
    )


@every_dtype
@every_width
def test_params_and_corrections_fit_each_other_after_any_jump(dtype, bits):
    before, after = extremes(dtype)
    tx = split_master_weights(jump(), bits, rounding="nearest" if bits == 24 else None)
    params, state = start(tx, before, dtype)
    held = np.asarray(master_weights(params, state))
    change = after - held
    intended = (held + np.asarray(change)).astype(np.float64)  # rounded to float32, as in any float32 training
    updates, state = jax.jit(tx.update)(jnp.zeros_like(before), state, params, change=change)
    params = optax.apply_updates(params, updates)
    found = np.asarray(master_weights(params, state)).astype(np.float64)
    assert np.isfinite(found).all()
    eps = {24: 2.0**-16, 32: 2.0**-24}[bits]
    tolerance = eps * np.abs(intended) + {"bfloat16": 2.0**-134, "float16": 2.0**-32}[dtype]
    # A weight that is all but cancelled ends within a float32 ULP of the old one.
    tolerance = np.where(np.abs(intended) < np.abs(held) * 2.0**-15, tolerance + np.abs(held) * 2.0**-23, tolerance)
    assert (np.abs(found - intended) <= tolerance).all()


@every_dtype
@every_width
def test_a_step_that_misses_its_16_bit_weight_leaves_no_correction(dtype, bits):
    """From just below 64, held as 64, across zero to any number of float32 ULP: the odd ones are 25 bits away."""
    steps_of_ulp = np.arange(1, 1 << 10)
    intended = -steps_of_ulp * 2.0**-18
    before = jnp.full(intended.shape, 64 - 2.0**-8, jnp.float32)
    tx = split_master_weights(jump(), bits)
    params, state = start(tx, before, dtype)
    change = jnp.asarray(intended - (64 - 2.0**-8), jnp.float32)
    updates, state = jax.jit(tx.update)(jnp.zeros_like(change), state, params, change=change)
    params = optax.apply_updates(params, updates)
    missed = bits_of(params) != bits_of(split(jnp.asarray(intended, jnp.float32), dtype, bits)[0])
    bits_of_half = {"bfloat16": 8, "float16": 11}[dtype]
    assert missed[(steps_of_ulp < 1 << bits_of_half) & (steps_of_ulp % 2 == 1)].all()
    assert not missed[steps_of_ulp % 2 == 0].any()
    assert not np.asarray(state.correction)[missed].any()
    found = np.asarray(master_weights(params, state)).astype(np.float64)
    assert np.abs(found - intended).max() <= 2.0**-18


@pytest.mark.slow
@every_dtype
@every_width
def test_op_by_op_gives_the_bits_of_the_compiled_update(dtype, bits):
    """So XLA elides nothing."""
    before, after = extremes(dtype)
    random = jax.random.normal(jax.random.key(0), (4096,)) * jnp.exp2(jnp.arange(4096.0) % 40 - 20)
    before, after = jnp.concatenate([before, random]), jnp.concatenate([after, random * 1.003])
    tx = split_master_weights(jump(), bits)
    params, state = start(tx, before, dtype)

    def step(params, state, change):
        updates, state = tx.update(jnp.zeros_like(change), state, params, change=change)
        params = optax.apply_updates(params, updates)
        return updates, params, state, master_weights(params, state)

    change = after - before
    compiled = jax.jit(step)(params, state, change)
    with jax.disable_jit():
        eager = step(params, state, change)
    assert_same_bits(compiled, eager)


def test_zero_keeps_its_sign_beside_an_update_of_zero():
    params = jnp.asarray([0.0, -0.0], jnp.bfloat16)
    tx = split_master_weights(optax.sgd(1.0))
    new_params, _ = steps(tx, params, [jnp.zeros(2), jnp.zeros(2)])
    assert_same_bits(new_params, params)


@every_width
def test_not_a_number_is_not_hidden(bits):
    params, gradient = jnp.ones(3, jnp.bfloat16), jnp.asarray([1.0, jnp.nan, jnp.inf])
    tx = split_master_weights(optax.sgd(0.5), bits)
    params, state = steps(tx, params, [gradient])
    np.testing.assert_array_equal(params.astype(jnp.float32), [0.5, np.nan, -np.inf])
    np.testing.assert_array_equal(master_weights(params, state), [0.5, np.nan, -np.inf])


# ---------------------------------------------------------------------------------------------------------------------
# Trees, state, types
# ---------------------------------------------------------------------------------------------------------------------


@every_dtype
@every_width
def test_other_leaves_get_what_the_inner_transformation_gives(dtype, bits):
    params = make_tree(dtype)
    gradient = jax.tree.map(lambda p: (0.1 * jnp.ones_like(p)).astype(p.dtype), params)
    inner = INNER["adamw"]
    tx = split_master_weights(inner, bits)
    updates, state = jax.jit(tx.update)(gradient, tx.init(params), params)
    alone, _ = jax.jit(inner.update)(gradient, inner.init(params), params)
    for name, p in params.items():
        narrow = p.dtype == jnp.dtype(dtype)
        assert updates[name].dtype == (jnp.float32 if narrow else p.dtype)
        if narrow:
            assert state.correction[name].dtype == {24: jnp.int8, 32: jnp.int16}[bits]
            assert state.correction[name].shape == p.shape
        else:
            assert state.correction[name] == optax.MaskedNode()
            np.testing.assert_allclose(updates[name], alone[name], rtol=1e-6)
    assert state.inner_state[0].mu["narrow"].dtype == jnp.float32
    masters = master_weights(params, state)
    assert masters["wide"] is params["wide"]
    assert masters["narrow"].dtype == jnp.float32


@every_width
def test_bytes_of_the_state(bits):
    params = {"kernel": jax.ShapeDtypeStruct((64, 32), jnp.bfloat16), "scale": jax.ShapeDtypeStruct((32,), jnp.float32)}
    per = {24: 1, 32: 2}[bits]
    tx = split_master_weights(optax.sgd(1.0, momentum=0.9), bits)
    rows = {row.path: row.bytes for row in memory_table(tx, params).rows}
    assert rows == {"kernel": 64 * 32 * (per + 4), "scale": 32 * 4}
    assert state_bytes(tx, params) - sum(rows.values()) < 100


@pytest.mark.parametrize("x64", [False, True])
def test_types_are_stable_and_init_needs_shapes_only(x64):
    params = make_tree()
    tx = split_master_weights(optax.adamw(optax.cosine_decay_schedule(1e-2, 100)))
    types = functools.partial(jax.eval_shape, lambda tree: tree)
    expected = types(tx.init(params))
    assert types(tx.init(types(params))) == expected
    with jax.enable_x64(x64):
        assert jax.eval_shape(tx.update, params, expected, params)[1] == expected


@pytest.mark.parametrize(
    "inner",
    [
        optax.contrib.schedule_free(optax.sgd(1e-2), 1e-2),
        optax.inject_hyperparams(optax.adamw)(1e-2),
        optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(),
        optax.masked(optax.adam(1e-2), {"narrow": True, "scalar": False, "wide": True, "empty": False}),
    ],
    ids=["schedule_free", "inject_hyperparams", "multi_steps", "masked"],
)
def test_any_inner_transformation(inner):
    params = make_tree()
    del params["complex"]  # which `inject_hyperparams` and `MultiSteps` cannot take
    after, state = steps(split_master_weights(inner), params, [params] * 3)
    assert {x.dtype for x in jax.tree.leaves(state.inner_state) if x.ndim} == {jnp.dtype("float32")}
    moved = jax.tree.map(lambda old, new: bool((old != new).any()), params, after)
    assert moved["narrow"]
    assert moved["wide"]


def test_schedule_free_starts_from_the_values():
    params = jnp.asarray([1.0, 2.0], jnp.bfloat16)
    state = split_master_weights(optax.contrib.schedule_free(optax.sgd(1e-2), 1e-2)).init(params)
    assert_same_bits(state.inner_state.z, jnp.asarray([1.0, 2.0]))


def test_stacked_layers_are_rounded_as_each_alone(key):
    params = jax.random.normal(key, (3, 16, 8), jnp.bfloat16)
    gradients = jax.random.normal(jax.random.key(1), (4, 3, 16, 8))
    tx = split_master_weights(optax.sgd(1e-4))
    stacked, state = steps(tx, params, gradients)
    for i in range(3):
        single = steps(tx, params[i], gradients[:, i])
        assert_same_bits((stacked[i], state.correction[i]), (single[0], single[1].correction))


def test_the_lenient_factory_accepts_float32_trees():
    params = {"kernel": jnp.ones((4, 2))}
    tx = split_leaves(optax.sgd(0.5), 24, None)
    params, state = steps(tx, params, [params])
    np.testing.assert_array_equal(params["kernel"], np.full((4, 2), 0.5))
    assert master_weights(params, state)["kernel"] is params["kernel"]


# ---------------------------------------------------------------------------------------------------------------------
# Export and import
# ---------------------------------------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize(
    "around", [lambda tx: tx, lambda tx: optax.chain(optax.identity(), tx)], ids=["alone", "chain"]
)
def test_import_then_export_is_exact_before_the_first_step(key, dtype, around):
    master = {"a": jax.random.normal(key, (9, 4)), "b": jnp.asarray(0.1)}
    tx = around(split_master_weights(optax.adam(1e-3), bits=32))
    params, state = start(tx, master, dtype)
    assert_same_bits(master_weights(params, state), master)
    jitted = jax.jit(with_master_weights)(master, params, state)
    assert_same_bits(jitted, (params, state))
    host = with_master_weights(jax.tree.map(np.asarray, master), jax.tree.map(jnp.zeros_like, params), state)
    assert_same_bits(host, (params, state))


@every_dtype
def test_24_bits_import_the_nearest(key, dtype):
    master = jax.random.normal(key, (64, 4))
    tx = split_master_weights(optax.adam(1e-3))
    params, state = start(tx, master, dtype)
    exported = master_weights(params, state)
    np.testing.assert_allclose(exported, master, rtol=2.0**-16)
    assert_same_bits(with_master_weights(exported, params, state), (params, state))


def test_mixed_trees_are_imported_as_they_are():
    params = make_tree()
    master = jax.tree.map(lambda p: p * 1.5 if p.dtype != jnp.bfloat16 else p.astype(jnp.float32) * 1.0001, params)
    tx = split_master_weights(optax.adam(1e-3), bits=32)
    new_params, state = with_master_weights(master, params, tx.init(params))
    assert new_params["wide"] is master["wide"]
    assert {name: x.dtype for name, x in new_params.items()} == {name: x.dtype for name, x in params.items()}
    assert_same_bits(master_weights(new_params, state)["narrow"], master["narrow"])


def test_states_without_or_with_two_splits_are_refused():
    params = jnp.ones(3, jnp.bfloat16)
    one = split_master_weights(optax.sgd(1.0)).init(params)
    for state, count in ((optax.adam(1.0).init(params), 0), ((one, one), 2)):
        with pytest.raises(ValueError, match=f"one SplitWeightsState, but contains {count}"):
            master_weights(params, state)
        with pytest.raises(ValueError, match=f"one SplitWeightsState, but contains {count}"):
            with_master_weights(params, params, state)


def test_other_params_are_refused():
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(2)}
    state = split_master_weights(optax.sgd(1.0)).init(params)
    for other in ({"a": jnp.ones(4, jnp.bfloat16), "b": jnp.ones(2)}, {"a": jnp.ones(3), "b": jnp.ones(2)}):
        with pytest.raises(ValueError, match="16-bit parameters"):
            master_weights(other, state)
    with pytest.raises(ValueError, match="master and params do not match"):
        with_master_weights({"a": jnp.ones(4), "b": jnp.ones(2)}, params, state)


# ---------------------------------------------------------------------------------------------------------------------
# In company
# ---------------------------------------------------------------------------------------------------------------------


@every_width
def test_bad_gradients_are_skipped_by_apply_if_finite(key, bits):
    params = jax.random.normal(key, (16, 4), jnp.bfloat16)
    tx = split_master_weights(optax.apply_if_finite(optax.adam(1e-3), 5), bits)
    params, state = steps(tx, params, [params])
    for bad in (jnp.nan, jnp.inf):
        after, skipped = steps(tx, params, [jnp.full_like(params, bad)], state)
        assert_same_bits((after, skipped.correction), (params, state.correction))
    again, _ = steps(tx, after, [params], skipped)
    assert (np.asarray(again) != np.asarray(params)).any()


def test_multi_steps_around_it(key):
    """Between its steps nothing moves; the mean of two equal gradients is that gradient."""
    params = jax.random.normal(key, (16, 4), jnp.bfloat16)
    split = split_master_weights(optax.sgd(1e-3), bits=32)
    once, state = steps(split, params, [params])
    tx = optax.MultiSteps(split, 2).gradient_transformation()
    half, half_state = steps(tx, params, [params])
    assert_same_bits(half, params)
    twice, twice_state = steps(tx, half, [params], half_state)
    assert_same_bits(master_weights(twice, twice_state), master_weights(once, state))


def test_nnx_optimizer():
    model = nnx.Linear(8, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    tx = split_master_weights(optax.adamw(1e-3), bits=32)
    optimizer, pure = nnx.Optimizer(model, tx, wrt=nnx.Param), nnx.as_pure(nnx.state(model, nnx.Param))
    gradient = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
    for _ in range(3):
        optimizer.update(model, gradient)
    expected = steps(tx, pure, [nnx.as_pure(gradient)] * 3)
    trained = nnx.state(model, nnx.Param)
    assert_same_bits(nnx.as_pure(trained), expected[0])
    exported = nnx.as_pure(master_weights(trained, optimizer.opt_state))
    assert_same_bits(exported, master_weights(*expected))
    weights, opt_state = with_master_weights(exported, trained, optimizer.opt_state)
    assert_same_bits(nnx.as_pure(weights), expected[0])
    assert_same_bits(nnx.as_pure(opt_state), nnx.as_pure(optimizer.opt_state))


def test_linen_train_state_keeps_boxes_and_donates():
    init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "x"))
    module = nn.Dense(4, param_dtype=jnp.bfloat16, kernel_init=init)
    params = module.init(jax.random.key(0), jnp.ones((3, 8)))["params"]
    tx = split_master_weights(optax.adamw(1e-3), bits=32)
    gradient = jax.tree.map(jnp.ones_like, params)
    expected = steps(tx, params, [gradient] * 2)
    state = TrainState.create(apply_fn=module.apply, params=jax.tree.map(jnp.copy, params), tx=tx)
    assert state.opt_state.correction["kernel"].names == (None, "x")
    step = jax.jit(lambda state: state.apply_gradients(grads=gradient), donate_argnums=0)
    state = step(step(state))
    assert_same_bits(state.params, expected[0])
    assert_same_bits(state.opt_state.correction, expected[1].correction)
    assert master_weights(state.params, state.opt_state)["kernel"].names == (None, "x")


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_corrections_lie_where_their_parameters_lie(key, axis_type):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(axis_type,))
    master = {"rows": jax.random.normal(key, (64, 32)), "cols": jax.random.normal(key, (32, 64))}
    tx = split_master_weights(optax.sgd(1e-3))
    params, state = start(tx, master, jnp.bfloat16)
    expected = steps(tx, params, [master], state)
    with jax.set_mesh(mesh):
        layout = {
            "rows": NamedSharding(mesh, PartitionSpec("x")),
            "cols": NamedSharding(mesh, PartitionSpec(None, "x")),
        }
        placed = jax.device_put(master, layout)
        params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), placed)
        params, state = with_master_weights(jax.tree.map(np.asarray, master), params, tx.init(params))
        compiled = jax.jit(tx.update).lower(placed, state, params).compile().as_text()
        assert "all-gather" not in compiled
        after, new_state = steps(tx, params, [placed], state)
        for tree in (params, state.correction, after, new_state.correction, master_weights(after, new_state)):
            for name, x in tree.items():
                assert x.sharding.is_equivalent_to(layout[name], 2)
    assert_same_bits((after, new_state.correction), (expected[0], expected[1].correction))


def test_the_correction_is_what_join_needs(key):
    params = jax.random.normal(key, (5, 3), jnp.float16)
    tx = split_master_weights(optax.sgd(1e-3))
    params, state = steps(tx, params, [params])
    assert isinstance(state, SplitWeightsState)
    assert_same_bits(master_weights(params, state), join(params, state.correction))


# ---------------------------------------------------------------------------------------------------------------------
# Bad input
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [16, 8, 24.0, "24", None, jnp.asarray(24)])
def test_bad_bits(bits):
    with pytest.raises(ValueError, match="bits must be 24 or 32"):
        split_master_weights(optax.sgd(1.0), bits)


def test_bad_rounding():
    with pytest.raises(ValueError, match="rounding must be one of 'nearest', 'stochastic'"):
        split_master_weights(optax.sgd(1.0), rounding="up")
    for rounding in ("nearest", "stochastic"):
        with pytest.raises(ValueError, match="no effect at 32 bits"):
            split_master_weights(optax.sgd(1.0), 32, rounding=rounding)


def test_bad_inner():
    with pytest.raises(TypeError, match="inner must be a GradientTransformation"):
        split_master_weights(optax.sgd)


def test_trees_without_16_bit_leaves():
    tx = split_master_weights(optax.sgd(1.0))
    with pytest.raises(ValueError, match=r"no effect.*complex64.*float32"):
        tx.init({"a": jnp.ones(3), "b": jnp.ones(3, jnp.complex64)})
    with pytest.raises(TypeError, match="'b' has dtype int32"):
        tx.init({"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(3, jnp.int32)})
    for empty in ({}, (), {"a": None}, {"a": optax.MaskedNode()}):
        assert not jax.tree.leaves(tx.init(empty).correction)
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones(2)}
    marked = optax.tree.map_params(tx, lambda _: 1, tx.init(params), transform_non_params=lambda _: 0)
    assert marked.correction["a"] == 1


def test_misfits_are_refused():
    params = {"a": jnp.ones(3, jnp.bfloat16), "b": jnp.ones((2, 2), jnp.bfloat16)}
    tx = split_master_weights(optax.sgd(1.0))
    state = tx.init(params)
    with pytest.raises(ValueError, match="needs the parameters"):
        tx.update(params, state)
    for bad in ({"a": params["a"]}, params | {"c": params["a"]}, params | {"b": jnp.ones(2)}):
        with pytest.raises(ValueError, match="updates"):
            jax.jit(tx.update)(bad, state, params)
        with pytest.raises(ValueError, match="16-bit parameters"):
            jax.jit(tx.update)(bad, state, bad)


def test_a_state_of_other_bits_is_refused_even_under_jit():
    params = jnp.ones(3, jnp.bfloat16)
    state = split_master_weights(optax.sgd(1.0), bits=32).init(params)
    with pytest.raises(ValueError, match="other settings"):
        jax.jit(split_master_weights(optax.sgd(1.0)).update)(params, state, params)


def test_a_state_that_was_cast_is_refused():
    params = jnp.ones(3, jnp.bfloat16)
    tx = split_master_weights(optax.sgd(1.0))
    state = tx.init(params)
    with pytest.raises(TypeError, match="int8 or int16, got float32"):
        tx.update(params, state._replace(correction=jnp.ones(3)), params)
