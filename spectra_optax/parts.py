"""Runs a local transformation part by part: on tiles in one pass over memory, or slice by slice in bounded memory.

Tiles are for the platforms that need kernels: there the transformation, built for a tile, is the body of the kernel of
`kernels/tiles.py`. A large stack of matrices that is not run on tiles is run slice by slice by `slicing.py`, where
parameters are the result. Every other leaf gets the plain formula. Results are the same to rounding; noise is the same.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from spectra_optax import backend, slicing
from spectra_optax.kernels import program as programs
from spectra_optax.kernels import tiles
from spectra_optax.kernels.grids import grid
from spectra_optax.kernels.shards import NotLocalError, layout_of
from spectra_optax.leaves import Leaf
from spectra_optax.lift import is_box, leaves_of
from spectra_optax.locality import Local, TileRules


def in_parts(
    plain: optax.GradientTransformation, local: Local, updates, state, params, *, apply: bool, shardings: Any = None
):
    """The update, or with `apply` the new parameters, and the new state; every matrix that can be is run in parts.

    The plain formula is written for all leaves; what is not used of it, XLA drops. `shardings` says how the parameters
    are laid out where their types do not.
    """
    gradients, treedef = jax.tree.flatten(updates)
    if shardings is not None and len(jax.tree.leaves(shardings)) != len(gradients):
        found = jax.tree.structure(shardings)
        raise ValueError(f"shardings must be a tree like the parameters, {treedef}, got {found}.")
    out, new = plain.update(updates, state, params)
    outputs = jax.tree.leaves(optax.apply_updates(params, out) if apply else out)
    decided = enumerate(zip(*(leaves_of(updates, rules) for rules in local.rules), strict=True))
    ways = {i: (leaves, found) for i, leaves in decided if (found := _ways(local, leaves, apply))}
    if not ways:
        return treedef.unflatten(outputs), new
    keyed, state_def = jax.tree_util.tree_flatten_with_path(new)
    new = dict(keyed)
    step = _Step(plain, local, updates, params, _by_path(state), _meanings(local, params), apply, shardings)
    for i, (leaves, found) in ways.items():
        for way in found:
            try:
                outputs[i], changed = way(step, i, leaves)
            except (NotLocalError, AttributeError, KeyError, TypeError, ValueError):
                continue  # functions of the whole tree may not bear one of a single leaf
            new |= {path: array for path, array in changed.items() if array.ndim}
            break
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

    def on_tiles(self, i: int, leaves: Sequence[Leaf]) -> tuple[jax.Array, dict[Any, jax.Array]]:
        """The output of leaf `i` and the state beside it, computed on tiles; kernels have the plain derivative."""
        g, params, p, layout = self._leaf(i)
        held, state_def = jax.tree.flatten(self._state(params))

        def on_tiles(g, *rest):
            *held, p = rest
            return self._tiled(leaves, params, layout, g, state_def.unflatten(held), p)

        computed = jax.custom_jvp(on_tiles)
        plain = self._rule(self.plain, jax.tree.structure(params), state_def)
        computed.defjvp(lambda primals, tangents: jax.jvp(plain, primals, tangents))
        *new, out = computed(g, *held, p)
        return out, _by_path(state_def.unflatten(new))

    def _tiled(self, leaves: Sequence[Leaf], params: Any, layout: NamedSharding | None, g, state, p) -> list[jax.Array]:
        """The new state and the output, of which kernels compute all that they can."""
        block, restore = _block(self.local, leaves), lambda new: new
        assert block is not None
        if self.local.prepared is not None:
            state, restore = self.local.prepared(g, state, layout)
        arrays, state_def = jax.tree.flatten(state)
        cut = grid(leaves[0].shape, block, [g, *arrays, p], layout)
        boxed = self._like(params, cut.tile)
        params, bare = _bare(params), jax.tree.structure(_bare(state))
        tx = self.local.build(TileRules(block=block))
        views, tile_def = jax.tree.flatten(jax.eval_shape(tx.init, _bare(boxed)))
        if tile_def != bare:
            raise NotLocalError("The state of a tile is built otherwise than that of the matrix.")
        rule = self._rule(tx, jax.tree.structure(params), bare)
        shapes = [cut.tile, *(view.shape for view in views), cut.tile]
        like = [*range(1, len(arrays) + 1), len(arrays) + 1 if self.apply else 0]
        *new, out = tiles.run(rule, cut, [g, *arrays, p], shapes, like)
        return [*jax.tree.leaves(restore(state_def.unflatten(new))), out]

    def in_slices(self, i: int, leaves: Sequence[Leaf]) -> tuple[jax.Array, dict[Any, jax.Array]]:
        """The parameter of leaf `i` and the state beside it, computed slice by slice of a stack."""
        g, params, p, layout = self._leaf(i)
        part = slicing.part_of(p.shape, _stacked(leaves), layout, slicing.limit(self.local.bulky))
        if part is None:
            raise NotLocalError("One part is all.")
        boxed = self._like(params, part)
        [sliced] = zip(*(leaves_of(boxed, rules) for rules in self.local.rules), strict=True)
        if any(dataclasses.replace(one, shape=leaf.shape) != leaf for one, leaf in zip(sliced, leaves, strict=True)):
            raise NotLocalError("A slice is treated otherwise than the stack.")
        keyed, state_def = jax.tree_util.tree_flatten_with_path(self._state(params))
        views, slice_def = jax.tree.flatten(jax.eval_shape(self.plain.init, boxed))
        if slice_def != state_def:
            raise NotLocalError("The state of a slice is built otherwise than that of the stack.")
        arrays, shapes = [g, *(x for _, x in keyed), p], [part, *(view.shape for view in views), part]
        stacked = [k for k, (x, view) in enumerate(zip(arrays, shapes, strict=True)) if k and x.shape != view]
        rule = self._rule(self.plain, jax.tree.structure(params), state_def)
        results = slicing.run(rule, arrays, shapes, stacked)
        return results.pop(), {keyed[k - 1][0]: x for k, x in zip(stacked, results, strict=False)}

    def _leaf(self, i: int) -> tuple[jax.Array, Any, jax.Array, NamedSharding | None]:
        """The gradient of leaf `i`, the tree with that parameter alone, it, and how it lies over devices."""
        params = _only(self.params, i)
        [g], [p] = jax.tree.leaves(_only(self.updates, i)), jax.tree.leaves(params)
        layout = layout_of(p, None if self.shardings is None else jax.tree.leaves(self.shardings)[i])
        return g, params, p, layout

    def _like(self, params: Any, shape: tuple[int, ...]) -> Any:
        """The tree of a part of a parameter; every elementwise piece must mean for it what it means for the whole."""
        part = jax.tree.map(lambda x: jax.ShapeDtypeStruct(shape, x.dtype), params)
        for whole, found in zip(self.meanings, _meanings(self.local, part), strict=True):
            if any(meaning is None or whole[path] != meaning for path, meaning in found.items()):
                raise NotLocalError("A piece of the transformation does more than combine numbers of the same place.")
        return part

    def _rule(self, tx: optax.GradientTransformation, tree_def: Any, state_def: Any) -> Callable[..., list[jax.Array]]:
        """The new state and the output for a part, `(gradient, *state, parameter) -> (*state, output)`."""

        def rule(g, *rest):
            *arrays, p = rest
            tree = tree_def.unflatten
            out, new = tx.update(tree([g]), state_def.unflatten(arrays), tree([p]))
            out = optax.apply_updates(tree([p]), out) if self.apply else out
            return [*jax.tree.leaves(new), *jax.tree.leaves(out)]

        return rule

    def _state(self, params: Any) -> Any:
        """The part of the state that stands beside one of the parameters."""
        keyed, treedef = jax.tree_util.tree_flatten_with_path(jax.eval_shape(self.plain.init, params))
        kind = lambda x: (x.shape, x.dtype)
        if any(path not in self.held or kind(self.held[path]) != kind(x) for path, x in keyed):
            raise NotLocalError("The state is not that of these parameters.")
        return treedef.unflatten([self.held[path] for path, _ in keyed])


def _ways(local: Local, leaves: Sequence[Leaf], apply: bool) -> list[Callable[..., Any]]:
    """The ways in which a leaf may be run in parts, the best first."""
    on_tiles = backend.kernels() is not None and _block(local, leaves) is not None
    part = slicing.part_of(leaves[0].shape, _stacked(leaves), None, slicing.limit(local.bulky))
    in_slices = apply and part is not None
    return [*([_Step.on_tiles] if on_tiles else []), *([_Step.in_slices] if in_slices else [])]


def _stacked(leaves: Sequence[Leaf]) -> int:
    """How many of a leaf's first axes count its matrices."""
    return min(min(leaf.rows + leaf.cols, default=0) for leaf in leaves)


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
