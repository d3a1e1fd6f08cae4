"""Sums over the rows, the columns and the whole of a matrix, all from one pass.

On TPUs a tile is some rows of the matrix, whole: sums over columns are complete with it, those over rows stay in fast
memory until the last. On GPUs tiles do not follow each other, so each writes sums of its own, at most 1/8 byte per
number of the matrix each, which are then added up, in the same order each time. Sharded matrices are summed shard by
shard, and then across the shards that share a row or a column.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding

from spectra_optax.kernels import launching
from spectra_optax.kernels.shards import Follows, NotLocalError, per_shard

Kept = Literal["rows", "columns", "none"]  # which axis of the matrix a sum still has

_NUMBERS = 2**18  # of a TPU's tile
_ROWS, _COLUMNS, _FEWEST = 64, 128, 2**10  # of a GPU's; numbers that are worth a tile there
_KEPT = {"rows": Follows(1, False), "columns": Follows(None, True), "none": Follows(None, False)}
_SUMMED: dict[Kept, tuple[int, ...]] = {"rows": (-1,), "columns": (-2,), "none": (-2, -1)}


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
      NotLocalError: if the matrix cannot be cut into the platform's tiles.
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
    count, apart = math.prod(batch), launching.is_gpu()
    rows, columns = _tile_of_gpu(r, c) if apart else (_rows_of_tile(r, c, 8 * 4 // inputs[1].dtype.itemsize), c)
    tiles = (r // rows, c // columns)

    def spec(follows: Follows, apart: bool) -> pl.BlockSpec:
        place = lambda b, i, j: (b, i if follows.per_block or apart else 0, j if follows.columns or apart else 0)
        return pl.BlockSpec((None, rows if follows.per_block else 1, columns if follows.columns else 1), place)

    def shape(follows: Follows) -> jax.ShapeDtypeStruct:
        n, m = tiles if apart else (1, 1)
        return jax.ShapeDtypeStruct((count, r if follows.per_block else n, c if follows.columns else m), jnp.float32)

    gives = [_KEPT[k] for k in kept]
    outputs = launching.launch(
        functools.partial(_body, rule, kept, apart),
        out_shape=[shape(f) for f in gives],
        grid=(count, *tiles),
        numbers=rows * columns,
        in_specs=[launching.scalars(), *(spec(f, False) for f in takes[1:] if f)],
        out_specs=[spec(f, apart) for f in gives],
    )(inputs[0], *(x.reshape(count, *x.shape[-2:]) for x in inputs[1:]))
    summed = [jnp.sum(x, axis=_SUMMED[k], keepdims=True) if apart else x for x, k in zip(outputs, kept, strict=True)]
    return [x.reshape(*batch, *x.shape[-2:]) for x in summed]


def _body(rule: Callable, kept: Sequence[Kept], apart: bool, scalars: Any, *refs: Any) -> None:
    """One tile."""
    inputs, outputs = refs[: -len(kept)], refs[-len(kept) :]
    arrays = rule(scalars, *(ref[...].astype(jnp.float32) for ref in inputs))
    for array, k, ref in zip(arrays, kept, outputs, strict=True):
        part = array
        for axis in _SUMMED[k]:
            part = jnp.sum(part, axis=axis, keepdims=True)
        ref[...] = part if apart or k == "rows" else jnp.where(pl.program_id(1) == 0, part, ref[...] + part)


def _rows_of_tile(r: int, c: int, registers: int) -> int:
    """Rows of a TPU's tile: whole registers of them, and as many tiles as fit the matrix."""
    fitting = [n for n in range(registers, r + 1, registers) if r % n == 0 and n * c <= _NUMBERS]
    if not fitting:
        raise NotLocalError(f"A matrix {r} x {c} cannot be cut into whole rows.")
    return fitting[-1]


def _tile_of_gpu(r: int, c: int) -> tuple[int, int]:
    """Rows and columns of a GPU's tile."""
    rows, columns = launching.power_of_two(r, _ROWS), launching.power_of_two(c, _COLUMNS)
    if rows * columns < _FEWEST:
        raise NotLocalError(f"A matrix {r} x {c} cannot be cut into tiles.")
    return rows, columns


def _flat(names: Any) -> tuple[Any, ...]:
    return names if isinstance(names, tuple) else (names,) if names is not None else ()
