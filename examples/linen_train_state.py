"""`spectra_adamw` in Flax Linen's `TrainState`, beside AdamW, in under a minute.

    python examples/linen_train_state.py

The model predicts the next byte of Python's standard library from the 16 before it: an embedding and three dense
layers. An Optax transformation goes into `TrainState.create(tx=...)`; nothing else is needed.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax.training.train_state import TrainState
from tqdm import trange

from lm.data import BYTE, Corpus, load_corpus
from spectra_optax import spectra_adamw, state_bytes

CONTEXT = 16
BATCH = 256


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
def step(state: TrainState, windows: jax.Array) -> TrainState:
    """One step of whatever optimizer the state was created with."""
    return state.apply_gradients(grads=jax.grad(loss)(state.params, state, windows))


def train(tx: optax.GradientTransformation, corpus: Corpus, steps: int, name: str) -> TrainState:
    """Trains a fresh model; the same one, on the same bytes, for every optimizer."""
    model = NextByte()
    params = model.init(jax.random.key(0), jnp.zeros((1, CONTEXT), jnp.int32))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    for i in trange(steps, desc=name, unit="step"):
        state = step(state, corpus.batch(seed=0, step=i, size=BATCH, context=CONTEXT))
    return state


def main(steps: int = 400, learning_rate: float = 2e-3) -> None:
    """Trains the same model with AdamW and SpectraAdamW; prints state bytes and validation loss of both."""
    corpus = load_corpus(None, BYTE, CONTEXT)
    schedule = optax.cosine_decay_schedule(learning_rate, steps)
    optimizers = {"adamw": optax.adamw(schedule), "spectra_adamw": spectra_adamw(schedule)}
    validation = corpus.validation_windows(8192, CONTEXT)
    for name, tx in optimizers.items():
        state = train(tx, corpus, steps, name)
        measured = float(jax.jit(loss)(state.params, state, validation))
        parameters = sum(np.size(p) for p in jax.tree.leaves(state.params))
        held = state_bytes(tx, state.params)
        print(f"{name}: {held:,} bytes of state, {held / parameters:.2f} per parameter, validation loss {measured:.3f}")


if __name__ == "__main__":
    typer.run(main)
