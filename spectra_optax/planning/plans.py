"""Plans: one training step's memory per chip, from the target's own compiler or from shapes alone.

From shapes, weights, state and gradient are exact up to the tiles of the chip, and temporaries are a rough count of
activations. The compiler's figures are those of the program that would run. The smallest topology is looked for with
shapes, temporaries scaled by what the compiler found of them where it was asked.
"""

from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AbstractMesh

from spectra_optax import arguments
from spectra_optax.lift import named
from spectra_optax.planning.compiling import measured
from spectra_optax.planning.decoder import Decoder
from spectra_optax.planning.optimizers import Released, optimizer_named
from spectra_optax.planning.presets import model_named
from spectra_optax.planning.targets import FAMILIES, Target, mesh_sizes, target_named
from spectra_optax.planning.training import (
    AXES,
    Placed,
    Trainable,
    device_bytes,
    gradient_bytes,
    language_model,
    placed,
)


class Plan(NamedTuple):
    """What a training step needs of a device, in bytes.

    Attributes:
      topology: where it runs, such as "v5e:4x4".
      devices: how many there are.
      mesh: shards along "data" and "model".
      compiled: whether the figures are the compiler's; else they are an estimate from shapes.
      parameters: numbers in the model.
      weights: the parameters.
      state: the optimizer's, with what completes 16-bit weights.
      gradient: what is held of it at once, in the dtype of the parameters.
      temporaries: everything else: activations, inputs, the program.
      memory: what a device has.
      fits: whether the step runs.
      smallest: the smallest topology of the family that fits, from shapes; None if none does.
    """

    topology: str
    devices: int
    mesh: tuple[int, int]
    compiled: bool
    parameters: int
    weights: int
    state: int
    gradient: int
    temporaries: int
    memory: int
    fits: bool
    smallest: str | None

    @property
    def total(self) -> int:
        """Bytes of everything."""
        return self.weights + self.state + self.gradient + self.temporaries

    @property
    def bytes_per_parameter(self) -> float:
        """Bytes of weights and state on all devices for each parameter: 12 for AdamW in float32."""
        return (self.weights + self.state) * self.devices / self.parameters


def plan(
    model: str | Decoder | Trainable,
    topology: str,
    optimizer: str | optax.GradientTransformation | Released = "adamw",
    *,
    batch: int = 16,
    seq: int = 2048,
    dtype: str | None = None,
    mesh: dict[str, int] | None = None,
    compiled: bool | None = None,
) -> Plan:
    """Tells what a whole training step needs of a TPU's or GPU's memory, without one.

    Args:
      model: a name (`planning.PRESETS`), the path of a Hugging Face `config.json`, sizes, or a `Trainable` of your own.
      topology: chips and their layout: "v5e:4x4", "v5p:2x2x4", "h100:8"; v4, v5e, v5p, v6e, h100, h200, a100.
      optimizer: a name (`planning.optimizers.OPTIMIZERS`) or any Optax transformation; `planning.Released` of either is
        a step that never holds more than one layer's gradient.
      batch: sequences in a step, on all devices; a `Trainable` brings its own.
      seq: tokens in a sequence.
      dtype: of the parameters; None is the one that goes with the optimizer's name, or float32, or the `Trainable`'s.
      mesh: shards along "data" (batch and FSDP) and "model" (tensor parallel); None puts as many devices along "data"
        as divide the batch and cut no block of the state.
      compiled: True asks the target's compiler, which takes minutes the first time and needs the extra "tpu" or "cuda";
        False estimates from shapes; None compiles where the extra is installed.

    Raises:
      ValueError: if model, topology, optimizer or mesh are not known or do not fit each other, or a block of the
        optimizer's state would be cut.
      ModuleNotFoundError: if the extra with the compiler is missing and `compiled` is True.

    Example:
      >>> from spectra_optax import plan
      >>> found = plan("llama3-8b", "v5e:4x4", "spectra_adamw", compiled=False)
      >>> f"{found.bytes_per_parameter:.2f} {found.total / 2**30:.1f} GiB of {found.memory / 2**30:.2f}"
      '3.29 5.7 GiB of 15.75'
    """
    target, (trainable, tx) = target_named(topology), _resolved(model, optimizer, batch, seq, dtype)
    batch = jax.tree.leaves(trainable.inputs)[0].shape[0]
    if compiled and not target.has_compiler:
        raise ModuleNotFoundError(
            f"Compiling for {target.name} needs XLA's compiler for it: pip install 'spectra-optax[{target.platform}]'. "
            "With compiled=False shapes alone give an estimate."
        )
    found = _estimated(trainable, tx, target, mesh_sizes(target, batch, mesh))
    scale = 1.0
    if compiled is not False and target.has_compiler:
        needs = measured(trainable, tx, target, target.mesh(found.mesh))
        rest = max(needs.total - needs.weights - needs.state, 0)
        gradient = min(found.gradient, rest)
        scale = (rest - gradient) / max(found.temporaries, 1)
        sizes = {"gradient": gradient, "temporaries": rest - gradient}
        found = found._replace(compiled=True, weights=needs.weights, state=needs.state, fits=needs.fits, **sizes)
    return found._replace(smallest=_smallest(trainable, tx, target, batch, scale))


