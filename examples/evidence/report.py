"""Finished runs as Markdown tables and as a picture of loss against memory."""

import math
import statistics
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lm.comparison import Row, markdown, rows_of

from .runs import TaskRun
from .tasks import TASKS


def by_task(runs: list[TaskRun]) -> dict[str, list[TaskRun]]:
    """The runs of each task, in the order of the tasks."""
    found = {task: [run for run in runs if run.task == task] for task in TASKS}
    return {task: of_task for task, of_task in found.items() if of_task}


def tables(runs: list[TaskRun]) -> str:
    """A section for each task: its settings, its table, what failed, and where a grid was too narrow."""
    return "\n\n".join(_section(task, of_task) for task, of_task in by_task(runs).items())


def _section(task: str, runs: list[TaskRun]) -> str:
    settings, first = runs[0].settings, runs[0]
    hours = sum(run.seconds for run in runs) / 3600
    about = f"{TASKS[task].about}: {settings['steps']} steps of {settings['batch']}, {first.parameters:,} parameters; "
    lines = [f"## {task}", "", f"{about}{len(runs)} runs in {hours:.1f} hours.", "", markdown(runs, shared_grid=False)]
    notes = [*_failures(runs), *_edges(runs)]
    return "\n".join([*lines, "", *notes] if notes else lines)


def _failures(runs: list[TaskRun]) -> list[str]:
    return [f"- {run.entry} at {run.rate:g}, seed {run.seed}, failed: {run.error}" for run in runs if run.error]


def _edges(runs: list[TaskRun]) -> list[str]:
    """A best rate that is the grid's first or last may not be the best there is."""
    tuned = [row for row in rows_of(runs) if len(row.by_rate) > 1 and math.isfinite(row.by_rate[row.rate].outcome)]
    at_edge = [row.entry for row in tuned if row.rate in (min(row.by_rate), max(row.by_rate))]
    return [f"- best at an edge of the grid: {', '.join(at_edge)}"] if at_edge else []


def pareto(rows: list[Row]) -> list[Row]:
    """Rows with the lowest loss among all that hold as little, from little to much."""
    front, lowest = [], math.inf
    for row in sorted(rows, key=lambda row: (row.at_best[0].bytes_per_parameter, _mean(row))):
        if _mean(row) < lowest:
            front.append(row)
            lowest = _mean(row)
    return front


def plot(runs: list[TaskRun], path: Path) -> None:
    """Draws loss at the best rate against bytes of state per parameter, a panel for each task."""
    tasks = by_task(runs)
    columns = min(2, len(tasks))
    figure = Figure(figsize=(8 * columns, 6 * math.ceil(len(tasks) / columns)), layout="constrained")
    panels = list(figure.subplots(math.ceil(len(tasks) / columns), columns, squeeze=False).flat)
    for axes, (task, of_task) in zip(panels, tasks.items(), strict=False):
        _panel(axes, rows_of(of_task))
        axes.set(title=TASKS[task].about, xlabel="state, bytes per parameter", ylabel="validation loss (nats)")
    for axes in panels[len(tasks) :]:
        axes.remove()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _panel(axes: Axes, rows: list[Row]) -> None:
    """Error bars are the seeds' standard deviation; hollow points have 16-bit weights; crosses lie above the panel."""
    rows = [row for row in rows if math.isfinite(row.at_best[0].bytes_per_parameter)]  # one that failed has no size
    top = _ceiling(rows)
    for row in rows:
        size, losses = row.at_best[0].bytes_per_parameter, row.validation_losses
        if _mean(row) <= top:
            spread = statistics.stdev(losses) if len(losses) > 1 else 0
            fill = "none" if row.at_best[0].weights == "bfloat16" else "full"
            axes.errorbar(size, _mean(row), yerr=spread, fmt="o", fillstyle=fill, capsize=3, color="C0")
            label = row.entry
        else:
            axes.plot(size, top, "x", color="C3")
            label = f"{row.entry}, {_mean(row):.3f}" if math.isfinite(_mean(row)) else f"{row.entry}, diverged"
        at = (size, min(_mean(row), top))
        axes.annotate(label, at, xytext=(4, 4), textcoords="offset points", fontsize=7)
    front = [row for row in pareto(rows) if _mean(row) <= top]
    sizes = [row.at_best[0].bytes_per_parameter for row in front]
    axes.step(sizes, [_mean(row) for row in front], where="post", color="C1", zorder=0, label="Pareto front")
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.grid(alpha=0.3)
    axes.legend()


def _ceiling(rows: list[Row]) -> float:
    """The highest loss that is drawn, lest one far off squash the rest: four times as far from the best as half are."""
    losses = sorted(_mean(row) for row in rows if math.isfinite(_mean(row)))
    if not losses:
        return 0.0
    return min(losses[-1], losses[0] + 4 * (statistics.median(losses) - losses[0])) if len(losses) > 2 else losses[-1]


def _mean(row: Row) -> float:
    return statistics.fmean(row.validation_losses)
