"""`spectra_adamw` in Flax Linen's `TrainState`, beside AdamW, in about a minute.

    python examples/linen_train_state.py
    python examples/linen_train_state.py --out runs/linen    # again, it goes on where it was stopped
    tensorboard --logdir runs/linen

The model predicts the next byte of Python's standard library from the 16 before it: an embedding and three dense
layers. An Optax transformation, with its schedule, its weight-decay mask and the clipping before it, goes into
`TrainState.create(tx=...)`; nothing else is needed. With `--out` losses are logged and Orbax keeps the `TrainState`.
"""

import contextlib
import functools
from pathlib import Path
from typing import Annotated

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import typer
from flax.training.train_state import TrainState
from tensorboardX import SummaryWriter
from tqdm import trange

from lm.data import BYTE, Corpus, load_corpus
from spectra_optax import check_stored_state, checkpoint_contents, spectra_adamw, state_bytes

CONTEXT = 16
BATCH = 256
KEEP_EVERY = 100  # steps between checkpoints


class NextByte(nn.Module):
    """Bytes `[batch, 16]` to logits of the next one, `[batch, 256]`."""

    width: int = 512

    @nn.compact
    def __call__(self, context: jax.Array) -> jax.Array:
        x = nn.Embed(256, 32)(context).reshape(len(context), -1)
        for _ in range(2):
            x = nn.gelu(nn.Dense(self.width)(x))
        return nn.Dense(256)(x)


def loss(params, state: TrainState, windows: jax.Array) -> jax.Array:
    """Mean cross entropy of the last byte of each window `[batch, 17]`."""
    logits = state.apply_fn({"params": params}, windows[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, -1]).mean()


@functools.partial(jax.jit, donate_argnums=0)
def step(state: TrainState, windows: jax.Array) -> tuple[TrainState, jax.Array]:
    """One step of whatever optimizer the state was created with, and the loss before it."""
    value, grads = jax.value_and_grad(loss)(state.params, state, windows)
    return state.apply_gradients(grads=grads), value


def matrices(params):
    """The weight-decay mask: biases do not decay."""
    return jax.tree.map(lambda param: param.ndim > 1, params)


def restored(manager: ocp.CheckpointManager, state: TrainState) -> TrainState:
    """The newest checkpoint, or `state` if there is none; one of another optimizer is refused."""
    newest = manager.latest_step()
    if newest is None:
        return state
    stored = checkpoint_contents(Path(manager.directory) / str(newest) / "default")
    check_stored_state(state.tx, state.params, stored["opt_state"])
    return manager.restore(newest, args=ocp.args.StandardRestore(state))


def train(tx: optax.GradientTransformation, corpus: Corpus, steps: int, name: str, out: Path | None) -> TrainState:
    """Trains a fresh model; the same one, on the same bytes, for every optimizer. With `out`, goes on from there."""
    model = NextByte()
    params = model.init(jax.random.key(0), jnp.zeros((1, CONTEXT), jnp.int32))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx).replace(step=jnp.int32(0))
    with contextlib.ExitStack() as stack:
        if out is not None:
            options = ocp.CheckpointManagerOptions(save_interval_steps=KEEP_EVERY, max_to_keep=2)
            manager = stack.enter_context(ocp.CheckpointManager((out / name / "state").resolve(), options=options))
            state = restored(manager, state)
            writer = stack.enter_context(SummaryWriter(str(out / name), purge_step=int(state.step)))
        for i in trange(int(state.step), steps, desc=name, unit="step"):
            state, value = step(state, corpus.batch(seed=0, step=i, size=BATCH, context=CONTEXT))
            if out is not None:
                writer.add_scalar("training loss", float(value), i)
                manager.save(i + 1, args=ocp.args.StandardSave(state), force=i + 1 == steps)
    return state


def main(
    steps: int = 400,
    learning_rate: float = 2e-3,
    out: Annotated[
        Path | None, typer.Option(help="Folder for logs and checkpoints; by default there are none.")
    ] = None,
) -> None:
    """Trains the same model with AdamW and SpectraAdamW; prints state bytes and validation loss of both."""
    corpus = load_corpus(None, BYTE, CONTEXT)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, steps // 10, steps)
    settings = {"weight_decay": 0.1, "mask": matrices}
    optimizers = {"adamw": optax.adamw(schedule, **settings), "spectra_adamw": spectra_adamw(schedule, **settings)}
    validation = corpus.validation_windows(8192, CONTEXT)
    for name, rule in optimizers.items():
        tx = optax.chain(optax.clip_by_global_norm(1.0), rule)
        state = train(tx, corpus, steps, name, out)
        measured = float(jax.jit(loss)(state.params, state, validation))
        parameters = sum(np.size(p) for p in jax.tree.leaves(state.params))
        held = state_bytes(tx, state.params)
        print(f"{name}: {held:,} bytes of state, {held / parameters:.2f} per parameter, validation loss {measured:.3f}")


if __name__ == "__main__":
    typer.run(main)
