"""Runs a rule on tiles of a matrix in one pass: every array is read once and every result written once.

A tile of a matrix `[r, c]` is a stack of blocks `[n, b, w]`: `b` rows that belong together, `w` columns. Slices of a
stack do not know of each other, so a rule that is local to blocks can be run on each tile as if it were the whole, and
the kernel's body is the rule itself. What a state holds for the rows, `[s, c]`, is cut alongside, `[n, s b / r, w]`.

Bytes moved: those of the arguments and results.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from spectra_optax import backend
from spectra_optax.kernels import launching, wording
from spectra_optax.kernels import program as programs
from spectra_optax.kernels.grids import Grid
from spectra_optax.kernels.shards import Follows, NotLocalError, per_shard

_DTYPES = frozenset(("float32", "bfloat16", "int8", "uint8", "int32"))
_OF_GPU = _DTYPES | {"float16", "int16", "uint16"}


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
    dtypes = _OF_GPU if launching.is_gpu() else _DTYPES
    if not dtypes.issuperset(str(x.dtype) for x in arrays if x.ndim):
        raise NotLocalError(f"Kernels take {', '.join(sorted(dtypes))}.")
    following = [cut.follows(x.shape, view) if x.ndim else None for x, view in zip(arrays, views, strict=True)]
    traced = programs.program(rule, [jax.ShapeDtypeStruct(v, x.dtype) for v, x in zip(views, arrays, strict=True)])
    values = dict(zip(traced.inputs, arrays, strict=True)) | traced.constants
    programs.evaluate(traced.before, values)
    places = {
        v: i for v, i in zip(traced.outputs, like, strict=True) if v in programs.variables([v]) and v not in values
    }
    if places:
        body, used = programs.needed(traced.inside, places)
        body = wording.checked(body)
        takes = dict(zip(traced.inputs, following, strict=True))
        gives = {v: follows for v, i in places.items() if (follows := following[i]) is not None}
        if len(gives) < len(places) or any(v.aval.ndim and v in takes and takes[v] is None for v in used):
            raise NotLocalError("The rule uses or changes an array that does not follow the matrix.")
        scalars, taken = [v for v in used if not v.aval.ndim], {v: takes.get(v) for v in used if v.aval.ndim}
        written = {v: traced.inputs[i] for v, i in places.items() if i}
        values |= _Kernel(cut, body, scalars, taken, gives, written).launched(values)
    return [programs.value(v, values) for v in traced.outputs]


@dataclasses.dataclass(frozen=True, eq=False)
class _Kernel:
    """The part of a rule that runs on tiles.

    Equal ones, as leaves of equal shape have them, are traced and lowered once.

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

    @functools.cached_property
    def _signature(self) -> Hashable:
        inputs, outputs = list(self.takes), list(self.gives)
        written = tuple(inputs.index(v) if v in inputs else None for v in map(self.places.get, outputs))
        follows = self.cut, tuple(self.takes.values()), tuple(self.gives.values()), written
        computed = programs.signature(self.body, [*self.scalars, *inputs], outputs)
        return backend.name(), backend.kernels(), follows, computed

    def __hash__(self) -> int:
        return hash(self._signature)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Kernel) and self._signature == other._signature

    def launched(self, values: dict[Any, Any]) -> dict[Any, jax.Array]:
        """The results, computed on every shard."""
        *batch, r, c = self.cut.shape
        rows = jnp.broadcast_to(jnp.arange(r, dtype=jnp.int32)[:, None], (*batch, r, 1))
        columns = jnp.broadcast_to(jnp.arange(c, dtype=jnp.int32), (*batch, 1, c))
        inputs = [*(_packed(pack, values) for pack in self._packs()), rows, columns, *(values[v] for v in self.takes)]
        gives, cut = list(self.gives.values()), self.cut
        results = per_shard(
            functools.partial(_call, self), inputs, self._follows(), gives, cut.layout, cut.shape, cut.block
        )
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

    def call(self, *inputs: jax.Array) -> tuple[jax.Array, ...]:
        """One pass over a shard."""
        follows, ahead = self._follows(), len(self._packs())
        *batch, r, _ = inputs[ahead].shape
        cut = self.cut._replace(shape=(*batch, r, inputs[ahead + 1].shape[-1]))
        count, arrays = math.prod(batch), list(self.takes)
        outputs = launching.launch(
            self._body,
            out_shape=[jax.ShapeDtypeStruct((count, *cut.whole(f)[-2:]), v.aval.dtype) for v, f in self.gives.items()],
            grid=(count, pl.cdiv(r, cut.rows), pl.cdiv(cut.shape[-1], cut.columns)),
            numbers=cut.rows * cut.columns,
            in_specs=[_everywhere(x) if f is None else cut.spec(f) for x, f in zip(inputs, follows, strict=True)],
            out_specs=[cut.spec(f) for f in self.gives.values()],
            input_output_aliases={
                ahead + 2 + arrays.index(self.places[v]): k
                for k, v in enumerate(self.gives)
                if v in self.places and self.places[v] in arrays and self.places[v].aval.dtype == v.aval.dtype
            },
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


@functools.partial(jax.jit, static_argnums=0)
def _call(kernel: _Kernel, *inputs: jax.Array) -> tuple[jax.Array, ...]:
    return kernel.call(*inputs)


def _packed(pack: Sequence[Any], values: dict[Any, Any]) -> jax.Array:
    """Scalars of one kind as one array of 32-bit numbers."""
    dtype = jnp.float32 if jnp.issubdtype(pack[0].aval.dtype, jnp.floating) else jnp.int32
    return jnp.stack([jnp.asarray(values[v]).astype(dtype) for v in pack])


def _everywhere(x: jax.Array) -> pl.BlockSpec:
    """Scalars, and constants whole in each tile."""
    if x.ndim == 1:
        return launching.scalars()
    return pl.BlockSpec(x.shape, lambda *_: (0,) * x.ndim)
