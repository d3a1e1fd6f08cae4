"""What a compiled update moves between devices: sums of vectors where a mean crosses shards, and no part of a matrix.

On eight simulated devices, and on sixteen TPU v5e that only their compiler knows.
"""

import math
import re

import jax
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spectra_optax import (
    Companded,
    Spectrum,
    backend,
    compress_state,
    flash_adamw,
    flash_lion,
    foam_adamw,
    gwt_adafactor,
    gwt_adamw,
    spectra_adamw,
    split_master_weights,
    state_sharding,
)
from spectra_optax.planning.targets import target_named

OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "spectra_adamw": spectra_adamw(1e-3),
    "spectra_adamw, 8 bits": spectra_adamw(1e-3, momentum=Spectrum(values=Companded())),
    "spectra_adamw, energy": spectra_adamw(1e-3, momentum=Spectrum(mask="energy")),
    "split spectra_adamw": split_master_weights(spectra_adamw(1e-3)),
    "flash_adamw": flash_adamw(1e-3),
    "flash_lion": flash_lion(1e-3),
    "gwt_adamw": gwt_adamw(1e-3),
    "gwt_adafactor": gwt_adafactor(1e-3),
    "foam_adamw": foam_adamw(1e-3),
    "foam_adamw, 8 bits": compress_state(foam_adamw(1e-3), mu=Companded(), nu=Companded("unsigned")),
}
LAYOUTS = {
    "rows/kernel": ((1024, 2048), ("data", None)),
    "columns/kernel": ((1024, 2048), (None, "data")),
    "tensor/kernel": ((1024, 2048), (None, "model")),
    "both/kernel": ((1024, 2048), ("data", "model")),
    "whole/kernel": ((1024, 2048), ()),
    "layers/kernel": ((3, 1024, 2048), (None, "model", "data")),
    "experts/kernel": ((4, 1024, 512), ("model", "data", None)),
    "table/embedding": ((2048, 1024), ("model", "data")),
    "norm/scale": ((1024,), ("data",)),
}
VECTOR = 3 * 2048  # the longest statistic of a leaf
MOVES = re.compile(r" = (.*?) (?:all-gather|all-to-all|collective-permute)(?:-start)?\(")
ARRAY = re.compile(r"\[([\d,]*)\]")


def compiled(tx, mesh):
    place = lambda tree, layouts: jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, layouts
    )
    shapes = {path: jax.ShapeDtypeStruct(shape, "bfloat16") for path, (shape, _) in LAYOUTS.items()}
    layouts = {path: NamedSharding(mesh, PartitionSpec(*spec)) for path, (_, spec) in LAYOUTS.items()}
    state = state_sharding(tx, shapes, layouts)
    params = place(shapes, layouts)
    step = jax.jit(tx.update, donate_argnums=1, out_shardings=(layouts, state))
    return step.lower(params, place(jax.eval_shape(tx.init, shapes), state), params).compile()


def moved(program):
    """The elements of the largest array that a collective other than a reduction moves."""
    results = MOVES.findall(program.as_text())
    dims = [dims for result in results for dims in ARRAY.findall(result)]
    return max((math.prod(map(int, filter(None, d.split(",")))) for d in dims), default=0)


@pytest.mark.slow
@pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_simulated_devices_move_no_matrix(tx):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    assert moved(compiled(tx, mesh)) <= VECTOR


@pytest.mark.slow
@pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_tpus_move_no_matrix(tx):
    target = target_named("v5e:4x4")
    if not target.has_compiler:
        pytest.skip("the TPU's compiler is not installed: pip install 'spectra-optax[tpu]'")
    with backend.compiling_for("tpu"):
        assert moved(compiled(tx, target.mesh((4, 4)))) <= VECTOR


def test_a_gathered_matrix_would_be_seen():
    mesh = Mesh(jax.devices(), ("data",))
    x = jax.ShapeDtypeStruct((1024, 512), "float32", sharding=NamedSharding(mesh, PartitionSpec("data")))
    whole = jax.jit(lambda x: x + 1.0, out_shardings=NamedSharding(mesh, PartitionSpec()))
    assert moved(whole.lower(x).compile()) == 1024 * 512
