"""A vision transformer or a convolutional network in Flax NNX on scikit-learn's digits, beside AdamW, in a minute.

    python examples/nnx_vision.py
    python examples/nnx_vision.py --network cnn --optimizer foam_adamw --learning-rate 4e-3
    tensorboard --logdir runs/nnx_vision

The optimizer is any Optax transformation: it gets a schedule and a weight-decay mask as `optax.adamw` would, stands in
a chain behind the clipping, and goes into `nnx.Optimizer`. Checkpoints hold what `--resume` needs to go on bit for bit.
"""

import time
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import optax
import typer
from flax import nnx
from tensorboardX import SummaryWriter
from tqdm import tqdm

from lm.checkpoints import RunCheckpoints
from lm.command import option, prepare
from lm.optimizers import NAMES, optimizer_named
from lm.steps import MakeOptimizer, TrainState, decays
from lm.training import History
from spectra_optax import state_bytes
from vision.data import ImageSet, digits
from vision.networks import NETWORKS, Classifier

COMPARED = ["adamw", "spectra_adamw"]
app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)


@app.command()
def main(
    network: Annotated[str, option(f"One of {', '.join(NETWORKS)}.", "Model")] = "vit",
    optimizer: Annotated[list[str], option(f"Repeatable; {NAMES}.", "Optimizer")] = COMPARED,
    learning_rate: Annotated[float, option("Peak, after the warm-up.", "Optimizer", min=0)] = 2e-3,
    weight_decay: Annotated[float, option("Of matrices.", "Optimizer", min=0)] = 0.1,
    steps: Annotated[int, option("Training steps.", "Run", min=1)] = 300,
    batch: Annotated[int, option("Images per step.", "Run", min=1)] = 64,
    seed: Annotated[int, option("Of the weights and the order of the images.", "Run", min=0)] = 0,
    out: Annotated[Path, option("Folder for checkpoints and logs.", "Run")] = Path("runs/nnx_vision"),
    resume: Annotated[bool, option("Go on from the checkpoints in --out, else replace them.", "Run")] = False,
    checkpoint_every: Annotated[int, option("Steps between checkpoints.", "Run")] = 100,
) -> None:
    """Trains a classifier of digits with each optimizer; prints state bytes and validation accuracy."""
    images = digits()
    settings = {"network": network, "learning_rate": learning_rate, "weight_decay": weight_decay}
    settings |= {"steps": steps, "batch": batch, "seed": seed, "images": images.digest}
    try:
        classifier = Classifier(network, images.side, images.levels)
        schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, steps // 10, steps)
        chains = {name: chain(optimizer_named(name), schedule, weight_decay) for name in optimizer}
        folders = {name: RunCheckpoints(out / name, settings, every=checkpoint_every, last=steps) for name in optimizer}
        prepare(folders, resume)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    for name, tx in chains.items():
        model = train(classifier, images, tx, folders[name], steps=steps, batch=batch, seed=seed, schedule=schedule)
        params = nnx.state(model, nnx.Param)
        held, parameters = state_bytes(tx, params), sum(np.size(x) for x in jax.tree.leaves(params))
        accuracy = float(classifier.accuracy(params, images.validation))
        per_parameter = f"{held / parameters:.2f} per parameter"
        print(f"{name}: {held:,} bytes of state, {per_parameter}, validation accuracy {accuracy:.1%}")


def chain(make_optimizer: MakeOptimizer, schedule: optax.Schedule, weight_decay: float) -> optax.GradientTransformation:
    """The optimizer as it would stand in any training script: clipping first, decay for matrices alone."""
    tx = make_optimizer(schedule, b1=0.9, b2=0.99, weight_decay=weight_decay, mask=decays)
    return optax.chain(optax.clip_by_global_norm(1.0), tx)


def train(
    classifier: Classifier,
    images: ImageSet,
    tx: optax.GradientTransformation,
    checkpoints: RunCheckpoints,
    *,
    steps: int,
    batch: int,
    seed: int,
    schedule: optax.Schedule,
) -> nnx.Module:
    """Trains a fresh network, or goes on from the newest checkpoint."""
    model = classifier.build(seed)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    history = restore(checkpoints, tx, model, optimizer)
    done = len(history.losses)
    step = make_step(classifier)
    # What a run that was killed had logged beyond its last checkpoint is dropped.
    with SummaryWriter(str(checkpoints.folder / "log"), purge_step=done) as writer:
        for i in tqdm(range(done, steps), initial=done, total=steps, desc=checkpoints.folder.name, unit="step"):
            started = time.perf_counter()
            loss = float(step(model, optimizer, images.batch(seed, i, batch, classifier.context)))
            history.losses.append(loss)
            history.seconds.append(time.perf_counter() - started)
            writer.add_scalar("training/loss", loss, i)
            writer.add_scalar("training/learning_rate", float(schedule(i)), i)
            checkpoints.save(TrainState(*pure(model, optimizer)), history)
        accuracy = classifier.accuracy(nnx.state(model, nnx.Param), images.validation)
        writer.add_scalar("validation/accuracy", float(accuracy), steps)
    return model


def make_step(classifier: Classifier):
    """A compiled step, which changes the network and the optimizer in place and returns the loss."""

    def mean_loss(model, rows):
        pixels, labels = classifier.images_and_labels(rows)
        return optax.softmax_cross_entropy_with_integer_labels(model(pixels), labels).mean()

    @nnx.jit
    def step(model, optimizer, rows):
        loss, grads = nnx.value_and_grad(mean_loss)(model, rows)
        optimizer.update(model, grads)
        return loss

    return step


def pure(model: nnx.Module, optimizer: nnx.Optimizer) -> tuple:
    """Parameters and the optimizer's state as trees of plain arrays, which is what checkpoints hold."""
    return nnx.as_pure(nnx.state(model, nnx.Param)), nnx.as_pure(optimizer.opt_state)


def restore(checkpoints: RunCheckpoints, tx, model: nnx.Module, optimizer: nnx.Optimizer) -> History:
    """Puts the newest checkpoint, if there is one, into the network and the optimizer."""
    state, history = checkpoints.restore(tx, TrainState(*pure(model, optimizer)))
    nnx.update(model, state.params)
    nnx.update(optimizer.opt_state, nnx.state(state.optimizer))
    optimizer.step[...] = np.uint32(len(history.losses))
    return history


if __name__ == "__main__":
    app()
