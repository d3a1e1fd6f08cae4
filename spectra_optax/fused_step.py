"""A step that returns parameters instead of updates, so that no update is written to memory and read back.

    params, state = fused_step(tx)(grads, state, params)

equals `tx.update` followed by `optax.apply_updates` to float32 rounding. On TPUs and GPUs, transformations of this
package run as one kernel for each matrix, out of which an update would have to be written (4 bytes a parameter) and
read again. Elsewhere those whose temporaries are as large as a parameter run slice by slice on large stacks of
matrices. Otherwise, and for every other transformation, it is the two calls, which XLA fuses by itself.
"""

import functools
from collections.abc import Callable
from typing import Any

import optax

from spectra_optax import arguments, tiling
from spectra_optax.parts import in_parts

Step = Callable[..., tuple[Any, Any]]


def fused_step(*transformations: optax.GradientTransformation, shardings: Any = None) -> Step:
    """Builds `(gradients, state, params) -> (params, state)`.

    Args:
      *transformations: one optimizer, or the members of a chain of which it is the last: `fused_step(clip, optimizer)`
        steps with the state of `optax.chain(clip, optimizer)`.
      shardings: a tree like the parameters of `jax.sharding.NamedSharding`, for parameters on a mesh with Auto axes,
        whose layout is not known while tracing; without it the step there is the two calls.

    Returns:
      A function of gradients, state and parameters, and of extra arguments for transformations that take them. Jit it
      with parameters and state donated. Where the state has arrays like the parameters, as AdamW's, jit a function that
      takes parameters first: JAX gives donated memory to the first result of its shape.

    Raises:
      ValueError: if there is no transformation.
      TypeError: if one is no `optax.GradientTransformation`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from spectra_optax import flash_adamw, fused_step
      >>> params = {"kernel": jnp.ones((128, 64), jnp.bfloat16)}
      >>> tx = flash_adamw(0.25)
      >>> step = jax.jit(fused_step(tx), donate_argnums=(1, 2))
      >>> params, state = step({"kernel": jnp.ones((128, 64))}, tx.init(params), params)
      >>> print(params["kernel"][0, 0])
      0.75
    """
    if not transformations:
        raise ValueError("fused_step needs a transformation.")
    for tx in transformations:
        arguments.instance("transformations", tx, optax.GradientTransformation)
    *before, last = transformations
    first: Any = optax.chain(*before) if before else optax.identity()
    whole = optax.with_extra_args_support(optax.chain(*transformations) if before else last)

    local = tiling.local_of(last)

    def step(gradients, state, params, **extra_args):
        if extra_args or local is None:
            updates, state = whole.update(gradients, state, params, **extra_args)
            return optax.apply_updates(params, updates), state
        apply = functools.partial(in_parts, tiling.untiled(last), local, apply=True, shardings=shardings)
        if not before:
            return apply(gradients, state, params)
        *states, own = state
        updates, others = first.update(gradients, tuple(states), params)
        params, own = apply(updates, own, params)
        return params, (*tuple(others), own)

    return step
