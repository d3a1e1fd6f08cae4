"""Sums over the rows, the columns and the whole of a matrix, all from one pass.

A tile is some rows of the matrix, whole: sums over columns are complete with it, those over rows stay in fast memory
until the last. Sharded matrices are summed shard by shard, and then across the shards that share a row or a column.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding

from spectra_optax import backend
from spectra_optax.kernels.shards import Follows, NotLocalError, per_shard

Kept = Literal["rows", "columns", "none"]  # which axis of the matrix a sum still has

_NUMBERS = 2**18  # of a tile
_KEPT = {"rows": Follows(1, False), "columns": Follows(None, True), "none": Follows(None, False)}


def sums(
    rule: Callable[..., Sequence[jax.Array]],
    matrix: jax.Array,
    others: Sequence[jax.Array],
    scalars: Sequence[jax.Array],
    kept: Sequence[Kept],
    layout: NamedSharding | None,
) -> Sequence[jax.Array]:
    """Computes arrays from a matrix, number by number, and returns only sums of them.

    Args:
      rule: `(scalars, matrix, *others) -> arrays` as large as the matrix, on float32 parts of it.
      matrix: `[..., r, c]`.
      others: float32 `[..., r, 1]` or `[..., 1, c]`.
      scalars: numbers for the rule, a list of float32.
      kept: for each array, which axis its sums keep.
      layout: of the matrix over devices, None on one.

    Returns:
      Sums, float32 `[..., r, 1]`, `[..., 1, c]` or `[..., 1, 1]`.

    Raises:
      NotLocalError: if the matrix cannot be cut into whole rows.
    """
    takes = [None, Follows(1, True), *(_KEPT["rows" if x.shape[-1] == 1 else "columns"] for x in others)]
    gives = [_KEPT[k] for k in kept]
    names = [None] * matrix.ndim if layout is None else [*layout.spec, *(None,) * (matrix.ndim - len(layout.spec))]
    lost = {"rows": names[-1], "columns": names[-2], "none": tuple(n for n in map(_flat, names[-2:]) for n in n)}
    kernel = functools.partial(_one_pass, rule, takes, kept)

    def shared(*arrays):
        return tuple(jax.lax.psum(x, lost[k]) if lost[k] else x for x, k in zip(kernel(*arrays), kept, strict=True))

    packed = jnp.stack([jnp.asarray(s, jnp.float32) for s in scalars] or [jnp.zeros([])])
    return per_shard(shared, [packed, matrix, *others], takes, gives, layout, matrix.shape, 1)


def _one_pass(rule: Callable, takes: Sequence[Follows | None], kept: Sequence[Kept], *inputs: jax.Array):
    """The sums of a shard."""
    *batch, r, c = inputs[1].shape
    rows = _rows_of_tile(r, c, 8 * 4 // inputs[1].dtype.itemsize)
    count = math.prod(batch)

    def spec(follows: Follows) -> pl.BlockSpec:
        place = lambda b, i: (b, i if follows.per_block else 0, 0)
        return pl.BlockSpec((None, rows if follows.per_block else 1, c if follows.columns else 1), place)

    gives = [_KEPT[k] for k in kept]
    outputs = pl.pallas_call(
        functools.partial(_body, rule, kept),
        out_shape=[
            jax.ShapeDtypeStruct((count, r if f.per_block else 1, c if f.columns else 1), jnp.float32) for f in gives
        ],
        grid=(count, r // rows),
        in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), *(spec(f) for f in takes[1:] if f)],
        out_specs=[spec(f) for f in gives],
        interpret=backend.name() != "tpu",
    )(inputs[0], *(x.reshape(count, *x.shape[-2:]) for x in inputs[1:]))
    return [x.reshape(*batch, *x.shape[-2:]) for x in outputs]


def _body(rule: Callable, kept: Sequence[Kept], scalars: Any, *refs: Any) -> None:
    """One tile."""
    inputs, outputs = refs[: -len(kept)], refs[-len(kept) :]
    arrays = rule(scalars, *(ref[...].astype(jnp.float32) for ref in inputs))
    is_first = pl.program_id(1) == 0
    for array, k, ref in zip(arrays, kept, outputs, strict=True):
        if k == "rows":
            ref[...] = jnp.sum(array, axis=1, keepdims=True)
            continue
        part = jnp.sum(array, axis=0, keepdims=True)
        part = jnp.sum(part, axis=1, keepdims=True) if k == "none" else part
        ref[...] = jnp.where(is_first, part, ref[...] + part)


def _rows_of_tile(r: int, c: int, registers: int) -> int:
    """Rows of a tile: whole registers of them, and as many tiles as fit the matrix."""
    fitting = [n for n in range(registers, r + 1, registers) if r % n == 0 and n * c <= _NUMBERS]
    if not fitting:
        raise NotLocalError(f"A matrix {r} x {c} cannot be cut into whole rows.")
    return fitting[-1]


def _flat(names: Any) -> tuple[Any, ...]:
    return names if isinstance(names, tuple) else (names,) if names is not None else ()
