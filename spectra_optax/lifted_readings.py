"""Lifts the reading of one array's state to that of a whole tree, as `lift.py` lifts rules."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from spectra_optax.leaves import Leaf, LeafRules, wide
from spectra_optax.lift import leaves_of, named
from spectra_optax.readings import Numbers, Parts, Reading, counted, taken


class ArrayReading(NamedTuple):
    """How the state of one leaf is read and written.

    Attributes:
      fields: of the twin: (type of its state, field), of arrays of the leaf's shape.
      read: `(leaf, numbers, arrays) -> values`, the arrays of those fields.
      write: `(leaf, numbers, count, *values) -> arrays`, what the state holds for them.
    """

    fields: tuple[tuple[str, str], ...]
    read: Callable[[Leaf, Numbers, dict[str, jax.Array]], tuple[jax.Array, ...]]
    write: Callable[..., dict[str, jax.Array]]


Complete = Callable[[Leaf, Parts, Numbers], Parts]


def lifted(
    state_type: type, leaves: LeafRules, array: ArrayReading, complete: Complete = lambda leaf, found, numbers: {}
) -> Reading:
    """The reading of a state of `lift`'s; `complete` tells for one leaf what follows from other parts."""
    names, owner = state_type._fields[1:-1], state_type.__name__

    def read(state, params, numbers):
        held = {name: dict(named(getattr(state, name))) for name in names}
        found: Parts = {(owner, "count", ""): lambda: state.count}
        for leaf in _with_elements(params, leaves):
            arrays = {name: held[name][leaf.path] for name in names if leaf.path in held[name]}
            for i, field in enumerate(array.fields):
                found[*field, leaf.path] = functools.partial(_value, i, leaf, array, numbers, arrays)
        return found

    def write(fresh, params, found, numbers):
        count, new = counted(found, owner, fresh.count), {name: {} for name in names}
        for leaf in _with_elements(params, leaves):
            like = jax.ShapeDtypeStruct(leaf.shape, wide(leaf.dtype))
            values = [taken(found, (*field, leaf.path), like) for field in array.fields]
            for name, x in _write(leaf, array, numbers, count, *values).items():
                new[name][leaf.path] = x
        fill = lambda name, tree: jax.tree.structure(tree).unflatten(
            [new[name].get(path, x).astype(x.dtype) for path, x in named(tree)]
        )
        return fresh._replace(count=count, **{name: fill(name, getattr(fresh, name)) for name in names})

    def completed(params, found, numbers):
        new: Parts = {}
        for leaf in _with_elements(params, leaves):
            new |= complete(leaf, found, numbers)
        return new

    return Reading(read, write, completed)


def _with_elements(params: Any, leaves: LeafRules) -> list[Leaf]:
    return [leaf for leaf in leaves_of(params, leaves) if leaf.kind != "empty"]


def _value(i: int, *args: Any) -> jax.Array:
    return _read(*args)[i]


@functools.partial(jax.jit, static_argnames=("leaf", "array"))
def _read(leaf: Leaf, array: ArrayReading, numbers: Numbers, arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    return array.read(leaf, numbers, arrays)


@functools.partial(jax.jit, static_argnames=("leaf", "array"))
def _write(leaf: Leaf, array: ArrayReading, numbers: Numbers, count: jax.Array, *values: jax.Array):
    return array.write(leaf, numbers, count, *values)
