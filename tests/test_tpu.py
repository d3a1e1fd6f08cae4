"""Steps compiled ahead of time for TPUs that nobody owns; `pip install "spectra-optax[tpu]"` brings the compiler."""

import os
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spectra_optax import (
    Spectrum,
    flash_adamw,
    flash_lion,
    foam_adamw,
    fused_step,
    gwt_adafactor,
    gwt_adamw,
    spectra_adamw,
    split_master_weights,
)
from spectra_optax.backend import compiling_for

pytest.importorskip("libtpu")
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "benchmarks"))

from bytes_moved import compiled_step, hbm_bytes, moved_bytes, placed, two_calls

SIZE = 4096
ADAMW = 7 * 4 * SIZE**2
BFLOAT16 = Spectrum()
# Optimizer, dtype of parameters and gradients, share of AdamW's least bytes: of a fused step, of two calls.
FIGURES = {
    "flash_adamw": (flash_adamw(1e-3), "bfloat16", 0.50, 0.80),
    "flash_lion": (flash_lion(1e-3), "bfloat16", 0.43, 0.73),
    "spectra_adamw": (spectra_adamw(1e-3, momentum=BFLOAT16), "float32", 0.76, 1.19),
    "split spectra_adamw": (split_master_weights(spectra_adamw(1e-3, momentum=BFLOAT16)), "bfloat16", 0.47, 0.94),
    "gwt_adamw": (gwt_adamw(1e-3), "float32", 0.58, 1.01),
    "foam_adamw": (foam_adamw(1e-3), "float32", 0.58, 1.01),
    "gwt_adafactor": (gwt_adafactor(1e-3), "float32", 0.80, 1.23),
}


@pytest.fixture(autouse=True)
def tpu():
    with compiling_for("tpu"):
        yield


@pytest.mark.parametrize("target", ["v5e", pytest.param("v6e", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FIGURES)
def test_bytes_that_a_step_moves(name, target):
    tx, dtype, fused, two = FIGURES[name]
    param = jax.ShapeDtypeStruct((SIZE, SIZE), dtype, sharding=placed(target))
    for step, share in ((fused_step(tx), fused), (two_calls(tx), two)):
        compiled, _ = compiled_step(tx, step, param)
        # On v6e whole arrays are fetched ahead, which counting operands counts many times over.
        count = moved_bytes if target == "v5e" else hbm_bytes
        assert count(compiled.as_text()) <= share * ADAMW


@pytest.mark.parametrize("spec", [("x", "y"), (("x", "y"), None), (None, ("x", "y"))], ids=str)
@pytest.mark.parametrize("name", ["flash_adamw", "split spectra_adamw", "gwt_adamw"])
def test_a_slice_of_a_pod_runs_a_kernel_on_each_shard(name, spec):
    tx, dtype, *_ = FIGURES[name]
    chips = np.array(topologies.get_topology_desc(platform="tpu", topology_name="v5e:4x4").devices).reshape(4, 4)
    mesh = Mesh(chips, ("x", "y"), axis_types=(AxisType.Explicit,) * 2)
    layout = NamedSharding(mesh, PartitionSpec(*spec))
    params = {"kernel": jax.ShapeDtypeStruct((SIZE, SIZE), dtype, sharding=layout)}
    known = lambda x: x.sharding if x.sharding is not None else NamedSharding(mesh, PartitionSpec())
    state = jax.eval_shape(tx.init, params)
    state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=known(x)), state)
    text = jax.jit(fused_step(tx), donate_argnums=(1, 2)).lower(params, state, params).compile().as_text()
    assert "tpu_custom_call" in text
    assert not [word for word in ("all-gather(", "all-to-all(", "collective-permute(") if word in text]
    assert ("all-reduce" in text) == ("spectra" in name)


@pytest.mark.parametrize("name", [*FIGURES, pytest.param("energy", marks=pytest.mark.slow)])
def test_a_stack_of_layers_needs_little_beside_itself(name):
    energy = (spectra_adamw(1e-3, momentum=Spectrum(mask="energy")), "float32")
    tx, dtype, *_ = FIGURES.get(name, energy)
    layers = 32 if dtype == "bfloat16" else 8  # as many as the chip's memory holds
    param = jax.ShapeDtypeStruct((layers, SIZE, 14336), dtype, sharding=placed("v5e"))
    args = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=param.sharding),
        ({"kernel": param}, jax.eval_shape(tx.init, {"kernel": param}), {"kernel": param}),
    )
    step = jax.jit(lambda params, state, grads: fused_step(tx)(grads, state, params), donate_argnums=(0, 1))
    temporaries = step.lower(*args).compile().memory_analysis().temp_size_in_bytes
    # Kernels hold theirs on the chip but for a few vectors a layer; what goes slice by slice holds those of a slice.
    assert temporaries < (2.5 if name == "energy" else 1.0) * SIZE * 14336 * 4
