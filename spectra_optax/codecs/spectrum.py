"""A matrix as the kept coefficients of a Fourier transform of its blocks.

One axis of a matrix is cut into blocks of length `b`; each block is transformed by the real Fourier basis of
`fourier.py` and `k` of its `b` coefficients are kept, in 16 or 32 bits, or companded in 8.

Which coefficients are kept is an integer array `index` `[..., m, k]` beside them: one row for all blocks of a matrix
(`m = 1`) or one for each (`m = n`, the number of blocks). The state names its own frequencies.

Bytes per parameter: `keep` times the bytes of one coefficient. Letters: `n` blocks of length `b`, `k` kept, `c` entries
across: `[..., n, b, c]`. A matrix that is cut along its last axis is transposed on the way in and out.
"""

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np

from spectra_optax import arguments, sharding
from spectra_optax.codecs.blocks import Layout, apart, block_length
from spectra_optax.codecs.companding import Companded
from spectra_optax.codecs.fourier import Lowering, analyse, frequency, synthesise, uses_fft
from spectra_optax.codecs.rounding import to_bfloat16
from spectra_optax.leaves import Leaf, wide
from spectra_optax.sharding import Slot, slot

MASKS = ("lowpass", "energy", "topk", "random")
_DYNAMIC = ("energy", "topk")
_REFRESH = 10
_DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Spectrum:
    """Names a spectral form of momentum: which coefficients of which blocks are kept, and how.

    Attributes:
      keep: share of the coefficients that is kept, in (0, 1].
      block: length of the blocks, at least 2. An axis shorter than that is one block; an axis that it does not divide
        takes its largest divisor of at least half the length, or ends in a block padded with zeros.
      mask: "lowpass" keeps the lowest frequencies; "energy" keeps those that had the most energy in the recent past,
        the same for all blocks of a matrix; "topk" lets each block choose; "random" draws them once.
      refresh: for "energy" and "topk", the number of steps between two choices (10 if None).
      dtype: of the coefficients: "bfloat16" (if None), "float16" or "float32" (complex parameters: complex64).
      seed: for "random", of the draw (0 if None).
      lowering: "fft" computes with `jnp.fft`, "matmul" with the same basis as a matrix; "auto" takes the faster.
        XLA gathers a sharded FFT on jax before 0.12; the product stays where its operands are.
      values: `Companded()` holds the coefficients of real parameters in 8 bits, in place of a dtype; a group is made of
        whole blocks.

    Example:
      >>> from spectra_optax import Spectrum
      >>> Spectrum(keep=0.5, mask="energy")
      Spectrum(keep=0.5, block=64, mask='energy', refresh=None, dtype=None, seed=None, lowering='auto', values=None)
      >>> Spectrum(keep=2)
      Traceback (most recent call last):
      ValueError: keep must lie in (0, 1], got 2.
    """

    keep: float = 0.25
    block: int = 64
    mask: Literal["lowpass", "energy", "topk", "random"] = "lowpass"
    refresh: int | None = None
    dtype: str | None = None
    seed: int | None = None
    lowering: Lowering = "auto"
    values: Companded | None = None

    def __post_init__(self):
        """Checks the settings and fills in those that depend on others."""
        if not isinstance(self.keep, numbers.Real):
            raise TypeError(f"keep must be a number, got {self.keep!r}.")
        if not 0.0 < self.keep <= 1.0:
            raise ValueError(f"keep must lie in (0, 1], got {self.keep!r}.")
        arguments.integer("block", self.block, 2)
        arguments.choice("mask", self.mask, MASKS)
        arguments.choice("lowering", self.lowering, ("auto", "fft", "matmul"))
        self._check_values()
        self._only_for("refresh", _DYNAMIC, smallest=1)
        self._only_for("seed", ("random",), smallest=0)

    def _check_values(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", arguments.dtype_name("dtype", self.dtype, _DTYPES))
        if self.values is None:
            return
        arguments.instance("values", self.values, Companded)
        if self.values.sign != "signed":
            raise ValueError(f"values must be signed, as coefficients are, got {self.values}.")
        if self.dtype is not None:
            raise ValueError(f"dtype={self.dtype!r} has no effect with values={self.values}; give one of them.")

    def _only_for(self, name: str, masks: tuple[str, ...], *, smallest: int) -> None:
        value = getattr(self, name)
        if value is None:
            return
        if self.mask not in masks:
            raise ValueError(f"{name}={value!r} has no effect with mask={self.mask!r}; it belongs to {masks}.")
        arguments.integer(name, value, smallest)

    @property
    def label(self) -> str:
        """What shapes a state, in words: the lowering and the refresh can change from run to run."""
        form = self.values.label if self.values is not None else self.dtype or "bfloat16"
        seed = f" seed={self.seed or 0}" if self.mask == "random" else ""
        return f"keep {float(self.keep):g} of {self.block} {self.mask}{seed} {form}"

    @property
    def period(self) -> int:
        """Steps between two choices of a mask that follows the gradients."""
        return self.refresh or _REFRESH

    @property
    def is_dynamic(self) -> bool:
        """Whether the mask follows the gradients."""
        return self.mask in _DYNAMIC

    @property
    def is_stored(self) -> bool:
        """Whether only the state knows the mask; the low-pass mask is a constant of the program."""
        return self.mask != "lowpass"

    def layout(self, length: int) -> Layout:
        """How an axis of this length is cut and how many coefficients of each block are kept."""
        block = block_length(length, self.block)
        return Layout(length, block, -(-length // block), max(1, round(self.keep * block)))

    def first_index(self, layout: Layout) -> np.ndarray:
        """The mask to start with, int32 `[k]`, ascending."""
        if self.mask == "random":
            drawn = np.random.default_rng(self.seed or 0).choice(layout.block, layout.kept, replace=False)
            return np.sort(drawn).astype(np.int32)
        return np.arange(layout.kept, dtype=np.int32)

    def leaf_layout(self, leaf: Leaf) -> Layout:
        """The layout of the axis along which a matrix leaf is cut."""
        return self.layout(leaf.matrix_shape[leaf.cut_axis])

    def whole_block(self, leaf: Leaf) -> int | None:
        """How many rows of a matrix leaf belong together, for tiles of them; None if it is not cut into such tiles."""
        layout = self.leaf_layout(leaf)
        if self.is_stored or layout.count * layout.block != layout.length or uses_fft(self.lowering, layout.block):
            return None
        groups = layout.coefficients if self.values is None else self._groups(layout)
        rows = math.lcm(layout.kept, groups.block) // layout.kept * layout.block
        tile = self.layout(rows)
        alike = self.values is None or self._groups(tile).block == groups.block
        return rows if layout.length % rows == 0 and tile.block == layout.block and alike else None

    def _groups(self, layout: Layout) -> Layout:
        """How companded coefficients are cut into groups: of whole blocks, so many that 8 shards have some if they can.

        Where a block has more coefficients than a group may, they are cut as any other array is.
        """
        assert self.values is not None
        n, k, largest = layout.count, layout.kept, self.values.group
        shards = 1 if n * k <= largest else math.gcd(n, sharding.USUAL_SHARDS)
        fitting = [m for m in range(1, n + 1) if n % m == 0 and m * k <= largest and n // m % shards == 0]
        if not fitting:
            return self.values.layout(n * k)
        return Layout(n * k, fitting[-1] * k, n // fitting[-1], fitting[-1] * k)

    @property
    def sign(self) -> Literal["signed"]:
        """Coefficients have both signs."""
        return "signed"

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays that hold a leaf."""
        return ("coefficients",) if self.values is None else ("coefficients", "scales")

    def _dtype(self, leaf: Leaf) -> str:
        return "complex64" if leaf.is_complex else self.dtype or "bfloat16"

    def slots(self, leaf: Leaf) -> dict[str, Slot]:
        """The arrays that hold the kept coefficients of a matrix leaf, where the axis that was cut stood."""
        layout, cut, shape = self.leaf_layout(leaf), leaf.cut_axis, list(leaf.matrix_shape)
        shape[cut] = layout.coefficients.length
        if self.values is None or leaf.is_complex:
            dtype = self._dtype(leaf)
            return {"coefficients": slot(shape, dtype, leaf.matrix_axes, run={cut: layout.kept})}
        groups = self._groups(layout)
        held = self.values.array_slots(groups, shape, leaf.matrix_axes, cut)
        whole = math.lcm(layout.kept, groups.block)  # neither a block nor a group may be cut
        return {
            "coefficients": slot(shape, held["codes"].dtype, leaf.matrix_axes, run={cut: whole}),
            "scales": held["scales"],
        }

    def hold(self, leaf: Leaf, coefficients: jax.Array, count: jax.Array) -> dict[str, jax.Array]:
        """The arrays for coefficients `[..., n, k, c]`; `count` moves stochastic rounding."""
        whole = self.leaf_layout(leaf)
        layout = whole.coefficients
        if self.values is None or leaf.is_complex:
            dtype = self._dtype(leaf)
            x = to_bfloat16(coefficients, count) if dtype == "bfloat16" else coefficients.astype(dtype)
            return {"coefficients": layout.join(x, leaf.cut_axis)}
        x = layout.join(coefficients.astype(jnp.float32), leaf.cut_axis)
        held = self.values.encode_array(self._groups(whole), x, leaf.cut_axis, count)
        return {"coefficients": held["codes"], "scales": held["scales"]}

    def held(self, leaf: Leaf, arrays: Mapping[str, jax.Array]) -> jax.Array:
        """The coefficients `[..., n, k, c]` in the arrays: the inverse of `hold`."""
        whole, x = self.leaf_layout(leaf), arrays["coefficients"]
        layout = whole.coefficients
        if self.values is not None and not leaf.is_complex:
            codes = {"codes": x, "scales": arrays["scales"]}
            x = self.values.decode_array(self._groups(whole), codes, leaf.cut_axis)
        return apart(layout.split(x, leaf.cut_axis))

    def encode(self, leaf: Leaf, x: jax.Array, count: jax.Array) -> dict[str, jax.Array]:
        """The arrays for the kept coefficients of `x`, float32 of the leaf's shape; the mask must be a constant."""
        layout = self.leaf_layout(leaf)
        blocks = layout.split(leaf.to_matrix(x), leaf.cut_axis)
        return self.hold(leaf, analyse(blocks, self.first_index(layout)[None], self.lowering), count)

    def decode(self, leaf: Leaf, arrays: Mapping[str, jax.Array]) -> jax.Array:
        """A leaf with the coefficients in the arrays and no others, float32."""
        layout, kept = self.leaf_layout(leaf), self.held(leaf, arrays).astype(wide(leaf.dtype))
        blocks = synthesise(kept, self.first_index(layout)[None], layout.block, self.lowering)
        return leaf.from_matrix(layout.join(blocks, leaf.cut_axis))


def energies(blocks: jax.Array, layout: Layout, spectrum: Spectrum) -> jax.Array:
    """Mean energy of each frequency, float32: `[..., 1, f]` over all blocks, or `[..., n, f]` if each chooses."""
    every = jnp.arange(layout.block, dtype=jnp.int32)[None]
    energy = jnp.square(jnp.abs(analyse(blocks, every, spectrum.lowering)))
    energy = jnp.mean(energy, axis=-1)  # of columns first, so that shards have few numbers to share
    energy = energy if spectrum.mask == "topk" else jnp.mean(energy, axis=-2, keepdims=True)
    members = np.expand_dims(
        frequency(np.arange(layout.block)) == np.arange(layout.frequencies)[:, None], tuple(range(energy.ndim - 1))
    )
    sums = jnp.sum(jnp.where(members, energy[..., None, :], 0.0), axis=-1)
    return (sums / members.sum(axis=-1)).astype(jnp.float32)


def strongest(energy: jax.Array, layout: Layout) -> jax.Array:
    """The `k` coefficients whose frequencies have the most energy: int32 `[..., m, k]`, ascending."""
    of_coefficients = jnp.take(energy, frequency(np.arange(layout.block)), axis=-1)
    return jnp.sort(jax.lax.top_k(of_coefficients, layout.kept)[1], axis=-1).astype(jnp.int32)
