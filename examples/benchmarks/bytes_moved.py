"""Bytes that a step of an optimizer moves through the memory of a TPU or an H100, from their compilers, without either.

    pip install 'jax[tpu]'
    python examples/benchmarks/bytes_moved.py --target v5e
    pip install 'jax[cuda13]'
    python examples/benchmarks/bytes_moved.py --target h100 --dtype bfloat16

XLA compiles a step, parameters and state donated, ahead of time: `fused_step`, and beside it `update` followed by
`optax.apply_updates`. Counted are the operands and results of every instruction of the program that runs, loops once;
the least possible is every input read once and every output written once.
"""

import json
import os
import re
from pathlib import Path
from typing import Annotated

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from spectra_optax import (
    Companded,
    FullMomentum,
    Spectrum,
    compress_state,
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
from spectra_optax.planning.targets import target_named

OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "spectra_adamw": spectra_adamw(1e-3),
    "spectra_adamw, full momentum": spectra_adamw(1e-3, momentum=FullMomentum()),
    "spectra_adamw, bfloat16 coefficients": spectra_adamw(1e-3, momentum=Spectrum()),
    "split spectra_adamw": split_master_weights(spectra_adamw(1e-3)),
    "split spectra_adamw, bfloat16 coefficients": split_master_weights(spectra_adamw(1e-3, momentum=Spectrum())),
    "adamw, 8-bit states": compress_state(optax.adamw(1e-3), mu=Companded(), nu=Companded("unsigned")),
    "flash_adamw": flash_adamw(1e-3),
    "flash_lion": flash_lion(1e-3),
    "gwt_adamw": gwt_adamw(1e-3),
    "gwt_adafactor": gwt_adafactor(1e-3),
    "foam_adamw": foam_adamw(1e-3),
}
NAMES = [name for name in OPTIMIZERS if not name.startswith("split")]  # which are for 16-bit parameters
TOPOLOGIES = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v4": "v4:2x2x1", "h100": "h100:1"}
BITS = {"pred": 8, "s4": 4, "u4": 4, "s8": 8, "u8": 8, "s16": 16, "u16": 16, "s32": 32, "u32": 32}
BITS |= {"f16": 16, "bf16": 16, "f32": 32, "c64": 64, "s64": 64, "u64": 64, "f64": 64}
ARRAY = re.compile(r"\b([a-z]+[0-9]+[a-z0-9]*|pred)\[([0-9,]*)\](\{[^}]*\})?")
ON_CHIP = "S(1)"  # in the layout of an array in a TPU's on-chip memory
FETCHES = ("copy-start", "slice-start")
FREE = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "partition-id")


def main(
    target: Annotated[str, typer.Option(help=f"One of {', '.join(TOPOLOGIES)}.")] = "v5e",
    size: Annotated[int, typer.Option(help="Rows and columns of the one matrix.")] = 4096,
    dtype: Annotated[str, typer.Option(help="Of parameters and gradients.")] = "float32",
    only: Annotated[list[str], typer.Option(help="Optimizers to compile; repeatable.")] = NAMES,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the figures too.")] = None,
) -> None:
    """Prints a table; ratios are to what float32 AdamW moves at the least."""
    place, adamw = placed(target), 7 * 4 * size**2
    columns = ("least, MB", "moved, MB", "of AdamW's least", "through main memory", "temporaries, MB")
    table, figures = Table("optimizer", "step", *columns), []
    for name in only:
        for kind, step_of in STEPS.items():
            tx, param = OPTIMIZERS[name], jax.ShapeDtypeStruct((size, size), dtype, sharding=place)
            with compiling_for("gpu" if target == "h100" else "tpu"):
                compiled, least = compiled_step(tx, step_of(tx), param)
            moved, hbm = (count(compiled.as_text()) for count in (moved_bytes, hbm_bytes))
            temporaries = compiled.memory_analysis().temp_size_in_bytes
            shares = (f"{moved / adamw:.2f}", f"{hbm / adamw:.2f}")
            table.add_row(name, kind, f"{least / 1e6:.1f}", f"{moved / 1e6:.1f}", *shares, f"{temporaries / 1e6:.0f}")
            named = {"optimizer": name, "step": kind, "target": target, "dtype": dtype, "size": size}
            figures.append(named | {"least": least, "moved": moved, "main_memory": hbm, "temporaries": temporaries})
    Console(width=120).print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=2))


def placed(target: str) -> NamedSharding:
    """One chip that is only known to the compiler."""
    if target not in TOPOLOGIES:
        raise typer.BadParameter(f"target must be one of {', '.join(TOPOLOGIES)}; got {target}")
    chips = target_named(TOPOLOGIES[target])
    return NamedSharding(Mesh(chips.mesh((chips.devices, 1)).devices[:1, 0], ("x",)), PartitionSpec())


def two_calls(tx: optax.GradientTransformation):
    """The step of every Optax loop."""

    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


STEPS = {"fused": fused_step, "two calls": two_calls}


def compiled_step(tx: optax.GradientTransformation, step_of_gradients, param: jax.ShapeDtypeStruct):
    """The compiled step of one matrix, and the least bytes it can move."""
    on_chip = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=param.sharding)
    state = jax.tree.map(on_chip, jax.eval_shape(tx.init, {"w": param}))
    size = lambda tree: sum(x.size * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
    # Parameters first, as they are returned: the first result of a shape takes the first memory of it.
    step = jax.jit(lambda params, state, grads: step_of_gradients(grads, state, params), donate_argnums=(0, 1))
    return step.lower({"w": param}, state, {"w": param}).compile(), 3 * size(param) + 2 * size(state)


def moved_bytes(program: str) -> int:
    """Bytes of the operands and results of every instruction of the entry computation that does something."""
    sizes, total = {}, 0
    for name, result, operation, operands in _instructions(program):
        sizes[name] = sum(_bytes(*array[:2]) for array in ARRAY.findall(result))
        if operation not in FREE and not operation.endswith("-done"):
            total += sizes[name] + sum(sizes.get(operand, 0) for operand in operands)
    return total


def hbm_bytes(program: str) -> int:
    """The same of arrays in the chip's main memory only; what is fetched ahead counts once, when it is fetched."""
    sizes, total = {}, 0
    for name, result, operation, operands in _instructions(program):
        arrays = [(_bytes(dtype, dims), ON_CHIP in layout) for dtype, dims, layout in ARRAY.findall(result)]
        sizes[name] = sum(size for size, on_chip in arrays if not on_chip)
        if operation in FETCHES:  # the result names source and destination, of which the smaller one is moved
            (size, _), *_ = moved = sorted(arrays[:2])
            total += size * (1 if any(on_chip for _, on_chip in moved) else 2)
        elif operation not in FREE and not operation.endswith("-done"):
            total += sizes[name] + sum(sizes.get(operand, 0) for operand in operands)
    return total


def _instructions(program: str):
    """Name, result, operation and operands of each instruction of the entry computation."""
    for line in program[program.index("\nENTRY ") :].splitlines():
        instruction = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (.*?)\b([a-z][\w\-]*)\((.*)", line)
        if instruction:
            name, result, operation, rest = instruction.groups()
            yield name, result, operation, re.findall(r"%([\w.\-]+)", rest.split("), ")[0])


def _bytes(dtype: str, dimensions: str) -> int:
    return BITS.get(dtype, 0) * int(np.prod([int(n) for n in dimensions.split(",") if n], initial=1)) // 8


if __name__ == "__main__":
    typer.run(main)
