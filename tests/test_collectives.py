"""What a compiled update moves between devices: sums of vectors where a mean crosses shards, and no part of a matrix.

On eight simulated devices, and on sixteen TPU v5e that only their compiler knows.
"""

import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spectra_optax import backend
from spectra_optax.planning.targets import target_named

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "benchmarks"))

from collectives import LAYOUTS, OPTIMIZERS, Collective, Placement, collectives, compiled

VECTOR = 3 * 2048  # the longest statistic of a leaf
# Sums of means are those that no optimizer without a state by rows and columns has.
SUMS = ("spectra_adamw", "split spectra_adamw", "gwt_adafactor")
# Leaves with arrays in common that lie otherwise, as the two matrices of a tensor-parallel block do.
PAIRS = {
    "of one shape": {
        "in": Placement("in/kernel", (2048, 2048), ("data", "model")),
        "out": Placement("out/kernel", (2048, 2048), ("model", "data")),
    },
    "of one length": {layout: LAYOUTS[layout] for layout in ("rows (FSDP)", "embedding")},
}


def assert_moves_no_matrix(name, program):
    found = collectives(program)
    # Masks that follow the energy choose among sums of all shards, for which CPUs gather vectors.
    assert [c for c in found if c.elements > VECTOR or c.kind not in ("all-reduce", "all-gather")] == []
    assert bool(found) == name.startswith(SUMS)


def tpus():
    target = target_named("v5e:4x4")
    if not target.has_compiler:
        pytest.skip("the TPU's compiler is not installed: pip install 'spectra-optax[tpu]'")
    return target.mesh((4, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_simulated_devices_move_no_matrix(name):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    assert_moves_no_matrix(name, compiled(OPTIMIZERS[name], mesh))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tpus_move_no_matrix(name):
    mesh = tpus()
    with backend.compiling_for("tpu"):
        assert_moves_no_matrix(name, compiled(OPTIMIZERS[name], mesh))


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("name", ["flash_adamw", "flash_sgd", "split spectra_adamw", "foam_adamw, 8 bits"])
def test_leaves_that_lie_otherwise_share_nothing(name, pair):
    mesh = tpus()
    with backend.compiling_for("tpu"):
        assert_moves_no_matrix(name, compiled(OPTIMIZERS[name], mesh, PAIRS[pair]))


def in_shard_map(update):
    mesh = jax.make_mesh((8,), ("device",), axis_types=(AxisType.Auto,))
    one = lambda *trees: jax.tree.map(lambda x: x[None], update(*jax.tree.map(lambda x: x[0], trees)))
    return jax.jit(jax.shard_map(one, mesh=mesh, in_specs=PartitionSpec("device"), out_specs=PartitionSpec("device")))


@pytest.mark.slow
@pytest.mark.parametrize("mapped", [in_shard_map, jax.pmap])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_devices_with_a_copy_each_send_nothing(name, mapped):
    tx = OPTIMIZERS[name]
    params = {"layer": {"kernel": jax.ShapeDtypeStruct((256, 128), "bfloat16")}}
    a_copy_each = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((8, *x.shape), x.dtype), (params, jax.eval_shape(tx.init, params), params)
    )
    assert collectives(mapped(tx.update).lower(*a_copy_each).compile()) == []


def test_a_gathered_matrix_would_be_seen():
    mesh = Mesh(jax.devices(), ("data",))
    x = jax.ShapeDtypeStruct((1024, 512), "float32", sharding=NamedSharding(mesh, PartitionSpec("data")))
    whole = jax.jit(lambda x: x + 1.0, out_shardings=NamedSharding(mesh, PartitionSpec()))
    assert collectives(whole.lower(x).compile()) == [Collective("all-gather", 1024 * 512)]
