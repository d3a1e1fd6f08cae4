"""Eight bits a number: a code for its fourth root, relative to the largest of its group.

    signed     x ~ s sign(c) (|c| / 127)^4          c in -127 .. 127, 0 only near 0
    unsigned   x ~ s (c / 255)^4                    c in 1 .. 255, and 0 exactly for 0
    4 bits     x ~ s ((c + 1) / 16)^4, x >= 0       c in 0 .. 15, two to a byte; never 0 unless the whole group is

A group is 64 neighbours along one axis of a matrix, `s` the largest magnitude among them. The fourth root spends its
codes on small numbers, which an optimizer divides by: half a step of the 255 is 0.8 % of the largest number, 8 % of one
1e-4 of it, 78 % of one 1e-8 of it. A second moment that is not 0 does not become 0, the division by which throws
parameters away.

Scales are float32, or powers of two held as their exponents. Rounded to the nearest code, an average that moves by less
than half a code a step stays where it is, unless its scale moves along. A momentum whose gradients end would never end,
and a second moment with a power-of-two scale would never decay: these round stochastically. A second moment with a
float32 scale is nearer to float32's when it rounds to the nearest.

Bytes per parameter: `bits / 8 + 4 / group` (1.0625), with power-of-two scales `bits / 8 + 1 / group` (1.0156).
Source: companding as in FlashOptim (arXiv:2602.23349), which takes softsign and square root; the code without zero from
Li et al. 2023 (arXiv:2309.01507).
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp

from spectra_optax import arguments, backend
from spectra_optax.codecs.blocks import Layout, apart, block_length
from spectra_optax.codecs.rounding import random_bits
from spectra_optax.leaves import Leaf
from spectra_optax.sharding import Slot, slot

_NOT_FINITE = -128  # the exponent of a group that holds an infinity or a NaN


@dataclasses.dataclass(frozen=True)
class Companded:
    """Names a form in 8 bits: fourth roots relative to the largest of a group.

    Attributes:
      sign: "signed", or "unsigned" for second moments and whatever else is never negative.
      bits: 8, or 4 for unsigned values.
      group: neighbours along an axis that share a scale, at least 2.
      rounding: "nearest" or "stochastic"; if None, stochastic for signed values and for scales that are powers of two.
      scale: "float32", or "power_of_two" in one byte.

    Example:
      >>> from spectra_optax import Companded
      >>> Companded("unsigned", scale="power_of_two", rounding="nearest")
      Traceback (most recent call last):
      ValueError: scale='power_of_two' with sign='unsigned' needs rounding='stochastic': rounded to the nearest code, a
      second moment would never decay.
    """

    sign: Literal["signed", "unsigned"] = "signed"
    bits: Literal[8, 4] = 8
    group: int = 64
    rounding: Literal["nearest", "stochastic"] | None = None
    scale: Literal["float32", "power_of_two"] = "float32"

    def __post_init__(self):
        """Checks the settings."""
        arguments.choice("sign", self.sign, ("signed", "unsigned"))
        arguments.choice("rounding", self.rounding, ("nearest", "stochastic", None))
        arguments.choice("scale", self.scale, ("float32", "power_of_two"))
        arguments.integer("group", self.group, 2)
        if self.bits != 8 and (self.bits != 4 or self.sign == "signed"):
            raise ValueError(f"bits must be 8, or 4 with sign='unsigned', got {self.bits!r} with {self.sign!r}.")
        if self.scale == "power_of_two" and self.sign == "unsigned" and self.rounding == "nearest":
            raise ValueError(
                "scale='power_of_two' with sign='unsigned' needs rounding='stochastic': rounded to the nearest code, "
                "a second moment would never decay."
            )

    @property
    def label(self) -> str:
        """What shapes a state, in words: the rounding can change from run to run."""
        return f"{self.sign} {self.bits} bits, group {self.group}, scale {self.scale}"

    @property
    def zero_is_zero(self) -> bool:
        """Whether code 0 is zero: those of a momentum then follow those of the second moment beside it."""
        return self.bits == 8

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays that hold a leaf."""
        return ("codes", "scales")

    def slots(self, leaf: Leaf) -> dict[str, Slot]:
        """The arrays that hold a matrix leaf."""
        return self.array_slots(self.leaf_layout(leaf), leaf.matrix_shape, leaf.matrix_axes, leaf.cut_axis)

    def encode(self, leaf: Leaf, x: jax.Array, count: jax.Array) -> dict[str, jax.Array]:
        """The arrays for `x`, float32 of the leaf's shape; `count` (int32 `[]`) moves stochastic rounding."""
        layout = self.leaf_layout(leaf)
        return self._encode(layout, layout.split(leaf.to_matrix(x), leaf.cut_axis), leaf.cut_axis, count)

    def decode(self, leaf: Leaf, arrays: Mapping[str, jax.Array]) -> jax.Array:
        """The numbers in the arrays, float32 of the leaf's shape."""
        return leaf.from_matrix(self.decode_array(self.leaf_layout(leaf), arrays, leaf.cut_axis))

    def whole_block(self, length: int) -> int | None:
        """How many neighbours along an axis of this length share a scale; None if the last group is padded."""
        layout = self.layout(length)
        return layout.block if layout.count * layout.block == length else None

    def leaf_layout(self, leaf: Leaf) -> Layout:
        """The layout of the axis along which a matrix leaf is cut into groups."""
        return self.layout(leaf.matrix_shape[leaf.cut_axis])

    def array_slots(
        self, layout: Layout, shape: Sequence[int], axes: Sequence[int | None], cut: int
    ) -> dict[str, Slot]:
        """The arrays that hold one of `shape` `[..., r, c]`, whose axes follow `axes`, in groups along axis `cut`."""
        codes, scales = list(shape), list(shape)
        codes[cut], scales[cut] = self._stored(layout).length, layout.count
        run, dtype = self._stored(layout).block, "int8" if self.sign == "signed" else "uint8"
        scale_dtype, start = ("float32", 0.0) if self.scale == "float32" else ("int8", -127)
        return {
            "codes": slot(codes, dtype, axes, run={cut: run}),
            "scales": slot(scales, scale_dtype, axes, value=start),
        }

    def encode_array(self, layout: Layout, x: jax.Array, cut: int, count: jax.Array) -> dict[str, jax.Array]:
        """Codes and scales of `x`, float32 `[..., r, c]`, as it comes from a product in blocks of another length."""
        return self._encode(layout, apart(layout.split(x, cut)), cut, count)

    def _encode(self, layout: Layout, groups: jax.Array, cut: int, count: jax.Array) -> dict[str, jax.Array]:
        largest = _largest(groups)
        held = largest if self.scale == "float32" else _exponent(largest)
        codes = self._codes(groups, self._scale(held), count)
        if self.bits == 4:
            codes = _pack(codes)
        return {"codes": self._stored(layout).join(codes, cut), "scales": _whole(layout).join(held, cut)}

    def decode_array(self, layout: Layout, arrays: Mapping[str, jax.Array], cut: int) -> jax.Array:
        """The numbers held by codes and scales in groups along axis `cut`, float32."""
        codes = apart(self._stored(layout).split(arrays["codes"], cut))  # or XLA stores a scale for each number
        scales = self._scale(_whole(layout).split(arrays["scales"], cut))
        if self.bits == 4:
            codes = _unpack(codes, layout.block)
        c = codes.astype(jnp.float32)
        root = (c + 1.0) * (1.0 / 16.0) if self.bits == 4 else c * (1.0 / self._largest)
        power = jnp.square(jnp.square(root)) * scales
        return layout.join(power * jnp.sign(c) if self.sign == "signed" else power, cut)

    @property
    def _largest(self) -> int:
        """The largest code."""
        return 127 if self.sign == "signed" else 2**self.bits - 1

    def _codes(self, groups: jax.Array, scale: jax.Array, count: jax.Array) -> jax.Array:
        ratio = jnp.abs(groups) / jnp.where(scale > 0, scale, 1.0)
        place = jnp.sqrt(jnp.sqrt(ratio)) * (16.0 if self.bits == 4 else self._largest)
        place = place - 1.0 if self.bits == 4 else place
        code = jnp.floor(place + self._offset(groups, count))
        if self.sign == "signed":
            return (jnp.sign(groups) * jnp.minimum(code, 127.0)).astype(jnp.int8)
        smallest = 0.0 if self.bits == 4 else (groups > 0).astype(jnp.float32)
        return jnp.clip(code, smallest, float(self._largest)).astype(jnp.uint8)

    @property
    def is_stochastic(self) -> bool:
        """Whether rounding is."""
        return self.rounding == "stochastic" or (
            self.rounding is None and (self.sign == "signed" or self.scale == "power_of_two")
        )

    def _offset(self, groups: jax.Array, count: jax.Array) -> jax.Array | float:
        if not self.is_stochastic:
            return 0.5
        return (random_bits(groups, count, 0) >> 8).astype(jnp.float32) * 2.0**-24

    def _scale(self, held: jax.Array) -> jax.Array:
        if self.scale == "float32":
            return held
        bits = (held.astype(jnp.int32) + 127) << 23
        return jnp.where(held == _NOT_FINITE, jnp.nan, jax.lax.bitcast_convert_type(bits, jnp.float32))

    def layout(self, length: int) -> Layout:
        """How an axis of this length is cut into groups."""
        block = block_length(length, self.group)
        return Layout(length, block, -(-length // block), block)

    def _stored(self, layout: Layout) -> Layout:
        """The layout of the codes."""
        if self.bits == 8:
            return layout
        packed = -(-layout.block // 2)
        return Layout(layout.count * packed, packed, layout.count, packed)


def _largest(groups: jax.Array) -> jax.Array:
    """The largest magnitude of each group `[..., g, c]`, as `[..., 1, c]`; NaN where there is one.

    XLA's maxima of floats lose NaNs on CPUs, for some shapes; their bits are in the same order, and NaN's are the last.
    """
    if backend.name() == "tpu":  # whose kernels have no maxima of integers
        return jnp.max(jnp.abs(groups), axis=-2, keepdims=True)
    bits = jax.lax.bitcast_convert_type(groups, jnp.int32) & 0x7FFFFFFF
    return jax.lax.bitcast_convert_type(jnp.max(bits, axis=-2, keepdims=True), jnp.float32)


def _whole(layout: Layout) -> Layout:
    """The layout of one number a group."""
    return Layout(layout.count, 1, layout.count, 1)


def _exponent(largest: jax.Array) -> jax.Array:
    """The least exponent, int8, of a power of two not below the float32 `largest`; -127 for 0."""
    bits = jax.lax.bitcast_convert_type(largest, jnp.int32)
    exponent = jnp.minimum(((bits + 0x7FFFFF) >> 23) - 127, 127)
    return jnp.where(jnp.isfinite(largest), exponent, _NOT_FINITE).astype(jnp.int8)


def _pack(codes: jax.Array) -> jax.Array:
    """Codes below 16, `[..., g, c]`, two to a byte: the first half of each group below, the second above."""
    half = -(-codes.shape[-2] // 2)
    low, high = codes[..., :half, :], codes[..., half:, :]
    missing = half - high.shape[-2]
    high = jnp.pad(high, [(0, 0)] * (codes.ndim - 2) + [(0, missing), (0, 0)]) if missing else high
    return low | (high << 4)


def _unpack(packed: jax.Array, length: int) -> jax.Array:
    """The inverse of `_pack`, `length` codes a group."""
    return jnp.concatenate([packed & 15, packed >> 4], axis=-2)[..., :length, :]
