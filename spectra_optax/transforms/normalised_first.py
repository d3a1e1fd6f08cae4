"""Averages of gradients that were normalised first, for matrices; Adam for what is dense.

    matrix    g -> g / sqrt(nu), nu factored -> clipped to a root mean square of 1 -> averaged
    dense     Adam

The chain that `spectra_adamw` and `gwt_adafactor` share, and how it looks on tiles.
"""

from collections.abc import Callable, Hashable
from typing import NamedTuple

import optax

from spectra_optax.arguments import Scalar
from spectra_optax.leaves import LeafRules
from spectra_optax.lift import labels
from spectra_optax.transforms.block_clip import clip_by_block_rms
from spectra_optax.transforms.factored_rms import scale_by_factored_rms
from spectra_optax.transforms.given_scale import scale_by_given


class Adam(NamedTuple):
    """Its numbers."""

    b1: Scalar
    b2: Scalar
    eps: Scalar


Average = Callable[[LeafRules], tuple[optax.GradientTransformation, ...]]


def normalised_first(average: Average, adam: Adam, leaves: LeafRules) -> optax.GradientTransformation:
    """The members `average(leaves)` of a chain, behind a factored second moment and a clip."""
    matrix = optax.chain(*_normalise(adam, leaves), *average(leaves))
    return _by_kind(matrix, matrix, adam, leaves)


def normalised_before(average: Average, adam: Adam, leaves: LeafRules) -> optax.GradientTransformation:
    """The same on tiles of matrices, whose factors are given."""
    tile = optax.chain(scale_by_given(adam.b2), optax.identity(), *average(leaves))
    return _by_kind(tile, optax.chain(*_normalise(adam, leaves), *average(leaves)), adam, leaves)


def _normalise(adam: Adam, leaves: LeafRules) -> tuple[optax.GradientTransformation, ...]:
    return scale_by_factored_rms(adam.b2, adam.eps, leaves=leaves), clip_by_block_rms(leaves=leaves)


def _by_kind(matrix, embedding, adam: Adam, leaves: LeafRules) -> optax.GradientTransformation:
    rules: dict[Hashable, optax.GradientTransformation] = {
        "matrix": matrix,
        "embedding": embedding,
        "dense": optax.scale_by_adam(*adam),
        "empty": optax.identity(),
    }
    return optax.partition(rules, labels(leaves))
