"""What an optimizer's update moves between devices, from the compiler's program: a table of optimizers by layouts.

    python examples/benchmarks/collectives.py                       eight simulated devices
    pip install 'jax[tpu]'
    python examples/benchmarks/collectives.py --topology v5e:4x4    sixteen TPUs that only their compiler knows

A cell counts the program's collectives and gives the elements of the largest: sums of rows' and columns' means where
shards share them, and nothing else. AdamW's own row is empty.
"""

import math
import os
import re
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import optax
import typer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.progress import track
from rich.table import Table

from spectra_optax import (
    Companded,
    FullMomentum,
    Spectrum,
    backend,
    compress_state,
    flash_adam,
    flash_adamw,
    flash_lion,
    flash_sgd,
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
    "spectra_adamw, bfloat16 coefficients": spectra_adamw(1e-3, momentum=Spectrum()),
    "spectra_adamw, full momentum": spectra_adamw(1e-3, momentum=FullMomentum()),
    "spectra_adamw, energy mask": spectra_adamw(1e-3, momentum=Spectrum(mask="energy")),
    "spectra_adamw, topk mask": spectra_adamw(1e-3, momentum=Spectrum(mask="topk")),
    "split spectra_adamw": split_master_weights(spectra_adamw(1e-3)),
    "flash_adamw": flash_adamw(1e-3),
    "flash_adam": flash_adam(1e-3),
    "flash_sgd": flash_sgd(1e-3, momentum=0.9),
    "flash_lion": flash_lion(1e-3),
    "gwt_adamw": gwt_adamw(1e-3),
    "gwt_adafactor": gwt_adafactor(1e-3),
    "foam_adamw": foam_adamw(1e-3),
    "foam_adamw, 8 bits": compress_state(foam_adamw(1e-3), mu=Companded(), nu=Companded("unsigned")),
}


class Placement(NamedTuple):
    """A parameter on a mesh with the axes "data" and "model"."""

    path: str
    shape: tuple[int, ...]
    spec: tuple[str | None, ...]


LAYOUTS = {
    "rows (FSDP)": Placement("rows/kernel", (1024, 2048), ("data", None)),
    "columns (FSDP)": Placement("columns/kernel", (1024, 2048), (None, "data")),
    "tensor parallel": Placement("tensor/kernel", (1024, 2048), (None, "model")),
    "both": Placement("both/kernel", (1024, 2048), ("data", "model")),
    "replicated": Placement("whole/kernel", (1024, 2048), ()),
    "stacked layers": Placement("layers/kernel", (3, 1024, 2048), (None, "model", "data")),
    "experts": Placement("experts/kernel", (4, 1024, 512), ("model", "data", None)),
    "embedding": Placement("table/embedding", (2048, 1024), ("model", "data")),
    "vector": Placement("norm/scale", (1024,), ("data",)),
}
_COLLECTIVE = re.compile(r" = (.*?) (all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)(?:-start)?\(")
_ARRAY = re.compile(r"\[([\d,]*)\]")


class Collective(NamedTuple):
    """One of a program's, with the elements of the largest array in its result."""

    kind: str
    elements: int


def collectives(program: Any) -> list[Collective]:
    """Those of a compiled program, loops once."""
    size = lambda dims: math.prod(map(int, filter(None, dims.split(","))))
    found = _COLLECTIVE.findall(program.as_text())
    return [Collective(kind, max(map(size, _ARRAY.findall(result)), default=0)) for result, kind in found]


def compiled(tx: optax.GradientTransformation, mesh: Mesh, placements: Mapping[str, Placement] = LAYOUTS) -> Any:
    """The update of bfloat16 parameters that lie as told, the state beside them."""
    put = lambda tree, layouts: jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, layouts
    )
    shapes = {p.path: jax.ShapeDtypeStruct(p.shape, "bfloat16") for p in placements.values()}
    layouts = {p.path: NamedSharding(mesh, PartitionSpec(*p.spec)) for p in placements.values()}
    state = state_sharding(tx, shapes, layouts)
    params = put(shapes, layouts)
    step = jax.jit(tx.update, donate_argnums=1, out_shardings=(layouts, state))
    return step.lower(params, put(jax.eval_shape(tx.init, shapes), state), params).compile()


def main(
    topology: Annotated[str | None, typer.Option(help="Such as v5e:4x4; eight simulated devices without.")] = None,
) -> None:
    """Prints the table as Markdown would have it."""
    if topology is None:
        jax.config.update("jax_num_cpu_devices", 8)
        mesh, platform = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2), "cpu"
    else:
        target = target_named(topology)
        rows = math.isqrt(target.devices)
        mesh, platform = target.mesh((target.devices // rows, rows)), target.platform.replace("cuda", "gpu")
    table = Table("optimizer", *LAYOUTS, title=f"collectives x largest, mesh {dict(mesh.shape)}")
    with backend.compiling_for(platform):
        for name, tx in track(OPTIMIZERS.items(), console=Console(stderr=True)):
            cells = [collectives(compiled(tx, mesh, {layout: place})) for layout, place in LAYOUTS.items()]
            table.add_row(name, *map(_drawn, cells))
    Console(width=200).print(table)


def _drawn(found: list[Collective]) -> str:
    return ", ".join(
        f"{len(of)} {kind} x {max(c.elements for c in of)}"
        for kind in dict.fromkeys(c.kind for c in found)
        if (of := [c for c in found if c.kind == kind])
    )


if __name__ == "__main__":
    typer.run(main)
