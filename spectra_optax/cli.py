"""The command `spectra-optax`.

    spectra-optax plan --model llama3-8b --topology v5e:4x4 --optimizer adamw --optimizer spectra_adamw

The table goes to the terminal, with `--json` a list of objects; progress and errors go to standard error.
"""

import json
import sys
from typing import Annotated, Any

import jax

from spectra_optax.planning.optimizers import OPTIMIZERS, Released
from spectra_optax.planning.plans import Plan, plan
from spectra_optax.planning.presets import PRESETS
from spectra_optax.planning.targets import FAMILIES, target_named

_DEFAULT = ["adamw", "spectra_adamw"]
_GIB = 2**30


def main() -> None:
    """Runs the command."""
    application()()


def application() -> Any:
    """The command as a Typer application; ends the process with advice where Typer is missing."""
    try:
        import typer
    except ModuleNotFoundError:
        sys.exit("The command needs typer and rich: pip install 'spectra-optax[plan]'")
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.callback()(_about)
    app.command("plan")(_command(typer))
    return app


def _about() -> None:
    """Optimizers for JAX that train as well as AdamW in a fraction of its memory."""


def _command(typer: Any) -> Any:
    """The function behind `plan`, whose options Typer reads from its annotations."""

    def command(
        model: Annotated[str, typer.Option(help=f"One of {', '.join(PRESETS)}, or a Hugging Face config.json.")],
        topology: Annotated[str, typer.Option(help=f"Such as v5e:4x4 or h100:8; of {', '.join(FAMILIES)}.")],
        optimizer: Annotated[list[str], typer.Option(help=f"Repeatable; {', '.join(OPTIMIZERS)}.")] = _DEFAULT,
        seq: Annotated[int, typer.Option(help="Tokens in a sequence.")] = 2048,
        batch: Annotated[int, typer.Option(help="Sequences in a step, on all devices.")] = 16,
        mesh: Annotated[str | None, typer.Option(help="Shards, such as data=4,model=4.")] = None,
        compile: Annotated[
            bool | None, typer.Option(help="Ask the compiler, or estimate from shapes; by default as installed.")
        ] = None,
        release_gradients: Annotated[
            bool, typer.Option("--release-gradients", help="Update each layer in the backward pass.")
        ] = False,
        as_json: Annotated[bool, typer.Option("--json", help="Print a list of objects, sizes in bytes.")] = False,
    ) -> None:
        """Says what a whole training step needs of each chip's memory, and whether it fits."""
        jax.config.update("jax_platforms", "cpu")  # to plan needs no accelerator, and must not take one
        settings: dict[str, Any] = {"batch": batch, "seq": seq, "compiled": compile}
        try:
            settings["mesh"] = None if mesh is None else _mesh(mesh)
            planned = {name: Released(name) if release_gradients else name for name in optimizer}
            plans = dict(_plans(model, topology, planned, settings))
        except (ValueError, TypeError, ModuleNotFoundError) as error:
            sys.exit(f"spectra-optax: {error}")
        title = f"{model}, {batch} sequences of {seq} tokens" + ", gradients released" * release_gradients
        print(_json(plans)) if as_json else _print(plans, title)

    return command


def _plans(model: str, topology: str, optimizers: dict[str, Any], settings: dict[str, Any]):
    """Each optimizer's plan, a line of progress on the terminal meanwhile."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    target = target_named(topology)
    console = Console(stderr=True)
    if settings["compiled"] is None and not target.has_compiler:
        hint = rf"pip install 'spectra-optax\[{target.platform}]' for the compiler's figures"
        console.print(f"[yellow]An estimate from shapes; {hint}.[/]", soft_wrap=True)
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        for i, (name, optimizer) in enumerate(optimizers.items(), 1):
            task = progress.add_task(f"{name} on {target.name} ({i} of {len(optimizers)}), may take minutes")
            yield name, plan(model, topology, optimizer, **settings)
            progress.remove_task(task)


def _mesh(text: str) -> dict[str, int]:
    try:
        return {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise ValueError(f"mesh must be written as data=4,model=4, got {text!r}.") from None


def _json(plans: dict[str, Plan]) -> str:
    rows = [{"optimizer": name, **found._asdict(), "total": found.total} for name, found in plans.items()]
    return json.dumps(rows, indent=2)


def _print(plans: dict[str, Plan], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    one = next(iter(plans.values()))
    source = "compiled" if one.compiled else "estimated from shapes"
    where = f"{one.devices} devices of {one.topology} (data={one.mesh[0]}, model={one.mesh[1]})"
    table = Table(title=f"{title}, on {where}: GiB on each, {source}")
    for column in ("optimizer", "weights", "state", "gradient", "temporaries", "total", "memory", "fits"):
        table.add_column(column)
    table.add_column("weights and state, bytes per parameter")
    table.add_column("smallest that fits (estimated)")
    for name, p in plans.items():
        sizes = (p.weights, p.state, p.gradient, p.temporaries, p.total, p.memory)
        figures = (f"{size / _GIB:.2f}" for size in sizes)
        table.add_row(name, *figures, "yes" if p.fits else "no", f"{p.bytes_per_parameter:.2f}", p.smallest or "none")
    Console(width=None if sys.stdout.isatty() else 140).print(table)
