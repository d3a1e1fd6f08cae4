"""What the state of any optimizer stands for, told by the transformations that built it.

Codes do not say what they mean; the masks, groups and rules about leaves that made them, only their transformation
knows. `readable` lets it tell, in parts of the states of its dense twin:

    factored second moment    ScaleByAdamState.nu
    spectral momentum         EmaState.ema
    moments in a subspace     ScaleByAdamState.mu, .nu

and a state of Optax's is its own twin. `parts` reads a whole state, however chains and wrappers nest it, `filled`
writes one. Arrays are computed when they are asked for.
"""

import contextvars
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spectra_optax.fields import is_field, opened
from spectra_optax.lift import named

Part = tuple[str, str, str]  # the type of a state, a field of it, the path of a parameter ("" for counts)
Parts = dict[Part, Callable[[], jax.Array]]
Numbers = dict[str, jax.Array]

ADAM, EMA = optax.ScaleByAdamState.__name__, optax.EmaState.__name__
_COUNTS = ("count", "step")  # of the updates that were made
_observing: contextvars.ContextVar[bool] = contextvars.ContextVar("observing", default=False)


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a state is read and written.

    Attributes:
      read: `(state, params, numbers) -> parts`.
      write: `(fresh_state, params, parts, numbers) -> state`.
      complete: `(params, parts, numbers) -> parts`, those that follow from others by what the transformation knows.
    """

    read: Callable[[Any, Any, Numbers], Parts]
    write: Callable[[Any, Any, Parts, Numbers], Any]
    complete: Callable[[Any, Parts, Numbers], Parts] = lambda params, parts, numbers: {}


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class _Observed:
    """Stands where a transformation's state would: the parameters that it sees, its numbers, and its reading."""

    params: Any
    numbers: Numbers
    reading: Reading

    def tree_flatten(self):
        return (self.params, self.numbers), self.reading

    @classmethod
    def tree_unflatten(cls, reading, children):
        params, numbers = children
        return cls(params, numbers, reading)


_is_observed = lambda node: isinstance(node, _Observed)


def readable(
    tx: optax.GradientTransformation, reading: Reading, **numbers: Any
) -> optax.GradientTransformationExtraArgs:
    """A transformation that tells how to read its state; `numbers` may be traced, as `inject_hyperparams` has them."""
    tx = optax.with_extra_args_support(tx)

    def init(params):
        if _observing.get():
            return _Observed(params, {name: jnp.asarray(x, jnp.float32) for name, x in numbers.items()}, reading)
        return tx.init(params)

    return optax.GradientTransformationExtraArgs(init, tx.update)


def parts(tx: optax.GradientTransformation, state: Any, params: Any) -> Parts:
    """What a state that `tx` built for these parameters stands for.

    Raises:
      ValueError: if two transformations of a chain tell the same part.
    """
    expected = _observed(tx, params)
    return _completed(expected, _read(expected, state, _paths(params)))


def filled(tx: optax.GradientTransformation, fresh: Any, params: Any, found: Parts) -> Any:
    """The state of `tx` that stands for the parts; counts and wrappers' own fields that are not told stay as they are.

    `fresh` is a state of `tx` for these parameters.

    Raises:
      ValueError: if a part that the state needs is not told, or belongs to other parameters.
    """
    expected = _observed(tx, params)
    return _write(expected, fresh, _completed(expected, found), _paths(params))


def taken(found: Parts, part: Part, like: Any) -> jax.Array:
    """A part in the shape and dtype of `like`.

    Raises:
      ValueError: if it is not told, or has another shape, or other integers.
    """
    owner, field, path = part
    if part not in found:
        told = sorted({f"{o}.{f}" for o, f, p in found if p or f not in _COUNTS})
        raise ValueError(
            f"The target holds {owner}.{field} of {path!r}, which the source's state does not tell: it tells "
            f"{', '.join(told) or 'nothing'} of {sorted({p for o, f, p in found if p or f not in _COUNTS})}. Accepted "
            f"are states of the same type, and for the optimizers of this package those of Adam ({ADAM})."
        )
    value = found[part]()
    exact = jnp.issubdtype(like.dtype, jnp.integer)
    if value.shape != like.shape or (exact and value.dtype != like.dtype):
        raise ValueError(
            f"The source's {owner}.{field} of {path!r} is {value.dtype}{list(value.shape)}, but the target's is "
            f"{like.dtype}{list(like.shape)}: they belong to other parameters or other settings."
        )
    return value.astype(like.dtype)


