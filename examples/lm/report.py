"""What a comparison leaves behind: a table for the terminal, a picture, and the numbers."""

import json
import math
from pathlib import Path

from matplotlib.figure import Figure
from rich.table import Table

from .training import EARLY_STEP, SMOOTHING, Result, smoothed


def table(results: dict[str, Result]) -> Table:
    """One row for each optimizer."""
    steps = max(len(result.history.losses) for result in results.values())
    table = Table()
    table.add_column("optimizer", no_wrap=True)
    early = f"training loss at step {min(steps, EARLY_STEP)}"
    for heading in ("state bytes", "bytes per parameter", "median step", early, "validation loss"):
        table.add_column(heading, justify="right")
    for name, result in results.items():
        table.add_row(
            name,
            f"{result.state_bytes:,}",
            f"{result.state_bytes / result.parameters:.2f}",
            f"{1000 * result.step_seconds:.0f} ms",
            f"{result.early_loss:.3f}",
            f"{result.validation_loss:.3f}",
        )
    return table


def plot(results: dict[str, Result], path: Path) -> None:
    """Draws every optimizer's training loss as a line and its validation loss as points."""
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for name, result in results.items():
        losses = smoothed(result.history.losses)
        (line,) = axes.plot(range(1, len(losses) + 1), losses, linewidth=1, label=f"{name}, training")
        steps, measured = zip(*result.history.validation, strict=True)
        per_parameter = result.state_bytes / result.parameters
        label = f"{name}, validation ({per_parameter:.2f} bytes of state per parameter)"
        axes.plot(steps, measured, "o", color=line.get_color(), label=label)
    axes.set(xlabel="step", ylabel="loss (nats per token)", title=f"training loss is the mean over {SMOOTHING} steps")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def write_json(results: dict[str, Result], settings: dict, path: Path) -> None:
    """Writes settings, totals and curves; a loss that is not finite becomes `null`."""
    optimizers = {
        name: {
            "state_bytes": result.state_bytes,
            "parameters": result.parameters,
            "step_seconds": result.step_seconds,
            "training_loss_at_step_40": _finite(result.early_loss),
            "validation_loss": _finite(result.validation_loss),
            "losses": [_finite(loss) for loss in result.history.losses],
            "validation": [[step, _finite(loss)] for step, loss in result.history.validation],
        }
        for name, result in results.items()
    }
    path.write_text(json.dumps({"settings": settings, "optimizers": optimizers}, indent=1))


def _finite(loss: float) -> float | None:
    return loss if math.isfinite(loss) else None
