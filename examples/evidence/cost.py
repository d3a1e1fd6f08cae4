"""How long a sweep takes, from a few steps of two optimizers, in processor time: what else runs does not count."""

import contextlib
import dataclasses
import itertools
import statistics
import time

from lm.sweep import Cell
from lm.training import History

from .runs import train_cell
from .tasks import grids_of, problem_of

TIMED = ("adamw_b1_0.9", "spectra_adamw")  # as quick and as slow as any, about
STEPS = 4


@dataclasses.dataclass(frozen=True)
class Cost:
    """Processor time of a task.

    Attributes:
      entries: How many optimizers are tried.
      runs: How many runs that makes.
      compiling: Seconds that a process takes to compile an optimizer's step.
      run: Seconds of a run that has been compiled.
    """

    entries: int
    runs: int
    compiling: float
    run: float

    def hours(self, jobs: int) -> float:
        """Of so many processes on as many cores, each of which compiles every entry."""
        return (self.entries * self.compiling + self.runs * self.run / jobs) / 3600


class _Enough(Exception):
    """Ends a run that has been timed."""


def cost_of(task: str, entries: list[str] | None, seeds: int, steps: int | None) -> Cost:
    """Times the first steps of a task."""
    grids = grids_of(task, entries)
    timed = [_seconds(task, steps, name) for name in TIMED]
    compiling, run = (statistics.fmean(values) for values in zip(*timed, strict=True))
    return Cost(len(grids), sum(len(rates) + seeds - 1 for rates in grids.values()), compiling, run)


def _seconds(task: str, steps: int | None, entry: str) -> tuple[float, float]:
    """To compile an entry's step, and of a run after that."""
    first, again = (_timed(task, steps, entry) for _ in range(2))
    step = statistics.median(again[1:] or again)
    return first[0] - again[0], again[0] + problem_of(task, steps).recipe.steps * step


def _timed(task: str, steps: int | None, entry: str) -> list[float]:
    """Seconds until the first step is done, and of each step after it."""
    times = [time.process_time()]

    def stop(history: History) -> None:
        times.append(time.process_time())
        if len(history.losses) == STEPS:
            raise _Enough

    with contextlib.suppress(_Enough):
        train_cell(problem_of(task, steps), Cell(entry, 0.0, 0), on_step=stop)
    return [later - earlier for earlier, later in itertools.pairwise(times)]
