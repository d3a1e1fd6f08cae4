"""The two ways in which a tree holds layers, stacked or listed, and the ways forward and back through either.

Stacked layers are walked by loops that carry parameters and state and write each layer's slice `[1, ...]` in place; a
slice keeps the axis of the layers, so that the optimizer treats it as it treats the stack. Listed layers are written
out one after another, and a barrier keeps XLA from going on to the next before a layer is updated.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spectra_optax.layerwise import REST, owners, probe, stacked_state
from spectra_optax.norm_clip import squares
from spectra_optax.partial_update import PartialUpdate
from spectra_optax.subtrees import at, put

Layer = Callable[[Any, Any], Any]
Scale = Callable[[list[jax.Array]], list[jax.Array]]
Back = tuple[list[jax.Array], Any, jax.Array]  # all leaves, the cotangent, the sum of the gradients' squares


class Saved(NamedTuple):
    """What the way forward through stacked layers leaves for the way back."""

    residuals: list[jax.Array]  # [L, ...] each
    structure: Any  # of one layer's pullback
    weights: list[int | None]  # which leaf of the layer's parameters each leaf of a pullback is, if any
    x: Any  # what runs through the layers; only its shapes matter


class Stacked:
    """Layers whose parameters are stacked, `[L, ...]` each, as `jax.lax.scan` takes them."""

    def __init__(self, tx: optax.GradientTransformation, params: Any, path: str, layer: Layer, policy: Any):
        """Checks parameters and optimizer, from shapes."""
        stack = at(params, path)
        counts = {x.shape[:1] for x in jax.tree.leaves(stack)}
        if len(counts) != 1 or () in counts:
            raise ValueError(f"The leaves of layers={path!r} must share a leading axis, got {sorted(counts)}.")
        [[self._count]] = counts
        self._path, self._layer = path, jax.checkpoint(layer, policy=policy, prevent_cse=False)

        def resized(n):
            return put(params, path, jax.tree.map(lambda x: jax.ShapeDtypeStruct((n, *x.shape[1:]), x.dtype), stack))

        marked = put(jax.tree.map(lambda x: REST, params), path, jax.tree.map(lambda x: path, stack))
        known = [path if one else REST for one in stacked_state(tx, resized, self._count)]
        for height in {self._count, probe(params)} - {1}:
            owners(tx, resized(height), jax.tree.leaves(marked), known, height)
        names = [*jax.tree.leaves(marked), *known]
        self._places = [i for i, name in enumerate(names) if name == path]
        self.rest = [i for i, name in enumerate(names) if name == REST]

    def outside(self, params: Any) -> Any:
        """The parameters with None in the layers' place."""
        return put(params, self._path, None)

    def forward(self, params: Any, x: Any) -> tuple[Any, Saved]:
        """Goes through the layers and keeps what the way back needs, but for the parameters."""
        structure, weights = None, []

        def body(x, p):
            nonlocal structure, weights
            x, pullback = jax.vjp(self._layer, p, x)
            residuals, structure = jax.tree.flatten(pullback)
            place = {id(w): i for i, w in enumerate(jax.tree.leaves(p))}
            weights = [place.get(id(r)) for r in residuals]
            return x, [r for r, i in zip(residuals, weights, strict=True) if i is None]

        x, residuals = jax.lax.scan(body, x, at(params, self._path))
        return x, Saved(residuals, structure, weights, x)

    def norm(self, params: Any, saved: Any, ct: Any) -> tuple[Any, jax.Array]:
        """Goes back through the layers; returns the cotangent and the sum of the gradients' squares."""
        stack = jax.tree.leaves(at(params, self._path))

        def body(t, carry):
            moving, total = carry
            i = self._count - 1 - t
            gradients, moving = _pulled_back(_slices(stack, i), _slices(saved.residuals, i), saved, moving)
            return moving, total + squares(gradients)

        moving, total = jax.lax.fori_loop(0, self._count, body, (_moving(ct), jnp.zeros([], jnp.float32)))
        return _cotangent(saved.x, moving), total

    def traced(self, tx: optax.GradientTransformation, params: Any, state: Any) -> tuple[PartialUpdate, list[Any]]:
        """The optimizer's step for one layer and the leaves outside, and all leaves with the first layer's."""
        leaves, treedef = jax.tree.flatten((params, state))
        leaves = _replaced(leaves, self._places, _slices([leaves[i] for i in self._places], 0))
        return PartialUpdate(tx, *treedef.unflatten(leaves)), leaves

    def backward(self, update: PartialUpdate, like, leaves: list[Any], saved: Any, ct: Any, scale: Scale) -> Back:
        """Goes back through the layers and updates each; `like` is from `traced`."""

        def body(t, carry):
            held, moving, total = carry
            i = self._count - 1 - t

            def updated():
                one = _slices(held, i)
                gradients, ct = _pulled_back(one, _slices(saved.residuals, i), saved, moving)
                new = update.run(self._places, scale(gradients), _replaced(like, self._places, one))
                return new, ct, total + squares(gradients)

            new, ct, norm = jax.lax.cond(i >= 0, updated, lambda: (_slices(held, i), moving, total))
            write = lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, i, 0)
            return list(map(write, held, new)), ct, norm

        start = ([leaves[i] for i in self._places], _moving(ct), jnp.zeros([], jnp.float32))
        held, moving, total = jax.lax.fori_loop(0, self._count, body, start)
        return _replaced(leaves, self._places, held), _cotangent(saved.x, moving), total


