"""A recipe's optimizer, its state before the first step, and the step, on one device or over a mesh."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from spectra_optax import ExactClip, gradient_release, with_master_weights

from .layout import Layout
from .model import ModelConfig, init_params, mean_loss, parts

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


def init_state(recipe: Recipe, make_optimizer: MakeOptimizer, seed: int, layout: Layout | None = None) -> TrainState:
    """The state before the first step; over a mesh, no device ever holds more of it than its own shards."""
    build = functools.partial(_fresh, recipe, make_optimizer, seed)
    if layout is None:
        # Committed to its device, as a restored state is, so that a resumed run does not compile anew.
        return jax.device_put(build(), jax.devices()[0])
    layout.rows(recipe.batch)
    return jax.jit(build, out_shardings=_shardings(recipe, make_optimizer, layout, jax.eval_shape(build)))()


def _shardings(recipe: Recipe, make_optimizer: MakeOptimizer, layout: Layout, state: TrainState) -> TrainState:
    return TrainState(*layout.shardings(optimizer(recipe, make_optimizer, 0.0), state.params))


def _fresh(recipe: Recipe, make_optimizer: MakeOptimizer, seed: int) -> TrainState:
    master, tx = init_params(recipe.model, seed), optimizer(recipe, make_optimizer, 0.0)
    params = jax.tree.map(lambda weight: weight.astype(recipe.weights), master)
    state = TrainState(params, tx.init(params))
    if recipe.weights != "float32":
        if not optax.tree.get_all_with_path(state.optimizer, "correction"):
            raise ValueError(f"weights={recipe.weights} needs an optimizer that completes them, such as flash_adamw")
        state = TrainState(*with_master_weights(master, *state))
    return state


@functools.partial(jax.jit, static_argnums=(0, 1, 5), donate_argnums=2)
def train_step(
    recipe: Recipe,
    make_optimizer: MakeOptimizer,
    state: TrainState,
    batch,
    learning_rate,
    layout: Layout | None = None,
):
    """One step on `batch` `[batch, context + 1]`: the new state, laid out as before, and the loss before the step.

    The learning rate is an argument like any other, so one compiled step serves every rate.
    """
    if recipe.release:
        after, loss = _released_step(recipe, _scheduled(recipe, make_optimizer, learning_rate), state, batch)
    else:
        after, loss = _ordinary_step(recipe, optimizer(recipe, make_optimizer, learning_rate), state, batch)
    if layout is None:
        return after, loss
    shardings = _shardings(recipe, make_optimizer, layout, state)
    return jax.lax.with_sharding_constraint(after, shardings), layout.replicated(loss)


def _ordinary_step(recipe: Recipe, tx: optax.GradientTransformation, state: TrainState, batch):
    loss, grads = jax.value_and_grad(functools.partial(mean_loss, recipe.model))(state.params, batch)
    updates, optimizer_state = tx.update(grads, state.optimizer, state.params)
    return TrainState(optax.apply_updates(state.params, updates), optimizer_state), loss


def _released_step(recipe: Recipe, tx: optax.GradientTransformation, state: TrainState, batch):
    """The same step and state: the clipping, which comes first in the chain, has none."""
    step = gradient_release(tx, state.params, **parts(recipe.model), clip=ExactClip(recipe.clip))
    clip_state, inner = state.optimizer
    params, inner, loss, _ = step(state.params, inner, batch)
    return TrainState(params, (clip_state, inner)), loss
