"""What laying out, saving and moving the state of a thousand parameters costs where its bytes are next to none.

    python examples/benchmarks/checkpoint_time.py

The state is laid out over eight simulated devices, saved, checked, and restored over four, along the other axis.
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
import typer
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from spectra_optax import (
    check_stored_state,
    checkpoint_contents,
    flash_adamw,
    gwt_adamw,
    spectra_adamw,
    state_sharding,
)

OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "spectra_adamw": spectra_adamw(1e-3),
    "flash_adamw": flash_adamw(1e-3),
    "gwt_adamw": gwt_adamw(1e-3),
}
NAMES = list(OPTIMIZERS)
COUNTED = ("layout", "layout over others", "restore")


def main(
    leaves: Annotated[int, typer.Option(help="Matrices among the parameters.")] = 1000,
    only: Annotated[list[str], typer.Option(help="Optimizers; repeatable.")] = NAMES,
) -> None:
    """Prints seconds, by the clock and of the processor."""
    jax.config.update("jax_num_cpu_devices", 8)
    table = Table("optimizer", "part", "seconds", "of the processor")
    for name in only:
        total = [0.0, 0.0]
        for part, *seconds in measured(OPTIMIZERS[name], leaves):
            table.add_row(name, part, *(f"{value:.2f}" for value in seconds))
            if part in COUNTED:
                total = [sum(pair) for pair in zip(total, seconds, strict=True)]
        table.add_row(name, ", ".join(COUNTED), *(f"{value:.2f}" for value in total), end_section=True)
    Console(width=120).print(table)


def measured(tx: optax.GradientTransformation, leaves: int) -> list[tuple[str, float, float]]:
    """Each part with its seconds by the clock and of the processor."""
    found = []

    @contextlib.contextmanager
    def timed(part: str) -> Iterator[None]:
        started = time.perf_counter(), time.process_time()
        yield
        found.append((part, time.perf_counter() - started[0], time.process_time() - started[1]))

    params = {f"layer_{i}": {"kernel": jax.ShapeDtypeStruct((512, 64), jnp.bfloat16)} for i in range(leaves)}
    with timed("layout"):
        of_eight = layout(tx, params, 8, PartitionSpec("x"))
    state = jax.tree.map(lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding), of_eight)
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as checkpointer:
        path = Path(folder) / "state"
        with timed("save"):
            checkpointer.save(path, state)
            checkpointer.wait_until_finished()
        with timed("layout over others"):
            of_four = layout(tx, params, 4, PartitionSpec(None, "x"))
        with timed("check"):
            contents = checkpoint_contents(path)
            with contextlib.suppress(ValueError):  # settings of zeros
                check_stored_state(tx, params, contents)
        with timed("restore"):
            jax.block_until_ready(checkpointer.restore(path, of_four))
    return found


def layout(tx: optax.GradientTransformation, params, devices: int, spec: PartitionSpec):
    """The state's shapes, laid out over the first devices as parameters are by `spec`."""
    mesh = jax.make_mesh((devices,), ("x",), (AxisType.Auto,), devices=jax.devices()[:devices])
    shardings = state_sharding(tx, params, NamedSharding(mesh, spec))
    place = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    return jax.tree.map(place, jax.eval_shape(tx.init, params), shardings)


if __name__ == "__main__":
    typer.run(main)
