"""Where states lie and what programs move, on eight devices: what the contract's table does not reach."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from spectra_optax import (
    Companded,
    LeafRules,
    Spectrum,
    compress_state,
    flash_adamw,
    scale_by_spectral_momentum,
    spectra_adamw,
)
from spectra_optax.codecs.blocks import block_length

OPTIMIZERS = {
    "spectra_adamw": spectra_adamw(1e-2),
    "8 bits": compress_state(optax.adamw(1e-2), mu=Companded(), nu=Companded("unsigned")),
    "flash_adamw": flash_adamw(1e-2),
}
every_optimizer = pytest.mark.parametrize("tx", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())


def mesh_of(kind):
    return jax.make_mesh((8,), ("x",), axis_types=(kind,))


def placed(shape, mesh, *spec):
    return {"kernel": jax.device_put(jnp.ones(shape), NamedSharding(mesh, PartitionSpec(*spec)))}


@every_optimizer
@pytest.mark.parametrize("spec", [("x", None), (None, "x")])
def test_an_explicit_mesh_needs_no_context(tx, spec):
    params = placed((520, 256), mesh_of(AxisType.Explicit), *spec)
    updates, state = jax.jit(tx.update)(params, tx.init(params), params)
    assert jax.typeof(updates["kernel"]).sharding.spec == PartitionSpec(*spec)
    alone = {"kernel": jnp.ones((520, 256))}
    np.testing.assert_allclose(updates["kernel"], tx.update(alone, tx.init(alone), alone)[0]["kernel"], rtol=1e-5)
    jax.jit(tx.update)(params, state, params)


@pytest.mark.parametrize(
    ("axes", "spec"),
    [(((0,), (1, 2)), (None, None, "x")), (((0, 1), (2,)), (None, "x", None)), (((0, 1), (2,)), ("x",))],
)
def test_merged_axes_may_be_sharded(axes, spec):
    tx = spectra_adamw(1e-2, leaves=LeafRules(axes=lambda path, shape: axes))
    params = placed((512, 8, 64), mesh_of(AxisType.Explicit), *spec)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    alone = {"kernel": jnp.ones((512, 8, 64))}
    np.testing.assert_allclose(updates["kernel"], tx.update(alone, tx.init(alone), alone)[0]["kernel"], rtol=1e-5)


@pytest.mark.parametrize("tx", [*OPTIMIZERS.values(), spectra_adamw(1e-2, momentum=Spectrum(mask="energy"))])
def test_shard_map_carries_the_state_through_a_scan(tx):
    def train(kernel):
        def step(carry, _):
            params, state = carry
            updates, state = tx.update(params, state, params)
            return (optax.apply_updates(params, updates), state), None

        params = {"kernel": kernel}
        return jax.lax.scan(step, (params, tx.init(params)), length=2)[0][0]["kernel"]

    spec = PartitionSpec("x")
    mapped = jax.jit(jax.shard_map(train, mesh=mesh_of(AxisType.Auto), in_specs=spec, out_specs=spec))
    x = jnp.linspace(0.5, 1, 8 * 64 * 64).reshape(512, 64)
    np.testing.assert_allclose(mapped(x)[64:128], jax.jit(train)(x[64:128]), rtol=1e-5)


@pytest.mark.parametrize("tx", [spectra_adamw(1e-2), scale_by_spectral_momentum(0.9)])
def test_a_state_lies_where_its_parameters_do(tx):
    device = jax.devices()[3]
    params = {"kernel": jax.device_put(jnp.ones((64, 64)), device)}
    assert all(x.devices() == {device} for x in jax.tree.leaves(tx.init(params)) if x.ndim == 2)
    everywhere = placed((64, 64), mesh_of(AxisType.Auto))
    assert all(len(x.devices()) == 8 for x in jax.tree.leaves(tx.init(everywhere)) if x.ndim == 2)
    assert not any(x.committed for x in jax.tree.leaves(tx.init({"kernel": jnp.ones((64, 64))})))


@pytest.mark.parametrize("length", [512, 576, 768, 1024, 1600, 2048, 3072, 4096, 5120, 11008, 14336])
def test_eight_shards_of_a_long_axis_hold_whole_blocks(length):
    block = block_length(length, 64)
    assert 32 <= block <= 64
    assert length % (8 * block) == 0


def test_states_of_other_leaf_rules_are_refused():
    params = {"kernel": jnp.ones((64, 64))}
    for make in (spectra_adamw, lambda rate, leaves: scale_by_spectral_momentum(leaves=leaves)):
        for other in (
            LeafRules(axes=lambda path, shape: ((1,), (0,))),
            LeafRules(embedding=lambda path: True),
            LeafRules(dense=lambda path: True),
        ):
            state = make(1e-2, leaves=other).init(params)
            with pytest.raises(ValueError, match=r"settings|other rules"):
                make(1e-2, leaves=LeafRules()).update(params, state, params)


def test_settings_that_shape_no_state_may_change():
    params = {"kernel": jnp.ones((64, 64))}
    first = Spectrum(keep=1, mask="energy", lowering="matmul")
    state = scale_by_spectral_momentum(spectrum=first).init(params)
    other = dataclasses.replace(first, keep=1.0, refresh=5, lowering="fft")
    scale_by_spectral_momentum(spectrum=other).update(params, state)
    assert dataclasses.replace(first, mask="lowpass") == Spectrum(keep=1, lowering="matmul")
