"""How the state of any optimizer lies over a mesh, given how its parameters do, without building either.

`init` is traced on shapes whose types carry the parameters' specs (an explicit mesh); what its arrays follow of them is
read off the types of the state. An array without one of the parameter's axes loses that axis's name. Where blocks or
groups would be cut, `init` keeps the axis whole: traced again on a mesh with one device an axis, where nothing is cut,
it names the axis, and the difference is an error here.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from spectra_optax.fields import owner
from spectra_optax.lift import is_box, named, path_name

Layout = PartitionSpec | NamedSharding
_is_layout = lambda node: node is None or isinstance(node, Layout)


class _Axes(NamedTuple):
    """A mesh as sizes by name, which need not be those of any devices."""

    sizes: dict[str, int]

    def shards(self, entry: Any) -> int:
        return math.prod(self.sizes[name] for name in _names(entry))

    def mesh(self) -> AbstractMesh:
        kinds = (AxisType.Explicit,) * len(self.sizes)
        return AbstractMesh(tuple(self.sizes.values()), tuple(self.sizes), axis_types=kinds)


def state_sharding(tx: optax.GradientTransformation, params: Any, param_specs: Any) -> Any:
    """Says how each array of an optimizer's state is sharded, given how the parameters are.

    Use it as `jax.jit(tx.init, out_shardings=state_sharding(tx, params, shardings))(params)`, which never holds more
    than the final shards, or to restore a checkpoint.

    Args:
      tx: any Optax transformation.
      params: parameters, or their shapes (`jax.eval_shape`); Linen's boxes and NNX states are welcome.
      param_specs: a `NamedSharding` or `PartitionSpec` for each parameter, or for a whole branch of them, as
        `nn.get_partition_spec` and `nnx.get_partition_spec` give them; None is replicated.

    Returns:
      A tree like the state, `tx.init(params)`. Its leaves are shardings on the parameters' mesh, or partition specs if
      those were given; axis sizes then are those of `jax.set_mesh`, without which no axis is checked against its size.

    Raises:
      ValueError: if a spec cuts a parameter unevenly, or cuts a run of the state (a block, or a group with one scale):
        the message names leaf, axis and the sizes that work; if a parameter has no spec, or meshes differ.
      TypeError: if `param_specs` holds anything else, or both kinds.

    Example:
      >>> import jax
      >>> from jax.sharding import PartitionSpec
      >>> from spectra_optax import scale_by_factored_rms, state_sharding
      >>> params = {"kernel": jax.ShapeDtypeStruct((512, 256), "float32")}
      >>> state = state_sharding(scale_by_factored_rms(), params, {"kernel": PartitionSpec("data", "model")})
      >>> state.rms_row, state.rms_col
      ({'kernel': P('data',)}, {'kernel': P('model',)})
    """
    layouts = _layouts(params, param_specs)
    mesh = _mesh(layouts)
    sizes = dict(mesh.shape) if mesh is not None else dict(jax.sharding.get_abstract_mesh().shape)
    specs = {path: x.spec if isinstance(x, NamedSharding) else x for path, x in layouts.items()}
    used = [name for spec in specs.values() for entry in spec for name in _names(entry)]
    if not sizes:
        sizes = dict.fromkeys(used, 1)
    unknown = sorted(set(used) - set(sizes))
    if unknown:
        raise ValueError(f"param_specs names axes that the mesh {sizes} does not have: {unknown}.")
    axes = _Axes(sizes)
    for path, x in named(params):
        _check_even(path, x.shape, specs[path], axes)
    state = _traced(tx, params, specs, axes)
    _check_whole(tx, params, specs, axes, state)
    placed = lambda spec: spec if mesh is None else NamedSharding(mesh, spec)
    return jax.tree.map(lambda x: placed(_spec(x)), state)


def _layouts(params: Any, param_specs: Any) -> dict[str, Layout]:
    """The layout of each parameter by path: its own entry's, or that of the branch it is on."""
    flat = jax.tree_util.tree_flatten_with_path(param_specs, is_leaf=lambda node: _is_layout(node) or is_box(node))[0]
    given = {path_name(path): _unboxed(node) for path, node in flat}
    for path, layout in given.items():
        if not _is_layout(layout):
            raise TypeError(f"param_specs must hold a PartitionSpec or NamedSharding at {path!r}, got {layout!r}.")
    found: dict[str, Layout] = {}
    for path, _ in named(params):
        parts = path.split("/")
        branches = ["/".join(parts[:n]) for n in range(len(parts), -1, -1)]
        branch = next((b for b in branches if b in given), None)
        if branch is None:
            raise ValueError(f"param_specs has no entry for parameter {path!r}; it has {sorted(given)}.")
        found[path] = PartitionSpec() if given[branch] is None else given[branch]
    return found


