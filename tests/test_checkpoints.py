"""Checkpoints that move between numbers of devices, are saved in the background, or belong to other settings."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from spectra_optax import (
    Companded,
    FullMomentum,
    LeafRules,
    Spectrum,
    Wavelet,
    check_stored_state,
    checkpoint_contents,
    compress_state,
    flash_adamw,
    foam_adamw,
    gwt_adamw,
    spectra_adamw,
    split_master_weights,
    state_sharding,
)

OPTIMIZERS = {
    "adamw": optax.adamw(1e-2),
    "spectra_adamw": spectra_adamw(1e-2),
    "topk": spectra_adamw(1e-2, momentum=Spectrum(mask="topk")),
    "flash_adamw": flash_adamw(1e-2),
    "gwt_adamw": gwt_adamw(1e-2),
    "split foam in 8 bits": split_master_weights(
        compress_state(foam_adamw(1e-2), mu=Companded(), nu=Companded("unsigned"))
    ),
}
every_optimizer = pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
SHAPES = {
    "dense": {"kernel": jax.ShapeDtypeStruct((2048, 64), "bfloat16"), "bias": jax.ShapeDtypeStruct((64,), "bfloat16")},
    "embed": {"embedding": jax.ShapeDtypeStruct((64, 2048), "bfloat16")},
}
# Numbers of devices along two axes, and the specs of kernel, bias and embedding.
HOPS = [
    ((4, 2), ("x", "y"), (), ("y", "x")),
    ((2, 2), (None, ("x", "y")), ("x",), (("x", "y"),)),
    ((1, 2), ("y",), (), (None, "y")),
    ((1, 1), (), (), ()),
    ((8, 1), ("x",), ("x",), (None, "x")),
]


def layout(tx, hop):
    """Shardings of the parameters and of the state."""
    sizes, kernel, bias, embedding = hop
    devices = jax.devices()[: sizes[0] * sizes[1]]
    mesh = jax.make_mesh(sizes, ("x", "y"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    on = lambda spec: NamedSharding(mesh, PartitionSpec(*spec))
    shardings = {"dense": {"kernel": on(kernel), "bias": on(bias)}, "embed": {"embedding": on(embedding)}}
    return shardings, state_sharding(tx, SHAPES, shardings)


def template(tx, hop):
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(place, jax.eval_shape(tx.init, SHAPES), layout(tx, hop)[1])


def bits(x):
    return np.asarray(x).reshape(-1).view(np.uint8)


def of_random_bits(shape, seed):
    """Any bits at all: not-a-numbers, subnormal numbers, codes that no encoder writes."""
    size = np.prod(shape.shape, dtype=int) * shape.dtype.itemsize
    random = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    return random.view(shape.dtype).reshape(shape.shape)


@every_optimizer
def test_a_state_moves_between_numbers_of_devices_bit_for_bit(tx, tmp_path):
    leaves, treedef = jax.tree.flatten(template(tx, HOPS[0]))
    expected = [of_random_bits(x, i) for i, x in enumerate(leaves)]
    state = treedef.unflatten([jax.device_put(x, s.sharding) for x, s in zip(expected, leaves, strict=True)])
    for i, hop in enumerate([*HOPS[1:], HOPS[0]]):
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / str(i), state)
            checkpointer.wait_until_finished()
            state = checkpointer.restore(tmp_path / str(i), template(tx, hop))
        for x, bytes_of_x, place in zip(
            jax.tree.leaves(state), expected, jax.tree.leaves(template(tx, hop)), strict=True
        ):
            np.testing.assert_array_equal(bits(x), bits(bytes_of_x))
            assert x.sharding == place.sharding


def by_a_manager(folder):
    return ocp.CheckpointManager(folder), lambda step: step


def by_a_checkpointer(folder):
    return ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler()), lambda step: folder / str(step)


@pytest.mark.parametrize("saved", [by_a_manager, by_a_checkpointer])
def test_saving_in_the_background_while_the_state_is_donated(saved, tmp_path):
    tx = spectra_adamw(1e-2)
    shardings, of_state = layout(tx, HOPS[0])
    params = jax.device_put(jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), SHAPES), shardings)
    init = jax.jit(tx.init, out_shardings=of_state)
    step = jax.jit(lambda state: tx.update(params, state, params)[1], donate_argnums=0, out_shardings=of_state)

    state, expected = init(params), []
    for _ in range(3):
        state = step(state)
        expected.append([bits(np.array(x)) for x in jax.tree.leaves(state)])
    assert any((a != b).any() for a, b in zip(expected[0], expected[2], strict=True))

    saver, where = saved(tmp_path)
    with saver:
        state = init(params)
        for i in range(3):
            state = step(state)
            saver.save(where(i), args=ocp.args.StandardSave(state))
        saver.wait_until_finished()
        for i, of_step in enumerate(expected):
            restored = saver.restore(where(i), args=ocp.args.StandardRestore(template(tx, HOPS[2])))
            for x, y in zip(jax.tree.leaves(restored), of_step, strict=True):
                np.testing.assert_array_equal(bits(x), y)


def eight_bit(**codecs):
    return compress_state(optax.adamw(1e-2), **codecs)


PARAMS = {"dense": {"kernel": jnp.ones((128, 64), jnp.bfloat16), "bias": jnp.ones(64, jnp.bfloat16)}}
REFUSED = {
    "block": (
        spectra_adamw(1e-2, momentum=Spectrum(block=32)),
        spectra_adamw(1e-2, momentum=Spectrum()),
        ("0.25 of 32", "0.25 of 64"),
    ),
    "keep": (
        spectra_adamw(1e-2, momentum=Spectrum(keep=0.5)),
        spectra_adamw(1e-2, momentum=Spectrum()),
        ("keep 0.5 of", "keep 0.25 of"),
    ),
    "mask": (
        spectra_adamw(1e-2, momentum=Spectrum(mask="energy")),
        spectra_adamw(1e-2, momentum=Spectrum()),
        ("energy", "lowpass"),
    ),
    "codec": (
        spectra_adamw(1e-2, momentum=Spectrum(dtype="float16")),
        spectra_adamw(1e-2),
        ("float16", "signed 8 bits"),
    ),
    "dtype": (
        spectra_adamw(1e-2, momentum=Spectrum(dtype="float16")),
        spectra_adamw(1e-2, momentum=Spectrum()),
        ("float16", "bfloat16"),
    ),
    "bits": (eight_bit(nu=Companded("unsigned")), eight_bit(nu=Companded("unsigned", bits=4)), ("8 bits", "4 bits")),
    "field": (eight_bit(mu=Companded()), eight_bit(nu=Companded("unsigned")), ("mu=", "nu=")),
    "group": (eight_bit(mu=Companded()), eight_bit(mu=Companded(group=32)), ("group 64", "group 32")),
    "split": (
        split_master_weights(optax.adamw(1e-2)),
        split_master_weights(optax.adamw(1e-2), bits=32),
        ("24", "32"),
    ),
    "level": (gwt_adamw(1e-2), gwt_adamw(1e-2, wavelet=Wavelet(level=3)), ("haar 2", "haar 3")),
    "wavelet": (gwt_adamw(1e-2), gwt_adamw(1e-2, wavelet=Wavelet("db2")), ("haar", "db2")),
    "leaves": (spectra_adamw(1e-2), spectra_adamw(1e-2, leaves=LeafRules(min_dim=128)), ("leaves", "leaves")),
    "momentum": (
        spectra_adamw(1e-2, momentum=FullMomentum()),
        spectra_adamw(1e-2),
        ("factored_rms", "spectral_momentum"),
    ),
    "another optimizer": (optax.adamw(1e-2), spectra_adamw(1e-2), ("none", "spectral_momentum")),
    "a dtype that Orbax would cast": (
        optax.adamw(1e-2, mu_dtype="float32"),
        optax.adamw(1e-2, mu_dtype="bfloat16"),
        ("mu/dense/bias", "got float32[64]", "expected bfloat16[64]"),
    ),
}


@pytest.mark.parametrize(("stored", "tx", "named"), REFUSED.values(), ids=REFUSED.keys())
def test_other_settings_are_refused_before_anything_is_restored(stored, tx, named, tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", {"params": PARAMS, "state": (stored.init(PARAMS), None)})
    contents = checkpoint_contents(tmp_path / "step")["state"][0]
    check_stored_state(stored, PARAMS, contents)
    with pytest.raises(ValueError, match="expected") as refused:
        check_stored_state(tx, PARAMS, contents)
    assert all(text in str(refused.value) for text in named), refused.value


def test_another_tree_of_parameters_is_refused(tmp_path):
    tx = optax.adamw(1e-2)
    other = {"dense": {"kernel": jnp.ones((64, 64), jnp.bfloat16), "bias": PARAMS["dense"]["bias"]}}
    with pytest.raises(
        ValueError, match=r"expected bfloat16\[128, 64\] at '0/mu/dense/kernel', got bfloat16\[64, 64\]"
    ):
        check_stored_state(tx, PARAMS, tx.init(other))
    with pytest.raises(ValueError, match="0/mu/dense/bias"):
        check_stored_state(tx, PARAMS, tx.init({"dense": {"kernel": PARAMS["dense"]["kernel"]}}))
    shapes = jax.eval_shape(spectra_adamw(1e-2).init, PARAMS)
    with pytest.raises(TypeError, match="must hold the values of"):
        check_stored_state(spectra_adamw(1e-2), PARAMS, shapes)


def test_the_state_of_an_nnx_optimizer_is_recognised(tmp_path):
    model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, spectra_adamw(1e-2), wrt=nnx.Param)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "step", nnx.state(optimizer))
    contents, params = checkpoint_contents(tmp_path / "step")["opt_state"], nnx.state(model, nnx.Param)
    check_stored_state(spectra_adamw(1e-2), params, contents)
    with pytest.raises(ValueError, match=r"of 64 lowpass.*of 32 lowpass|of 32 lowpass.*of 64 lowpass"):
        check_stored_state(spectra_adamw(1e-2, momentum=Spectrum(block=32, values=Companded())), params, contents)


@every_optimizer
def test_init_holds_no_more_than_the_final_shards(tx):
    shardings, of_state = layout(tx, HOPS[0])
    placed = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), SHAPES, shardings)
    shapes = jax.eval_shape(tx.init, SHAPES)
    held = jax.tree.map(lambda x, s: np.prod(s.shard_shape(x.shape), dtype=int) * x.dtype.itemsize, shapes, of_state)
    memory = jax.jit(tx.init, out_shardings=of_state).lower(placed).compile().memory_analysis()
    table = 8 * len(jax.tree.leaves(shapes))  # of pointers to the results
    assert memory.output_size_in_bytes == sum(jax.tree.leaves(held)) + table
    assert memory.temp_size_in_bytes == 0
