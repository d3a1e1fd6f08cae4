"""Finds fields by name in the state of any optimizer, however chains, partitions and wrappers nest it.

A state is a pytree of NamedTuples (or registered dataclasses); a field of one, such as Adam's `mu`, is a tree like the
parameters. `map_nodes` rewrites such nodes; `spread` and `gather` turn one tree into several with the same paths, and
back, leaving alone what stands in for absent leaves and the boxes that Flax puts around arrays.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import jax
import optax

from spectra_optax.lift import is_box, named, path_name

Arrays = Mapping[str, jax.Array]


def map_nodes(rule: Callable[[dict[str, Any]], Mapping[str, Any]], state: Any) -> Any:
    """Rewrites every node with named fields: `rule(fields)` gives the fields it replaces, the others are walked."""
    keys, children, treedef = opened(state)
    if not keys:
        return state
    fields = {key.name: child for key, child in zip(keys, children, strict=True) if is_field(key)}
    new = rule(fields) if fields else {}
    return treedef.unflatten(
        new[key.name] if is_field(key) and key.name in new else map_nodes(rule, child)
        for key, child in zip(keys, children, strict=True)
    )


def nodes(state: Any) -> list[dict[str, Any]]:
    """The fields of every node that has named ones."""
    found: list[dict[str, Any]] = []

    def collect(fields):
        found.append(fields)
        return {}

    map_nodes(collect, state)
    return found


def spread(
    tree: Any, names: Iterable[str], rule: Callable[[str, jax.Array], Mapping[str, tuple[jax.Array, bool]]]
) -> dict[str, Any]:
    """Turns one tree into one for each name.

    `rule(path, array)` gives the arrays by name, each with whether it takes the array's box; where a name has none its
    tree holds `optax.MaskedNode()`.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_box)
    trees: dict[str, list[Any]] = {name: [] for name in names}
    for path, node in flat:
        inside, box = jax.tree.flatten(node)
        arrays = rule(path_name(path), inside[0]) if inside else {}
        for name, leaves in trees.items():
            if not inside:
                leaves.append(node)
            elif name not in arrays:
                leaves.append(optax.MaskedNode())
            else:
                array, boxed = arrays[name]
                leaves.append(box.unflatten([array]) if boxed else array)
    return {name: treedef.unflatten(leaves) for name, leaves in trees.items()}


def gather(trees: Mapping[str, Any], like: Any, rule: Callable[[str, Arrays], jax.Array]) -> Any:
    """The inverse of `spread`: `rule(path, arrays)` gives the one array, which takes the box of its leaf in `like`."""
    boxes = {path_name(path): node for path, node in jax.tree_util.tree_flatten_with_path(like, is_leaf=is_box)[0]}
    arrays: dict[str, dict[str, jax.Array]] = {}
    for name, tree in trees.items():
        for path, array in named(tree):
            arrays.setdefault(path, {})[name] = array
    absent = lambda node: is_box(node) or isinstance(node, optax.MaskedNode)
    flat, treedef = jax.tree_util.tree_flatten_with_path(next(iter(trees.values())), is_leaf=absent)
    leaves = []
    for path, node in flat:
        path = path_name(path)
        if path in arrays:
            value = rule(path, arrays[path])
            node = jax.tree.structure(boxes[path]).unflatten([value]) if path in boxes else value
        leaves.append(node)
    return treedef.unflatten(leaves)


def owner(path: tuple[Any, ...], leaves: Container[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    """The path of the parameter that an array of a state belongs to, which ends the array's own; None if none does."""
    return next((path[i:] for i in range(1, len(path) + 1) if path[i:] in leaves), None)


def opened(node: Any) -> tuple[list[Any], list[Any], Any]:
    """Keys and children of a node, one level deep; no keys if it is a leaf."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)
    return [path[0] for path, _ in flat if path], [child for path, child in flat if path], treedef


def is_field(key: Any) -> bool:
    """Whether a key names a field of a NamedTuple or a dataclass."""
    return isinstance(key, jax.tree_util.GetAttrKey)
