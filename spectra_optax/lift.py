"""Lifts a rule for one array to an Optax transformation over any pytree: the only place that walks trees.

A rule is two functions. `slots(leaf)` says, from shapes alone, which arrays the state holds for a leaf; `step(leaf,
count, gradient, **arrays)` maps a gradient and those arrays to an update and the new arrays. The state is a NamedTuple
`(count, *fields, settings)` in which every field is a tree like the parameters; where a leaf has no such array the tree
holds `optax.MaskedNode()`, as under `optax.masked`.

Shardings follow the parameter: a slot names, for each of its axes, the axis of the parameter that it runs along. The
boxes that Flax puts around arrays (Linen's `Partitioned`, NNX's `Variable`) carry sharding metadata; a slot with the
parameter's own axes keeps the box, any other slot drops it.
"""

import zlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from spectra_optax import arguments, sharding
from spectra_optax.leaves import Leaf, LeafRules, wide
from spectra_optax.sharding import Slot

FORMAT = 2  # of the states; raised when a layout changes
_LEAVES = ", leaves "  # in a state's description, before the checksum of how its leaves are treated


Slots = dict[str, Slot]
Step = Callable[..., tuple[jax.Array, dict[str, jax.Array]]]


def lift(
    state_type: type, slots: Callable[[Leaf], Slots], step: Step, leaves: LeafRules, settings: str
) -> optax.GradientTransformationExtraArgs:
    """Turns a rule for one array into an Optax transformation.

    Args:
      state_type: a NamedTuple with fields `count`, the slots' names, `settings`.
      slots: which arrays the state holds for a leaf.
      step: `(leaf, count, gradient, **arrays) -> (update, arrays)`; the gradient is at least float32, the count is
        that of the step being made, from 1.
      leaves: how each leaf is treated.
      settings: what else shapes the state, in words; it travels with the state, which is refused under other settings.

    Returns:
      A transformation whose updates have the gradients' dtype. `init` raises `TypeError` for leaves that are not
      floating or complex; `update` raises `ValueError` where gradients and state do not belong together.
    """
    arguments.instance("leaves", leaves, LeafRules)
    fields = state_type._fields[1:-1]
    label = f"spectra_optax {FORMAT} {settings}"

    def init(params):
        nodes, treedef = jax.tree.flatten(params, is_leaf=is_box)
        treated = leaves_of(params, leaves)
        decided = iter([slots(leaf) for leaf in treated])
        decided = [next(decided) if jax.tree.leaves(node) else {} for node in nodes]
        trees = (
            treedef.unflatten([start_beside(s.get(f), node) for s, node in zip(decided, nodes, strict=True)])
            for f in fields
        )
        return state_type(jnp.zeros([], jnp.int32), *trees, encode_settings(described(label, treated)))

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        check_type(state, state_type)
        decided = leaves_of(updates, leaves)
        check_settings(state.settings, described(label, decided))
        gradients, treedef = jax.tree.flatten(updates)
        count = optax.safe_increment(state.count)
        held = {f: _arrays(f, getattr(state, f), [(d, slots(d).get(f)) for d in decided]) for f in fields}
        outputs, new = [], {f: [] for f in fields}
        for i, (leaf, g) in enumerate(zip(decided, gradients, strict=True)):
            arrays = {f: held[f][i] for f in fields if held[f][i] is not None}
            u, arrays = step(leaf, count, g.astype(wide(g.dtype)), **arrays)
            outputs.append(u.astype(g.dtype))
            for f, array in arrays.items():
                new[f].append(array)
        trees = (jax.tree.structure(getattr(state, f)).unflatten(new[f]) for f in fields)
        return treedef.unflatten(outputs), state_type(count, *trees, state.settings)

    return optax.GradientTransformationExtraArgs(init, update)


def lift_stateless(
    rule: Callable[[Leaf, jax.Array], jax.Array], leaves: LeafRules
) -> optax.GradientTransformationExtraArgs:
    """Turns `(leaf, gradient) -> update`, without a state, into an Optax transformation."""
    arguments.instance("leaves", leaves, LeafRules)

    def init(params):
        leaves_of(params, leaves)
        return optax.EmptyState()

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        gradients, treedef = jax.tree.flatten(updates)
        outputs = [
            rule(leaf, g.astype(wide(g.dtype))).astype(g.dtype)
            for leaf, g in zip(leaves_of(updates, leaves), gradients, strict=True)
        ]
        return treedef.unflatten(outputs), state

    return optax.GradientTransformationExtraArgs(init, update)


def labels(leaves: LeafRules) -> Callable[[Any], Any]:
    """Returns a function that maps a tree to the kind of each leaf, as `optax.partition` wants its labels."""

    def label(tree):
        return jax.tree.unflatten(jax.tree.structure(tree), [leaf.kind for leaf in leaves_of(tree, leaves)])

    return label


