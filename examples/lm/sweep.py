"""Sweeps: entries, each tuned alike, run side by side on their own cores, none twice.

Every entry is tried at all of its learning rates on the first seed, then at the best of them on the other seeds. Each
finished run is kept at once, so a sweep that was stopped goes on where it was.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import NamedTuple

from tqdm import tqdm

from .comparison import Run, best_rate
from .optimizers import MakeOptimizer
from .recipe import Recipe

PINNING = hasattr(os, "sched_setaffinity")  # Not on macOS.


class Entry(NamedTuple):
    """What is compared: an optimizer, the decay of its momentum, the dtype of the parameters."""

    make_optimizer: MakeOptimizer
    b1: float = 0.9
    weights: str = Recipe.weights


class Cell(NamedTuple):
    """One run to do, but for the recipe that all share."""

    entry: str
    rate: float
    seed: int


class Record(NamedTuple):
    """Where finished runs are kept: reads them all, adds one."""

    read: Callable[[], Sequence[Run]]
    append: Callable[[Run], None]


def cores() -> list[int]:
    """Numbers of the CPU cores that this process may use."""
    return sorted(os.sched_getaffinity(0)) if PINNING else list(range(os.cpu_count()))


def workers(jobs: int) -> ProcessPoolExecutor:
    """Worker processes, the cores dealt out among them; a `ValueError` if there are fewer.

    A worker pins itself before its first computation, which is when JAX sizes its thread pools. Workers live as long
    as the sweep, so each compiles an entry once and serves all its learning rates and seeds.
    """
    at_hand = cores()
    if not 1 <= jobs <= len(at_hand):
        raise ValueError(f"jobs must be between 1 and the {len(at_hand)} cores at hand, got {jobs}")
    context = get_context("spawn")
    shares = context.SimpleQueue()
    for job in range(jobs):
        shares.put(at_hand[job::jobs])
    return ProcessPoolExecutor(jobs, context, initializer=_pin, initargs=(shares,))


def sweep(
    grids: dict[str, Sequence[float]],
    seeds: Sequence[int],
    run_cell: Callable[[Cell], Run],
    record: Record,
    pool: Executor,
    name: str = "",
) -> None:
    """Runs whatever `record` lacks of the learning rates of each entry, and then of its seeds."""
    tuning = [Cell(entry, rate, seeds[0]) for entry, rates in grids.items() for rate in rates]
    _run_missing(tuning, run_cell, record, pool, f"{name} learning rates")
    runs = record.read()
    repeats = [Cell(entry, best_rate(runs, entry), seed) for entry in grids for seed in seeds[1:]]
    _run_missing(repeats, run_cell, record, pool, f"{name} seeds")


def _run_missing(cells: Sequence[Cell], run_cell: Callable, record: Record, pool: Executor, name: str) -> None:
    """Only this process writes."""
    finished = {Cell(run.entry, run.rate, run.seed) for run in record.read()}
    futures = [pool.submit(run_cell, cell) for cell in cells if cell not in finished]
    for future in tqdm(as_completed(futures), total=len(futures), desc=name.strip(), unit="run"):
        record.append(future.result())


def _pin(shares) -> None:
    if PINNING:
        os.sched_setaffinity(0, shares.get())
