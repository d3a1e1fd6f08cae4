"""One run of a task, as a line of the results file; a run that fails is one too."""

import dataclasses
import importlib.metadata
import math
import os
import platform
import time
from pathlib import Path

from lm.comparison import Run
from lm.settings import settings_of
from lm.sweep import Cell
from lm.training import Result, train

from .entries import TRIALS
from .tasks import Problem, problem_of

PACKAGES = ("jax", "jaxlib", "optax", "flax", "numpy", "spectra-optax")
CPU_INFO = Path("/proc/cpuinfo")


@dataclasses.dataclass(frozen=True)
class TaskRun(Run):
    """A finished run.

    Attributes:
      task: Name of the task.
      weights: Dtype of the parameters.
      parameters: Their number.
      start_loss: Validation loss before the first step.
      seconds: Wall time of the whole run, compilation included.
      error: What went wrong, if the run has no result.
      environment: What it ran on.
    """

    task: str
    weights: str
    parameters: int
    start_loss: float
    seconds: float
    error: str | None
    environment: dict

    @property
    def diverged(self) -> bool:
        """Whether training has made nothing better."""
        return not self.validation_loss < self.start_loss


def run_cell(task: str, steps: int | None, cell: Cell) -> TaskRun:
    """Trains one cell of a task; never raises, so that a failure stays on record and the others go on."""
    problem, started, result, error = problem_of(task, steps), time.perf_counter(), None, None
    try:
        result = train_cell(problem, cell)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return _record(task, problem, cell, result, error, time.perf_counter() - started)


def train_cell(problem: Problem, cell: Cell, **kwargs) -> Result:
    """The training itself; `kwargs` are `train`'s."""
    entry = TRIALS[cell.entry].entry
    recipe = dataclasses.replace(problem.recipe, b1=entry.b1, weights=entry.weights)
    start = lambda: problem.start(cell.seed)
    return train(
        recipe, problem.corpus, entry.make_optimizer, learning_rate=cell.rate, seed=cell.seed, start=start, **kwargs
    )


def settings_of_problem(problem: Problem) -> dict:
    """What all runs of a task share."""
    settings = settings_of(problem.recipe, problem.corpus)
    del settings["b1"], settings["weights"]  # each entry has its own
    return settings


def environment() -> dict:
    """Versions, and the processor."""
    return {
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in PACKAGES},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def _processor() -> str:
    if not CPU_INFO.exists():  # which only Linux has
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in CPU_INFO.read_text().splitlines() if "model name" in line]
    return names[0] if names else platform.machine()


def _record(
    task: str, problem: Problem, cell: Cell, result: Result | None, error: str | None, seconds: float
) -> TaskRun:
    return TaskRun(
        **cell._asdict(),
        validation_loss=result.validation_loss if result else math.nan,
        early_loss=result.early_loss if result else math.nan,
        bytes_per_parameter=result.state_bytes / result.parameters if result else math.nan,
        step_seconds=result.step_seconds if result else math.nan,
        settings=settings_of_problem(problem),
        task=task,
        weights=TRIALS[cell.entry].entry.weights,
        parameters=result.parameters if result else 0,
        start_loss=result.history.validation[0][1] if result else math.nan,
        seconds=seconds,
        error=error,
        environment=environment(),
    )
