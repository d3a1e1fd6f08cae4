"""Reads and replaces a part of a tree by its path, "a/b/c", whatever the tree is made of."""

from typing import Any

from spectra_optax.fields import opened
from spectra_optax.lift import path_name


def at(tree: Any, path: str) -> Any:
    """The part of a tree at a path.

    Raises:
      ValueError: if there is none.
    """
    names, children, _ = opened(tree)
    for name, child in zip((path_name([key]) for key in names), children, strict=True):
        if name == path:
            return child
        if path.startswith(f"{name}/"):
            return at(child, path.removeprefix(f"{name}/"))
    raise ValueError(f"The tree has no part {path!r}, only {', '.join(repr(path_name([key])) for key in names)}.")


def put(tree: Any, path: str, part: Any) -> Any:
    """The tree with another part at a path that it has."""
    names, children, treedef = opened(tree)
    for i, name in enumerate(path_name([key]) for key in names):
        if name == path:
            children[i] = part
        elif path.startswith(f"{name}/"):
            children[i] = put(children[i], path.removeprefix(f"{name}/"), part)
    return treedef.unflatten(children)
