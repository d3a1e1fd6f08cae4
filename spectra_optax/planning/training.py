"""One training step of anything, laid out over a mesh and ready to be compiled for it.

    loss, gradient -> fused_step          parameters and state donated
    gradient_release                      where the optimizer is `Released`

Gradients lie as the parameters do. An axis that does not divide into the shards that its spec names is replicated.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from spectra_optax.fused_step import fused_step
from spectra_optax.gradient_release import gradient_release
from spectra_optax.planning import forward
from spectra_optax.planning.decoder import Decoder
from spectra_optax.state_layout import state_sharding
from spectra_optax.subtrees import at, put

AXES = ("data", "model")


class Parts(NamedTuple):
    """A model as `gradient_release` takes it.

    Attributes:
      embed: `(params, inputs) -> x`.
      layer: `(layer_params, x) -> x`.
      head_loss: `(params, x, inputs) -> loss`.
      layers: the path of the stacked layers' parameters.
    """

    embed: Callable[[Any, Any], Any]
    layer: Callable[[Any, Any], Any]
    head_loss: Callable[[Any, Any, Any], Any]
    layers: str = "layers"


class Trainable(NamedTuple):
    """What a step trains.

    Attributes:
      shapes: the parameters' tree, as `jax.eval_shape` gives it.
      specs: a `PartitionSpec` for each parameter over the mesh axes "data" and "model".
      loss: `loss(params, inputs)`, a scalar.
      inputs: a tree of shapes, sharded along their first axis over "data".
      activations: bytes of activations over all devices, for the estimate without a compiler.
      gathered: the same of matrices that a device holds whole for a while, but for its share along "model".
      parts: the same loss in parts, for gradient release.
      releases: whether the step updates each layer as soon as its gradient is known.
    """

    shapes: Any
    specs: Any
    loss: Callable[[Any, Any], jax.Array]
    inputs: Any
    activations: int = 0
    gathered: int = 0
    parts: Parts | None = None
    releases: bool = False


class Placed(NamedTuple):
    """The arguments of a step, as shapes with shardings."""

    params: Any
    state: Any
    inputs: Any


def language_model(decoder: Decoder, dtype: str, batch: int, seq: int) -> Trainable:
    """A decoder and its next-token loss on `batch` sequences of `seq` tokens."""
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    activations, value = decoder.activation_bytes(batch, seq), functools.partial(forward.loss, decoder)
    parts = Parts(forward.embed, functools.partial(forward.layer, decoder), forward.head_loss)
    return Trainable(decoder.shapes(dtype), decoder.specs, value, tokens, activations, decoder.gathered_bytes, parts)


def placed(trainable: Trainable, tx: optax.GradientTransformation, mesh: Mesh | AbstractMesh) -> Placed:
    """Lays parameters, state and inputs over a mesh, of which the sizes are enough.

    Raises:
      ValueError: if the inputs' first axis does not spread over "data", or blocks of the state would be cut.
    """
    shards = mesh.shape["data"]
    for x in jax.tree.leaves(trainable.inputs):
        if x.shape[0] % shards:
            raise ValueError(
                f"batch must be a multiple of the {shards} shards of the mesh axis 'data', got {x.shape[0]}."
            )
    fitted = lambda x, spec: NamedSharding(mesh, _fitted(x.shape, spec, dict(mesh.shape)))
    layouts = jax.tree.map(fitted, trainable.shapes, trainable.specs)
    state = _on(jax.eval_shape(tx.init, trainable.shapes), state_sharding(tx, trainable.shapes, layouts))
    inputs = jax.tree.map(lambda x: NamedSharding(mesh, PartitionSpec("data")), trainable.inputs)
    return Placed(_on(trainable.shapes, layouts), state, _on(trainable.inputs, inputs))


def lowered(trainable: Trainable, tx: optax.GradientTransformation, mesh: Mesh) -> jax.stages.Lowered:
    """The program of a step, not yet compiled."""
    args = placed(trainable, tx, mesh)
    layouts = jax.tree.map(lambda x: x.sharding, args)
    step = _releasing(trainable, tx) if trainable.releases else _ordinary(trainable, tx, layouts.params)
    outs = (layouts.params, layouts.state, NamedSharding(mesh, PartitionSpec()))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return jax.jit(step, donate_argnums=(0, 1), out_shardings=outs).lower(*args)


def _ordinary(trainable: Trainable, tx: optax.GradientTransformation, layout: Any) -> Callable[..., Any]:
    def step(params, state, inputs):
        value, grads = jax.value_and_grad(trainable.loss)(params, inputs)
        grads = jax.lax.with_sharding_constraint(grads, layout)
        return *fused_step(tx, shardings=layout)(grads, state, params), value

    return step


def _releasing(trainable: Trainable, tx: optax.GradientTransformation) -> Callable[..., Any]:
    assert trainable.parts is not None
    step = gradient_release(tx, trainable.shapes, **trainable.parts._asdict())
    return lambda params, state, inputs: step(params, state, inputs)[:3]


def gradient_bytes(trainable: Trainable, params: Any) -> int:
    """Bytes on a device of the gradients that are held at once."""
    if trainable.parts is None or not trainable.releases:
        return device_bytes(params)
    stack, rest = at(params, trainable.parts.layers), put(params, trainable.parts.layers, None)
    return device_bytes(stack) // jax.tree.leaves(stack)[0].shape[0] + device_bytes(rest)


def device_bytes(tree: Any) -> int:
    """Bytes on one device of shapes with shardings."""
    size = lambda x: math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    return sum(map(size, jax.tree.leaves(tree)))


def _on(shapes: Any, layouts: Any) -> Any:
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, layouts)


def _fitted(shape: tuple[int, ...], spec: PartitionSpec, sizes: dict[str, int]) -> PartitionSpec:
    shards = lambda entry: math.prod(sizes[n] for n in (entry if isinstance(entry, tuple) else (entry,)) if n)
    kept = (entry if n % shards(entry) == 0 else None for n, entry in zip(shape, tuple(spec), strict=False))
    return PartitionSpec(*kept)
