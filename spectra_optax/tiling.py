"""Runs optimizers whose rules are local to blocks of rows in one pass over memory, on the platforms that need kernels.

On TPUs XLA makes a pass of its own for every change of shape, so a state in blocks costs several times AdamW's traffic.
A `Tiled` transformation knows how to be built for a tile, and is run there on every tile of a matrix by
`kernels/tiles.py`: the transformation itself is the kernel's body. Everywhere else, and for leaves that are no matrices
or are not cut into whole blocks, it is the plain transformation. Results are the same to rounding; noise is the same.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from spectra_optax import backend
from spectra_optax.kernels import program as programs
from spectra_optax.kernels import tiles
from spectra_optax.kernels.shards import NotLocalError, layout_of
from spectra_optax.leaves import Leaf, LeafRules, inexact
from spectra_optax.lift import is_box, leaves_of


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
    """

    build: Callable[[LeafRules], optax.GradientTransformation]
    rules: tuple[LeafRules, ...]
    block: Callable[[Leaf], int | None]
    elementwise: tuple[optax.GradientTransformation, ...] = ()
    prepared: Callable[[jax.Array, Any, NamedSharding | None], tuple[Any, Callable[[Any], Any]]] | None = None


class Tiled(optax.GradientTransformationExtraArgs):
    """An Optax transformation that can run on tiles of matrices.

    Attributes:
      plain: the same transformation without kernels.
      local: how it looks on tiles.
    """

    plain: optax.GradientTransformationExtraArgs
    local: Local | None = None


def tiled(plain: optax.GradientTransformation, local: Local) -> Tiled:
    """A transformation that runs on tiles where the platform asks for it."""
    plain = optax.with_extra_args_support(plain)

    def update(updates, state, params=None, **extra_args):
        if extra_args or params is None or not runs_kernels():
            return plain.update(updates, state, params, **extra_args)
        return on_tiles(made, updates, state, params, apply=False)

    made = Tiled(plain.init, update)
    made.plain, made.local = plain, local
    return made


def local_of(tx: optax.GradientTransformation) -> Local | None:
    """How a transformation looks on tiles, if it is known."""
    return tx.local if isinstance(tx, Tiled) else None


def runs_kernels() -> bool:
    """Whether the platform needs kernels: XLA's passes suffice elsewhere."""
    return backend.name() == "tpu"


