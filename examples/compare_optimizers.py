"""The table behind the claim "not worse than AdamW": every optimizer at its own best learning rate.

    python examples/compare_optimizers.py run --jobs 2
    python examples/compare_optimizers.py report

`run` trains every entry at every learning rate on the first seed, then at its best rate on the other seeds, on the
model and text of `train_lm.py`. It appends each finished run to a file and, started again, goes on where it stopped.
`report` prints what the file holds as Markdown.
"""

import dataclasses
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from lm.comparison import Run, append_run, markdown, read_runs
from lm.data import BYTE, load_corpus
from lm.model import ModelConfig
from lm.optimizers import adapted, optimizer_named
from lm.recipe import Recipe
from lm.settings import require_same, settings_of
from lm.sweep import Cell, Entry, Record, sweep, workers
from lm.training import train
from spectra_optax import Spectrum, spectra_adamw

# Those of Optax whose compressed selves are compared with them.
PEERS = (
    "nadam",
    "radam",
    "adabelief",
    "adan",
    "rmsprop",
    "yogi",
    "lamb",
    "ademamix",
    "adopt",
    "muon",
    "schedule_free_adamw",
)


def _spectra(**settings) -> Entry:
    return Entry(adapted(partial(spectra_adamw, momentum=Spectrum(**settings))))


ENTRIES = {
    "adamw_b1_0.5": Entry(optimizer_named("adamw"), b1=0.5),
    "adamw_b1_0.8": Entry(optimizer_named("adamw"), b1=0.8),
    "adamw_b1_0.9": Entry(optimizer_named("adamw"), b1=0.9),
    "spectra_lowpass": Entry(optimizer_named("spectra_adamw_bfloat16")),
    "spectra_full": Entry(optimizer_named("spectra_adamw_full")),
    # With b1 = 0 the momentum is the update itself, so what it stores has no effect.
    "no_momentum": Entry(optimizer_named("spectra_adamw_full"), b1=0.0),
    "spectra_random": _spectra(mask="random"),
    "spectra_energy": _spectra(mask="energy"),
    "spectra_topk": _spectra(mask="topk"),
    "spectra_lowpass_eighth": _spectra(keep=1 / 8),
    "spectra_8bit": Entry(optimizer_named("spectra_adamw")),
    "spectra_8bit_split": Entry(optimizer_named("spectra_adamw_split"), weights="bfloat16"),
    **{
        name: Entry(optimizer_named(name))
        for name in ("gwt_adamw", "gwt_adamw_level3", "gwt_adafactor", "foam_adamw", "foam_adamw_8bit")
    },
    "flash_adamw": Entry(optimizer_named("flash_adamw"), weights="bfloat16"),
    **{
        f"flash_{name}": Entry(optimizer_named(f"flash_{name}"), weights="bfloat16") for name in ("adam", "lion", "sgd")
    },
    **{name: Entry(optimizer_named(name)) for name in ("adam", "lion", "sgd", *PEERS)},
    **{f"8bit_{name}": Entry(optimizer_named(f"8bit_{name}")) for name in PEERS},
}
NAMES = list(ENTRIES)
RATES = [5e-4, 1e-3, 2e-3, 4e-3, 8e-3]
SEEDS = [0, 1, 2]
app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
ResultsFile = Annotated[Path, typer.Option(help="JSON-lines file, one finished run a line.")]
RESULTS = Path("runs/compare_optimizers.jsonl")


@app.command()
def run(
    entries: Annotated[list[str], typer.Option(help=f"Repeatable; of {', '.join(NAMES)}.")] = NAMES,
    rates: Annotated[list[float], typer.Option(help="Learning rates to try; repeatable.")] = RATES,
    seeds: Annotated[
        list[int], typer.Option(help="The first gets every rate, the rest the best; repeatable.", min=0)
    ] = SEEDS,
    steps: Annotated[int, typer.Option(help="Training steps of a run.")] = Recipe.steps,
    layers: Annotated[int, typer.Option(help="Blocks of the model.")] = ModelConfig.layers,
    width: Annotated[int, typer.Option(help="Width of the model.")] = ModelConfig.width,
    jobs: Annotated[int, typer.Option(help="Runs side by side, each on its own share of the CPU cores.")] = 1,
    results: ResultsFile = RESULTS,
) -> None:
    """Trains whatever the results file does not hold yet."""
    unknown = [entry for entry in entries if entry not in ENTRIES]
    if unknown:
        raise typer.BadParameter(f"entries must be of {', '.join(NAMES)}, got {', '.join(unknown)}")
    try:
        recipe = Recipe(ModelConfig(layers=layers, width=width), steps)
        settings = _settings(recipe)
        for finished in read_runs(results):
            require_same(settings, finished.settings, results)
        pool = workers(jobs)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    record = Record(partial(read_runs, results), partial(append_run, results))
    with pool:
        sweep(dict.fromkeys(entries, rates), seeds, partial(_run_cell, recipe), record, pool)
    print(markdown(read_runs(results)))


@app.command()
def report(results: ResultsFile = RESULTS) -> None:
    """Prints the finished runs as a Markdown table."""
    runs = read_runs(results)
    if not runs:
        raise typer.BadParameter(f"there are no finished runs in {results}; `run` makes them")
    print(markdown(runs))


def _corpus(recipe: Recipe):
    return load_corpus(None, BYTE, recipe.model.context)


def _settings(recipe: Recipe) -> dict:
    settings = settings_of(recipe, _corpus(recipe))
    del settings["b1"], settings["weights"]  # Each entry has its own.
    return settings


def _run_cell(recipe: Recipe, cell: Cell) -> Run:
    entry = ENTRIES[cell.entry]
    recipe = dataclasses.replace(recipe, b1=entry.b1, weights=entry.weights)
    result = train(recipe, _corpus(recipe), entry.make_optimizer, learning_rate=cell.rate, seed=cell.seed)
    return Run(
        **cell._asdict(),
        validation_loss=result.validation_loss,
        early_loss=result.early_loss,
        bytes_per_parameter=result.state_bytes / result.parameters,
        step_seconds=result.step_seconds,
        settings=_settings(recipe),
    )


if __name__ == "__main__":
    app()
