"""The training loop: one function, `train`, that a script with a progress bar and a sweep without one both call."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import jax
import numpy as np
import optax

from spectra_optax import state_bytes

from .data import Corpus
from .layout import Layout
from .recipe import Model, Recipe
from .steps import MakeOptimizer, TrainState, init_state, optimizer, train_step

SMOOTHING = 10
EARLY_STEP = 40
INTERIM_WINDOWS = 64


@dataclasses.dataclass
class History:
    """What a run has measured so far.

    Attributes:
      losses: Training loss of every step.
      seconds: Wall time of every step.
      validation: Pairs of a number of steps done and the validation loss then; from 0 where weights were given.
    """

    losses: list[float] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)
    validation: list[list[float]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Result:
    """A finished run.

    Attributes:
      history: Losses and times, step by step.
      parameters: Number of the network's parameters.
      state_bytes: Exact size of the optimizer's state.
      state: What the last step left; None where it had to make room.
    """

    history: History
    parameters: int
    state_bytes: int
    state: TrainState | None

    @property
    def validation_loss(self) -> float:
        """Validation loss after the last step."""
        return self.history.validation[-1][1]

    @property
    def early_loss(self) -> float:
        """Training loss at step 40, smoothed: the mean over steps 31 to 40, or the last ten of a shorter run."""
        return smoothed(self.history.losses)[:EARLY_STEP][-1]

    @property
    def step_seconds(self) -> float:
        """Median wall time of a step."""
        return float(np.median(self.history.seconds))


class Checkpoints(Protocol):
    """Where `train` leaves its progress and finds it again."""

    def restore(self, tx: optax.GradientTransformation, state: TrainState) -> tuple[TrainState, History]: ...

    def save(self, state: TrainState, history: History) -> None: ...


def smoothed(losses: list[float]) -> list[float]:
    """At each step, the mean of the last 10 losses, or of all where there are fewer."""
    return [float(np.mean(losses[max(0, end - SMOOTHING) : end])) for end in range(1, len(losses) + 1)]


def train(
    recipe: Recipe,
    corpus: Corpus,
    make_optimizer: MakeOptimizer,
    *,
    learning_rate: float,
    seed: int = 0,
    start: Callable[[], Any] | None = None,
    layout: Layout | None = None,
    checkpoints: Checkpoints | None = None,
    on_step: Callable[[History], None] = lambda history: None,
) -> Result:
    """Trains a network, or goes on with one that `checkpoints` holds, to the end of `recipe`.

    Args:
      recipe: What to do. Runs that share it and `make_optimizer` compile once per process.
      corpus: Text to learn, in the model's tokens.
      make_optimizer: Called as `make_optimizer(learning_rate, b1=, b2=, weight_decay=, mask=)`.
      learning_rate: Peak of the schedule.
      seed: Picks the order of the batches, and the initial weights if `start` does not.
      start: Makes the initial weights, of which nobody else may hold on to: a step reuses their memory.
      layout: Mesh over which the run lies, which may be that of many processes; by default one device.
      checkpoints: Restored from before the first step and saved to after every step it wants.
      on_step: Called after every step with what has been measured so far.
    """
    make_weights = functools.partial(recipe.model.init_params, seed) if start is None else start
    state, history = init_state(recipe, make_optimizer, make_weights, layout), History()
    parameters = sum(param.size for param in jax.tree.leaves(state.params))
    tx = optimizer(recipe, make_optimizer, learning_rate)
    held = state_bytes(tx, state.params)
    if checkpoints is not None:
        state, history = checkpoints.restore(tx, state)
    evaluate_at = evaluation_steps(recipe)
    windows = corpus.validation_windows(recipe.validation_windows, recipe.model.context)
    if start is not None and not history.losses:
        history.validation.append([0, validation_loss(recipe, state.params, windows, layout)])
    for step in range(len(history.losses), recipe.steps):
        batch = _batch(recipe, corpus, seed, step, layout)
        started = time.perf_counter()
        state, loss = train_step(recipe, make_optimizer, state, batch, np.float32(learning_rate), layout)
        history.losses.append(float(loss))
        history.seconds.append(time.perf_counter() - started)
        if step + 1 in evaluate_at:
            stride = 1 if step + 1 == recipe.steps else math.ceil(len(windows) / INTERIM_WINDOWS)
            history.validation.append([step + 1, validation_loss(recipe, state.params, windows[::stride], layout)])
        if checkpoints is not None:
            checkpoints.save(state, history)
        on_step(history)
    return Result(history, parameters, held, state)


def _batch(recipe: Recipe, corpus: Corpus, seed: int, step: int, layout: Layout | None):
    read = functools.partial(corpus.batch, seed, step, recipe.batch, recipe.model.context)
    return read() if layout is None else layout.assemble(read(layout.rows(recipe.batch)), recipe.batch)


def evaluation_steps(recipe: Recipe) -> set[int]:
    """The numbers of steps after which the validation loss is measured."""
    return {math.ceil(recipe.steps * (i + 1) / recipe.evaluations) for i in range(recipe.evaluations)}


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(model: Model, params, windows):
    return model.mean_loss(params, windows)


def validation_loss(recipe: Recipe, params, windows: np.ndarray, layout: Layout | None = None) -> float:
    """Mean loss on `windows`, a batch at a time."""
    batches = np.split(windows, range(recipe.batch, len(windows), recipe.batch))
    place = (lambda batch: batch) if layout is None else layout.place
    losses = [float(_evaluate(recipe.model, params, place(batch))) for batch in batches]
    return float(np.average(losses, weights=[len(batch) for batch in batches]))
