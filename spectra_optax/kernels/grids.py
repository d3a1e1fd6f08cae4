"""How a matrix is cut into the tiles of a platform.

A TPU's tile fills an on-chip memory of megabytes, in whole registers of 8 rows of 128 columns, and may overhang the
matrix. A GPU's fills the registers of its threads, and every side is a power of two that divides the matrix's.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.sharding import NamedSharding

from spectra_optax.kernels import launching
from spectra_optax.kernels.shards import Follows, NotLocalError, shard_of

_LANES = 128  # columns of a TPU's tile, which has 8 rows of 32 bits
_ROWS, _SECTOR = 32, 16  # of a GPU's tile: a group of codes, as many numbers as a fetch brings at the least
_NUMBERS, _LARGEST = 2**17, 2**18  # of each array in a tile: a dozen float32 copies of them fit beside each other


class Grid(NamedTuple):
    """How a matrix `[*batch, r, c]` is cut into tiles."""

    shape: tuple[int, ...]
    block: int  # rows that belong together
    rows: int  # of a tile, a multiple of `block`
    columns: int  # of a tile
    layout: NamedSharding | None = None  # of the matrix over several devices

    @property
    def tile(self) -> tuple[int, ...]:
        """The shape of a tile: a matrix of as many axes."""
        return (*(1 for _ in self.shape[:-2]), self.rows, self.columns)

    def follows(self, shape: Sequence[int], view: Sequence[int]) -> Follows | None:
        """How an array runs along the matrix, of which a rule sees tiles of the shape `view`; None if it does not."""
        *batch, r, c = self.shape
        if len(shape) != len(self.shape) or list(shape[:-2]) != batch or shape[-1] not in (1, c):
            return None
        per_block = shape[-2] * self.block // r if shape[-2] * self.block % r == 0 else None
        ways = [Follows(per_block, shape[-1] == c), *([Follows(None, shape[-1] == c)] if shape[-2] == 1 else [])]
        return next((f for f in ways if math.prod(self.view(f)) == math.prod(view)), None)

    def view(self, follows: Follows) -> tuple[int, int, int]:
        """The shape of a tile of such an array as a stack of blocks."""
        width = self.columns if follows.columns else 1
        return (self.rows // self.block, follows.per_block, width) if follows.per_block else (1, 1, width)

    def spec(self, follows: Follows) -> pl.BlockSpec:
        """Where the tiles of such an array, `[batch, s, c]`, lie."""
        n, s, width = self.view(follows)
        place = lambda b, i, j: (b, i if follows.per_block else 0, j if follows.columns else 0)
        return pl.BlockSpec((None, n * s, width), place)

    def whole(self, follows: Follows) -> tuple[int, ...]:
        """The shape of such an array."""
        *batch, r, c = self.shape
        rows = r // self.block * follows.per_block if follows.per_block else 1
        return (*batch, rows, c if follows.columns else 1)


def grid(shape: Sequence[int], block: int, arrays: Sequence[Any], layout: NamedSharding | None = None) -> Grid:
    """Cuts a matrix into the tiles of the platform.

    Raises:
      NotLocalError: if the platform has no tiles for it.
    """
    tile = _in_threads if launching.is_gpu() else _in_registers
    return Grid(tuple(shape), block, *tile(shape, block, arrays, shard_of(layout, shape)), layout)


def _in_registers(shape: Sequence[int], block: int, arrays: Sequence[Any], shard: Sequence[int]) -> tuple[int, int]:
    """A TPU's tile: every array with rows of its own has whole registers of them."""
    rows = block
    for array in arrays:
        per_block = array.shape[-2] * block // shape[-2] if array.ndim == len(shape) else 0
        if per_block:
            registers = 8 * max(1, 4 // jnp.dtype(array.dtype).itemsize)
            rows = math.lcm(rows, block * registers // math.gcd(per_block, registers))
    rows *= max(1, _NUMBERS // (2 * _LANES) // rows)
    rows = min(rows, shard[-2])  # a whole side needs no registers
    if rows % block or rows * _LANES > _LARGEST:
        raise NotLocalError(f"{rows} rows of a matrix {shape} in blocks of {block} make no tile.")
    return rows, min(max(1, _NUMBERS // rows // _LANES), -(-shape[-1] // _LANES)) * _LANES


def _in_threads(shape: Sequence[int], block: int, arrays: Sequence[Any], shard: Sequence[int]) -> tuple[int, int]:
    """A GPU's tile: powers of two that fill the shard, whole blocks by whole sectors of memory."""
    rows = max(block, launching.power_of_two(shard[-2], _ROWS))
    columns = launching.power_of_two(shard[-1], max(launching.NUMBERS_OF_GPU // rows, _SECTOR))
    if block & (block - 1) or shard[-2] % rows or columns < _SECTOR:
        raise NotLocalError(f"Blocks of {block} rows of a matrix {shard} make no tile.")
    return rows, columns
