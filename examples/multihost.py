"""The smallest training run of many processes: one program, started once on every host.

    python examples/multihost.py --coordinator 10.0.0.1:1234 --processes 2 --process-id 0    # and 1, on the other host

On TPU pods, Slurm, Open MPI and Kubernetes JAX finds the other processes by itself, so that every host runs

    python examples/multihost.py

which on a single machine is a run of one process. Each process reads its own rows of every batch; parameters and state
lie over the mesh. Checkpoints go to `--out`, a folder that all hosts share, and the same command goes on from the last
of them, with any number of processes.
"""

import functools
from pathlib import Path
from typing import Annotated

import jax
import typer
from tqdm import tqdm

from lm.checkpoints import RunCheckpoints
from lm.data import BYTE, load_corpus
from lm.layout import ACCEPTED, Layout, axis_sizes
from lm.model import ModelConfig
from lm.optimizers import NAMES, optimizer_named
from lm.recipe import Recipe
from lm.settings import settings_of
from lm.steps import check
from lm.training import History, train

SEED = 0
app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    coordinator: Annotated[str | None, typer.Option(help="Address and port of process 0.")] = None,
    processes: Annotated[int | None, typer.Option(help="How many there are.")] = None,
    process_id: Annotated[int | None, typer.Option(help="Which this one is, from 0.")] = None,
    mesh: Annotated[str | None, typer.Option(help=f"{ACCEPTED}; by default fsdp over all devices.")] = None,
    optimizer: Annotated[str, typer.Option(help=f"{NAMES}.")] = "spectra_adamw",
    weights: Annotated[str, typer.Option(help="float32, or bfloat16 with a flash optimizer.")] = Recipe.weights,
    learning_rate: Annotated[float, typer.Option(help="Peak, after the warm-up.")] = 1e-3,
    steps: Annotated[int, typer.Option(help="Training steps.")] = Recipe.steps,
    batch: Annotated[int, typer.Option(help="Sequences per step, of all processes.")] = Recipe.batch,
    width: Annotated[int, typer.Option(help="Of the network.")] = ModelConfig.width,
    text: Annotated[Path | None, typer.Option(help="A file or folder; by default Python's standard library.")] = None,
    out: Annotated[Path, typer.Option(help="Folder of the checkpoints.")] = Path("runs/multihost"),
    checkpoint_every: Annotated[int, typer.Option(help="Steps between checkpoints.")] = 50,
) -> None:
    """Trains a small GPT over all devices of all processes."""
    try:
        sizes = None if mesh is None else axis_sizes(mesh)
        make_optimizer = optimizer_named(optimizer)
        join(coordinator, processes, process_id)
        layout = Layout.of(sizes or {"fsdp": jax.device_count()})
        corpus = load_corpus(text, BYTE, ModelConfig.context)
        recipe = Recipe(ModelConfig(width=width), steps, batch, weights=weights)
        check(recipe, make_optimizer, jax.eval_shape(lambda: recipe.model.init_params(SEED)), layout)
        settings = settings_of(recipe, corpus, optimizer=optimizer, learning_rate=learning_rate)
        checkpoints = RunCheckpoints(out, settings, every=checkpoint_every, last=steps)
        checkpoints.require_same_settings()
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from None
    run = functools.partial(train, recipe, corpus, make_optimizer, learning_rate=learning_rate, seed=SEED)
    with tqdm(total=steps, initial=checkpoints.step or 0, unit="step", disable=jax.process_index() > 0) as bar:

        def show(history: History) -> None:
            bar.set_postfix_str(f"loss {history.losses[-1]:.3f}", refresh=False)
            bar.update()

        result = run(layout=layout, checkpoints=checkpoints, on_step=show)
    print(f"process {jax.process_index()} of {jax.process_count()}: validation loss {result.validation_loss:.4f}")


def join(coordinator: str | None, processes: int | None, process_id: int | None) -> None:
    """Joins the other processes; without arguments those that JAX finds, and none where it finds none."""
    given = [value is not None for value in (coordinator, processes, process_id)]
    if any(given) and not all(given):
        raise ValueError(
            "coordinator, processes and process_id belong together, or are all left to JAX; got "
            f"coordinator={coordinator}, processes={processes}, process_id={process_id}"
        )
    try:
        jax.distributed.initialize(coordinator, processes, process_id)
    except ValueError:
        if any(given):
            raise


if __name__ == "__main__":
    app()
