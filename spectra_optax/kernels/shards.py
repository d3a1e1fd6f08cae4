"""Runs a kernel on each shard of a sharded matrix: no shard talks to another.

XLA cannot cut a kernel, and for TPUs it has no way to be told how (`custom_partitioning` is not supported there). So
the layout must be known while tracing: from the types of arrays where the mesh's axes are Explicit, from the user where
they are Auto. What follows the rows of a matrix is cut with them, between blocks, and what follows its columns with
those.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from spectra_optax import backend

Kernel = Callable[..., tuple[jax.Array, ...]]


class NotLocalError(Exception):
    """A rule cannot be run on tiles; the plain formula can."""


class Follows(NamedTuple):
    """How an array `[*batch, s, t]` runs along a matrix `[*batch, r, c]`."""

    per_block: int | None  # its rows for each block of the matrix's, or None for one row in all
    columns: bool  # whether t is c; otherwise it is 1


def layout_of(x: jax.Array, told: NamedSharding | None) -> NamedSharding | None:
    """How an array lies over devices, None if on one; `told` by the user if not None.

    Raises:
      NotLocalError: if that is not known while tracing.
    """
    layout = told if told is not None else jax.typeof(x).sharding
    if told is None and layout.mesh.empty:
        if backend.devices() > 1:
            raise NotLocalError("Whether it lies on several devices only the compiler knows.")
        return None
    if layout.mesh.size == 1 and not any(layout.spec):
        return None
    types = set(layout.mesh.axis_types)
    if AxisType.Manual in types:
        raise NotLocalError("Inside `jax.shard_map` results vary between devices, which a kernel does not say.")
    if told is None and types != {AxisType.Explicit} and layout.mesh.size > 1:
        raise NotLocalError("How it lies over the devices of an Auto mesh only the compiler knows.")
    return layout


def shard_of(layout: NamedSharding | None, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of what a device holds of an array.

    Raises:
      NotLocalError: if not all hold as much.
    """
    try:
        return tuple(shape) if layout is None else layout.shard_shape(tuple(shape))
    except ValueError as error:
        raise NotLocalError(str(error)) from None


def per_shard(
    kernel: Kernel,
    arrays: Sequence[jax.Array],
    takes: Sequence[Follows | None],
    gives: Sequence[Follows],
    layout: NamedSharding | None,
    shape: Sequence[int],
    block: int,
) -> tuple[jax.Array, ...]:
    """Calls `kernel(*arrays)` on the shards of its arguments.

    Args:
      kernel: works on any part of the matrix that holds whole blocks.
      arrays: its arguments.
      takes: how each follows the matrix; None for those that every shard needs whole.
      gives: the same of its results.
      layout: of the matrix; None on one device.
      shape: of the matrix.
      block: rows that belong together.

    Raises:
      NotLocalError: if a shard would cut a block.
    """
    if layout is None:
        return kernel(*arrays)
    *batch, rows, columns = (*layout.spec, *(None,) * (len(shape) - len(layout.spec)))
    if shard_of(layout, shape)[-2] % block:
        raise NotLocalError(f"Shards would cut one of {shape[-2] // block} blocks.")

    def spec(follows: Follows | None) -> PartitionSpec:
        if follows is None:
            return PartitionSpec()
        return PartitionSpec(*batch, rows if follows.per_block else None, columns if follows.columns else None)

    inside, outside = tuple(map(spec, takes)), tuple(map(spec, gives))
    if AxisType.Explicit in layout.mesh.axis_types:
        places = (NamedSharding(layout.mesh, p) for p in inside)
        arrays = [jax.sharding.reshard(x, place) for x, place in zip(arrays, places, strict=True)]
    return jax.shard_map(kernel, mesh=layout.mesh, in_specs=inside, out_specs=outside, check_vma=False)(*arrays)
