"""Random bits for stochastic rounding, computed from where a number stands and when: no key to keep, nothing to store.

    bits = mix(mix(count + salt) + row * A + column * B)

`mix` is the finaliser of MurmurHash3, in which every input bit flips every output bit with probability near one half.
The bits depend on the step and on the place within the last two axes only, so stacked matrices get what each would get
alone, and a shard computes its own. They are good enough to round without bias and must not be used for anything else.
"""

import jax
import jax.numpy as jnp

from spectra_optax import sharding

_STRIDES = (0x9E3779B1, 0x85EBCA77)  # odd and unrelated: no two places of a matrix below 2^16 x 2^16 collide in step


def random_bits(x: jax.Array, count: jax.Array, salt: int) -> jax.Array:
    """Uniform bits, uint32 of the shape and sharding of `x`, new for every `count` (int32 `[]`) and `salt`."""
    place = _mix(count.astype(jnp.uint32) * jnp.uint32(_STRIDES[0]) + jnp.uint32(salt))
    for axis, stride in zip(range(x.ndim - 1, max(-1, x.ndim - 3), -1), _STRIDES, strict=False):
        place = place + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride)
    return sharding.like(_mix(jnp.broadcast_to(place, x.shape)), x)


def _mix(h: jax.Array) -> jax.Array:
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)