def counted(found: Parts, owner: str, fresh: jax.Array) -> jax.Array:
    """How many updates were made: as the state of that type tells, else Adam's, else any; `fresh` if none does."""
    told = [part for part in found if part[1] in _COUNTS]
    ranked = sorted(told, key=lambda part: (part[0] != owner, part[0] != ADAM))
    return jnp.asarray(found[ranked[0]](), fresh.dtype) if ranked else fresh


def _observed(tx: optax.GradientTransformation, params: Any) -> Any:
    """The structure of a state, with `_Observed` in place of those that are readable."""
    token = _observing.set(True)
    try:
        # New functions, because JAX remembers what it traced by the function.
        shapes = jax.eval_shape(lambda p: tx.init(p), params)
        zeros = lambda x: jnp.zeros(x.shape, x.dtype)  # of which none is built
        numbers = jax.jit(lambda: [node.numbers for node in _nodes(tx.init(jax.tree.map(zeros, params)))])()
    finally:
        _observing.reset(token)
    known = iter(numbers)
    fill = lambda node: dataclasses.replace(node, numbers=next(known, {})) if _is_observed(node) else node
    return jax.tree.map(fill, shapes, is_leaf=_is_observed)


def _nodes(tree: Any) -> list[_Observed]:
    return [node for node in jax.tree.leaves(tree, is_leaf=_is_observed) if _is_observed(node)]


def _completed(expected: Any, found: Parts) -> Parts:
    for node in _nodes(expected):
        found = found | node.reading.complete(node.params, found, node.numbers)
    return found


def _paths(params: Any) -> dict[str, Any]:
    return dict(named(params))


def _read(expected: Any, state: Any, paths: dict[str, Any]) -> Parts:
    if _is_observed(expected):
        return expected.reading.read(state, expected.params, expected.numbers)
    found: Parts = {}
    keys, children, _ = opened(expected)
    for key, child, held in zip(keys, children, opened(state)[1], strict=True):
        if is_field(key) and _is_held(child, paths):
            new = {(type(state).__name__, key.name, path): _constant(x) for path, x in named(held)}
        else:
            new = _read(child, held, paths)
        twice = [part for part in found.keys() & new.keys() if part[2]]
        if twice:
            raise ValueError(f"The state tells {sorted(twice)} more than once; convert its parts one by one.")
        found = new | found  # of counts, the first
    return found


def _write(expected: Any, fresh: Any, found: Parts, paths: dict[str, Any]) -> Any:
    if _is_observed(expected):
        return expected.reading.write(fresh, expected.params, found, expected.numbers)
    keys, children, treedef = opened(fresh)
    shapes = opened(expected)[1]
    if not keys:
        return fresh
    owner = type(fresh).__name__
    held = [is_field(key) and _is_held(shape, paths) for key, shape in zip(keys, shapes, strict=True)]
    wraps = any(jax.tree.leaves(shape) for shape, one in zip(shapes, held, strict=True) if not one)
    new = [
        _filled_field(owner, key.name, child, found, lenient=wraps) if one else _write(shape, child, found, paths)
        for key, child, shape, one in zip(keys, children, shapes, held, strict=True)
    ]
    return treedef.unflatten(new)


def _filled_field(owner: str, field: str, tree: Any, found: Parts, *, lenient: bool) -> Any:
    """A field of a state of Optax's; a wrapper's own fields may be missing."""

    def fill(path, x):
        part = (owner, field, path)
        if _is_count(x):
            return counted(found, owner, x) if field in _COUNTS else taken(found, part, x) if part in found else x
        return x if x.size == 0 or (lenient and part not in found) else taken(found, part, x)

    return jax.tree.structure(tree).unflatten([fill(path, x) for path, x in named(tree)])


def _is_held(field: Any, paths: dict[str, Any]) -> bool:
    """Whether a field is a tree like the parameters, or a count; not an inner state or a setting."""
    arrays = named(field)
    if _nodes(field) or not arrays:
        return False
    if [path for path, _ in arrays] == [""]:  # of a state that counts, or of parameters that are one array
        x = arrays[0][1]
        return _is_count(x) or ("" in paths and not jnp.issubdtype(x.dtype, jnp.unsignedinteger))
    return all(path in paths for path, _ in arrays)


def _is_count(x: Any) -> bool:
    return x.ndim == 0 and not jnp.issubdtype(x.dtype, jnp.inexact)


def _constant(x: Any) -> Callable[[], Any]:
    return lambda: x