def _resolved(
    model: str | Decoder | Trainable,
    optimizer: str | optax.GradientTransformation | Released,
    batch: int,
    seq: int,
    dtype: Any,
) -> tuple[Trainable, optax.GradientTransformation]:
    if isinstance(optimizer, Released):
        trainable, tx = _resolved(model, optimizer.optimizer, batch, seq, dtype)
        if trainable.parts is None:
            raise ValueError("Released needs a Trainable with parts: gradients are released layer by layer.")
        return trainable._replace(releases=True), tx
    arguments.instance("model", model, str, Decoder, Trainable)
    arguments.instance("optimizer", optimizer, str, optax.GradientTransformation)
    arguments.integer("batch", batch, 1)
    arguments.integer("seq", seq, 2)
    given = dtype
    if dtype is not None:
        dtype = arguments.dtype_name("dtype", dtype, ("float32", "bfloat16", "float16"))
    if isinstance(optimizer, str):
        choice = optimizer_named(optimizer)
        tx, dtype = choice.make(), dtype or choice.dtype
    else:
        tx = optimizer
    if isinstance(model, Trainable):
        if given is not None:
            raise ValueError(f"dtype={given!r} has no effect on a Trainable, whose shapes have theirs.")
        return model, tx
    decoder = model_named(model) if isinstance(model, str) else model
    if decoder.positions and seq > decoder.positions:
        raise ValueError(f"seq must be at most the model's {decoder.positions} positions, got {seq}.")
    return language_model(decoder, dtype or "float32", batch, seq), tx


def _estimated(
    trainable: Trainable, tx: optax.GradientTransformation, target: Target, meshes: list[tuple[int, int]]
) -> Plan:
    """The plan on the first of the meshes that cuts no block of the state."""
    sizes, args = _on_first(trainable, tx, meshes)
    weights, state = device_bytes(args.params), device_bytes(args.state)
    gradient, gathered = gradient_bytes(trainable, args.params), trainable.gathered // sizes[1]
    temporaries = trainable.activations // target.devices + gathered + device_bytes(args.inputs)
    return Plan(
        topology=target.name,
        devices=target.devices,
        mesh=sizes,
        compiled=False,
        parameters=sum(x.size for _, x in named(trainable.shapes)),
        weights=weights,
        state=state,
        gradient=gradient,
        temporaries=temporaries,
        memory=target.memory,
        fits=weights + state + gradient + temporaries <= target.memory,
        smallest=None,
    )


def _on_first(
    trainable: Trainable, tx: optax.GradientTransformation, meshes: list[tuple[int, int]]
) -> tuple[tuple[int, int], Placed]:
    sizes, *others = meshes
    try:
        return sizes, placed(trainable, tx, AbstractMesh(sizes, AXES))
    except ValueError:
        if not others:
            raise
        return _on_first(trainable, tx, others)


def _smallest(
    trainable: Trainable, tx: optax.GradientTransformation, target: Target, batch: int, scale: float
) -> str | None:
    """The first topology of the family whose estimate fits, with temporaries `scale` times those of shapes."""
    for layout in FAMILIES[target.family].sizes:
        candidate = Target(target.family, layout)
        try:
            found = _estimated(trainable, tx, candidate, mesh_sizes(candidate, batch, None))
        except ValueError:  # there, blocks of the state would be cut
            continue
        if found.total + (scale - 1) * found.temporaries <= found.memory:
            return candidate.name
    return None
