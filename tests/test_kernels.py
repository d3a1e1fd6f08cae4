"""Rules on tiles: the kernels that TPUs and GPUs get, interpreted, against the plain formulas."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from spectra_optax import (
    Companded,
    FullMomentum,
    LeafRules,
    Spectrum,
    Wavelet,
    backend,
    compress_state,
    flash_adamw,
    flash_lion,
    flash_sgd,
    foam_adamw,
    fused_step,
    gwt_adafactor,
    gwt_adamw,
    spectra_adamw,
    split_master_weights,
    tiling,
)
from spectra_optax.kernels import program as programs
from spectra_optax.kernels.shards import NotLocalError
from spectra_optax.kernels.sums import sums

EIGHT_BITS = {"mu": Companded(), "nu": Companded("unsigned")}
# Partly filled tiles in both directions, a stack, and what stays plain.
SHAPES = {"wide": (768, 160), "stacked": (2, 256, 48), "bias": (48,), "ragged": (130, 40), "embedding": (64, 128)}
ON_TILES = ("wide", "stacked")
FOR_GPU = SHAPES | {"wide": (1024, 160)}  # blocks of 768 rows are no powers of two, nor are Triton's tiles
second_only = lambda params: jax.tree.unflatten(jax.tree.structure(params), [i == 1 for i in range(len(params))])
flat_only = lambda params: jax.tree.map(lambda p: p.ndim == 2, params)
# Optimizer, dtype of the parameters.
OPTIMIZERS = {
    "flash_adamw": (flash_adamw(1e-2, mask=flat_only), "bfloat16"),
    "flash_lion": (flash_lion(1e-2), "bfloat16"),
    "flash_sgd": (flash_sgd(1e-2, momentum=0.9, weight_decay=0.1), "bfloat16"),
    "gwt_adamw": (gwt_adamw(1e-2), "float32"),
    "foam_adamw": (foam_adamw(1e-2, wavelet=Wavelet(level=1)), "float32"),
    "gwt_adafactor": (gwt_adafactor(1e-2), "float32"),
    "spectra_adamw": (spectra_adamw(1e-2), "float32"),
    "spectra_adamw_8_bits": (spectra_adamw(1e-2, momentum=Spectrum(values=Companded())), "bfloat16"),
    "split_spectra_adamw": (split_master_weights(spectra_adamw(1e-2)), "bfloat16"),
    "foam_adamw_8_bits": (compress_state(foam_adamw(1e-2), **EIGHT_BITS), "float32"),
    "nadam_8_bits": (compress_state(optax.nadam(1e-2), **EIGHT_BITS), "float32"),
}
QUICK = ("flash_adamw", "spectra_adamw")


PLATFORMS = ("tpu", "gpu")


@pytest.fixture(params=PLATFORMS)
def kernels(request, monkeypatch):
    """One device of a platform that runs kernels."""
    monkeypatch.setattr(backend, "kernels", lambda: request.param)
    monkeypatch.setattr(backend, "devices", lambda: 1)
    return request.param


def drawn(dtype="float32", shapes=SHAPES, seed=0, scale=1.0):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(scale * rng.normal(size=shape), dtype) for name, shape in shapes.items()}


def plainly(tx):
    """The step of two calls, without kernels."""
    return fused_step(tx.plain if isinstance(tx, tiling.Tiled) else tx)


def trained(step, tx, params, steps=2):
    state, step = tx.init(params), jax.jit(step)
    for t in range(steps):
        gradients = drawn(jax.tree.leaves(params)[0].dtype, jax.tree.map(jnp.shape, params), t + 1, 1e-2)
        params, state = step(gradients, state, params)
    return params, state


def two_calls(tx):
    def step(gradients, state, params):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return step


def launches(step, tx, params):
    """Kernels of the program of a step."""
    return str(jax.make_jaxpr(step)(params, tx.init(params), params)).count("pallas_call[")


def assert_same(got, expected):
    for (path, x), y in zip(jax.tree_util.tree_flatten_with_path(got)[0], jax.tree.leaves(expected), strict=True):
        assert x.dtype == y.dtype
        integers = jnp.issubdtype(x.dtype, jnp.integer)
        x, y = (np.asarray(z, "float64") for z in (x, y))
        # Another order of operations: a code, or a 16-bit number, may round to its neighbour, seldom.
        off, share = np.abs(x - y) > 1e-5 * np.abs(y).max(), 2e-2 if integers else 2e-3
        assert off.mean() < share, (jax.tree_util.keystr(path), off.mean())


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in OPTIMIZERS])
def test_a_fused_step_on_tiles_is_the_plain_step(name, kernels):
    tx, dtype = OPTIMIZERS[name]
    params = drawn(dtype, FOR_GPU if kernels == "gpu" else SHAPES)
    step = fused_step(tx)
    per_leaf = 3 if "spectra" in name or "adafactor" in name else 1
    assert launches(step, tx, params) == per_leaf * len(ON_TILES)
    assert_same(trained(step, tx, params), trained(plainly(tx), tx, params))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*OPTIMIZERS])
def test_updates_from_tiles_are_the_plain_ones(name, kernels):
    tx, dtype = OPTIMIZERS[name]
    params = drawn(dtype)
    assert_same(trained(two_calls(tx), tx, params), trained(plainly(tx), tx, params))


@pytest.mark.parametrize(
    "inner",
    [
        optax.lamb(1e-2),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)),
        optax.adamw(1e-2, mask=lambda params: jax.tree.map(lambda p: p.shape[0] > 600, params)),
        optax.chain(optax.adam(1e-2), optax.stateless(lambda u, p: jax.tree.map(jnp.fliplr, u))),
        optax.chain(
            optax.scale_by_adam(), optax.stateless(lambda u, p: jax.tree.map(lambda x: x * x.shape[0] ** -0.5, u))
        ),
        optax.multi_transform(
            {"tall": optax.adam(1e-2), "short": optax.adam(1e-4)},
            lambda params: jax.tree.map(lambda p: "tall" if p.shape[0] > 600 else "short", params),
        ),
        optax.adamw(1e-2, weight_decay=0.5, mask=second_only),
    ],
    ids=[
        *("trust ratio", "global norm", "mask by size", "moves numbers", "scale by size", "rates by size"),
        "mask by place",
    ],
)
def test_what_looks_beyond_a_number_is_not_run_on_tiles(inner, kernels):
    params = drawn(shapes={"first": (64, 32), "kernel": (1024, 300)})
    tx = compress_state(inner, leaves=LeafRules(dense=lambda path: path == "first"), **EIGHT_BITS)
    assert launches(two_calls(tx), tx, params) == 0
    assert_same(trained(two_calls(tx), tx, params), trained(plainly(tx), tx, params))


@pytest.mark.parametrize(
    "tx",
    [
        spectra_adamw(1e-2, momentum=Spectrum(mask="energy")),
        spectra_adamw(1e-2, momentum=FullMomentum()),
        spectra_adamw(1e-2, momentum=Spectrum(lowering="fft")),
        compress_state(spectra_adamw(1e-2, momentum=Spectrum(dtype="float32")), mu=Companded(group=128)),
        gwt_adamw(1e-2, wavelet=Wavelet(axis=-1)),
        gwt_adamw(1e-2, leaves=LeafRules(axes=lambda path, shape: ((1,), (0,)))),
        compress_state(optax.adam(1e-2), mu=Companded()),
    ],
    ids=[
        "mask in the state",
        "whole momentum",
        "fft",
        "groups across blocks",
        "other axis",
        "transposed",
        "half precision",
    ],
)
def test_what_does_not_lie_in_blocks_of_rows_stays_plain(tx, kernels):
    params = drawn("float16" if "CompressedState" in str(tx.init(jnp.ones((64, 64)))) else "float32")
    assert launches(two_calls(tx), tx, params) == 0


def test_a_wrong_state_is_refused_as_everywhere(kernels):
    tx, params = flash_adamw(1e-2), drawn("bfloat16")
    state = tx.init(drawn("bfloat16", {**SHAPES, "wide": (768, 161)}))
    with pytest.raises(ValueError, match="wide"):
        fused_step(tx)(params, state, params)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda: optax.chain(optax.clip_by_global_norm(1e-3), flash_adamw(1e-2)),
        lambda: optax.inject_hyperparams(flash_adamw)(optax.linear_schedule(1e-2, 0.0, 10)),
        lambda: optax.apply_if_finite(compress_state(optax.adamw(1e-2), **EIGHT_BITS), 2),
        lambda: optax.MultiSteps(gwt_adamw(optax.linear_schedule(1e-2, 0.0, 10)), 2),
    ],
    ids=["chain", "inject_hyperparams", "apply_if_finite", "MultiSteps"],
)
def test_wrapped_optimizers_run_on_tiles(wrap, kernels, monkeypatch):
    params = drawn(shapes={"kernel": (256, 128)})
    tx = wrap()
    assert launches(two_calls(tx), tx, params) == (kernels == "tpu")  # XLA for GPUs joins an update with its use
    got = trained(two_calls(tx), tx, params)
    monkeypatch.setattr(backend, "kernels", lambda: None)
    assert_same(got, trained(two_calls(wrap()), tx, params))


def test_a_fused_chain_steps_with_the_state_of_the_chain(kernels):
    clip, tx = optax.clip_by_global_norm(1e-3), flash_lion(1e-2)
    params, chain = drawn("bfloat16"), optax.chain(optax.clip_by_global_norm(1e-3), flash_lion(1e-2))
    got, expected = trained(fused_step(clip, tx), chain, params), trained(two_calls(chain), chain, params)
    assert_same(got, expected)


@pytest.mark.slow
def test_vmapped_and_scanned(kernels):
    tx = flash_adamw(1e-2)
    params = {"kernel": drawn("bfloat16", {"kernel": (3, 128, 64)})["kernel"]}
    step = lambda p: functools.reduce(
        lambda carry, _: fused_step(tx)(carry[0], carry[1], carry[0]), range(2), (p, tx.init(p))
    )
    apart = [step({"kernel": p})[0]["kernel"] for p in params["kernel"]]
    assert_same(jax.jit(jax.vmap(step))(params)[0]["kernel"], jnp.stack(apart))
    scanned = jax.lax.scan(lambda c, _: (fused_step(tx)(c[0], c[1], c[0]), None), (params, tx.init(params)), length=2)
    assert_same(scanned[0], jax.jit(step)(params))


@pytest.mark.parametrize("types", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("spec", [("x", "y"), (("x", "y"), None), (None, ("x", "y"))], ids=str)
@pytest.mark.parametrize("name", ["flash_adamw", "split_spectra_adamw"])
@pytest.mark.parametrize("platform", PLATFORMS)
def test_each_shard_has_a_kernel_of_its_own(platform, name, spec, types, monkeypatch):
    monkeypatch.setattr(backend, "kernels", lambda: platform)
    tx, dtype = OPTIMIZERS[name]
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(types, types))
    layout = {"kernel": NamedSharding(mesh, PartitionSpec(*spec))}
    plain = drawn(dtype, {"kernel": (1024, 256)})
    params = jax.device_put(plain, layout)
    step = fused_step(tx, shardings=layout if types == AxisType.Auto else None)
    assert launches(step, tx, params)
    state = tx.init(params)
    text = jax.jit(step).lower(params, state, params).compile().as_text()
    assert not {word for word in ("all-gather", "all-to-all", "collective-permute") if word in text}
    assert ("all-reduce" in text) == ("spectra" in name)
    got, expected = trained(step, tx, params), trained(plainly(tx), tx, plain)
    assert got[0]["kernel"].sharding.is_equivalent_to(layout["kernel"], 2)
    assert_same(jax.device_get(got), jax.device_get(expected))


@pytest.mark.parametrize("name", ["flash_adamw", "spectra_adamw"])
def test_kernels_have_the_derivative_of_the_plain_step(name, kernels):
    tx, dtype = OPTIMIZERS[name]
    params = drawn(dtype, {"kernel": (128, 64)})
    state = tx.init(params)

    def moved(step, scale):
        gradients = jax.tree.map(lambda p: (scale * p).astype(p.dtype), params)
        return optax.tree.sum(optax.tree.cast(step(gradients, state, params)[0], jnp.float32))

    step = fused_step(tx)
    assert launches(step, tx, params)
    got, expected = (jax.jit(jax.grad(functools.partial(moved, f)))(1.0) for f in (step, plainly(tx)))
    np.testing.assert_allclose(got, expected, rtol=1e-5)


def test_a_mesh_of_one_device(kernels):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    params = jax.device_put(drawn("bfloat16", {"kernel": (128, 64)}), NamedSharding(mesh, PartitionSpec("x")))
    tx = flash_lion(1e-2)
    assert launches(fused_step(tx), tx, params) == 1
    assert_same(trained(fused_step(tx), tx, params), trained(plainly(tx), tx, params))


def test_masks_that_cannot_bear_a_single_leaf(kernels):
    tx = flash_adamw(1e-2, weight_decay=0.5, mask=lambda params: {name: p.ndim > 1 for name, p in params.items()})
    params = drawn("bfloat16", {"kernel": (128, 64), "bias": (64,)})
    assert_same(trained(fused_step(tx), tx, params), trained(plainly(tx), tx, params))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_layouts_that_are_not_known_or_cut_blocks_stay_plain(platform, monkeypatch):
    monkeypatch.setattr(backend, "kernels", lambda: platform)
    tx = flash_adamw(1e-2)
    for types, rows in ((AxisType.Auto, 1024), (AxisType.Explicit, 256)):
        mesh = jax.make_mesh((8,), ("x",), axis_types=(types,))
        layout = NamedSharding(mesh, PartitionSpec("x"))
        params = jax.device_put(drawn("bfloat16", {"kernel": (rows, 64)}), layout)
        assert launches(fused_step(tx), tx, params) == 0
    assert launches(fused_step(tx), tx, drawn("bfloat16")) == 0  # on which of the devices only the compiler knows


@pytest.mark.parametrize("shape", [(64, 24), (3, 96, 130), (8, 4096), (3, 96, 160), (16, 1024)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_of_one_pass(shape, dtype, kernels):
    x = drawn(dtype, {"x": shape})["x"]
    whole = shape[-2] % 16 == 0 or dtype == "float32" if kernels == "tpu" else shape[-1] % 32 == 0
    if not whole:
        with pytest.raises(NotLocalError, match="cannot be cut into"):
            sums(lambda numbers, x: [x], x, [], [], ("rows",), None)
        return
    row = jnp.broadcast_to(jnp.arange(x.shape[-2], dtype="float32")[:, None], (*x.shape[:-1], 1))
    rule = lambda numbers, x, row: [x, numbers[0] * x, x * row]
    rows, columns, total = sums(rule, x, [row], [2.0], ("rows", "columns", "none"), None)
    wide = np.asarray(x, "float64")
    np.testing.assert_allclose(rows, wide.sum(-1, keepdims=True), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(columns, 2 * wide.sum(-2, keepdims=True), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(total, (wide * np.asarray(row)).sum((-2, -1), keepdims=True), rtol=1e-4, atol=1e-1)


def test_programs_are_flat_and_scalars_come_first():
    square = jax.jit(lambda x, s: jax.nn.relu(x) * (s + 1.0) ** 2)
    arguments = [jax.ShapeDtypeStruct((4, 8), "float32"), jax.ShapeDtypeStruct((), "float32")]
    traced = programs.program(lambda x, s: [square(x, s)], arguments)
    assert [e.outvars[0].aval.ndim for e in traced.before] == [0, 0]
    assert all(e.outvars[0].aval.ndim == 2 for e in traced.inside)
    assert all("jit" not in e.primitive.name and "call" not in e.primitive.name for e in traced.inside)
    meaning = lambda rule, of=arguments: programs.meanings(programs.program(rule, of), ["x", "s"])
    [known], wide = meaning(lambda x, s: [square(x, s)]), [jax.ShapeDtypeStruct((6, 9), "float32"), arguments[1]]
    assert known is not None
    assert meaning(lambda x, s: [square(x, s)], wide) == [known]
    assert meaning(lambda x, s: [square(x, 2 * s)]) != [known]
    assert meaning(lambda x, s: [x * x.shape[0]], wide) != meaning(lambda x, s: [x * x.shape[0]])
    assert meaning(lambda x, s: [x - x.mean()]) == meaning(lambda x, s: [x.T]) == [None]


def test_wrong_arguments_are_refused(kernels):
    tx, params = flash_lion(1e-2), drawn("bfloat16")
    mesh = jax.make_mesh((1,), ("x",))
    with pytest.raises(ValueError, match="shardings must be a tree like the parameters"):
        fused_step(tx, shardings={"wide": NamedSharding(mesh, PartitionSpec())})(params, tx.init(params), params)
    with pytest.raises(ValueError, match="needs a transformation"):
        fused_step()
    with pytest.raises(TypeError, match="transformations must be a GradientTransformation"):
        fused_step(1e-3)


@pytest.mark.parametrize("name", ["flash_adamw", "split_spectra_adamw"])
def test_boxed_parameters_run_on_tiles(name, kernels, monkeypatch):
    tx, dtype = flash_lion(1e-2) if name == "flash_adamw" else OPTIMIZERS[name][0], jnp.bfloat16
    model = nnx.Linear(256, 128, rngs=nnx.Rngs(0), param_dtype=dtype)
    params = nnx.state(model, nnx.Param)
    step = fused_step(tx)
    assert launches(step, tx, params) == (3 if "spectra" in name else 1)
    got = jax.jit(step)(params, tx.init(params), params)
    expected = jax.jit(plainly(tx))(params, tx.init(params), params)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    assert_same(got, expected)
