"""One process of the runs of `test_multihost.py`: trains with several optimizers, and reports losses and hashes.

python multihost_worker.py '{"processes": 2, "process_id": 0, ...}'
"""

import hashlib
import json
import os
import signal
import sys
from pathlib import Path

import jax
import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))

import multihost
from lm.checkpoints import RunCheckpoints
from lm.data import load_corpus
from lm.layout import Layout, axis_sizes, simulate_devices
from lm.model import ModelConfig
from lm.optimizers import optimizer_named
from lm.recipe import Recipe
from lm.settings import settings_of
from lm.training import train

LEARNING_RATE, STEPS, EVERY = 3e-3, 8, 3


def recipe_of(optimizer):
    """A network of one block, whose parameters are 16-bit where the optimizer completes them."""
    model = ModelConfig(layers=1, width=32, heads=2, context=16)
    weights = "bfloat16" if optimizer.startswith("flash") else "float32"
    return Recipe(model, steps=STEPS, batch=8, weights=weights, evaluations=1, validation_windows=16)


class Watched(RunCheckpoints):
    """Checkpoints that know the hashes of the last state, shard by shard."""

    def save(self, state, history):
        super().save(state, history)
        if len(history.losses) == self.last:
            self.hashes = dict(hashes_of(state))


def hashes_of(state):
    """The hash of every shard that this process holds, by its leaf and its place in it."""
    for path, x in jax.tree_util.tree_leaves_with_path(state):
        for shard in x.addressable_shards:
            place = [index.indices(n)[:2] for index, n in zip(shard.index, x.shape, strict=True)]
            key = f"{jax.tree_util.keystr(path)} {place} on {shard.device.id}"
            yield key, hashlib.sha256(np.asarray(shard.data).tobytes()).hexdigest()


def main(text, folder, optimizers, coordinator, processes, process_id, local_devices, mesh, dies_at, report):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    simulate_devices(local_devices)
    multihost.join(coordinator, processes, process_id)
    layout, corpus, found = Layout.of(axis_sizes(mesh)), load_corpus(Path(text), "byte", 16), {}

    def die(history):
        if len(history.losses) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    for name in optimizers:
        recipe = recipe_of(name)
        checkpoints = Watched(Path(folder) / name, settings_of(recipe, corpus), every=EVERY, last=STEPS)
        checkpoints.require_same_settings()
        first, make = checkpoints.step or 0, optimizer_named(name)
        on = {"layout": layout, "checkpoints": checkpoints, "on_step": die}
        result = train(recipe, corpus, make, learning_rate=LEARNING_RATE, **on)
        losses = [*result.history.losses, result.validation_loss]
        found[name] = {"first": first, "losses": losses, "hashes": checkpoints.hashes}
    Path(report).write_text(json.dumps(found))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
