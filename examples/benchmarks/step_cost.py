"""What a step of an optimizer costs on this machine beside `optax.adamw`: wall time, compile time, temporary memory.

    python examples/benchmarks/step_cost.py

Steps are taken in turns, so that whatever else the machine does falls on all alike; the ratio is the median of the
ratios within a turn.
"""

import json
import time
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from rich.console import Console
from rich.table import Table

from spectra_optax import (
    FullMomentum,
    Spectrum,
    flash_adamw,
    flash_lion,
    foam_adamw,
    fused_step,
    gwt_adafactor,
    gwt_adamw,
    spectra_adamw,
)

OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "muon": optax.contrib.muon(1e-3),
    "spectra_adamw": spectra_adamw(1e-3),
    "spectra_adamw, bfloat16 coefficients": spectra_adamw(1e-3, momentum=Spectrum()),
    "spectra_adamw, full momentum": spectra_adamw(1e-3, momentum=FullMomentum()),
    "flash_adamw": flash_adamw(1e-3),
    "flash_lion": flash_lion(1e-3),
    "gwt_adamw": gwt_adamw(1e-3),
    "gwt_adafactor": gwt_adafactor(1e-3),
    "foam_adamw": foam_adamw(1e-3),
}
NAMES = list(OPTIMIZERS)


def main(
    leaves: Annotated[int, typer.Option(help="Matrices whose step is timed.")] = 8,
    size: Annotated[int, typer.Option(help="Their rows and columns.")] = 2048,
    turns: Annotated[int, typer.Option(help="Timed steps of each optimizer.")] = 12,
    compiled_leaves: Annotated[int, typer.Option(help="Matrices, of 20 shapes, whose update is compiled.")] = 200,
    only: Annotated[list[str], typer.Option(help="Optimizers beside adamw; repeatable.")] = NAMES,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where to write the figures too.")] = None,
) -> None:
    """Prints a table."""
    chosen = {name: OPTIMIZERS[name] for name in dict.fromkeys(["adamw", *only])}
    seconds, temporary = step_seconds(chosen, leaves, size, turns)
    table = Table("optimizer", "step, ms", "ratio", "temporaries, MB", f"compile {compiled_leaves} leaves, s")
    figures = {}
    for name, tx in chosen.items():
        ratio, milliseconds = np.median(seconds[name] / seconds["adamw"]), 1e3 * np.median(seconds[name])
        compiled = compile_seconds(tx, compiled_leaves)
        figures[name] = {"milliseconds": milliseconds, "ratio": ratio, "temporary_bytes": temporary[name]}
        figures[name]["compile_seconds"] = compiled
        table.add_row(name, f"{milliseconds:.1f}", f"{ratio:.2f}", f"{temporary[name] / 1e6:.0f}", f"{compiled:.1f}")
    Console(width=120).print(table)
    if json_file is not None:
        json_file.write_text(json.dumps({"leaves": leaves, "size": size, "figures": figures}, indent=2))


def step_seconds(chosen: dict, leaves: int, size: int, turns: int) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    """Seconds of each step `[turns]` and bytes of temporaries, by optimizer."""
    params = {f"w{i}": jax.random.normal(jax.random.key(i), (size, size)) for i in range(leaves)}
    grads = jax.tree.map(lambda x: 0.01 * x, params)
    steps = {name: _compiled_step(tx, params) for name, tx in chosen.items()}
    carried = {name: (jax.tree.map(jnp.copy, params), tx.init(params)) for name, tx in chosen.items()}
    seconds = {name: [] for name in chosen}
    for _ in range(turns):
        for name, step in steps.items():
            started = time.perf_counter()
            params, state = carried[name]
            carried[name] = jax.block_until_ready(step(params, state, grads))
            seconds[name].append(time.perf_counter() - started)
    temporary = {name: step.memory_analysis().temp_size_in_bytes for name, step in steps.items()}
    return {name: np.asarray(values) for name, values in seconds.items()}, temporary


def _compiled_step(tx: optax.GradientTransformation, params):
    # Arguments in the order of the results: donated memory goes to the first result of its shape.
    step = lambda params, state, grads: fused_step(tx)(grads, state, params)
    return jax.jit(step, donate_argnums=(0, 1)).lower(params, jax.eval_shape(tx.init, params), params).compile()


def compile_seconds(tx: optax.GradientTransformation, leaves: int) -> float:
    """Seconds from tracing to the compiled `update` of a tree of 20 shapes."""
    shapes = [(32 * (2 + i % 20), 32 * (3 + i % 5)) for i in range(leaves)]
    params = {f"w{i}": jax.ShapeDtypeStruct(shape, jnp.float32) for i, shape in enumerate(shapes)}
    started = time.perf_counter()
    jax.jit(tx.update).lower(params, jax.eval_shape(tx.init, params), params).compile()
    return time.perf_counter() - started


if __name__ == "__main__":
    typer.run(main)
