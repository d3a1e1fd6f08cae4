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
    local: Local


def tiled(plain: optax.GradientTransformation, local: Local) -> Tiled:
    """A transformation that runs on tiles where the platform asks for it."""
    plain = optax.with_extra_args_support(plain)

    def update(updates, state, params=None, **extra_args):
        if extra_args or params is None or not runs_kernels():
            return plain.update(updates, state, params, **extra_args)
        return on_tiles(plain, local, updates, state, params, apply=False)

    made = Tiled(plain.init, update)
    made.plain, made.local = plain, local
    return made


def runs_kernels() -> bool:
    """Whether the platform needs kernels: XLA's passes suffice elsewhere."""
    return backend.name() == "tpu"


def untiled(tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """A transformation without kernels, for a place inside another one."""
    return tx.plain if isinstance(tx, Tiled) else tx


def on_tiles(
    plain: optax.GradientTransformation, local: Local, updates, state, params, *, apply: bool, shardings: Any = None
):
    """The update, or with `apply` the new parameters, and the new state; every matrix that can be is run on tiles.

    `shardings` says how the parameters are laid out where their types do not.
    """
    gradients, treedef = jax.tree.flatten(updates)
    if shardings is not None and len(jax.tree.leaves(shardings)) != len(gradients):
        found = jax.tree.structure(shardings)
        raise ValueError(f"shardings must be a tree like the parameters, {treedef}, got {found}.")
    decided = list(zip(*(leaves_of(updates, rules) for rules in local.rules), strict=True))
    keyed, state_def = jax.tree_util.tree_flatten_with_path(state)
    held = dict(keyed)
    whole = _Whole(plain, local, updates, params, held, apply, shardings)
    outputs, new, left = list(gradients), dict(held), set(range(len(gradients)))
    for i, leaves in enumerate(decided):
        block = _block(local, leaves)
        if block is None:
            continue
        try:
            outputs[i], changed = whole.tiled(i, leaves[0], block)
        except NotLocalError:
            continue
        new |= changed
        left.discard(i)
    if len(left) == len(gradients):
        return whole.finished(*plain.update(updates, state, params))
    if left:
        try:
            others, changed = whole.plainly(left)
        except NotLocalError:  # the plain transformation says what is wrong with the state
            return whole.finished(*plain.update(updates, state, params))
        new |= changed
        for i, output in zip(sorted(left), others, strict=True):
            outputs[i] = output
    return treedef.unflatten(outputs), state_def.unflatten([new[path] for path, _ in keyed])


class _Whole(NamedTuple):
    """A step of all leaves, of which some are taken at a time."""

    plain: optax.GradientTransformation
    local: Local
    updates: Any
    params: Any
    held: dict[Any, jax.Array]  # the state's arrays by path
    apply: bool
    shardings: Any

    def tiled(self, i: int, leaf: Leaf, block: int) -> tuple[jax.Array, dict[Any, jax.Array]]:
        """The output of leaf `i` and the state beside it, computed on tiles."""
        updates, params = _only(self.updates, {i}), _only(self.params, {i})
        state, restore = self._state(params), lambda new: new
        [g], [p] = jax.tree.leaves(updates), jax.tree.leaves(params)
        layout = layout_of(p, None if self.shardings is None else jax.tree.leaves(self.shardings)[i])
        if self.local.prepared is not None:
            state, restore = self.local.prepared(g, state, layout)
        arrays, state_def = jax.tree.flatten(state)
        params, bare = _bare(params), jax.tree.structure(_bare(state))
        cut = tiles.grid(leaf.shape, block, [g, *arrays, p], layout)
        tile = jax.tree.map(lambda x: jax.ShapeDtypeStruct(cut.tile, x.dtype), params)
        if not all(_is_elementwise(piece, params, tile) for piece in self.local.elementwise):
            raise NotLocalError("A piece of the transformation does more than combine numbers of the same place.")
        tx = self.local.build(TileRules(block=block))
        views, tile_def = jax.tree.flatten(jax.eval_shape(tx.init, tile))
        if tile_def != bare:
            raise NotLocalError("The state of a tile is built otherwise than that of the matrix.")

        def rule(g, *rest):
            *arrays, p = rest
            tree = jax.tree.structure(params).unflatten
            out, new = self.finished(*tx.update(tree([g]), bare.unflatten(arrays), tree([p])), tree([p]))
            return [*jax.tree.leaves(new), *jax.tree.leaves(out)]

        shapes = [cut.tile, *(view.shape for view in views), cut.tile]
        like = [*range(1, len(arrays) + 1), len(arrays) + 1 if self.apply else 0]
        *new, out = tiles.run(rule, cut, [g, *arrays, p], shapes, like)
        return out, _by_path(restore(state_def.unflatten(new)))

    def plainly(self, left: set[int]) -> tuple[list[jax.Array], dict[Any, jax.Array]]:
        """The outputs of some leaves and the state beside them, by the plain transformation."""
        updates, params = _only(self.updates, left), _only(self.params, left)
        # Under jit the state's description of its leaves, which are others now, is compared by its length only.
        step = jax.jit(lambda *step: self.finished(*self.plain.update(*step), step[-1]))
        out, new = step(updates, self._state(params), params)
        return jax.tree.leaves(out), _by_path(new)

    def finished(self, updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        """What a step returns."""
        params = self.params if params is None else params
        return (optax.apply_updates(params, updates) if self.apply else updates), state

    def _state(self, params: Any) -> Any:
        """The part of the state that stands beside some of the parameters."""
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


def _is_elementwise(piece: optax.GradientTransformation, params: Any, tile: Any) -> bool:
    """Whether a transformation treats a leaf elementwise, and a tile of it in the same way."""

    def operations(like):
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), like)
        flat, treedef = jax.tree.flatten((like, jax.eval_shape(piece.init, like), like))
        update = lambda *arrays: jax.tree.leaves(piece.update(*treedef.unflatten(arrays)))
        return programs.elementwise(programs.program(update, flat))

    try:
        whole = operations(params)
        return whole is not None and whole == operations(tile)
    except (TypeError, ValueError):  # one that holds an array of the whole matrix's shape
        return False


def _only(tree: Any, keep: set[int]) -> Any:
    """A tree with `optax.MaskedNode()` in place of all leaves but those numbered."""
    leaves, treedef = jax.tree.flatten(tree)
    return treedef.unflatten([x if i in keep else optax.MaskedNode() for i, x in enumerate(leaves)])


def _bare(tree: Any) -> Any:
    """A tree without boxes, which fit no tile."""
    return jax.tree.map(lambda node: (jax.tree.leaves(node) or [optax.MaskedNode()])[0], tree, is_leaf=is_box)


def _by_path(tree: Any) -> dict[Any, Any]:
    return dict(jax.tree_util.tree_flatten_with_path(tree)[0])
