"""A recipe's optimizer, its state before the first step, and the step, on one device or over a mesh."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax

from spectra_optax import ExactClip, gradient_release, with_master_weights

from .layout import Layout
from .recipe import Recipe

DECAYING = frozenset({"kernel", "embedding"})

MakeOptimizer = Callable[..., optax.GradientTransformation]


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
        mask=decays,
    )


def decays(params):
    """Which parameters weight decay is for: by name, since vectors that are stacked over layers look like matrices."""
    names = lambda path: {getattr(entry, "key", None) for entry in path}
    return jax.tree_util.tree_map_with_path(lambda path, _: not DECAYING.isdisjoint(names(path)), params)


def init_state(
    recipe: Recipe, make_optimizer: MakeOptimizer, make_weights: Callable[[], Any], layout: Layout | None = None
) -> TrainState:
    """The state before the first step, from weights in float32, or in `recipe.weights`.

    Over a mesh no device ever holds more of it than its own shards.
    """
    build = lambda: _fresh(recipe, make_optimizer, make_weights())
    if layout is None:
        # Committed to its device, as a restored state is, so that a resumed run does not compile anew.
        return jax.device_put(build(), jax.devices()[0])
    return jax.jit(build, out_shardings=_shardings(recipe, make_optimizer, layout, jax.eval_shape(build)))()


def check(recipe: Recipe, make_optimizer: MakeOptimizer, shapes: Any, layout: Layout | None = None) -> None:
    """Raises the `ValueError` of an optimizer or a mesh that weights of these shapes cannot have; computes nothing."""
    state = jax.eval_shape(functools.partial(_fresh, recipe, make_optimizer), shapes)
    if layout is not None:
        layout.rows(recipe.batch)
        _shardings(recipe, make_optimizer, layout, state)
    if recipe.release:
        _released(recipe, _scheduled(recipe, make_optimizer, 0.0), state.params)


def _shardings(recipe: Recipe, make_optimizer: MakeOptimizer, layout: Layout, state: TrainState) -> TrainState:
    return TrainState(*layout.shardings(optimizer(recipe, make_optimizer, 0.0), state.params))


def _fresh(recipe: Recipe, make_optimizer: MakeOptimizer, master: Any) -> TrainState:
    tx = optimizer(recipe, make_optimizer, 0.0)
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
    loss, grads = jax.value_and_grad(recipe.model.mean_loss)(state.params, batch)
    updates, optimizer_state = tx.update(grads, state.optimizer, state.params)
    return TrainState(optax.apply_updates(state.params, updates), optimizer_state), loss


def _released_step(recipe: Recipe, tx: optax.GradientTransformation, state: TrainState, batch):
    """The same step and state: the clipping, which comes first in the chain, has none."""
    clip_state, inner = state.optimizer
    params, inner, loss, _ = _released(recipe, tx, state.params)(state.params, inner, batch)
    return TrainState(params, (clip_state, inner)), loss


def _released(recipe: Recipe, tx: optax.GradientTransformation, params: Any) -> Callable[..., Any]:
    return gradient_release(tx, params, **recipe.model.parts(), clip=ExactClip(recipe.clip))
