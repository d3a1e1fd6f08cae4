"""Which leaf is treated how: the one decision that every transformation of this package shares.

A parameter is a **matrix** over its last two axes `[..., r, c]`, every axis before them a batch (scan-stacked layers,
experts, convolution taps); or an **embedding**, a matrix whose rows are looked up and must not influence each other; or
**dense**, too small or too thin to be worth compressing. The decision needs the leaf's path, global shape and dtype,
nothing else, so it is the same on one device and on a pod, and it is made before an array is touched.
"""

import contextlib
import contextvars
import dataclasses
import math
from collections.abc import Callable, Generator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from spectra_optax import arguments, sharding

Kind = Literal["matrix", "embedding", "dense", "empty"]
Axes = tuple[tuple[int, ...], tuple[int, ...]]
# Flax's names for vectors. Stacked over layers they look like matrices, and are none.
_VECTORS = ("bias", "scale")
# What models call their lookup tables, and the layer before the loss.
_TABLES = ("embed", "embedder", "wte", "wpe")
_HEADS = ("head", "lm_head", "output_head", "logits")
_seen: contextvars.ContextVar[dict[str, "Leaf"] | None] = contextvars.ContextVar("seen leaves", default=None)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter and how it is treated.

    Attributes:
      path: names from the root, joined by "/".
      shape: the global shape of the parameter.
      dtype: its dtype.
      kind: "matrix", "embedding", "dense", or "empty" for a leaf without elements.
      reason: why, in words, for `memory_table`.
      rows: the parameter's axes that make the matrix's rows (none unless a matrix or an embedding).
      cols: the axes that make its columns.
      block: for a tile of a matrix, how many rows belong together; it is then seen as a stack of blocks of them.
    """

    path: str = dataclasses.field(compare=False)  # equal leaves share one traced rule
    shape: tuple[int, ...]
    dtype: np.dtype
    kind: Kind
    reason: str = dataclasses.field(compare=False)
    rows: tuple[int, ...] = ()
    cols: tuple[int, ...] = ()
    block: int | None = None

    @property
    def is_matrix(self) -> bool:
        """Whether the leaf is seen as one matrix, or a batch of them."""
        return self.kind in ("matrix", "embedding")

    @property
    def is_complex(self) -> bool:
        """Whether the parameter is complex."""
        return jnp.issubdtype(self.dtype, jnp.complexfloating)

    @property
    def cut_axis(self) -> int:
        """The matrix axis that blocks are cut along: -2, or -1 where rows must not mix."""
        return -1 if self.kind == "embedding" else -2

    @property
    def batch(self) -> tuple[int, ...]:
        """The axes that are neither rows nor columns."""
        return tuple(a for a in range(len(self.shape)) if a not in self.rows + self.cols)

    @property
    def matrix_shape(self) -> tuple[int, ...]:
        """`[*batch, r, c]`, or `[*batch, r / block, block, c]`."""
        r, c = _size(self.shape, self.rows), _size(self.shape, self.cols)
        rows = (r,) if self.block is None else (r // self.block, self.block)
        return (*(self.shape[a] for a in self.batch), *rows, c)

    @property
    def matrix_axes(self) -> tuple[int, ...]:
        """For each axis of `matrix_shape`, the (major) axis of the parameter that it follows."""
        rows = self.rows[:1] * (1 if self.block is None else 2)
        return (*self.batch, *rows, self.cols[0])

    def to_matrix(self, x: jax.Array) -> jax.Array:
        """Views the parameter's shape as `[*batch, r, c]`; the identity unless `LeafRules.axes` says otherwise."""
        order = self.batch + self.rows + self.cols
        for axis in (*self.rows[1:], *self.cols[1:]):
            x = sharding.undivided(x, axis, 1)  # a merge of two axes can only be sharded along the first
        if order != tuple(range(len(self.shape))):
            x = jnp.transpose(x, order)
        return x if x.shape == self.matrix_shape else x.reshape(self.matrix_shape)

    def from_matrix(self, x: jax.Array) -> jax.Array:
        """The inverse of `to_matrix`."""
        order = self.batch + self.rows + self.cols
        split = tuple(self.shape[a] for a in order)
        x = x if x.shape == split else x.reshape(split)
        return x if order == tuple(range(len(order))) else jnp.transpose(x, tuple(np.argsort(order)))


