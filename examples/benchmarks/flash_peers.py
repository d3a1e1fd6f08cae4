"""FlashOptim's AdamW here and in `flashoptim-jax`, in one run: bytes of state, time of a step, error against float32.

    pip install flashoptim-jax==0.1.0
    python examples/benchmarks/flash_peers.py

Both train the same bfloat16 weights with the same bfloat16 gradients; the error is the distance of their float32
weights from those of `optax.adamw` in float32, as a share of the way those went.
"""

import functools
import time
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flashoptim_jax import flash_adamw as their_adamw
from flashoptim_jax import reconstruct_weights
from rich.console import Console
from rich.table import Table

from spectra_optax import flash_adamw, master_weights, with_master_weights

RATE, DECAY = 1e-3, 0.1


class Peer(NamedTuple):
    """An optimizer: its state, its step on donated parameters and state, its weights in float32."""

    params: dict
    state: object
    step: object
    weights: object


def ours(master) -> Peer:
    """The flash optimizer of this package."""
    tx = flash_adamw(RATE, weight_decay=DECAY)
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), master)
    params, state = with_master_weights(master, params, tx.init(params))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, gradients):
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    return Peer(params, state, step, master_weights)


def theirs(master) -> Peer:
    """`flashoptim-jax`, whose kernels run on GPUs alone, in the form that runs anywhere."""
    tx = their_adamw(learning_rate=RATE, weight_decay=DECAY, fused=False)
    params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), master)
    step = jax.jit(tx.step, donate_argnums=(0, 1))
    return Peer(params, tx.init(params), step, lambda params, state: reconstruct_weights(params, state.ecc))


def dense(master) -> Peer:
    """`optax.adamw` in float32."""
    tx = optax.adamw(RATE, weight_decay=DECAY)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state, gradients):
        wide = jax.tree.map(lambda g: g.astype(jnp.float32), gradients)
        updates, state = tx.update(wide, state, params)
        return optax.apply_updates(params, updates), state

    return Peer(jax.tree.map(jnp.copy, master), tx.init(master), step, lambda params, state: params)


def main(
    leaves: Annotated[int, typer.Option(help="Number of matrices.")] = 4,
    side: Annotated[int, typer.Option(help="Side of each.")] = 1024,
    steps: Annotated[int, typer.Option(help="Steps, timed one by one in turn.")] = 50,
) -> None:
    """Prints the table."""
    keys = jax.random.split(jax.random.key(0), leaves)
    master = {f"w{i}": jax.random.normal(key, (side, side)) for i, key in enumerate(keys)}
    peers = {
        "optax.adamw, float32": dense(master),
        "flashoptim-jax 0.1.0": theirs(master),
        "spectra_optax": ours(master),
    }
    held = {name: (peer.params, peer.state) for name, peer in peers.items()}
    size = lambda tree: sum(x.nbytes for x in jax.tree.leaves(tree)) / (leaves * side * side)
    bytes_of = {name: (size(params), size(state)) for name, (params, state) in held.items()}
    seconds = {name: [] for name in peers}
    for t in range(steps):
        draw = lambda w, t=t: (0.1 + jax.random.normal(jax.random.key(t), w.shape)).astype(jnp.bfloat16)
        gradients = jax.block_until_ready(jax.tree.map(draw, master))
        for name, peer in peers.items():
            started = time.perf_counter()
            held[name] = jax.block_until_ready(peer.step(*held[name], gradients))
            seconds[name].append(time.perf_counter() - started)
    exact, *_ = held["optax.adamw, float32"]
    gone = jnp.sqrt(sum(jnp.sum((exact[k] - master[k]) ** 2) for k in master))
    table = Table("optimizer", "weights, B/param", "state, B/param", "step, ms", "against theirs", "error")
    reference = np.asarray(seconds["flashoptim-jax 0.1.0"][5:])
    for name, peer in peers.items():
        weights = peer.weights(*held[name])
        error = jnp.sqrt(sum(jnp.sum((weights[k] - exact[k]) ** 2) for k in master)) / gone
        times = np.asarray(seconds[name][5:])
        ratio = np.median(times / reference)
        cells = (
            *(f"{b:.3f}" for b in bytes_of[name]),
            f"{1000 * np.median(times):.1f}",
            f"{ratio:.2f}",
            f"{error:.4f}",
        )
        table.add_row(name, *cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    typer.run(main)