def _unboxed(node: Any) -> Any:
    return next(iter(jax.tree.leaves(node, is_leaf=_is_layout)), None) if is_box(node) else node


def _mesh(layouts: dict[str, Layout]) -> Any:
    """The one mesh of all layouts; None if they are partition specs."""
    meshes = {path: x.mesh for path, x in layouts.items() if isinstance(x, NamedSharding)}
    others = [path for path, x in layouts.items() if x != PartitionSpec() and path not in meshes]
    if meshes and others:
        raise TypeError(
            f"param_specs must be all NamedShardings or all PartitionSpecs; those of {others} are no shardings."
        )
    if len(set(meshes.values())) > 1:
        raise ValueError(f"param_specs must lie on one mesh, got {list(set(meshes.values()))}.")
    return next(iter(meshes.values()), None)


def _traced(tx: optax.GradientTransformation, params: Any, specs: dict[str, PartitionSpec], axes: _Axes) -> Any:
    """The state's shapes, whose shardings say which names their axes took from the parameters."""
    mesh = axes.mesh()
    placed = iter([NamedSharding(mesh, specs[path]) for path, _ in named(params)])
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=next(placed)), params)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # the user's would not go with the one in the types
        return jax.eval_shape(tx.init, shapes)


def _check_even(path: str, shape: tuple[int, ...], spec: PartitionSpec, axes: _Axes) -> None:
    if len(spec) > len(shape):
        raise ValueError(f"The spec of parameter {path!r} has {len(spec)} axes, {spec}, but its shape is {shape}.")
    for axis, entry in enumerate(spec):
        if shape[axis] % axes.shards(entry):
            works = [n for n in range(2, axes.shards(entry)) if shape[axis] % n == 0]
            raise ValueError(
                f"Parameter {path!r} {list(shape)} cannot be cut along axis {axis} into {axes.shards(entry)} shards "
                f"over {entry!r}; sizes that work are {_listed(works)}."
            )


def _check_whole(tx: Any, params: Any, specs: dict[str, PartitionSpec], axes: _Axes, state: Any) -> None:
    """Refuses a layout of which the state kept less than it would on one device an axis."""
    whole = lambda sizes: _traced(tx, params, specs, _Axes(dict.fromkeys(axes.sizes, 1) | sizes))
    flat = jax.tree_util.tree_flatten_with_path(state)[0]
    paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]]
    for i, ((path, x), full) in enumerate(zip(flat, jax.tree.leaves(whole({})), strict=True)):
        for axis, (kept, wanted) in enumerate(zip(_entries(x), _entries(full), strict=True)):
            if kept == wanted:
                continue
            leaf = owner(path, paths)
            works = _sizes_that_work(whole, i, axis, wanted, x.shape[axis], axes.shards(wanted))
            raise ValueError(
                f"The layout {specs.get(path_name(leaf), PartitionSpec())} of parameter {path_name(leaf)!r} would cut "
                f"axis {axis} of its state {path_name(path)!r}, {x.dtype}{list(x.shape)}, into the "
                f"{axes.shards(wanted)} shards of {wanted!r}, and with it blocks or groups that belong together; "
                f"sizes that work are {_listed(works)}."
            )


def _sizes_that_work(
    whole: Callable[[dict[str, int]], Any], leaf: int, axis: int, entry: Any, length: int, shards: int
) -> list[int]:
    """Numbers of shards below the refused one that cut nothing, found by trying the divisors of the axis."""
    first = _names(entry)[0]
    tried = [n for n in range(2, shards) if length % n == 0]
    return [n for n in tried if _entries(jax.tree.leaves(whole({first: n}))[leaf])[axis] == entry]


def _listed(sizes: list[int]) -> str:
    return ", ".join(map(str, [1, *sizes]))


def _spec(x: Any) -> PartitionSpec:
    return x.sharding.spec if x.sharding is not None else PartitionSpec()


def _entries(x: Any) -> tuple[Any, ...]:
    spec = tuple(_spec(x))
    return spec + (None,) * (len(x.shape) - len(spec))


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else entry if isinstance(entry, tuple) else (entry,)
