"""What the commands that train have in common: grouped options, folders to resume or empty, a progress bar."""

import contextlib
from collections.abc import Callable, Iterator

import numpy as np
import typer
from tqdm import tqdm

from .checkpoints import RunCheckpoints
from .recipe import Recipe
from .training import SMOOTHING, History


def option(help: str, panel: str, **limits):
    """A command line option; `panel` groups it in `--help`."""
    return typer.Option(help=help, rich_help_panel=panel, **limits)


def prepare(folders: dict[str, RunCheckpoints], resume: bool) -> None:
    """Checks that every run can be resumed, or empties the folders of runs that start afresh."""
    if resume and all(checkpoints.step is None for checkpoints in folders.values()):
        raise ValueError(f"resume: there are no checkpoints in {', '.join(str(c.folder) for c in folders.values())}")
    for checkpoints in folders.values():
        if resume:
            checkpoints.require_same_settings()
        else:
            checkpoints.clear()


@contextlib.contextmanager
def progress(name: str, recipe: Recipe, done: int) -> Iterator[Callable[[History], None]]:
    """A bar with the smoothed loss and the tokens per second, as a callback for `train`; `done` steps lie behind it."""
    with tqdm(initial=done, total=recipe.steps, desc=name, unit="step") as bar:

        def show(history: History) -> None:
            loss, seconds = np.mean(history.losses[-SMOOTHING:]), np.median(history.seconds[-SMOOTHING:])
            speed = recipe.batch * recipe.model.context / seconds
            bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s", refresh=False)
            bar.update(len(history.losses) - bar.n)

        yield show
