"""The training loop: one function, `train`, that a script with a progress bar and a sweep without one both call."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
import optax

from spectra_optax import ExactClip, gradient_release, state_bytes, with_master_weights

from .data import Corpus
from .recipe import Model, Recipe

SMOOTHING = 10
EARLY_STEP = 40
INTERIM_WINDOWS = 64
DECAYING = frozenset({"kernel", "embedding"})

MakeOptimizer = Callable[..., optax.GradientTransformation]


class TrainState(NamedTuple):
    """What a step changes."""

    params: Any
    optimizer: Any


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

    def restore(self, state: TrainState) -> tuple[TrainState, History]: ...

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
      checkpoints: Restored from before the first step and saved to after every step it wants.
      on_step: Called after every step with what has been measured so far.
    """
    make_weights = functools.partial(recipe.model.init_params, seed) if start is None else start
    state, history = init_state(recipe, make_optimizer, make_weights()), History()
    parameters = sum(param.size for param in jax.tree.leaves(state.params))
    held = state_bytes(optimizer(recipe, make_optimizer, learning_rate), state.params)
    if checkpoints is not None:
        state, history = checkpoints.restore(state)
    evaluate_at = evaluation_steps(recipe)
    windows = corpus.validation_windows(recipe.validation_windows, recipe.model.context)
    if start is not None and not history.losses:
        history.validation.append([0, validation_loss(recipe, state.params, windows)])
    for step in range(len(history.losses), recipe.steps):
        batch = corpus.batch(seed, step, recipe.batch, recipe.model.context)
        started = time.perf_counter()
        state, loss = train_step(recipe, make_optimizer, state, batch, np.float32(learning_rate))
        history.losses.append(float(loss))
        history.seconds.append(time.perf_counter() - started)
        if step + 1 in evaluate_at:
            stride = 1 if step + 1 == recipe.steps else math.ceil(len(windows) / INTERIM_WINDOWS)
            history.validation.append([step + 1, validation_loss(recipe, state.params, windows[::stride])])
        if checkpoints is not None:
            checkpoints.save(state, history)
        on_step(history)
    return Result(history, parameters, held, state)


def optimizer(recipe: Recipe, make_optimizer: MakeOptimizer, learning_rate) -> optax.GradientTransformation:
    """The optimizer under the recipe's schedule, behind the clipping that every optimizer gets."""
    return optax.chain(optax.clip_by_global_norm(recipe.clip), _scheduled(recipe, make_optimizer, learning_rate))


def _scheduled(recipe: Recipe, make_optimizer: MakeOptimizer, learning_rate) -> optax.GradientTransformation:
    warmup = int(recipe.warmup * recipe.steps)
    shape = optax.warmup_cosine_decay_schedule(0.0, 1.0, warmup, recipe.steps, end_value=0.1)
    return make_optimizer(
        lambda count: learning_rate * shape(count + 1),
        b1=recipe.b1,
        b2=recipe.b2,
        weight_decay=recipe.weight_decay,
        mask=decays,
    )


def decays(params):
    """Which parameters weight decay is for: by name, since vectors that are stacked over layers look like matrices."""
    names = lambda path: {getattr(entry, "key", None) for entry in path}
    return jax.tree_util.tree_map_with_path(lambda path, _: not DECAYING.isdisjoint(names(path)), params)


def init_state(recipe: Recipe, make_optimizer: MakeOptimizer, master: Any) -> TrainState:
    """The state before the first step, from weights in float32, or in `recipe.weights`."""
    tx = optimizer(recipe, make_optimizer, 0.0)
    params = jax.tree.map(lambda weight: weight.astype(recipe.weights), master)
    state = TrainState(params, tx.init(params))
    if recipe.weights != "float32":
        if not optax.tree.get_all_with_path(state.optimizer, "correction"):
            raise ValueError(f"weights={recipe.weights} needs an optimizer that completes them, such as flash_adamw")
        state = TrainState(*with_master_weights(master, *state))
    # Committed to its device, as a restored state is, so that a resumed run does not compile anew.
    return jax.device_put(state, jax.devices()[0])


def check(recipe: Recipe, make_optimizer: MakeOptimizer, master: Any) -> None:
    """Raises the `ValueError` of an optimizer that cannot train such weights, before anything is computed."""
    params = jax.eval_shape(functools.partial(init_state, recipe, make_optimizer), master).params
    if recipe.release:
        _released(recipe, _scheduled(recipe, make_optimizer, 0.0), params)


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_step(recipe: Recipe, make_optimizer: MakeOptimizer, state: TrainState, batch, learning_rate):
    """One step on `batch` `[batch, context + 1]`: the new state and the loss before it.

    The learning rate is an argument like any other, so one compiled step serves every rate.
    """
    if recipe.release:
        return _released_step(recipe, _scheduled(recipe, make_optimizer, learning_rate), state, batch)
    loss, grads = jax.value_and_grad(recipe.model.mean_loss)(state.params, batch)
    tx = optimizer(recipe, make_optimizer, learning_rate)
    updates, optimizer_state = tx.update(grads, state.optimizer, state.params)
    return TrainState(optax.apply_updates(state.params, updates), optimizer_state), loss


def _released_step(recipe: Recipe, tx: optax.GradientTransformation, state: TrainState, batch):
    """The same step and state: the clipping, which comes first in the chain, has none."""
    clip_state, inner = state.optimizer
    params, inner, loss, _ = _released(recipe, tx, state.params)(state.params, inner, batch)
    return TrainState(params, (clip_state, inner)), loss


def _released(recipe: Recipe, tx: optax.GradientTransformation, params: Any) -> Callable[..., Any]:
    return gradient_release(tx, params, **recipe.model.parts(), clip=ExactClip(recipe.clip))


def evaluation_steps(recipe: Recipe) -> set[int]:
    """The numbers of steps after which the validation loss is measured."""
    return {math.ceil(recipe.steps * (i + 1) / recipe.evaluations) for i in range(recipe.evaluations)}


@functools.partial(jax.jit, static_argnums=0)
def _evaluate(model: Model, params, windows):
    return model.mean_loss(params, windows)


def validation_loss(recipe: Recipe, params, windows: np.ndarray) -> float:
    """Mean loss on `windows`, a batch at a time."""
    batches = np.split(windows, range(recipe.batch, len(windows), recipe.batch))
    losses = [float(_evaluate(recipe.model, params, batch)) for batch in batches]
    return float(np.average(losses, weights=[len(batch) for batch in batches]))
