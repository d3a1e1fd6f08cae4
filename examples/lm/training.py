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
from .model import ModelConfig, init_params, mean_loss, parts

SMOOTHING = 10
EARLY_STEP = 40
INTERIM_STRIDE = 8

MakeOptimizer = Callable[..., optax.GradientTransformation]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What a run does, but for the learning rate and the seed, which may change without compiling again.

    Attributes:
      model: Size of the network.
      steps: Training steps.
      batch: Windows per step.
      b1: Decay of the optimizer's momentum.
      b2: Decay of the optimizer's second moment.
      weight_decay: Decay of the matrices, times the learning rate; vectors do not decay.
      clip: Gradients are scaled down to this global norm before any optimizer sees them.
      weights: Dtype of the parameters, "float32" or "bfloat16"; the latter needs an optimizer that completes them.
      warmup: Part of the steps in which the learning rate rises; after it, a cosine takes it to a tenth.
      evaluations: How often the validation loss is measured, the last time at the end.
      validation_windows: Size of the validation set, of which evaluations before the last take every eighth window.
      release: Whether each block is updated on the way back, so that gradients never exist all at once.
    """

    model: ModelConfig
    steps: int = 200
    batch: int = 8
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0
    weights: str = "float32"
    warmup: float = 0.1
    evaluations: int = 5
    validation_windows: int = 512
    release: bool = False

    def __post_init__(self):
        for name in ("steps", "batch", "evaluations", "validation_windows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in ("b1", "b2", "warmup"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay must not be negative, got {self.weight_decay}")
        if self.weights not in ("float32", "bfloat16"):
            raise ValueError(f"weights must be float32 or bfloat16, got {self.weights!r}")
        if self.clip <= 0:
            raise ValueError(f"clip must be positive, got {self.clip}")


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
      validation: Pairs of a number of steps done and the validation loss then.
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
    """

    history: History
    parameters: int
    state_bytes: int

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
    checkpoints: Checkpoints | None = None,
    on_step: Callable[[History], None] = lambda history: None,
) -> Result:
    """Trains a fresh network, or one that `checkpoints` holds, to the end of `recipe`.

    Args:
      recipe: What to do. Runs that share it and `make_optimizer` compile once per process.
      corpus: Text to learn, of `recipe.model.vocabulary` tokens.
      make_optimizer: Called as `make_optimizer(learning_rate, b1=, b2=, weight_decay=, mask=)`.
      learning_rate: Peak of the schedule.
      seed: Picks the initial weights and the order of the batches.
      checkpoints: Restored from before the first step and saved to after every step it wants.
      on_step: Called after every step with what has been measured so far.
    """
    state, history = init_state(recipe, make_optimizer, seed), History()
    parameters = sum(param.size for param in jax.tree.leaves(state.params))
    held = state_bytes(optimizer(recipe, make_optimizer, learning_rate), state.params)
    if checkpoints is not None:
        state, history = checkpoints.restore(state)
    evaluate_at = evaluation_steps(recipe)
    windows = corpus.validation_windows(recipe.validation_windows, recipe.model.context)
    for step in range(len(history.losses), recipe.steps):
        batch = corpus.batch(seed, step, recipe.batch, recipe.model.context)
        started = time.perf_counter()
        state, loss = train_step(recipe, make_optimizer, state, batch, np.float32(learning_rate))
        history.losses.append(float(loss))
        history.seconds.append(time.perf_counter() - started)
        if step + 1 in evaluate_at:
            measured = windows if step + 1 == recipe.steps else windows[::INTERIM_STRIDE]
            history.validation.append([step + 1, validation_loss(recipe, state.params, measured)])
        if checkpoints is not None:
            checkpoints.save(state, history)
        on_step(history)
    return Result(history, parameters, held)


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
        mask=_matrices,
    )


def _matrices(params):
    return jax.tree.map(lambda param: param.ndim > 1, params)


def init_state(recipe: Recipe, make_optimizer: MakeOptimizer, seed: int) -> TrainState:
    """The state before the first step."""
    master, tx = init_params(recipe.model, seed), optimizer(recipe, make_optimizer, 0.0)
    params = jax.tree.map(lambda weight: weight.astype(recipe.weights), master)
    state = TrainState(params, tx.init(params))
    if recipe.weights != "float32":
        if not optax.tree.get_all_with_path(state.optimizer, "correction"):
            raise ValueError(f"weights={recipe.weights} needs an optimizer that completes them, such as flash_adamw")
        state = TrainState(*with_master_weights(master, *state))
    # Committed to its device, as a restored state is, so that a resumed run does not compile anew.
    return jax.device_put(state, jax.devices()[0])


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def train_step(recipe: Recipe, make_optimizer: MakeOptimizer, state: TrainState, batch, learning_rate):
    """One step on `batch` `[batch, context + 1]`: the new state and the loss before it.

    The learning rate is an argument like any other, so one compiled step serves every rate.
    """
    if recipe.release:
        return _released_step(recipe, _scheduled(recipe, make_optimizer, learning_rate), state, batch)
    loss, grads = jax.value_and_grad(functools.partial(mean_loss, recipe.model))(state.params, batch)
    tx = optimizer(recipe, make_optimizer, learning_rate)
    updates, optimizer_state = tx.update(grads, state.optimizer, state.params)
    return TrainState(optax.apply_updates(state.params, updates), optimizer_state), loss


def _released_step(recipe: Recipe, tx: optax.GradientTransformation, state: TrainState, batch):
    """The same step and state: the clipping, which comes first in the chain, has none."""
    step = gradient_release(tx, state.params, **parts(recipe.model), clip=ExactClip(recipe.clip))
    clip_state, inner = state.optimizer
    params, inner, loss, _ = step(state.params, inner, batch)
    return TrainState(params, (clip_state, inner)), loss


def evaluation_steps(recipe: Recipe) -> set[int]:
    """The numbers of steps after which the validation loss is measured."""
    return {math.ceil(recipe.steps * (i + 1) / recipe.evaluations) for i in range(recipe.evaluations)}


_evaluate = jax.jit(mean_loss, static_argnums=0)


def validation_loss(recipe: Recipe, params, windows: np.ndarray) -> float:
    """Mean loss on `windows`, a batch at a time."""
    batches = np.split(windows, range(recipe.batch, len(windows), recipe.batch))
    losses = [float(_evaluate(recipe.model, params, batch)) for batch in batches]
    return float(np.average(losses, weights=[len(batch) for batch in batches]))
