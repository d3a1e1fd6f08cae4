"""Runs a rule on a stack of matrices slice by slice, so that its temporaries are those of a slice.

    for i in slices:  p[i], state[i] = rule(g[i], p[i], state[i])        written in the place of what was read

A stack `[*batch, r, c]` is cut along its batch axes into parts `[*part, r, c]` of at most 2^25 numbers on a device (or
one matrix), along axes that are not sharded, so no device needs another's slice. Numbers are those of the whole stack.

What XLA makes one pass of, a loop would only cut into several. But on GPUs it writes float32 copies between the passes
of every rule with a maximum or a mean once they exceed 2 GiB: for `flash_adamw` 8.2 bytes per parameter of 32 layers of
4096 x 14336, slice by slice 0.32.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from spectra_optax import backend

_LARGEST = 2**25  # numbers: temporaries of 128 MiB for each float32 that a rule holds
_ONE_PASS = 2**29  # numbers that XLA for GPUs does not hold in float32 between two passes


def limit(bulky: bool) -> float:
    """How many numbers of a stack a device takes at once, for a rule that is or is not bulky (`Local.bulky`)."""
    if bulky:
        return _LARGEST
    return _ONE_PASS if backend.name() == "gpu" else math.inf


def part_of(shape: Sequence[int], axes: int, layout: NamedSharding | None, at_once: float) -> tuple[int, ...] | None:
    """The shape of the parts of a stack, cut along its first `axes` axes; None where one part is all.

    A stack of up to `at_once` numbers on a device is not cut.
    """
    own = shape if layout is None else layout.shard_shape(tuple(shape))
    part, held = list(shape), math.prod(own)
    if held <= at_once:
        return None
    for axis in range(axes):
        if held > _LARGEST and own[axis] == shape[axis]:
            fits = (k for k in range(shape[axis], 0, -1) if shape[axis] % k == 0)
            part[axis] = next((k for k in fits if held // shape[axis] * k <= _LARGEST), 1)
            held = held // shape[axis] * part[axis]
    return tuple(part) if list(part) != list(shape) else None


def run(
    rule: Callable[..., Sequence[jax.Array]],
    arrays: Sequence[jax.Array],
    views: Sequence[tuple[int, ...]],
    stacked: Sequence[int],
) -> list[jax.Array]:
    """The new values of the arguments numbered `stacked`, computed part by part and written in their places.

    Args:
      rule: maps a part of every argument to the new parts of all but the first; treats the slices of a stack apart.
      arrays: its arguments.
      views: the shape of a part of each; its own if every part sees the same.
      stacked: the arguments that are replaced.
    """
    cuts = [tuple(n // k for n, k in zip(x.shape, view, strict=True)) for x, view in zip(arrays, views, strict=True)]
    grid = cuts[0]

    def corner(steps, k):
        return [step * size if n > 1 else 0 for step, size, n in zip(steps, views[k], cuts[k], strict=False)]

    def body(index, held):
        steps = jnp.unravel_index(index, grid)
        parts = [jax.lax.dynamic_slice(x, corner(steps, k), views[k]) for k, x in enumerate(held)]
        held, new = list(held), rule(*parts)
        for k in stacked:
            held[k] = jax.lax.dynamic_update_slice(held[k], new[k - 1].astype(held[k].dtype), corner(steps, k))
        return held

    # What is not replaced goes along: an array that is known while tracing would be taken for the whole.
    held = jax.lax.fori_loop(0, math.prod(grid), body, list(arrays))
    return [held[k] for k in stacked]