def untiled(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """A transformation without kernels, for a place inside another one."""
    return tx.plain if isinstance(tx, Tiled) and tx.local is not None else tx


def on_tiles(tx: Tiled, updates, state, params, *, apply: bool, shardings: Any = None):
    """The update, or with `apply` the new parameters, and the new state; every matrix that can be is run on tiles.

    The plain formula is written for all leaves; what is not used of it, XLA drops. `shardings` says how the parameters
    are laid out where their types do not.
    """
    local = tx.local
    assert local is not None
    gradients, treedef = jax.tree.flatten(updates)
    if shardings is not None and len(jax.tree.leaves(shardings)) != len(gradients):
        found = jax.tree.structure(shardings)
        raise ValueError(f"shardings must be a tree like the parameters, {treedef}, got {found}.")
    out, new = tx.plain.update(updates, state, params)
    outputs = jax.tree.leaves(optax.apply_updates(params, out) if apply else out)
    keyed, state_def = jax.tree_util.tree_flatten_with_path(new)
    held, new = _by_path(state), dict(keyed)
    decided = zip(*(leaves_of(updates, rules) for rules in local.rules), strict=True)
    blocks = {i: (leaves[0], _block(local, leaves)) for i, leaves in enumerate(decided)}
    blocks = {i: (leaf, block) for i, (leaf, block) in blocks.items() if block is not None}
    step = _Step(tx.plain, local, updates, params, held, _meanings(local, params), apply, shardings)
    for i, (leaf, block) in blocks.items():
        try:
            outputs[i], changed = step.tiled(i, leaf, block)
        except (NotLocalError, AttributeError, KeyError, TypeError, ValueError):
            continue  # functions of the whole tree may not bear one of a single leaf
        new |= {path: array for path, array in changed.items() if array.ndim}
    return treedef.unflatten(outputs), state_def.unflatten([new[path] for path, _ in keyed])


class _Step(NamedTuple):
    """A step of all leaves, of which one is taken at a time."""

    plain: optax.GradientTransformation
    local: Local
    updates: Any
    params: Any
    held: dict[Any, jax.Array]  # the state's arrays by path
    meanings: list[dict[Any, int | None]]  # of the results of each elementwise piece, by path
    apply: bool
    shardings: Any

    def tiled(self, i: int, leaf: Leaf, block: int) -> tuple[jax.Array, dict[Any, jax.Array]]:
        """The output of leaf `i` and the state beside it, computed on tiles."""
        updates, params = _only(self.updates, i), _only(self.params, i)
        state, restore = self._state(params), lambda new: new
        [g], [p] = jax.tree.leaves(updates), jax.tree.leaves(params)
        layout = layout_of(p, None if self.shardings is None else jax.tree.leaves(self.shardings)[i])
        if self.local.prepared is not None:
            state, restore = self.local.prepared(g, state, layout)
        arrays, state_def = jax.tree.flatten(state)
        cut = tiles.grid(leaf.shape, block, [g, *arrays, p], layout)
        boxed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(cut.tile, x.dtype), params)
        for whole, tile in zip(self.meanings, _meanings(self.local, boxed), strict=True):
            if any(meaning is None or whole[path] != meaning for path, meaning in tile.items()):
                raise NotLocalError("A piece of the transformation does more than combine numbers of the same place.")
        params, bare = _bare(params), jax.tree.structure(_bare(state))
        tx = self.local.build(TileRules(block=block))
        views, tile_def = jax.tree.flatten(jax.eval_shape(tx.init, _bare(boxed)))
        if tile_def != bare:
            raise NotLocalError("The state of a tile is built otherwise than that of the matrix.")

        def rule(g, *rest):
            *arrays, p = rest
            tree = jax.tree.structure(params).unflatten
            out, new = tx.update(tree([g]), bare.unflatten(arrays), tree([p]))
            out = optax.apply_updates(tree([p]), out) if self.apply else out
            return [*jax.tree.leaves(new), *jax.tree.leaves(out)]

        shapes = [cut.tile, *(view.shape for view in views), cut.tile]
        like = [*range(1, len(arrays) + 1), len(arrays) + 1 if self.apply else 0]
        *new, out = tiles.run(rule, cut, [g, *arrays, p], shapes, like)
        return out, _by_path(restore(state_def.unflatten(new)))

    def _state(self, params: Any) -> Any:
        """The part of the state that stands beside one of the parameters."""
        keyed, treedef = jax.tree_util.tree_flatten_with_path(jax.eval_shape(self.plain.init, params))
        kind = lambda x: (x.shape, x.dtype)
        if any(path not in self.held or kind(self.held[path]) != kind(x) for path, x in keyed):
            raise NotLocalError("The state is not that of these parameters.")
        return treedef.unflatten([self.held[path] for path, _ in keyed])


def _block(local: Local, leaves: Sequence[Leaf]) -> int | None:
    """How many rows of a leaf belong together; None if it is not to be cut into tiles."""
    n = len(leaves[0].shape)
    natural = all(leaf.kind == "matrix" and leaf.rows == (n - 2,) and leaf.cols == (n - 1,) for leaf in leaves)
    if not natural or leaves[0].dtype not in (jnp.bfloat16, jnp.float32):
        return None
    block = local.block(leaves[0])
    return block if block is not None and leaves[0].shape[-2] % block == 0 else None


def _meanings(local: Local, params: Any) -> list[dict[Any, int | None]]:
    """What each elementwise piece computes for parameters like these: by path, `programs.meanings`."""

    def of(piece):
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), params)
        keyed, treedef = jax.tree_util.tree_flatten_with_path((like, jax.eval_shape(piece.init, like), like))
        update = lambda *arrays: jax.tree.leaves(piece.update(*treedef.unflatten(arrays)))
        traced = programs.program(update, [x for _, x in keyed])
        results = _by_path(jax.eval_shape(piece.update, *treedef.unflatten([x for _, x in keyed])))
        return dict(zip(results, programs.meanings(traced, [str(path) for path, _ in keyed]), strict=True))

    return [of(piece) for piece in local.elementwise]


def _only(tree: Any, i: int) -> Any:
    """A tree with `optax.MaskedNode()` in place of all leaves but one."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([x if j == i else optax.MaskedNode() for j, x in enumerate(leaves)])


def _bare(tree: Any) -> Any:
    """A tree without boxes, which fit no tile."""
    return jax.tree.map(lambda node: (jax.tree.leaves(node) or [optax.MaskedNode()])[0], tree, is_leaf=is_box)


def _by_path(tree: Any) -> dict[Any, Any]:
    return dict(jax.tree_util.tree_flatten_with_path(tree)[0])
