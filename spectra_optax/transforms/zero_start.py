"""Builds a compact state without building the full one first.

Nearly every statistic of an optimizer starts at zero, and a zero's compact form is known. Building the zeros only to
encode them would need the full state's memory before training starts, or, compiled, have XLA fold them as constants,
element by element.
"""

from collections.abc import Callable, Container
from typing import Any

import jax
import jax.numpy as jnp

from spectra_optax import fields, sharding

Init = Callable[[Any], Any]


def starts_at_zero(init: Init, names: Container[str], params: Any, shapes: Any) -> bool:
    """Whether every field of these names starts at zero, seen on parameters of one element each.

    `shapes` is the state of the real parameters; one that is built differently for small ones proves nothing.
    """
    with jax.ensure_compile_time_eval():
        small = jax.tree.map(lambda x: jnp.ones((1,) * len(x.shape), x.dtype), params)
        try:
            state = init(small)
        except (TypeError, ValueError):  # an optimizer may refuse such parameters
            return False
        if jax.tree.structure(state) != jax.tree.structure(shapes):
            return False
        held = [field for node in fields.nodes(state) for name, field in node.items() if name in names]
        return not any(bool(jnp.any(x != 0)) for x in jax.tree.leaves(held))


def without_zeros(init: Init, started: Any, names: Container[str], params: Any) -> Any:
    """Fills in the fields of other names, which `started` holds as shapes."""

    def others(params):
        return jax.tree.leaves(fields.map_nodes(lambda node: {n: None for n in node if n in names}, init(params)))

    rest = iter(_compiled(others, params))
    leaves, treedef = jax.tree.flatten(started)
    return treedef.unflatten(next(rest) if isinstance(x, jax.ShapeDtypeStruct) else x for x in leaves)


def _compiled(function: Callable[[Any], Any], params: Any) -> Any:
    """Runs a function of the parameters as one program, which builds only what is returned, on one device.

    On several the layout of what it builds is for the function's own operations to choose.
    """
    nodes, treedef = jax.tree.flatten(params)
    layouts = [sharding.of(x) for x in nodes]
    traced = any(isinstance(getattr(layout, "mesh", None), jax.sharding.AbstractMesh) for layout in layouts)
    devices = set() if traced else {d for layout in layouts if layout is not None for d in layout.device_set}
    if not nodes or traced or len(devices) > 1:
        return function(params)
    is_array = [isinstance(x, jax.Array) for x in nodes]  # others are shapes, which no program takes

    def run(arrays):
        held = iter(arrays)
        full = treedef.unflatten(next(held) if is_one else x for x, is_one in zip(nodes, is_array, strict=True))
        return function(full)

    with jax.default_device(next(iter(devices), None)):
        return jax.jit(run)([x for x, is_one in zip(nodes, is_array, strict=True) if is_one])
