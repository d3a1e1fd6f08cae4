"""The settings of a run as plain values, so that results of different settings are never mixed."""

import dataclasses

from .data import Corpus
from .recipe import Recipe


def settings_of(recipe: Recipe, corpus: Corpus, **more) -> dict:
    """Everything that decides a run's outcome, flat: `{"layers": 3, "steps": 300, "text": "f637...", ...}`."""
    values = dataclasses.asdict(recipe)
    return {**values.pop("model"), **values, "text": corpus.digest, **more}


def require_same(settings: dict, found: dict, where) -> None:
    """Raises a `ValueError` that names both values of every setting in which `found` differs."""
    names = [name for name in {**found, **settings} if settings.get(name) != found.get(name)]
    if names:
        theirs = ", ".join(f"{name}={found.get(name)}" for name in names)
        ours = ", ".join(f"{name}={settings.get(name)}" for name in names)
        raise ValueError(f"{where} holds a run with {theirs}, but this run has {ours}")
