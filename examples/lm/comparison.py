"""Finished runs of a sweep: kept as JSON lines, reported as a Markdown table."""

import collections
import dataclasses
import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished run; a line of the results file.

    Attributes:
      entry: Name of the row.
      rate: Peak learning rate.
      seed: Seed of the weights and the order of the batches.
      validation_loss: After the last step; not finite if the run diverged.
      early_loss: Training loss at step 40, the mean over steps 31 to 40.
      bytes_per_parameter: Size of the optimizer's state over the number of parameters.
      step_seconds: Median wall time of a step, with other runs beside it.
      settings: Everything else that decides the outcome.
    """

    entry: str
    rate: float
    seed: int
    validation_loss: float
    early_loss: float
    bytes_per_parameter: float
    step_seconds: float
    settings: dict

    @property
    def diverged(self) -> bool:
        """Whether the run has no loss to speak of."""
        return not math.isfinite(self.validation_loss)

    @property
    def outcome(self) -> float:
        """The validation loss, infinite if the run diverged."""
        return math.inf if self.diverged else self.validation_loss


def read_runs(path: Path, kind: type[Run] = Run) -> list:
    """The runs in the file, none if there is no file."""
    if not path.exists():
        return []
    return [kind(**json.loads(line)) for line in path.read_text().splitlines()]


def append_run(path: Path, run: Run) -> None:
    """Adds a line to the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(dataclasses.asdict(run)) + "\n")


def _sweep(runs: Iterable[Run], entry: str) -> dict[float, Run]:
    """An entry's runs by rate, on the one seed on which the most rates were tried."""
    runs = [run for run in runs if run.entry == entry]
    seed = collections.Counter(run.seed for run in runs).most_common(1)[0][0]
    return {run.rate: run for run in runs if run.seed == seed}


def best_rate(runs: Iterable[Run], entry: str) -> float:
    """The rate with the lowest validation loss on the seed on which the most rates were tried."""
    by_rate = _sweep(runs, entry)
    return min(by_rate, key=lambda rate: by_rate[rate].outcome)


@dataclasses.dataclass(frozen=True)
class Row:
    """What the table says of one entry.

    Attributes:
      entry: Name of the row.
      rate: Best rate.
      by_rate: Runs on one seed by rate.
      at_best: Runs at the best rate, one a seed.
    """

    entry: str
    rate: float
    by_rate: dict[float, Run]
    at_best: list[Run]

    @property
    def validation_losses(self) -> list[float]:
        """Validation losses at the best rate, one a seed."""
        return [run.outcome for run in self.at_best]

    @property
    def early_losses(self) -> list[float]:
        """Training losses at step 40 at the best rate, one a seed."""
        return [run.early_loss if math.isfinite(run.early_loss) else math.inf for run in self.at_best]


def rows_of(runs: list[Run]) -> list[Row]:
    """A row for every entry, in the order in which the file first names them."""
    rows = []
    for entry in dict.fromkeys(run.entry for run in runs):
        rate = best_rate(runs, entry)
        at_best = [run for run in runs if run.entry == entry and run.rate == rate]
        rows.append(Row(entry, rate, _sweep(runs, entry), at_best))
    return rows


def verdict(losses: list[float], reference: list[float]) -> str:
    """Whether the mean of `losses`, one a seed, is not above the reference's by more than the seeds' spread.

    The spread is that of a difference: the root of the summed squares of the two sample standard deviations.
    """
    difference = statistics.fmean(losses) - statistics.fmean(reference)
    spread = math.hypot(_deviation(losses), _deviation(reference))
    if difference == math.inf:
        return "worse"
    if math.isnan(spread):
        return "more seeds needed"
    return f"{'worse' if difference > spread else 'not worse'} ({difference:+.3f}, spread {spread:.3f})"


def markdown(runs: list[Run], baseline: str = "adamw", *, shared_grid: bool = True) -> str:
    """The table. Its reference is the row with the lowest mean validation loss whose name starts with `baseline`.

    The losses by rate have a column for each rate, or share one if every entry has a grid of its own.
    """
    rows, rates = rows_of(runs), sorted({run.rate for run in runs})
    references = [row for row in rows if row.entry.startswith(baseline)]
    reference = min(references, key=lambda row: statistics.fmean(row.validation_losses), default=None)
    head = ["entry", "state B/param", "best lr", *([f"lr {rate:g}" for rate in rates] if shared_grid else ["by lr"])]
    head += ["seeds", "validation loss at best lr", "against the reference"]
    head += ["training loss at step 40", "against the reference"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        cells = [row.entry, f"{row.at_best[0].bytes_per_parameter:.2f}", f"{row.rate:g}"]
        by_rate = {rate: _loss(row.by_rate[rate].outcome) if rate in row.by_rate else "" for rate in rates}
        tried = {rate: loss for rate, loss in by_rate.items() if loss}
        cells += list(by_rate.values()) if shared_grid else [", ".join(f"{r:g}: {loss}" for r, loss in tried.items())]
        cells += [str(len(row.at_best)), _mean(row.validation_losses), _against(row, reference, "validation_losses")]
        cells += [_mean(row.early_losses), _against(row, reference, "early_losses")]
        lines.append(cells)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _against(row: Row, reference: Row | None, losses: str) -> str:
    if reference is None or row is reference:
        return "" if reference is None else "is the reference"
    return verdict(getattr(row, losses), getattr(reference, losses))


def _deviation(losses: list[float]) -> float:
    return statistics.stdev(losses) if len(losses) > 1 and all(map(math.isfinite, losses)) else math.nan


def _loss(loss: float) -> str:
    return f"{loss:.3f}" if math.isfinite(loss) else "diverged"


def _mean(losses: list[float]) -> str:
    mean, deviation = statistics.fmean(losses), _deviation(losses)
    return _loss(mean) if math.isnan(deviation) else f"{mean:.3f} ± {deviation:.3f}"
