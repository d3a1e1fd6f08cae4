"""Large stacks of matrices, slice by slice, against the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from spectra_optax import (
    FullMomentum,
    LeafRules,
    Spectrum,
    backend,
    flash_adamw,
    fused_step,
    gwt_adamw,
    slicing,
    spectra_adamw,
    split_master_weights,
)

# A stack in 3 parts of 2, one of experts in 6 parts, one that is small, no stack.
SHAPES = {"layers": (6, 64, 96), "experts": (2, 3, 128, 96), "few": (2, 64, 96), "kernel": (256, 96), "bias": (96,)}
OPTIMIZERS = {
    "spectra_adamw": (lambda: spectra_adamw(1e-2), "float32"),
    "energy": (lambda: spectra_adamw(1e-2, momentum=Spectrum(mask="energy", refresh=2)), "float32"),
    "topk": (lambda: spectra_adamw(1e-2, momentum=Spectrum(mask="topk", refresh=2)), "float32"),
    "split": (lambda: split_master_weights(spectra_adamw(1e-2)), "bfloat16"),
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    """Parts of two small matrices, on one device."""
    monkeypatch.setattr(slicing, "_LARGEST", 2 * 64 * 96)
    monkeypatch.setattr(backend, "devices", lambda: 1)


def drawn(dtype, seed=0, shapes=SHAPES):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}


def two_calls(tx):
    def step(gradients, state, params):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


def trained(step, tx, params, steps=3):
    state = tx.init(params)
    for t in range(1, steps + 1):
        gradients = drawn("float32", t)
        params, state = step({name: gradients[name] for name in params}, state, params)
    return params, state


def loops(step, tx, params):
    return str(jax.make_jaxpr(step)(params, tx.init(params), params)).count("scan[")


def assert_same(got, expected):
    for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(expected), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        x, y = (np.asarray(z, "float64") for z in (x, y))
        off = np.abs(x - y) > 1e-5 * np.abs(y).max()  # a code may round to its neighbour, seldom
        assert off.mean() < 1e-3, (jax.tree_util.keystr(path), off.mean())


@pytest.mark.parametrize(
    ("shape", "axes", "part"),
    [
        ((6, 64, 96), 1, (2, 64, 96)),
        ((7, 64, 96), 1, (1, 64, 96)),
        ((2, 64, 96), 1, None),
        ((64, 96), 0, None),
        ((1024, 96), 0, None),
        ((2, 3, 128, 96), 2, (1, 1, 128, 96)),
        ((2, 3, 32, 96), 2, (1, 3, 32, 96)),
        ((4, 1024, 96), 1, (1, 1024, 96)),
    ],
)
def test_parts_are_the_largest_that_fit(shape, axes, part):
    assert slicing.part_of(shape, axes, None, 2 * 64 * 96) == part


@pytest.mark.parametrize(
    ("spec", "part"), [((), (2, 64, 96)), (("x",), None), ((None, "x"), None), ((None, None, "x"), None)]
)
def test_parts_follow_what_a_device_holds(spec, part):
    mesh = jax.make_mesh((2,), ("x",))
    layout = NamedSharding(mesh, PartitionSpec(*spec))
    assert slicing.part_of((4, 64, 96), 1, layout, 2 * 64 * 96) == part


@pytest.mark.parametrize("make", [flash_adamw, gwt_adamw])
@pytest.mark.parametrize(("platform", "layers", "count"), [("gpu", 10, 1), ("gpu", 8, 0), ("cpu", 10, 0)])
def test_gpus_without_kernels_take_up_to_two_gibibytes_at_once(make, platform, layers, count, monkeypatch):
    monkeypatch.setenv(backend.OFF, "off")
    tx, params = make(1e-3), {"layers": jax.ShapeDtypeStruct((layers, 8192, 8192), "bfloat16")}
    state = jax.eval_shape(tx.init, params)
    with backend.compiling_for(platform):
        assert str(jax.make_jaxpr(fused_step(tx))(params, state, params)).count("scan[") == count


def test_codes_in_slices_are_those_of_the_stack(monkeypatch):
    monkeypatch.setattr(slicing, "limit", lambda bulky: 2 * 64 * 96)
    tx, params = flash_adamw(1e-2), drawn("bfloat16")
    assert loops(fused_step(tx), tx, params) == 2
    assert_same(trained(jax.jit(fused_step(tx)), tx, params), trained(jax.jit(two_calls(tx)), tx, params))


QUICK = ("spectra_adamw",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in OPTIMIZERS])
def test_slices_are_the_stack(name):
    make, dtype = OPTIMIZERS[name]
    tx, params = make(), drawn(dtype)
    assert loops(fused_step(tx), tx, params) == 2
    assert_same(trained(jax.jit(fused_step(tx)), tx, params), trained(jax.jit(two_calls(tx)), tx, params))


def test_without_jit():
    tx, params = spectra_adamw(1e-2), {"layers": drawn("float32")["layers"]}
    assert_same(trained(fused_step(tx), tx, params), trained(jax.jit(two_calls(tx)), tx, params))


def test_temporaries_are_those_of_a_part():
    tx, matrix = spectra_adamw(1e-2), 64 * 96 * 4

    def temporaries(layers):
        params = {"layers": jax.ShapeDtypeStruct((layers, 64, 96), "float32")}
        args = (params, jax.eval_shape(tx.init, params), params)
        # Parameters first: JAX gives donated memory to the first result of its shape.
        step = lambda params, state, gradients: fused_step(tx)(gradients, state, params)
        return jax.jit(step, donate_argnums=(0, 1)).lower(*args).compile().memory_analysis().temp_size_in_bytes

    few, many = temporaries(8), temporaries(32)
    assert many - few < 2 * matrix  # of 24 more: XLA copies the codes, which are small


@pytest.mark.parametrize("types", [AxisType.Explicit, pytest.param(AxisType.Auto, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("spec", "count"),
    [((None, "x", "y"), 1), ((None, ("x", "y")), 1), ((None, None, "x"), 1), (("y",), 0), ((), 1)],
    ids=str,
)
def test_shards_keep_to_themselves(spec, count, types):
    tx, plain = spectra_adamw(1e-2), {"layers": jnp.tile(drawn("float32")["layers"], (4, 8, 8))}
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(types, types))
    layout = {"layers": NamedSharding(mesh, PartitionSpec(*spec))}
    params = jax.device_put(plain, layout)
    step = fused_step(tx, shardings=layout if types == AxisType.Auto else None)
    state = tx.init(params)
    assert loops(step, tx, params) == count
    text = jax.jit(step).lower(params, state, params).compile().as_text()
    assert not {word for word in ("all-gather", "all-to-all", "collective-permute") if word in text}
    got = jax.jit(step)(params, state, params)
    assert got[0]["layers"].sharding.is_equivalent_to(layout["layers"], 3)
    expected = jax.jit(two_calls(tx))(plain, tx.init(plain), plain)
    assert_same(jax.device_get(got), jax.device_get(expected))


def test_a_layout_that_only_the_compiler_knows_is_left_alone(monkeypatch):
    monkeypatch.setattr(backend, "devices", lambda: 8)
    tx, params = spectra_adamw(1e-2), drawn("float32")
    assert loops(fused_step(tx), tx, params) == 0


@pytest.mark.parametrize(
    "tx",
    [
        gwt_adamw(1e-2),
        spectra_adamw(1e-2, momentum=FullMomentum()),
        spectra_adamw(1e-2, leaves=LeafRules(axes=lambda path, shape: ((0,), (1, 2)) if len(shape) == 3 else None)),
        spectra_adamw(1e-2, leaves=LeafRules(dense=lambda path: path in ("layers", "experts"))),
    ],
    ids=["one pass", "whole momentum", "no stack", "dense"],
)
def test_what_needs_no_slices_gets_none(tx):
    params = {name: p for name, p in drawn("float32").items() if name != "experts"}
    assert loops(fused_step(tx), tx, params) == 0


def test_a_mask_that_tells_slices_from_stacks_keeps_the_stack():
    mask = lambda params: jax.tree.map(lambda p: p.shape[0] > 1, params)
    tx, params = (
        spectra_adamw(1e-2, weight_decay=0.5, mask=mask),
        {"layers": jnp.tile(drawn("float32")["layers"], (1, 4, 1))},
    )
    assert loops(fused_step(tx), tx, params) == 0
    got = jax.jit(fused_step(tx))(params, tx.init(params), params)
    assert_same(got, jax.jit(two_calls(tx))(params, tx.init(params), params))


def test_after_other_members_of_a_chain():
    clip, tx = optax.clip_by_global_norm(1e-3), spectra_adamw(1e-2)
    params, chain = drawn("float32"), optax.chain(clip, tx)
    assert loops(fused_step(clip, tx), chain, params) == 2
    assert_same(
        trained(jax.jit(fused_step(clip, tx)), chain, params), trained(jax.jit(two_calls(chain)), chain, params)
    )
