"""Trains a small GPT with several optimizers and compares them: memory, speed and loss.

    python examples/train_lm.py

The text is Python's standard library, so nothing is downloaded. Every optimizer starts from the same weights and sees
the same batches. A table is printed at the end; the curves, the numbers and the checkpoints go to a folder.
"""

import functools
import math
from pathlib import Path
from typing import Annotated

import jax
import typer
from rich.console import Console

from lm.checkpoints import RunCheckpoints
from lm.command import option, prepare, progress
from lm.data import BYTE, TOKENS, load_corpus
from lm.layout import ACCEPTED, Layout, axis_sizes, simulate_devices
from lm.model import ModelConfig
from lm.optimizers import NAMES, optimizer_named
from lm.recipe import Recipe
from lm.report import plot, table, write_json
from lm.settings import settings_of
from lm.steps import check
from lm.training import train

COMPARED = ["adamw", "spectra_adamw"]
app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    optimizer: Annotated[list[str], option(f"Repeatable; {NAMES}.", "Optimizer")] = COMPARED,
    learning_rate: Annotated[float, option("Peak, after the warm-up.", "Optimizer", min=0)] = 1e-3,
    b1: Annotated[float, option("Decay of the momentum.", "Optimizer")] = Recipe.b1,
    b2: Annotated[float, option("Decay of the second moment.", "Optimizer")] = Recipe.b2,
    weight_decay: Annotated[float, option("Of matrices.", "Optimizer")] = Recipe.weight_decay,
    clip: Annotated[float, option("Global norm that gradients are clipped to.", "Optimizer")] = Recipe.clip,
    weights: Annotated[
        str, option("float32, or bfloat16 with a split or flash optimizer.", "Optimizer")
    ] = Recipe.weights,
    release_gradients: Annotated[bool, option("Update each block on the way back.", "Optimizer")] = False,
    steps: Annotated[int, option("Training steps.", "Run")] = Recipe.steps,
    batch: Annotated[int, option("Sequences per step.", "Run")] = Recipe.batch,
    mesh: Annotated[str | None, option(f"{ACCEPTED.capitalize()}; on CPUs the devices are simulated.", "Run")] = None,
    seed: Annotated[int, option("Of the weights and the order of the text.", "Run", min=0)] = 0,
    out: Annotated[Path, option("Folder for results and checkpoints.", "Run")] = Path("runs/train_lm"),
    resume: Annotated[bool, option("Go on from the checkpoints in --out, else replace them.", "Run")] = False,
    checkpoint_every: Annotated[int, option("Steps between checkpoints.", "Run")] = 100,
    text: Annotated[Path | None, option("A file or a folder; by default Python's standard library.", "Text")] = None,
    tokens: Annotated[str, option(f"One of {', '.join(TOKENS)}.", "Text")] = BYTE,
    layers: Annotated[int, option("Blocks.", "Model")] = ModelConfig.layers,
    width: Annotated[int, option("Length of the residual stream's vectors.", "Model")] = ModelConfig.width,
    heads: Annotated[int, option("Attention heads; must divide the width.", "Model")] = ModelConfig.heads,
    context: Annotated[int, option("Longest sequence, in tokens.", "Model")] = ModelConfig.context,
) -> None:
    """Trains a small GPT with several optimizers and compares them: memory, speed and loss."""
    try:
        factories = {name: optimizer_named(name) for name in optimizer}
        corpus = load_corpus(text, tokens, context)
        model = ModelConfig(corpus.vocabulary, layers, width, heads, context)
        recipe = Recipe(model, steps, batch, b1, b2, weight_decay, clip, weights, release=release_gradients)
        layout = None if mesh is None else layout_of(mesh)
        shapes = jax.eval_shape(lambda: model.init_params(seed))
        for make_optimizer in factories.values():
            check(recipe, make_optimizer, shapes, layout)
        settings = settings_of(recipe, corpus, learning_rate=learning_rate, seed=seed)
        folders = {name: RunCheckpoints(out / name, settings, every=checkpoint_every, last=steps) for name in factories}
        prepare(folders, resume)
    except (ValueError, FileNotFoundError) as error:
        raise typer.BadParameter(str(error)) from None
    results = {}
    for name, make_optimizer in factories.items():
        run = functools.partial(train, recipe, corpus, make_optimizer, learning_rate=learning_rate, seed=seed)
        with progress(name, recipe, done=folders[name].step or 0) as on_step:
            results[name] = run(layout=layout, checkpoints=folders[name], on_step=on_step)
    plot(results, out / "curves.png")
    write_json(results, settings, out / "results.json")
    console = Console()
    console.print(table(results))
    console.print(f"curves: {out}/curves.png, numbers: {out}/results.json", soft_wrap=True)


def layout_of(mesh: str) -> Layout:
    """The layout over the mesh, of this machine's accelerators or of simulated devices."""
    sizes = axis_sizes(mesh)
    simulate_devices(math.prod(sizes.values()))
    return Layout.of(sizes)


if __name__ == "__main__":
    app()