class Listed:
    """Layers that each have a path of their own."""

    def __init__(
        self,
        tx: optax.GradientTransformation,
        params: Any,
        paths: Sequence[str],
        layer: Layer | Sequence[Layer],
        policy: Any,
    ):
        """Checks parameters and optimizer, from shapes."""
        functions = [layer] * len(paths) if callable(layer) else list(layer)
        if len(set(paths)) != len(paths) or len(functions) != len(paths):
            raise ValueError(f"layers must be different paths, one for each of {len(functions)} layers, got {paths!r}.")
        self._paths = list(paths)
        self._functions = [jax.checkpoint(one, policy=policy) for one in functions]
        marked = jax.tree.map(lambda x: REST, params)
        for path in paths:
            marked = put(marked, path, jax.tree.map(lambda x, path=path: path, at(params, path)))
        state = jax.tree.leaves(jax.eval_shape(tx.init, params))
        names = jax.tree.leaves(marked)
        names = [*names, *owners(tx, params, names, [REST] * len(state))]
        self._places = {path: [i for i, name in enumerate(names) if name == path] for path in paths}
        self.rest = [i for i, name in enumerate(names) if name == REST]

    def outside(self, params: Any) -> Any:
        """The parameters with None in the layers' places."""
        for path in self._paths:
            params = put(params, path, None)
        return params

    def forward(self, params: Any, x: Any) -> tuple[Any, list[Any]]:
        """Goes through the layers and keeps what the way back needs."""
        pullbacks = []
        for path, function in zip(self._paths, self._functions, strict=True):
            x, pullback = jax.vjp(function, at(params, path), x)
            pullbacks.append(pullback)
        return x, pullbacks

    def norm(self, params: Any, saved: Any, ct: Any) -> tuple[Any, jax.Array]:
        """Goes back through the layers; returns the cotangent and the sum of the gradients' squares."""
        del params
        total = jnp.zeros([], jnp.float32)
        for pullback in reversed(saved):
            gradients, ct = pullback(ct)
            ct, total = _in_turn(ct, total + squares(gradients))
        return ct, total

    def traced(self, tx: optax.GradientTransformation, params: Any, state: Any) -> tuple[PartialUpdate, list[Any]]:
        """The optimizer's step, and all leaves."""
        return PartialUpdate(tx, params, state), jax.tree.leaves((params, state))

    def backward(self, update: PartialUpdate, like, leaves: list[Any], saved: Any, ct: Any, scale: Scale) -> Back:
        """Goes back through the layers and updates each; `like` is from `traced`."""
        total = jnp.zeros([], jnp.float32)
        for path, pullback in zip(reversed(self._paths), reversed(saved), strict=True):
            gradients, ct = pullback(ct)
            gradients, places = jax.tree.leaves(gradients), self._places[path]
            new = update.run(places, scale(gradients), like)
            ct, (new, total) = _in_turn(ct, (new, total + squares(gradients)))
            leaves = _replaced(leaves, places, new)
        return leaves, ct, total


def _pulled_back(one: list[jax.Array], residuals: list[jax.Array], saved: Saved, moving: list[jax.Array]):
    """Gradients `[1, ...]` of a layer whose slices, parameters first, are `one`, and the cotangent before it."""
    rest = iter([r[0] for r in residuals])
    pullback = saved.structure.unflatten([next(rest) if i is None else one[i][0] for i in saved.weights])
    gradients, ct = pullback(_cotangent(saved.x, moving))
    return [g[None] for g in jax.tree.leaves(gradients)], _moving(ct)


def after(ct: Any, norm: jax.Array) -> Any:
    """The cotangent, NaN where the norm is.

    Depending on the norm, the second way back can neither share the gradients of the first nor run ahead of it, even
    where XLA drops barriers, as it does for CPUs.
    """
    return _cotangent(ct, [jnp.where(norm == norm, c, jnp.full_like(c, jnp.nan)) for c in _moving(ct)])


def _in_turn(ct: Any, results: Any) -> tuple[Any, Any]:
    """Has whatever is computed from the cotangent wait for the results."""
    moving, results = jax.lax.optimization_barrier((_moving(ct), results))
    return _cotangent(ct, moving), results


def _moving(ct: Any) -> list[jax.Array]:
    """The leaves of a cotangent that are numbers; those of integers are not."""
    return [c for c in jax.tree.leaves(ct) if c.dtype != jax.dtypes.float0]


def _cotangent(x: Any, moving: Sequence[jax.Array]) -> Any:
    """The inverse of `_moving`, for a cotangent of `x` or like `x`."""
    numbers, none = iter(moving), jax.dtypes.float0
    is_number = lambda a: jnp.issubdtype(a.dtype, jnp.inexact)
    return jax.tree.map(lambda a: next(numbers) if is_number(a) else np.zeros(a.shape, none), x)


def _slices(stack: Sequence[jax.Array], i: jax.Array | int) -> list[jax.Array]:
    return [jax.lax.dynamic_slice_in_dim(x, i, 1, 0) for x in stack]


def _replaced(leaves: Sequence[Any], places: Sequence[int], new: Sequence[Any]) -> list[Any]:
    leaves = list(leaves)
    for i, x in zip(places, new, strict=True):
        leaves[i] = x
    return leaves