@dataclasses.dataclass(frozen=True)
class LeafRules:
    """Says which leaves are compressed, and along which axes. Pass the same rules to every piece of a chain.

    Attributes:
      min_dim: a matrix with a side smaller than this stays dense.
      dense: predicate on the path ("block_0/attention/out/kernel"); the leaves it accepts stay dense.
      embedding: predicate on the path; the leaves it accepts are embeddings, as are those whose last name is
        "embedding". Their rows never influence each other's momentum.
      axes: `axes(path, shape)` names the axes of rows and columns of leaves whose matrix is not the last two axes,
        for example `((0,), (1, 2))` for a kernel `[d, heads, head_dim]`; None leaves the leaf to the rule, which knows
        Flax's `query`, `key` and `value` kernels.

    Example:
      >>> from spectra_optax import LeafRules
      >>> rules = LeafRules(dense=lambda path: "head" in path)
      >>> rules.leaf("mlp/kernel", (12, 768, 3072), "float32").reason
      'matrix 768 x 3072 in a batch of 12'
      >>> rules.leaf("head/kernel", (768, 50304), "float32").reason
      'dense: named by the rules'
    """

    min_dim: int = 32
    dense: Callable[[str], bool] | None = None
    embedding: Callable[[str], bool] | None = None
    axes: Callable[[str, tuple[int, ...]], Axes | None] | None = None

    def __post_init__(self):
        """Checks the settings."""
        arguments.integer("min_dim", self.min_dim, 2)
        for name in ("dense", "embedding", "axes"):
            if getattr(self, name) is not None and not callable(getattr(self, name)):
                raise TypeError(f"{name} must be a function of the leaf's path or None, got {getattr(self, name)!r}.")

    def leaf(self, path: str, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> Leaf:
        """Decides how one leaf is treated.

        Raises:
          TypeError: if the dtype is not floating or complex.
          ValueError: if `axes` names axes that the leaf does not have.
        """
        leaf = Leaf(path, tuple(shape), inexact(path, dtype), *self._decide(path, tuple(shape)))
        seen = _seen.get()
        if seen is not None:
            seen[path] = leaf
        return leaf

    def _decide(self, path: str, shape: tuple[int, ...]) -> tuple[Kind, str, tuple[int, ...], tuple[int, ...]]:
        name = path.rsplit("/", 1)[-1]
        if 0 in shape:
            return "empty", "empty: no elements", (), ()
        if self.dense is not None and self.dense(path):
            return "dense", "dense: named by the rules", (), ()
        if name in _VECTORS:
            return "dense", f"dense: {name!r} names a vector", (), ()
        axes = self.axes(path, shape) if self.axes is not None else None
        axes = _attention(path, shape) if axes is None else axes
        if axes is None and len(shape) < 2:
            return "dense", f"dense: {len(shape)} axes", (), ()
        rows, cols = _checked(path, shape, axes) if axes is not None else ((len(shape) - 2,), (len(shape) - 1,))
        r, c = _size(shape, rows), _size(shape, cols)
        if min(r, c) < self.min_dim:
            return "dense", f"dense: side {min(r, c)} is below min_dim {self.min_dim}", (), ()
        embeds = name == "embedding" or (self.embedding is not None and self.embedding(path))
        kind: Kind = "embedding" if embeds else "matrix"
        count = math.prod(shape) // (r * c)
        return kind, f"{kind} {r} x {c}" + (f" in a batch of {count}" if count > 1 else ""), rows, cols


def embeds_or_predicts(path: str) -> bool:
    """Whether a path names an embedding or a head, as language models call them.

    Example:
      >>> from spectra_optax.leaves import embeds_or_predicts
      >>> list(map(embeds_or_predicts, ("embed_tokens/embedding", "lm_head/kernel", "attention_heads/kernel")))
      [True, True, False]
    """
    return any(
        name in _HEADS or name in _TABLES or name.startswith(("embed_", "embedding")) or name.endswith("_embed")
        for name in path.split("/")
    )


LINEAR_LAYERS = LeafRules(dense=embeds_or_predicts)


def inexact(path: str, dtype: jax.typing.DTypeLike) -> np.dtype:
    """The dtype of a parameter.

    Raises:
      TypeError: if it is neither floating, in 16 bits or more, nor complex.
    """
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.inexact) or dtype.itemsize < 2:
        raise TypeError(
            f"Parameter {path!r} has dtype {dtype}; optimizers accept complex parameters, and floating ones of 16 bits "
            "or more. Leave others out with optax.masked or optax.partition."
        )
    return dtype


def wide(dtype: Any) -> Any:
    """The dtype to compute in: float32, or the dtype itself where it is wider or complex."""
    return jnp.promote_types(dtype, jnp.float32)


@contextlib.contextmanager
def observed() -> Generator[dict[str, Leaf]]:
    """Collects, by path, every leaf that is decided while the context is open."""
    seen: dict[str, Leaf] = {}
    token = _seen.set(seen)
    try:
        yield seen
    finally:
        _seen.reset(token)


def _attention(path: str, shape: tuple[int, ...]) -> Axes | None:
    """The axes of Flax's query, key and value kernels `[..., d, heads, head_dim]`, one matrix from `d` to the heads.

    Scan-stacked `[layers, d, ...]` kernels of that name have fewer layers than `d`, and attention fewer heads.
    """
    if path.rsplit("/", 2)[-2:-1] not in (["query"], ["key"], ["value"]) or len(shape) < 3 or shape[-3] <= shape[-2]:
        return None
    n = len(shape)
    return (n - 3,), (n - 2, n - 1)


def _size(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    return math.prod(shape[a] for a in axes)


def _checked(path: str, shape: tuple[int, ...], axes: Axes) -> Axes:
    accepted = f"axes({path!r}, {shape}) must give two non-empty, disjoint groups of the leaf's axes, got {axes!r}."
    try:
        rows, cols = (tuple(group) for group in axes)
    except (TypeError, ValueError) as error:
        raise ValueError(accepted) from error
    rows, cols = (
        tuple(a % len(shape) if -len(shape) <= a < len(shape) else a for a in group) for group in (rows, cols)
    )
    named = rows + cols
    if not rows or not cols or len(set(named)) != len(named) or not set(named) <= set(range(len(shape))):
        raise ValueError(accepted)
    return rows, cols
