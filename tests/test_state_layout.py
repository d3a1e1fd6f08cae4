"""`state_sharding` against the shardings that `init` itself gives placed parameters, and the layouts it refuses."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from spectra_optax import (
    Companded,
    Spectrum,
    compress_state,
    flash_adamw,
    foam_adamw,
    gwt_adafactor,
    gwt_adamw,
    scale_by_factored_rms,
    spectra_adamw,
    split_master_weights,
    state_sharding,
)

OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "spectra_adamw": spectra_adamw(1e-2),
    "topk in 8 bits": spectra_adamw(1e-2, momentum=Spectrum(mask="topk", values=Companded())),
    "gwt_adamw": gwt_adamw(1e-2),
    "foam_adamw": foam_adamw(1e-2),
    "gwt_adafactor": gwt_adafactor(1e-2),
    "flash_adamw": flash_adamw(1e-2),
    "split spectra": split_master_weights(spectra_adamw(1e-2)),
    "MultiSteps": optax.MultiSteps(flash_adamw(1e-2), 2),
    "adan in 8 bits": compress_state(optax.adan(1e-2), m=Companded(), v=Companded(), n=Companded("unsigned")),
}
every_optimizer = pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())

SHAPES = {
    "attention": {"kernel": (1024, 512), "bias": (512,)},
    "experts": {"kernel": (2, 3, 512, 512)},
    "embed": {"embedding": (1024, 1024)},
    "norm": {"scale": (7,)},
}
SPECS = {
    "attention": {"kernel": PartitionSpec("data", "model"), "bias": PartitionSpec("model")},
    "experts": {"kernel": PartitionSpec(None, None, "model", "data")},
    "embed": {"embedding": PartitionSpec("model", "data")},
    "norm": None,
}
is_spec = lambda node: isinstance(node, PartitionSpec)
is_shape = lambda node: isinstance(node, tuple)


def shapes_of(dtype="bfloat16"):
    return jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, dtype), SHAPES, is_leaf=is_shape)


def mesh_of(kind=AxisType.Auto, sizes=(4, 2)):
    return jax.make_mesh(sizes, ("data", "model"), axis_types=(kind,) * 2)


def placed_on(mesh, tree):
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), tree, is_leaf=is_spec)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@every_optimizer
def test_layouts_are_those_that_init_gives(tx, kind):
    shardings = placed_on(mesh_of(kind), SPECS)
    params = jax.tree.map(
        lambda x, s: jax.device_put(jnp.ones(x.shape, x.dtype), s),
        shapes_of(),
        {**shardings, "norm": {"scale": NamedSharding(mesh_of(kind), PartitionSpec())}},
    )
    expected, found = tx.init(params), state_sharding(tx, shapes_of(), shardings)
    jitted = jax.jit(tx.init, out_shardings=found)(params)
    for (path, x), y, s in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(jitted), jax.tree.leaves(found), strict=True
    ):
        if isinstance(x.sharding, NamedSharding):  # the others are whole on one device
            assert s.is_equivalent_to(x.sharding, x.ndim), jax.tree_util.keystr(path)
        else:
            assert s.is_fully_replicated, jax.tree_util.keystr(path)
        np.testing.assert_array_equal(x, y)


@every_optimizer
def test_specs_give_specs(tx):
    mesh = mesh_of()
    shardings = state_sharding(tx, shapes_of(), placed_on(mesh, SPECS))
    with jax.set_mesh(mesh):
        assert jax.tree.map(lambda s: s.spec, shardings) == state_sharding(tx, shapes_of(), SPECS)
    assert jax.tree.map(lambda s: s.spec, shardings) == state_sharding(tx, shapes_of(), SPECS)


def test_a_reduced_array_loses_the_reduced_axis():
    params = {"kernel": jax.ShapeDtypeStruct((4, 256, 128), "float32")}
    state = state_sharding(scale_by_factored_rms(), params, {"kernel": PartitionSpec("pipe", "data", "model")})
    assert state.rms_row["kernel"] == PartitionSpec("pipe", "data")
    assert state.rms_col["kernel"] == PartitionSpec("pipe", "model")
    assert state.settings == PartitionSpec()


@pytest.mark.parametrize("tx", [spectra_adamw(1e-2), flash_adamw(1e-2)], ids=["spectra_adamw", "flash_adamw"])
def test_linen_boxes(tx):
    kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), ("data", "model"))
    model = nn.Dense(512, kernel_init=kernel_init, param_dtype=jnp.bfloat16)
    params = jax.eval_shape(model.init, jax.random.key(0), jnp.ones((1, 512)))["params"]
    found = state_sharding(tx, params, nn.get_partition_spec(params))
    assert jax.tree.structure(found) == jax.tree.structure(jax.eval_shape(tx.init, params))
    plain = state_sharding(tx, nn.unbox(params), {"kernel": PartitionSpec("data", "model"), "bias": PartitionSpec()})
    assert jax.tree.leaves(found) == jax.tree.leaves(plain)


def test_nnx_states():
    def build():
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("data", "model"))
        return nnx.Linear(512, 512, kernel_init=init, rngs=nnx.Rngs(0))

    mesh = mesh_of()
    with jax.set_mesh(mesh):
        params = nnx.state(nnx.eval_shape(build), nnx.Param)
        found = state_sharding(flash_adamw(1e-2), params, nnx.get_partition_spec(params))
    names = [str(spec) for spec in jax.tree.leaves(found, is_leaf=is_spec)]
    assert names.count(str(PartitionSpec("data", "model"))) == 4  # codes and scales of both moments


def test_optimizers_of_optax_that_reduce():
    params = {"kernel": jax.ShapeDtypeStruct((256, 512), "float32")}
    state = state_sharding(optax.adafactor(1e-2), params, PartitionSpec("data", "model"))
    factored = optax.tree.get(state, "v_row"), optax.tree.get(state, "v_col")
    assert factored == ({"kernel": PartitionSpec("data")}, {"kernel": PartitionSpec("model")})


def test_a_branch_may_share_one_spec():
    tx, params = optax.sgd(1e-2, momentum=0.9), {"a": {"b": jax.ShapeDtypeStruct((8,), "float32")}}
    for specs in (PartitionSpec("x"), {"a": PartitionSpec("x")}, {"a": {"b": PartitionSpec("x")}}):
        assert state_sharding(tx, params, specs)[0].trace == {"a": {"b": PartitionSpec("x")}}


def refusal(tx, params, specs, **sizes):
    with jax.sharding.use_abstract_mesh(AbstractMesh(tuple(sizes.values()), tuple(sizes))):
        with pytest.raises(ValueError, match=r".") as refused:
            state_sharding(tx, params, specs)
    return str(refused.value)


def test_a_cut_group_is_refused_by_name():
    params = {"embed": {"embedding": jax.ShapeDtypeStruct((1000, 512), "bfloat16")}}
    message = refusal(flash_adamw(1e-2), params, PartitionSpec("model", "data"), data=16, model=2)
    assert "'embed/embedding'" in message
    assert "axis 1" in message
    assert "16 shards of 'data'" in message
    assert message.endswith("sizes that work are 1, 2, 4, 8.")
    state_sharding(optax.adamw(1e-2), params, PartitionSpec("model", "data"))  # has no groups


def test_a_cut_block_is_refused_where_two_axes_share_it():
    params = {"kernel": jax.ShapeDtypeStruct((768, 512), "float32")}
    tx = spectra_adamw(1e-2, momentum=Spectrum())
    message = refusal(tx, params, PartitionSpec(("data", "model")), data=16, model=2)
    assert "32 shards of ('data', 'model')" in message
    assert message.endswith("sizes that work are 1, 2, 4, 8, 16.")


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        (PartitionSpec("data", None, None), "has 3 axes"),
        (PartitionSpec(None, "data"), r"'kernel' \[64, 33\].*axis 1.*4 shards.*work are 1, 3\."),
        (PartitionSpec("pipe"), r"does not have: \['pipe'\]"),
        ({"bias": PartitionSpec()}, r"no entry for parameter 'kernel'"),
    ],
)
def test_a_spec_that_does_not_fit_is_refused(specs, message):
    params = {"kernel": jax.ShapeDtypeStruct((64, 33), "float32")}
    with jax.set_mesh(mesh_of()), pytest.raises(ValueError, match=message):
        state_sharding(optax.adamw(1e-2), params, specs)


def test_other_entries_are_refused():
    params = {"kernel": jax.ShapeDtypeStruct((64, 32), "float32"), "bias": jax.ShapeDtypeStruct((32,), "float32")}
    with pytest.raises(TypeError, match="'kernel'"):
        state_sharding(optax.adamw(1e-2), params, {"kernel": "data", "bias": None})
    one = NamedSharding(mesh_of(), PartitionSpec("data"))
    with pytest.raises(TypeError, match="bias"):
        state_sharding(optax.adamw(1e-2), params, {"kernel": one, "bias": PartitionSpec("data")})
    other = NamedSharding(mesh_of(sizes=(2, 4)), PartitionSpec("data"))
    with pytest.raises(ValueError, match="one mesh"):
        state_sharding(optax.adamw(1e-2), params, {"kernel": one, "bias": other})


@pytest.mark.slow
def test_a_thousand_leaves_take_seconds():
    import time

    params = {f"layer_{i}": {"kernel": jax.ShapeDtypeStruct((512, 512), "bfloat16")} for i in range(1000)}
    start = time.perf_counter()
    state_sharding(flash_adamw(1e-2), params, PartitionSpec("data", "model"))
    assert time.perf_counter() - start < 10
