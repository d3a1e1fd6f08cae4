"""What is known of a transformation whose rule is local: to blocks of a matrix's rows, and to the matrices of a stack.

Such a rule can be run on tiles of a matrix, stacks of blocks, as if each were the whole; and on slices of a stack.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import NamedSharding

from spectra_optax.leaves import Leaf, LeafRules, inexact


@dataclasses.dataclass(frozen=True)
class TileRules(LeafRules):
    """Treats every leaf as the tile of a matrix, a stack of blocks.

    Attributes:
      block: how many rows belong together.
    """

    block: int = 1

    def leaf(self, path: str, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Leaf:
        """How a tile is treated."""
        n = len(shape)
        return Leaf(path, tuple(shape), inexact(path, dtype), "matrix", "tile", (n - 2,), (n - 1,), self.block)


class Local(NamedTuple):
    """How a transformation looks on tiles.

    Attributes:
      build: makes it for other rules about leaves.
      rules: those that it was made for; a leaf must be a matrix under all of them.
      block: how many rows of a matrix belong together; None if it cannot be cut into tiles.
      elementwise: pieces that others wrote, which are trusted with tiles only where each number depends on the numbers
        in its place.
      prepared: replaces, outside the kernel, parts of the state that depend on whole matrices:
        `(gradient, state, layout) -> (state, restore)`, with `restore(new_state)` the state to keep.
      bulky: whether the plain formula holds temporaries of a matrix's size everywhere, so that large stacks are run
        slice by slice.
    """

    build: Callable[[LeafRules], optax.GradientTransformation]
    rules: tuple[LeafRules, ...]
    block: Callable[[Leaf], int | None]
    elementwise: tuple[optax.GradientTransformation, ...] = ()
    prepared: Callable[[jax.Array, Any, NamedSharding | None], tuple[Any, Callable[[Any], Any]]] | None = None
    bulky: bool = False