def named(tree: Any) -> list[tuple[str, Any]]:
    """The arrays of a tree, in order, each with its path as "a/b/c"; boxes leave no trace in the path."""
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_box)[0]
    return [(path_name(path), array) for path, node in flat for array in jax.tree.leaves(node)]


def path_name(path: Any) -> str:
    """A path of JAX's as "a/b/c"."""
    return "/".join(map(_name, path))


def unboxed(tree: Any) -> Any:
    """The tree with plain arrays in place of boxes (boxes without an array stay)."""
    return jax.tree.map(lambda node: (jax.tree.leaves(node) or [node])[0], tree, is_leaf=is_box)


def described(label: str, decided: list[Leaf]) -> str:
    """A label with a checksum of how the leaves are treated, which functions of a path leave no other trace of."""
    from_end = lambda leaf, axes: [axis - len(leaf.shape) for axis in axes]  # the same for a leaf and a stack of it
    treated = [(leaf.kind, from_end(leaf, leaf.rows), from_end(leaf, leaf.cols)) for leaf in decided]
    return f"{label}{_LEAVES}{zlib.crc32(repr(treated).encode()):08x}"


def check_type(state: Any, expected: type) -> None:
    """Refuses a state that another transformation built."""
    if not isinstance(state, expected):
        raise ValueError(f"The state must be the {expected.__name__} that init returned, got {type(state).__name__}.")


def check_settings(stored: jax.Array, label: str) -> None:
    """Refuses a state that was built under other settings, as far as its arrays can tell.

    Raises:
      ValueError: if the state's description of itself differs; under `jit` only its length is known.
    """
    expected = np.frombuffer(label.encode(), np.uint8)
    if isinstance(stored, jax.core.Tracer):
        if stored.shape == expected.shape:
            return
        found = f"a description of {stored.shape} bytes"
    elif np.array_equal(stored, expected):
        return
    else:
        found = decode_settings(stored)
    if found.split(_LEAVES)[0] == label.split(_LEAVES)[0]:
        problem = "The gradients or parameters do not belong to this state, or its leaves were treated by other rules"
    else:
        problem = "The optimizer's state was built under other settings"
    raise ValueError(f"{problem}: expected {label!r}, got {found!r}.")


def leaves_of(tree: Any, rules: LeafRules) -> list[Leaf]:
    """How each leaf of a tree is treated, in order."""
    return [rules.leaf(path, np.shape(x), dtype_of(path, x)) for path, x in named(tree)]


def dtype_of(path: str, x: Any) -> Any:
    """The dtype of a parameter, or a `TypeError` that names it where it is no array."""
    if not hasattr(x, "dtype"):
        raise TypeError(f"Parameter {path!r} is {x!r}, a {type(x).__name__}; parameters must be arrays.")
    return x.dtype


def is_box(node: Any) -> bool:
    """Whether a node is one of Flax's boxes, told by their methods so that Flax need not be installed."""
    kind = type(node)
    return all(hasattr(kind, m) for m in ("unbox", "replace_boxed")) or all(
        hasattr(kind, m) for m in ("get_value", "get_metadata")
    )


def _name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def start_beside(s: Slot | None, node: Any) -> Any:
    """The first value of a slot beside the parameter (or box) `node`, boxed where the box fits it."""
    arrays, box = jax.tree.flatten(node)
    if not arrays:
        return node
    if s is None:
        return optax.MaskedNode()
    value = sharding.start(s, arrays[0])
    return box.unflatten([value]) if sharding.fits(s, arrays[0].shape) else value


def _arrays(field: str, tree: Any, decided: list[tuple[Leaf, Slot | None]]) -> list[jax.Array | None]:
    """The arrays of one field of a state, one entry per leaf, checked against what its slots say."""
    held = named(tree)
    expected = [(leaf.path, s) for leaf, s in decided if s is not None]
    if [path for path, _ in held] != [path for path, _ in expected]:
        other = {path for path, _ in held} ^ {path for path, _ in expected}
        raise ValueError(
            f"The gradients do not belong to this state: its field {field!r} and the gradients differ in "
            f"{sorted(other) or 'the order of their leaves'}. Initialise with parameters of the gradients' structure."
        )
    for (path, array), (_, s) in zip(held, expected, strict=True):
        if array.shape != s.shape or array.dtype != s.dtype:
            raise ValueError(
                f"State field {field!r} of {path!r} is {array.dtype}{list(array.shape)}, but gradients and settings "
                f"ask for {s.dtype}{list(s.shape)}: the state belongs to other parameters or other settings."
            )
    arrays = iter([array for _, array in held])
    return [None if s is None else next(arrays) for _, s in decided]


def encode_settings(label: str) -> jax.Array:
    """The settings as an array, uint8 `[n]`, to travel with the state."""
    return jnp.asarray(np.frombuffer(label.encode(), np.uint8))


def decode_settings(stored: jax.Array) -> str:
    """The settings that such an array holds."""
    return bytes(np.asarray(stored)).decode(errors="replace")
