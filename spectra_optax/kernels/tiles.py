"""Runs a rule on tiles of a matrix in one pass: every array is read once and every result written once.

A tile of a matrix `[r, c]` is a stack of blocks `[n, b, w]`: `b` rows that belong together, `w` columns. Slices of a
stack do not know of each other, so a rule that is local to blocks can be run on each tile as if it were the whole, and
the kernel's body is the rule itself. What a state holds for the rows, `[s, c]`, is cut alongside, `[n, s b / r, w]`.

Bytes moved: those of the arguments and results. Compiled by Pallas for TPUs, interpreted elsewhere.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding

from spectra_optax import backend
from spectra_optax.kernels import program as programs
from spectra_optax.kernels.shards import Follows, NotLocalError, per_shard, shards_of_rows

_DTYPES = frozenset(("float32", "bfloat16", "int8", "uint8", "int32"))
_LANES = 128  # columns of a TPU's tile, which has 8 rows of 32 bits
_NUMBERS, _LARGEST = 2**17, 2**18  # of each array in a tile: a dozen float32 copies of them fit beside each other


class Grid(NamedTuple):
    """How a matrix `[*batch, r, c]` is cut into tiles."""

    shape: tuple[int, ...]
    block: int  # rows that belong together
    rows: int  # of a tile, a multiple of `block`
    columns: int  # of a tile, a multiple of 128
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
    """Cuts a matrix into tiles in which every array with rows of its own has whole registers of them.

    Raises:
      NotLocalError: if the tiles would be too large.
    """
    rows = block
    for array in arrays:
        per_block = array.shape[-2] * block // shape[-2] if array.ndim == len(shape) else 0
        if per_block:
            registers = 8 * max(1, 4 // jnp.dtype(array.dtype).itemsize)
            rows = math.lcm(rows, block * registers // math.gcd(per_block, registers))
    rows *= max(1, _NUMBERS // (2 * _LANES) // rows)
    rows = min(rows, shape[-2] // shards_of_rows(layout, len(shape)))  # a whole side needs no registers
    if rows % block or rows * _LANES > _LARGEST:
        raise NotLocalError(f"{rows} rows of a matrix {shape} in blocks of {block} make no tile.")
    columns = min(max(1, _NUMBERS // rows // _LANES), -(-shape[-1] // _LANES)) * _LANES
    return Grid(tuple(shape), block, rows, columns, layout)


def run(rule: Callable, cut: Grid, arrays: Sequence[jax.Array], views: Sequence[tuple[int, ...]], like: Sequence[int]):
    """Computes `rule(*arrays)`, a list of arrays, on tiles.

    Args:
      rule: local to blocks of `cut.block` rows.
      cut: the tiles.
      arrays: scalars, arrays that follow the matrix, and others, which the rule may only return.
      views: the shape in which the rule sees a tile of each.
      like: for each result, which argument it replaces: it follows the matrix as that does and takes its place in
        memory, except that nothing is written over the first.

    Raises:
      NotLocalError: if the rule needs an array that does not follow the matrix.
    """
    if not _DTYPES.issuperset(str(x.dtype) for x in arrays if x.ndim):
        raise NotLocalError(f"Kernels take {', '.join(sorted(_DTYPES))}.")
    following = [cut.follows(x.shape, view) if x.ndim else None for x, view in zip(arrays, views, strict=True)]
    traced = programs.program(rule, [jax.ShapeDtypeStruct(v, x.dtype) for v, x in zip(views, arrays, strict=True)])
    values = dict(zip(traced.inputs, arrays, strict=True)) | traced.constants
    programs.evaluate(traced.before, values)
    places = {
        v: i for v, i in zip(traced.outputs, like, strict=True) if v in programs.variables([v]) and v not in values
    }
    if places:
        body, used = programs.needed(traced.inside, places)
        takes = dict(zip(traced.inputs, following, strict=True))
        gives = {v: follows for v, i in places.items() if (follows := following[i]) is not None}
        if len(gives) < len(places) or any(v.aval.ndim and v in takes and takes[v] is None for v in used):
            raise NotLocalError("The rule uses or changes an array that does not follow the matrix.")
        scalars, taken = [v for v in used if not v.aval.ndim], {v: takes.get(v) for v in used if v.aval.ndim}
        written = {v: traced.inputs[i] for v, i in places.items() if i}
        values |= _Kernel(cut, body, scalars, taken, gives, written).launched(values)
    return [programs.value(v, values) for v in traced.outputs]


class _Kernel(NamedTuple):
    """The part of a rule that runs on tiles.

    Attributes:
      cut: the tiles.
      body: its equations.
      scalars: the variables without axes that it takes.
      takes: the others, and how they follow the matrix; None for constants.
      gives: the variables that it computes, the same.
      places: for some of these, the argument in whose memory they are written.
    """

    cut: Grid
    body: list[Any]
    scalars: list[Any]
    takes: dict[Any, Follows | None]
    gives: dict[Any, Follows]
    places: dict[Any, Any]

    def launched(self, values: dict[Any, Any]) -> dict[Any, jax.Array]:
        """The results, computed on every shard."""
        *batch, r, c = self.cut.shape
        rows = jnp.broadcast_to(jnp.arange(r, dtype=jnp.int32)[:, None], (*batch, r, 1))
        columns = jnp.broadcast_to(jnp.arange(c, dtype=jnp.int32), (*batch, 1, c))
        inputs = [*(_packed(pack, values) for pack in self._packs()), rows, columns, *(values[v] for v in self.takes)]
        gives, cut = list(self.gives.values()), self.cut
        results = per_shard(self._call, inputs, self._follows(), gives, cut.layout, cut.shape, cut.block)
        return dict(zip(self.gives, results, strict=True))

    def _packs(self) -> list[list[Any]]:
        """Floating scalars, and the others; without empty ones."""
        kinds = [[], []]
        for v in self.scalars:
            kinds[not jnp.issubdtype(v.aval.dtype, jnp.floating)].append(v)
        return [kind for kind in kinds if kind]

    def _follows(self) -> list[Follows | None]:
        """How what a kernel is called with follows the matrix: scalars, numbers of rows and columns, arrays."""
        return [
            *(None for _ in self._packs()),
            Follows(self.cut.block, False),
            Follows(None, True),
            *self.takes.values(),
        ]

    def _call(self, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        """One pass over a shard."""
        follows, ahead = self._follows(), len(self._packs())
        *batch, r, _ = inputs[ahead].shape
        cut = self.cut._replace(shape=(*batch, r, inputs[ahead + 1].shape[-1]))
        count, arrays = math.prod(batch), list(self.takes)
        outputs = pl.pallas_call(
            self._body,
            out_shape=[jax.ShapeDtypeStruct((count, *cut.whole(f)[-2:]), v.aval.dtype) for v, f in self.gives.items()],
            grid=(count, pl.cdiv(r, cut.rows), pl.cdiv(cut.shape[-1], cut.columns)),
            in_specs=[_everywhere(x) if f is None else cut.spec(f) for x, f in zip(inputs, follows, strict=True)],
            out_specs=[cut.spec(f) for f in self.gives.values()],
            input_output_aliases={
                ahead + 2 + arrays.index(self.places[v]): k
                for k, v in enumerate(self.gives)
                if v in self.places and self.places[v] in arrays and self.places[v].aval.dtype == v.aval.dtype
            },
            interpret=backend.name() != "tpu",
        )(*(x.reshape(-1, *x.shape[-2:]) if f else x for x, f in zip(inputs, follows, strict=True)))
        return tuple(x.reshape(*batch, *x.shape[-2:]) for x in outputs)

    def _body(self, *refs: Any) -> None:
        """One tile."""
        values, inputs = {}, iter(refs)
        for pack in self._packs():
            ref = next(inputs)
            values |= {v: ref[i].astype(v.aval.dtype) for i, v in enumerate(pack)}
        rows, columns = next(inputs)[...], next(inputs)[...]
        values |= {v: next(inputs)[...].reshape(v.aval.shape) for v in self.takes}
        programs.evaluate(self.body, values, programs.Place(len(self.cut.shape), rows, columns))
        for v, ref in zip(self.gives, inputs, strict=True):
            ref[...] = values[v].reshape(ref.shape)


def _packed(pack: Sequence[Any], values: dict[Any, Any]) -> jax.Array:
    """Scalars of one kind as one array of 32-bit numbers."""
    dtype = jnp.float32 if jnp.issubdtype(pack[0].aval.dtype, jnp.floating) else jnp.int32
    return jnp.stack([jnp.asarray(values[v]).astype(dtype) for v in pack])


def _everywhere(x: jax.Array) -> pl.BlockSpec:
    """Scalars in the scalar unit's memory, constants whole in each tile."""
    if x.ndim == 1:
        return pl.BlockSpec(memory_space=pltpu.SMEM)
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)
