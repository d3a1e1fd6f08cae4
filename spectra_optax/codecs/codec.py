"""What a compact form must offer so that any field of any optimizer's state can be held in it.

`Companded`, `Factored` and `Spectrum` offer it; a form of your own that does works in `compress_state` as well. Build
its slots with `spectra_optax.sharding.slot`. A form of second moments should not turn what is not 0 into 0;
one with an array `codes` in which 0 is zero may say `zero_is_zero = True`, and momenta beside it are zeroed there.
"""

from collections.abc import Mapping
from typing import Literal, Protocol, runtime_checkable

import jax

from spectra_optax.leaves import Leaf
from spectra_optax.sharding import Slot


@runtime_checkable
class Codec(Protocol):
    """A compact form of matrices; hashable and equal to itself when built again, as frozen dataclasses are."""

    @property
    def sign(self) -> Literal["signed", "unsigned"]:
        """Whether it holds numbers of both signs, or none below 0."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """The arrays that hold a leaf, whatever the leaf."""
        ...

    def slots(self, leaf: Leaf) -> dict[str, Slot]:
        """The arrays that hold a matrix leaf: their shapes, dtypes, first values and layouts."""
        ...

    def encode(self, leaf: Leaf, x: jax.Array, count: jax.Array) -> dict[str, jax.Array]:
        """The arrays for `x`, float32 of the leaf's shape, at step `count`."""
        ...

    def decode(self, leaf: Leaf, arrays: Mapping[str, jax.Array]) -> jax.Array:
        """The numbers in the arrays, float32 of the leaf's shape."""
        ...
