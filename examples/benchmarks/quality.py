"""Quality against memory: every optimizer, tuned alike, on every task; one command, which anyone can run again.

    pip install '.[benchmarks]'
    python examples/benchmarks/quality.py estimate --jobs 2
    python examples/benchmarks/quality.py run --jobs 2
    python examples/benchmarks/quality.py report

`run` tries every optimizer at five learning rates on the first seed, then at the best of them on two more. It appends
each finished run, with its settings and what it ran on, to a file of JSON lines, and goes on where it was stopped; any
part can be run alone. Runs that fail or diverge are kept, and tried again only once their lines are deleted. `report`
prints tables and draws loss against bytes of state.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent.parent))

from evidence.cost import cost_of
from evidence.entries import TRIALS, missing_packages
from evidence.report import plot, tables
from evidence.runs import TaskRun, run_cell, settings_of_problem
from evidence.tasks import TASKS, grids_of, problem_of
from lm.comparison import append_run, read_runs
from lm.settings import require_same
from lm.sweep import Record, sweep, workers

SEEDS, ALL_TASKS = [0, 1, 2], list(TASKS)
app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
Tasks = Annotated[list[str], typer.Option(help=f"Repeatable; of {', '.join(TASKS)}.")]
Entries = Annotated[list[str] | None, typer.Option(help=f"Repeatable; of {', '.join(TRIALS)}; by default all.")]
Seeds = Annotated[list[int], typer.Option(help="The first gets every rate, the rest the best; repeatable.", min=0)]
Jobs = Annotated[int, typer.Option(help="Runs side by side, each on its own share of the CPU cores.", min=1)]
Steps = Annotated[int | None, typer.Option(help="Training steps, in place of each task's own.", min=1)]
ResultsFile = Annotated[Path, typer.Option(help="JSON-lines file, one finished run a line.")]
RESULTS = Path("runs/quality.jsonl")


@app.command()
def run(
    tasks: Tasks = ALL_TASKS,
    entries: Entries = None,
    seeds: Seeds = SEEDS,
    jobs: Jobs = 1,
    steps: Steps = None,
    results: ResultsFile = RESULTS,
) -> None:
    """Trains whatever the results file does not hold yet."""
    _check(tasks, entries)
    if absent := missing_packages(entries or []):
        raise typer.BadParameter(f"{', '.join(absent)} must be installed: pip install '.[benchmarks]'")
    entries = entries or [name for name in TRIALS if name not in missing_packages(list(TRIALS))]
    try:
        pool = workers(jobs)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with pool:
        for task in tasks:
            record = Record(partial(_finished, results, task), partial(append_run, results))
            _prepare(task, steps, record, results)
            sweep(grids_of(task, entries), seeds, partial(run_cell, task, steps), record, pool, task)
    report(results, None)


@app.command()
def report(
    results: ResultsFile = RESULTS,
    picture: Annotated[Path | None, typer.Option(help="Where to draw; by default beside the results.")] = None,
) -> None:
    """Prints the finished runs as Markdown tables, and draws them."""
    runs = read_runs(results, TaskRun)
    if not runs:
        raise typer.BadParameter(f"there are no finished runs in {results}; `run` makes them")
    print(tables(runs))
    picture = picture or results.with_suffix(".png")
    plot(runs, picture)
    Console(stderr=True).print(f"picture: {picture}", soft_wrap=True)


@app.command()
def estimate(
    tasks: Tasks = ALL_TASKS, entries: Entries = None, seeds: Seeds = SEEDS, jobs: Jobs = 2, steps: Steps = None
) -> None:
    """Times the first steps of each task and says how long `run` would take on as many idle cores."""
    _check(tasks, entries)
    table, total = Table("task", "optimizers", "runs", "to compile, s", "run, s", "hours"), 0.0
    for task in tasks:
        cost = cost_of(task, entries, len(seeds), steps)
        total += cost.hours(jobs)
        times = f"{cost.compiling:.1f}", f"{cost.run:.1f}", f"{cost.hours(jobs):.2f}"
        table.add_row(task, str(cost.entries), str(cost.runs), *times)
    console = Console(width=100)
    console.print(table)
    console.print(f"together {total:.1f} hours in {jobs} processes, on as many idle cores")


def _check(tasks: list[str], entries: list[str] | None) -> None:
    for name, given, known in (("tasks", tasks, TASKS), ("entries", entries or [], TRIALS)):
        unknown = [value for value in given if value not in known]
        if unknown:
            raise typer.BadParameter(f"{name} must be of {', '.join(known)}, got {', '.join(unknown)}")


def _finished(results: Path, task: str) -> list[TaskRun]:
    return [run for run in read_runs(results, TaskRun) if run.task == task]


def _prepare(task: str, steps: int | None, record: Record, results: Path) -> None:
    """Fetches what the task needs, once for all processes, and refuses results of other settings."""
    try:
        settings = settings_of_problem(problem_of(task, steps))
        for finished in record.read():
            require_same(settings, finished.settings, results)
    except (ValueError, FileNotFoundError, ModuleNotFoundError) as error:
        raise typer.BadParameter(str(error)) from None


if __name__ == "__main__":
    app()
