"""Bits for stochastic rounding, computed from where a number stands and when: no key to keep, nothing to store.

    bits / 2^32 = frac(count * phi + row * a + column * b)

with `phi` the golden ratio and `a`, `b` the powers of the plastic number: a low-discrepancy sequence in time and in
space. Rounded up where the bits fall below a number's fraction, a number that stays is rounded up in that share of the
steps to within `O(log t / t)`, where independent draws would only reach `O(1 / sqrt(t))`; an average that moves by a
hundredth of a code each step moves in the codes too.

The bits depend on the step and on the place within the last two axes, so stacked matrices get what each would get
alone. Good for rounding and for nothing else: neighbours are far from independent.

Source: Roberts 2018, "The unreasonable effectiveness of quasirandom sequences", for the constants.
"""

import jax
import jax.numpy as jnp

_TIME = 0x9E3779B1  # 2^32 / 1.618034, odd
_PLACE = (0xC13FA9A9, 0x91E10DA5)  # 2^32 / 1.324718 and 2^32 / 1.324718^2


def random_bits(x: jax.Array, count: jax.Array, salt: int) -> jax.Array:
    """Bits, uint32 of the shape and sharding of `x` (float32), uniform over the steps `count` (int32 `[]`).

    `salt` shifts the sequence, so that two roundings of one place in one step differ. The last bit of `x` moves it by
    `2^-32`: or XLA would compute the bits of two leaves once and carry leaves to where the others' shards lie.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32) & 1
    for axis, stride in zip(range(x.ndim - 1, max(-1, x.ndim - 3), -1), _PLACE, strict=False):
        bits = bits + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride)
    return bits + (count.astype(jnp.uint32) * jnp.uint32(_TIME) + jnp.uint32(salt * _PLACE[1] % 2**32))


def to_bfloat16(x: jax.Array, count: jax.Array) -> jax.Array:
    """Rounds to bfloat16 without bias: an average that moves by less than half a bfloat16 a step moves on."""
    x = x.astype(jnp.float32)
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    raised = (bits + (random_bits(x, count, 0) >> 16)) & jnp.uint32(0xFFFF0000)
    return jax.lax.bitcast_convert_type(jnp.where(jnp.isfinite(x), raised, bits), jnp.float32).astype(jnp.bfloat16)
