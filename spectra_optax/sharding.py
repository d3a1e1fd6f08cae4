"""What the state of a leaf looks like, and how it is laid out over devices: like its parameter.

A `Slot` describes one array of a leaf's state from shapes alone. It names, for each of its axes, the axis of the
parameter that it runs along, so that a parameter's sharding can be carried over, and how many neighbours along an axis
belong together (the coefficients of one block), so that no shard cuts them.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

USUAL_SHARDS = 8  # on an axis, and a divisor of the greater numbers


class Slot(NamedTuple):
    """One array of a leaf's state.

    Attributes:
      shape: its global shape.
      dtype: its dtype.
      axes: for each of its axes, the parameter's axis that it runs along, or None.
      run: for each axis, how many neighbours belong together.
      value: what it holds at the start; broadcast to `shape`.
    """

    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[int | None, ...]
    run: tuple[int, ...]
    value: Any = 0.0


def slot(
    shape: Sequence[int],
    dtype: Any,
    axes: Sequence[int | None],
    *,
    run: Mapping[int, int] | None = None,
    value: Any = 0.0,
) -> Slot:
    """Builds a `Slot`; `run` gives only the axes whose neighbours belong together."""
    runs = {axis % len(shape): length for axis, length in (run or {}).items()}
    return Slot(tuple(shape), jnp.dtype(dtype), tuple(axes), tuple(runs.get(a, 1) for a in range(len(shape))), value)


def start(s: Slot, param: Any) -> jax.Array:
    """The slot's first value, sharded like its parameter."""
    if isinstance(param, jax.core.Tracer):  # what varies between the devices of a `jax.shard_map` has a type of its own
        zeros = jnp.zeros_like(param, dtype=s.dtype, shape=s.shape, device=carried(s, param))
    else:
        zeros = jnp.zeros_like(jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=carried(s, param)))
    if isinstance(s.value, float) and s.value == 0:
        return zeros
    return zeros + jnp.broadcast_to(jnp.asarray(s.value, s.dtype), s.shape)


def fits(s: Slot, shape: Sequence[int]) -> bool:
    """Whether names of mesh axes written for a parameter of this shape can be laid on the slot as they are.

    Where the slot is shorter, a usual number of shards must find whole runs; which mesh it will be is not known yet.
    """
    if s.axes != tuple(range(len(shape))):
        return False
    return all(n == m or n // run % USUAL_SHARDS == 0 for n, m, run in zip(s.shape, shape, s.run, strict=True))


def of(x: Any) -> Any:
    """The sharding of an array, a tracer (its explicit axes) or an abstract array; None where it has none."""
    return jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)


def like(x: jax.Array, other: jax.Array, axes: Sequence[int] | None = None) -> jax.Array:
    """Lays `x` out over an explicit mesh as `other` lies, on the given axes (all if None); elsewhere a no-op."""
    layout = jax.typeof(other).sharding
    if not any(layout.spec) and not any(jax.typeof(x).sharding.spec):
        return x
    spec = tuple(name if axes is None or a in axes else None for a, name in enumerate(layout.spec))
    return _reshard(x, layout, spec) if tuple(jax.typeof(x).sharding.spec) != spec else x


def undivided(x: jax.Array, axis: int, parts: int) -> jax.Array:
    """Gathers `x` along an explicit axis unless its shards each hold a whole number of `parts`; mostly a no-op."""
    layout = jax.typeof(x).sharding
    spec = list(layout.spec) + [None] * (x.ndim - len(layout.spec))
    if parts % _shards(layout.mesh, spec[axis]) == 0:
        return x
    spec[axis] = None
    return _reshard(x, layout, spec)


def _reshard(x: jax.Array, layout: NamedSharding, spec: Sequence[Any]) -> jax.Array:
    """Names the mesh, so that no `jax.set_mesh` is needed."""
    return jax.sharding.reshard(x, NamedSharding(layout.mesh, PartitionSpec(*spec)))


def carried(s: Slot, param: Any) -> jax.sharding.Sharding | None:
    """The parameter's sharding carried over to a slot; an axis that shards would cut within a run is replicated."""
    sharding = of(param)
    if not isinstance(sharding, NamedSharding):
        return sharding if getattr(param, "committed", False) and sharding.is_fully_replicated else None
    if isinstance(param, jax.core.Tracer) and not any(sharding.spec):
        return None
    spec = tuple(sharding.spec) + (None,) * (len(param.shape) - len(sharding.spec))
    names = [None if axis is None else spec[axis] for axis in s.axes]
    kept = (
        name if n // run % _shards(sharding.mesh, name) == 0 else None
        for name, n, run in zip(names, s.shape, s.run, strict=True)
    )
    return NamedSharding(sharding.mesh, PartitionSpec(*kept))


def _shards(mesh: Any, name: Any) -> int:
    names = name if isinstance(name, tuple) else (name,)
    return math.prod(mesh.shape[n] for n in names if n is not None)
