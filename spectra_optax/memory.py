"""How many bytes an optimizer's state takes, exactly and from shapes alone, and which leaf got what and why.

The state is never built: `jax.eval_shape` runs `init` on shapes, so a 70B model is measured on a laptop.
"""

import collections
import dataclasses
import math
from typing import Any

import jax
import optax

from spectra_optax.fields import owner
from spectra_optax.leaves import observed
from spectra_optax.lift import named, path_name, unboxed


def state_bytes(tx: optax.GradientTransformation, params: Any) -> int:
    """Bytes of the state that `tx` keeps for `params`, without building it.

    Args:
      tx: any Optax transformation.
      params: parameters, or their shapes (`jax.ShapeDtypeStruct`).

    Returns:
      The sum over all arrays of the state of elements times bytes per element.

    Example:
      >>> import jax, optax
      >>> from spectra_optax import spectra_adamw, state_bytes
      >>> params = {"kernel": jax.ShapeDtypeStruct((8192, 4096), "float32")}
      >>> state_bytes(optax.adamw(1e-3), params) / 2**20, round(state_bytes(spectra_adamw(1e-3), params) / 2**20, 2)
      (256.00000381469727, 8.55)
    """
    return sum(map(_nbytes, jax.tree.leaves(jax.eval_shape(tx.init, _shapes(params)))))


@dataclasses.dataclass(frozen=True)
class MemoryRow:
    """One leaf of a `MemoryTable`.

    Attributes:
      path: the leaf's path.
      shape: its shape.
      dtype: its dtype.
      bytes: of state that belong to it.
      reference: bytes of state that the reference optimizer keeps for it.
      holds: the state's arrays for it, as "name dtype[shape]".
      reason: how it is treated and why; "" where no transformation of this package decided.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    reference: int
    holds: tuple[str, ...]
    reason: str


@dataclasses.dataclass(frozen=True)
class MemoryTable:
    """The bytes of an optimizer's state, leaf by leaf; `str` draws it.

    Attributes:
      rows: one for each leaf of the parameters.
      shared: bytes that belong to no leaf (counts, settings).
      shared_reference: the same of the reference optimizer.
      parameters: how many numbers the parameters hold.
    """

    rows: tuple[MemoryRow, ...]
    shared: int
    shared_reference: int
    parameters: int

    @property
    def bytes(self) -> int:
        """Bytes of the whole state; equals `state_bytes`."""
        return self.shared + sum(row.bytes for row in self.rows)

    @property
    def reference(self) -> int:
        """Bytes of the whole state of the reference optimizer."""
        return self.shared_reference + sum(row.reference for row in self.rows)

    def __str__(self) -> str:
        """A table as text: one line a leaf, and the totals."""
        head = ("leaf", "shape", "bytes", "reference", "what and why", "state")
        cells = [
            (r.path, "x".join(map(str, r.shape)), f"{r.bytes:,}", f"{r.reference:,}", r.reason, ", ".join(r.holds))
            for r in self.rows
        ]
        cells.append(("no leaf's", "", f"{self.shared:,}", f"{self.shared_reference:,}", "counts and settings", ""))
        per = f"{self.bytes / max(1, self.parameters):.3f} bytes per parameter"
        cells.append(("total", f"{self.parameters:,}", f"{self.bytes:,}", f"{self.reference:,}", per, ""))
        widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
        sides = ("<", "<", ">", ">", "<", "<")
        return "\n".join(
            "  ".join(f"{c:{side}{w}}" for c, side, w in zip(line, sides, widths, strict=True)).rstrip()
            for line in (head, *cells)
        )


def memory_table(
    tx: optax.GradientTransformation, params: Any, *, reference: optax.GradientTransformation | None = None
) -> MemoryTable:
    """Tells, from shapes alone, how many bytes of state each leaf gets, in which form, and why.

    Args:
      tx: any Optax transformation.
      params: parameters, or their shapes.
      reference: what to compare with; `optax.adamw` if None.

    Returns:
      A `MemoryTable`, whose rows can be read and whose `str` is a table.

    Example:
      >>> import functools, jax
      >>> from spectra_optax import memory_table, spectra_adamw
      >>> shape = functools.partial(jax.ShapeDtypeStruct, dtype="float32")
      >>> table = memory_table(spectra_adamw(1e-3), {"kernel": shape((1024, 512)), "bias": shape((512,))})
      >>> [(row.path, row.bytes, row.reference, row.reason) for row in table.rows]
      [('bias', 4096, 4096, "dense: 'bias' names a vector"), ('kernel', 153664, 4194304, 'matrix 1024 x 512')]
    """
    params = _shapes(params)
    paths = dict(named(params))
    with observed() as decided:
        held, shared = _by_leaf(tx, params)
    other, shared_reference = _by_leaf(reference or optax.adamw(1e-3), params)
    rows = tuple(
        MemoryRow(
            path,
            tuple(x.shape),
            str(x.dtype),
            sum(_nbytes(a) for _, a in held[path]),
            sum(_nbytes(a) for _, a in other[path]),
            tuple(f"{name} {a.dtype}{list(a.shape)}" for name, a in held[path]),
            decided[path].reason if path in decided else "",
        )
        for path, x in paths.items()
    )
    return MemoryTable(rows, shared, shared_reference, sum(x.size for x in paths.values()))


def _by_leaf(tx: optax.GradientTransformation, params: Any) -> tuple[dict[str, list[tuple[str, Any]]], int]:
    """The state's arrays of each leaf, named by their field, and the bytes of all others.

    If the parameters are one array, whose path is empty, all belong to it but scalars and the settings' description.
    """
    state = jax.eval_shape(lambda p: tx.init(p), params)  # JAX keeps the trace of `tx.init`, and with it the decisions
    names = {path: path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]}
    held, shared = collections.defaultdict(list), 0
    for path, array in jax.tree_util.tree_flatten_with_path(state)[0]:
        leaf = owner(path, names)
        field = path_name(_since_field(path[: len(path) - len(leaf or ())]))
        if leaf is None or (not leaf and (not array.shape or field == "settings")):
            shared += _nbytes(array)
        else:
            held[names[leaf]].append((field, array))
    return held, shared


def _since_field(path: Any) -> Any:
    """The end of a path from the last named field on: `mu`, or `mu/codes` where a field is held in several arrays."""
    named = [i for i, key in enumerate(path) if isinstance(key, jax.tree_util.GetAttrKey)]
    return path[named[-1] :] if named else path[-1:]


def _shapes(params: Any) -> Any:
    """The parameters' shapes, out of any boxes."""
    return unboxed(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params))


def _nbytes(array: Any) -> int:
    return math.prod(array.shape) * array.dtype.itemsize
