"""Cuts one axis of a matrix into blocks: neighbours that are transformed, or share a scale, together.

The axis keeps its place and its neighbours, so a block lives on the shard of its first row; nothing is ever flattened.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from spectra_optax import backend, sharding


@dataclasses.dataclass(frozen=True)
class Layout:
    """How one axis of a matrix is cut: `length` into `count` blocks of `block`, `kept` coefficients of each."""

    length: int
    block: int
    count: int
    kept: int

    @property
    def frequencies(self) -> int:
        """How many frequencies a block has."""
        return self.block // 2 + 1

    @property
    def coefficients(self) -> "Layout":
        """The layout of the kept coefficients, which stand where the axis stood."""
        return Layout(self.count * self.kept, self.kept, self.count, self.kept)

    def split(self, x: jax.Array, axis: int) -> jax.Array:
        """Cuts axis -2 or -1 of `[..., r, c]` into blocks `[..., n, b, across]`; the last is padded with zeros."""
        x = sharding.undivided(x, axis, self.count if x.shape[axis] % self.count == 0 else 1)
        x = x if axis == -2 else jnp.swapaxes(x, -1, -2)
        *batch, length, across = x.shape
        missing = self.count * self.block - length
        x = jnp.pad(x, [(0, 0)] * len(batch) + [(0, missing), (0, 0)]) if missing else x
        return x.reshape(*batch, self.count, self.block, across)

    def join(self, blocks: jax.Array, axis: int) -> jax.Array:
        """The inverse of `split`."""
        *batch, count, block, across = blocks.shape
        x = blocks.reshape(*batch, count * block, across)
        x = jax.lax.slice_in_dim(x, 0, self.length, axis=-2) if count * block != self.length else x
        return x if axis == -2 else jnp.swapaxes(x, -1, -2)


def apart(blocks: jax.Array) -> jax.Array:
    """On TPUs, keeps XLA from moving the cut past what is computed from the blocks; elsewhere a no-op."""
    return jax.lax.optimization_barrier(blocks) if backend.name() == "tpu" else blocks


_TILE = 8  # rows of a TPU's tile


def block_length(length: int, block: int) -> int:
    """The length of an axis's blocks: a divisor from half of `block` to `block`, or `block` with a padded last one.

    An axis that is long enough is cut into a multiple of 8 blocks where it can be, so that shards hold whole ones.
    """
    if length <= block:
        return length
    divisors = [b for b in range(block, (block - 1) // 2, -1) if length % b == 0]
    if length >= sharding.USUAL_SHARDS * block:
        whole = [b for b in divisors if length // b % sharding.USUAL_SHARDS == 0]
        divisors = sorted(whole, key=lambda b: b % _TILE != 0) or divisors  # stable: the longest first
    return divisors[0] if divisors else block


def product(matrices: jax.Array | np.ndarray, blocks: jax.Array) -> jax.Array:
    """`[..., m, p, q] @ [..., n, q, c]`, as `n` separate products: their operands need no transposition."""
    shape = (*blocks.shape[:-2], *matrices.shape[-2:])
    spread = sharding.like(jnp.broadcast_to(matrices, shape), blocks, range(blocks.ndim - 2))
    return jnp.matmul(spread, blocks, precision="highest")
