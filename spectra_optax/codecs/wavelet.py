"""A matrix in the basis of an orthogonal wavelet, and the approximation that is kept of it.

    level 1    x [n]  ->  a, d [floor((n + f - 1) / 2)],   a_k = sum_j low_j x_(2k+1-j),  d_k the same with `high`
    level l    again on a;  x  ->  a_l, d_l, ..., d_1

`f` is the length of the filters; beyond its ends an axis is zero, so that nothing is lost: energy is preserved and the
inverse is the transpose. Haar's `f` is 2, which makes `a_l` the sum of `2^l` neighbours over `2^(l/2)`, and
`ceil(n / 2^l)` of them.

Bytes per parameter: one number in `2^l`. Letters: `[..., n, c]`, transformed along the axis of length `n`.
Source: Mallat 1989, A theory for multiresolution signal decomposition.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from spectra_optax import arguments, backend, sharding
from spectra_optax.codecs.blocks import Layout, product
from spectra_optax.codecs.filter_bank import analyse, low_pass, synthesise
from spectra_optax.leaves import Leaf
from spectra_optax.sharding import Slot, slot

_DEEPEST = 8
_TILE = 8  # rows of a TPU's tile
_TALLEST = 1024  # rows that a kernel holds at a time


@dataclasses.dataclass(frozen=True)
class Wavelet:
    """Names the part of a matrix that an orthogonal wavelet transform calls its approximation.

    Attributes:
      kind: "haar", or PyWavelets' name of another orthogonal wavelet, for which it must be installed: "db2", "coif1".
      level: how often the approximation is transformed again, 1 to 8; it keeps one number in `2^level`.
      axis: of each matrix, -2 or -1; if None the contraction axis of a Flax kernel, -2, and -1 for embeddings.
      lowering: of Haar's: "sums" adds rows; "matmul" multiplies tiles of rows, which TPUs need not rearrange for it;
        "auto" takes the better for the platform. Longer wavelets are matrix products everywhere.

    Example:
      >>> import jax.numpy as jnp
      >>> from spectra_optax import Wavelet
      >>> wavelet = Wavelet("haar", level=2)
      >>> approximation, *details = wavelet.transform(jnp.ones((8, 3)))
      >>> approximation.shape, [d.shape for d in details], round(float(approximation[0, 0]), 3)
      ((2, 3), [(2, 3), (4, 3)], 2.0)
      >>> Wavelet("haar", level=9)
      Traceback (most recent call last):
      ValueError: level must lie in 1 to 8, got 9.
    """

    kind: str = "haar"
    level: int = 2
    axis: int | None = None
    lowering: Literal["auto", "sums", "matmul"] = "auto"

    def __post_init__(self):
        """Checks the settings."""
        arguments.integer("level", self.level, 1)
        if self.level > _DEEPEST:
            raise ValueError(f"level must lie in 1 to {_DEEPEST}, got {self.level}.")
        if self.axis not in (None, -2, -1):
            raise ValueError(f"axis must be -2 or -1, or None for the contraction axis, got {self.axis!r}.")
        arguments.choice("lowering", self.lowering, ("auto", "sums", "matmul"))
        low_pass(self.kind)
        if self.lowering != "auto" and not self.is_haar:
            raise ValueError(f"lowering={self.lowering!r} has no effect with kind={self.kind!r}; it belongs to 'haar'.")

    @property
    def is_haar(self) -> bool:
        """Whether the approximation is a sum of neighbours."""
        return len(low_pass(self.kind)) == 2

    @property
    def label(self) -> str:
        """What shapes a state, in words."""
        along = "" if self.axis is None else f" along {self.axis}"
        return f"{self.kind} {self.level}{along}"

    @property
    def sign(self) -> Literal["signed"]:
        """Approximations have both signs."""
        return "signed"

    @property
    def names(self) -> tuple[str, ...]:
        """The array that holds a leaf."""
        return ("approximation",)

    def cut_axis(self, leaf: Leaf) -> int:
        """The axis of a matrix leaf along which it is transformed."""
        return leaf.cut_axis if self.axis is None else self.axis

    def length(self, n: int) -> int:
        """How many numbers the approximation of an axis of length `n` has."""
        return self._lengths(n)[-1]

    def matrix_shape(self, leaf: Leaf) -> tuple[int, ...]:
        """The shape of a matrix leaf's approximation.

        Raises:
          ValueError: if the axis is too short for the level.
        """
        shape, cut = list(leaf.matrix_shape), self.cut_axis(leaf)
        shortest = (len(low_pass(self.kind)) - 1) * 2**self.level
        if shape[cut] < shortest:
            raise ValueError(
                f"level={self.level} of {self.kind!r} is too deep for {leaf.path!r}: its axis has length {shape[cut]}, "
                f"at least {shortest} is needed. Lower the level, or keep the leaf dense by LeafRules."
            )
        shape[cut] = self.length(shape[cut])
        return tuple(shape)

    def whole_block(self, leaf: Leaf) -> int | None:
        """How many rows of a matrix leaf tiles should hold together; None where they cannot."""
        rows = _TILE * sharding.USUAL_SHARDS * 2**self.level
        fits = self.is_haar and self.cut_axis(leaf) == -2 and leaf.shape[-2] % rows == 0
        return rows if fits and rows <= _TALLEST else None

    def slot(self, leaf: Leaf, dtype: jax.typing.DTypeLike) -> Slot:
        """An array of the shape of a matrix leaf's approximation; only Haar's can be sharded along the axis."""
        shape, cut = self.matrix_shape(leaf), self.cut_axis(leaf)
        return slot(shape, dtype, leaf.matrix_axes, run=None if self.is_haar else {cut: shape[cut]})

    def transform(self, x: jax.Array, axis: int = -2) -> list[jax.Array]:
        """All coefficients of `x`: the approximation, then the details from the last level to the first."""
        a, details = self._reaching(_turned(x, axis)), []
        for _ in range(self.level):
            a, d = analyse(a, self.kind)
            details.insert(0, _turned(d, axis))
        return [_turned(a, axis), *details]

    def inverse(self, coefficients: Sequence[jax.Array], n: int, axis: int = -2) -> jax.Array:
        """The array of length `n` along `axis` that has these coefficients."""
        a, *details = (self._reaching(_turned(part, axis)) for part in coefficients)
        for d, length in zip(details, reversed(self._lengths(n)[:-1]), strict=True):
            a = synthesise(a, d, length, self.kind)
        return _turned(a, axis)

    def approximation(self, x: jax.Array, axis: int = -2) -> jax.Array:
        """The first of `transform`."""
        return self.sums(x, axis) * 2.0 ** (-self.level / 2) if self.is_haar else self.transform(x, axis)[0]

    def sums(self, x: jax.Array, axis: int = -2) -> jax.Array:
        """Sums of `2^level` neighbours, zeros beyond the end of the axis included."""
        whole, reduced = self._tiles(x.shape[axis])
        blocks = whole.split(x, axis)
        if reduced.block == 1:
            sums = jnp.sum(blocks, axis=-2, keepdims=True)
        else:
            sums = product(self._neighbours(x.dtype), blocks)
        return reduced.join(sums, axis)

    def expansion(self, a: jax.Array, n: int, axis: int = -2) -> jax.Array:
        """The inverse of an approximation whose details are zero: the transpose of `approximation`."""
        if self.is_haar:
            return self.spread(a * 2.0 ** (-self.level / 2), n, axis)
        zeros = [jnp.zeros_like(a, shape=_resized(a, axis, m)) for m in reversed(self._lengths(n)[1:])]
        return self.inverse([a, *zeros], n, axis)

    def spread(self, a: jax.Array, n: int, axis: int = -2) -> jax.Array:
        """Each number of an approximation at the `2^level` places nearest to it, `n` in all along `axis`."""
        whole, reduced = self._tiles(n)
        a = a if a.shape[axis] == reduced.length else jax.lax.slice_in_dim(a, 0, reduced.length, axis=axis)
        blocks = reduced.split(a, axis)
        if reduced.block == 1:
            copies = jnp.broadcast_to(blocks, (*blocks.shape[:-2], whole.block, blocks.shape[-1]))
        else:
            copies = product(self._neighbours(a.dtype).T, blocks)
        return whole.join(copies, axis)

    def slots(self, leaf: Leaf) -> dict[str, Slot]:
        """The array that holds a matrix leaf."""
        return {"approximation": self.slot(leaf, jnp.float32)}

    def encode(self, leaf: Leaf, x: jax.Array, count: jax.Array) -> dict[str, jax.Array]:
        """The approximation of `x`, float32 of the leaf's shape; details are dropped."""
        del count
        return {"approximation": self.approximation(leaf.to_matrix(x), self.cut_axis(leaf))}

    def decode(self, leaf: Leaf, arrays: Mapping[str, jax.Array]) -> jax.Array:
        """A leaf with that approximation and no details, float32."""
        cut = self.cut_axis(leaf)
        return leaf.from_matrix(self.expansion(arrays["approximation"], leaf.matrix_shape[cut], cut))

    def _reaching(self, x: jax.Array) -> jax.Array:
        """`x` for blocks along axis -2: those of longer filters reach into their neighbours, so shards must not end."""
        return x if self.is_haar else sharding.undivided(x, -2, 1)

    def _lengths(self, n: int) -> list[int]:
        """Lengths of the approximations of every level, from 0."""
        taps, lengths = len(low_pass(self.kind)), [n]
        for _ in range(self.level):
            lengths.append((lengths[-1] + taps - 1) // 2)
        return lengths

    def _tiles(self, n: int) -> tuple[Layout, Layout]:
        """How an axis of length `n` is cut into neighbours that are summed, and how their sums are."""
        size, sums = 2**self.level, -(-n // 2**self.level)
        wanted = self.lowering == "matmul" or (self.lowering == "auto" and backend.name() == "tpu")
        # Shards must hold whole tiles.
        tile = _TILE if wanted and n % (_TILE * size * sharding.USUAL_SHARDS) == 0 else 1
        count = -(-sums // tile)
        return Layout(n, tile * size, count, tile), Layout(sums, tile, count, tile)

    def _neighbours(self, dtype: jax.typing.DTypeLike) -> np.ndarray:
        """A matrix of 0 and 1 that sums `2^level` neighbours."""
        return np.kron(np.eye(_TILE), np.ones((1, 2**self.level))).astype(jnp.finfo(dtype).dtype)


def _turned(x: jax.Array, axis: int) -> jax.Array:
    """`x` with `axis`, -2 or -1, as its axis -2; its own inverse."""
    return x if axis == -2 else jnp.swapaxes(x, -1, -2)


def _resized(x: jax.Array, axis: int, n: int) -> tuple[int, ...]:
    shape = list(x.shape)
    shape[axis] = n
    return tuple(shape)
