"""Steps compiled ahead of time for GPUs that nobody owns; `pip install "spectra-optax[cuda]"` brings the compiler."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from spectra_optax import (
    Companded,
    Spectrum,
    Wavelet,
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
)
from spectra_optax.backend import OFF, compiling_for

pytest.importorskip("jax_plugins.xla_cuda13")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "benchmarks"))

from bytes_moved import compiled_step, moved_bytes, placed, two_calls

SIZE = 4096
ADAMW = 7 * 4 * SIZE**2
EIGHT_BITS = {"mu": Companded(), "nu": Companded("unsigned")}
# Optimizer, dtype of parameters and gradients, share of AdamW's least bytes: of a fused step, of two calls.
FIGURES = {
    "flash_adamw": (flash_adamw(1e-3), "bfloat16", 0.44, 0.62),
    "flash_lion": (flash_lion(1e-3), "bfloat16", 0.37, 0.49),
    "spectra_adamw": (spectra_adamw(1e-3), "float32", 0.76, 1.19),
    "split spectra_adamw": (split_master_weights(spectra_adamw(1e-3)), "bfloat16", 0.47, 0.83),
    "gwt_adamw": (gwt_adamw(1e-3), "float32", 0.58, 0.83),
    "foam_adamw": (foam_adamw(1e-3), "float32", 0.58, 0.87),
    "gwt_adafactor": (gwt_adafactor(1e-3), "float32", 0.81, 1.24),
}
# Blocks, codes and rules of other sizes and shapes, and how many kernels they are.
FORMS = {
    "an eighth": (spectra_adamw(1e-3, momentum=Spectrum(keep=1 / 8)), 3),
    "an eighth in 8 bits": (spectra_adamw(1e-3, momentum=Spectrum(keep=1 / 8, values=Companded())), 3),
    "blocks of 16": (spectra_adamw(1e-3, momentum=Spectrum(block=16)), 3),
    "blocks of 256": (spectra_adamw(1e-3, momentum=Spectrum(block=256)), 3),
    "float32 scales": (spectra_adamw(1e-3, momentum=Spectrum(values=Companded(scale="float32"))), 3),
    "other frequencies": (spectra_adamw(1e-3, momentum=Spectrum(mask="random")), 0),
    "32-bit weights": (split_master_weights(spectra_adamw(1e-3), bits=32), 3),
    "level 1": (gwt_adamw(1e-3, wavelet=Wavelet(level=1)), 1),
    "level 3": (foam_adamw(1e-3, wavelet=Wavelet(level=3)), 1),
    "level 8": (gwt_adamw(1e-3, wavelet=Wavelet(level=8)), 0),
    "sums as products": (gwt_adamw(1e-3, wavelet=Wavelet(lowering="matmul")), 1),
    "moments in 8 bits": (compress_state(foam_adamw(1e-3), **EIGHT_BITS), 1),
    "nesterov": (flash_sgd(1e-3, momentum=0.9, nesterov=True), 1),
    "groups of 128": (compress_state(optax.adamw(1e-3), mu=Companded(group=128)), 1),
    "4 bits": (compress_state(optax.adamw(1e-3), mu=Companded(), nu=Companded("unsigned", bits=4)), 0),
    "three moments": (
        compress_state(optax.adan(1e-3), m=Companded(), v=Companded(), n=Companded("unsigned")),
        1,
    ),
    "maxima": (compress_state(optax.amsgrad(1e-3), **EIGHT_BITS), 1),
}


@pytest.fixture(autouse=True)
def gpu():
    with compiling_for("gpu"):
        yield


def kernels(text):
    return text.count("__gpu$xla.gpu.triton")


@pytest.mark.parametrize("name", FIGURES)
def test_bytes_that_a_step_moves(name):
    tx, dtype, fused, two = FIGURES[name]
    param = jax.ShapeDtypeStruct((SIZE, SIZE), dtype, sharding=placed("h100"))
    for step, share in ((fused_step(tx), fused), (two_calls(tx), two)):
        compiled, _ = compiled_step(tx, step, param)
        assert moved_bytes(compiled.as_text()) <= share * ADAMW


@pytest.mark.parametrize("name", FORMS)
def test_what_triton_knows_is_a_kernel_and_the_rest_is_not(name):
    tx, count = FORMS[name]
    param = jax.ShapeDtypeStruct((2, 1024, 3072), jnp.bfloat16, sharding=placed("h100"))
    compiled, _ = compiled_step(tx, fused_step(tx), param)
    assert kernels(compiled.as_text()) == count


def test_no_kernels_if_they_are_off(monkeypatch):
    monkeypatch.setenv(OFF, "off")
    tx, dtype, *_ = FIGURES["flash_adamw"]
    param = jax.ShapeDtypeStruct((1024, 1024), dtype, sharding=placed("h100"))
    assert not kernels(compiled_step(tx, fused_step(tx), param)[0].as_text())


def everything(x, y):
    """Every operation on numbers of the same place that rules are let into kernels with."""
    ones = [lax.abs, lax.ceil, lax.cos, lax.exp, lax.exp2, lax.floor, lax.log, lax.log1p, lax.logistic, lax.neg]
    ones += [lax.rsqrt, lax.sign, lax.sin, lax.sqrt, lax.square, lax.tan, lax.tanh, lax.stop_gradient]
    twos = [lax.add, lax.atan2, lax.div, lax.max, lax.min, lax.mul, lax.pow, lax.rem, lax.sub]
    numbers = [f(x) for f in ones] + [f(x, y) for f in twos]
    numbers += [
        lax.integer_pow(x, 3),
        lax.integer_pow(x, -2),
        lax.clamp(-1.0, x, 1.0),
        lax.is_finite(x).astype(x.dtype),
    ]
    chosen = (((x > y) & (x >= 0)) | ~(y <= 0)) ^ (x < 3) | (x != y) | (x == 2)
    return sum(numbers, jnp.where(chosen, x, y))


def test_every_operation_of_a_rule_of_others_can_be_lowered():
    inner = optax.stateless(lambda updates, params: jax.tree.map(everything, updates, params))
    tx = compress_state(optax.chain(optax.trace(0.9), inner), trace=Companded())
    param = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=placed("h100"))
    compiled, _ = compiled_step(tx, fused_step(tx), param)
    assert kernels(compiled.as_text()) == 1


@pytest.mark.parametrize("name", FIGURES)
def test_a_stack_of_layers_needs_little_beside_itself(name):
    tx, dtype, *_ = FIGURES[name]
    layer, place = SIZE * 14336, placed("h100")
    on_chip = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    params = {"kernel": on_chip(jax.ShapeDtypeStruct((32, SIZE, 14336), dtype))}
    state = jax.tree.map(on_chip, jax.eval_shape(tx.init, params))
    step = jax.jit(lambda params, state, grads: fused_step(tx)(grads, state, params), donate_argnums=(0, 1))
    temporaries = step.lower(params, state, params).compile().memory_analysis().temp_size_in_bytes
    assert temporaries < (1.6 if "spectra" in name or "adafactor" in name else 0.1) * layer * 4  # sums of tiles


def test_leaves_of_equal_shape_share_a_kernel():
    tx = flash_adamw(1e-3)
    place = placed("h100")
    on_chip = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)
    params = {f"{i}/kernel": on_chip(jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16)) for i in range(4)}
    state = jax.tree.map(on_chip, jax.eval_shape(tx.init, params))
    lowered = jax.jit(fused_step(tx), donate_argnums=(1, 2)).lower(params, state, params)
    assert kernels(lowered.as_text()) == 1
    assert kernels(lowered.compile().as_text()) == 4
