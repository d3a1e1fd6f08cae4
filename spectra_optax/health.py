"""What can be seen of a running state that goes wrong, as scalars to log.

    nonfinite     how many numbers are infinite or NaN
    zeros         share of the numbers, or codes, that are 0
    saturated     share of the numbers, or scales, that are at an end of their form's range: the largest it has, or so
                  small that the next step down is 0
    update_ratio  rms(update) / rms(update of the dense optimizer from the same moments and gradients)

Bytes read: those of the state; a few scalars come out, so that it can be a part of a training step.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spectra_optax.conversion import convert_state
from spectra_optax.fields import owner
from spectra_optax.lift import named, path_name, unboxed
from spectra_optax.transforms.in_float32 import check_alike

_SCALES = ("scales", "mu_scales")
_EXPONENTS = (-126, 127)  # the ends of scales that are powers of two; -127 is 0, -128 not finite


def state_health(
    tx: optax.GradientTransformation,
    state: Any,
    params: Any,
    *,
    gradients: Any = None,
    reference: optax.GradientTransformation | None = None,
) -> dict[str, jax.Array]:
    """Telemetry of an optimizer's state, as scalars to be logged.

    Args:
      tx: the transformation whose state it is, any of Optax's or of this package.
      state: the running state.
      params: the parameters that it belongs to.
      gradients: the next gradients, to compare updates; only with `reference`.
      reference: a dense optimizer with the same learning rate and decays, `optax.adamw` for most here, which makes its
        update from what the state decodes to (`convert_state`).

    Returns:
      A flat dict. "nonfinite" is the number of all; the others are "leaf/field/measure": "kernel/mu/codes/zeros".
      Counts are int32, shares float32. Codes have no "saturated", because the largest of each group has the largest
      code; with 4 bits, "zeros" are bytes of two smallest codes. With `gradients`, "leaf/update_ratio" is 0 where the
      update is, and 1 where both are; of 16-bit parameters behind a split it is the update that lands. Works under
      `jit`.

    Raises:
      ValueError: if only one of `gradients` and `reference` is given; if the state is not one of `tx`, or does not tell
        what the reference holds.

    Example:
      >>> import jax.numpy as jnp
      >>> from spectra_optax import flash_adamw, state_health
      >>> params = {"kernel": jnp.ones((64, 64))}
      >>> tx = flash_adamw(1e-3)
      >>> gradients = {"kernel": jnp.zeros((64, 64)).at[:16].set(jnp.nan)}
      >>> _, state = tx.update(gradients, tx.init(params), params)
      >>> health = state_health(tx, state, params)
      >>> print(health["nonfinite"], health["kernel/mu/scales/zeros"])
      128 0.0
    """
    if (gradients is None) != (reference is None):
        raise ValueError("gradients and reference have an effect only together: give both or neither.")
    check_alike("state", state, "a state of tx", jax.eval_shape(tx.init, params))
    health = {"nonfinite": jnp.zeros([], jnp.int32)}
    for name, x, is_scale in _arrays(state, params):
        for measure, rule in _measures(x, is_scale).items():
            health[f"{name}/{measure}"] = rule(x)
        health["nonfinite"] += health.get(f"{name}/nonfinite", 0)
    if reference is not None:
        health |= _ratios(tx, reference, state, params, gradients)
    return health


def _arrays(state: Any, params: Any) -> list[tuple[str, jax.Array, bool]]:
    """The arrays of a state that belong to parameters, as "leaf/field", each with whether it holds scales."""
    leaves = {path for path, x in jax.tree_util.tree_flatten_with_path(unboxed(params))[0]}
    found: dict[str, tuple[jax.Array, bool]] = {}
    for path, x in jax.tree_util.tree_flatten_with_path(unboxed(state))[0]:
        leaf = owner(path, leaves)
        if leaf is None or x.size == 0 or _is_setting(path):
            continue
        before = path[: len(path) - len(leaf)]
        last = max((i for i, key in enumerate(before) if isinstance(key, jax.tree_util.GetAttrKey)), default=0)
        name = "/".join(filter(None, (path_name(leaf), path_name(before[last:]))))
        whole = "/".join(filter(None, (path_name(leaf), path_name(before))))
        found[name if name not in found else whole] = x, path_name(before[-1:]) in _SCALES
    return [(name, x, is_scale) for name, (x, is_scale) in found.items()]


def _is_setting(path: tuple[Any, ...]) -> bool:
    """Whether an array is a state's description of itself, which parameters that are one array seem to own."""
    return isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "settings"


def _measures(x: jax.Array, is_scale: bool) -> dict[str, Callable[[jax.Array], jax.Array]]:
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return {"nonfinite": _nonfinite, "zeros": _zeros, "saturated": _saturated}
    if is_scale:
        return {
            "nonfinite": lambda e: jnp.sum(e == _EXPONENTS[0] - 2, dtype=jnp.int32),
            "zeros": lambda e: _share(e == _EXPONENTS[0] - 1),
            "saturated": lambda e: _share((e == _EXPONENTS[0]) | (e == _EXPONENTS[1])),
        }
    return {"zeros": _zeros} if x.dtype.itemsize < 4 else {}


def _nonfinite(x: jax.Array) -> jax.Array:
    return jnp.sum(~jnp.isfinite(x), dtype=jnp.int32)


def _zeros(x: jax.Array) -> jax.Array:
    return _share(x == 0)


def _saturated(x: jax.Array) -> jax.Array:
    size, form = jnp.abs(x), jnp.finfo(x.dtype)
    return _share(((size > 0) & (size <= float(form.tiny))) | ((size >= float(form.max)) & jnp.isfinite(size)))


def _share(mask: jax.Array) -> jax.Array:
    return jnp.mean(mask, dtype=jnp.float32)


def _ratios(
    tx: optax.GradientTransformation, reference: optax.GradientTransformation, state: Any, params: Any, gradients: Any
) -> dict[str, jax.Array]:
    dense = convert_state(tx, reference, state, params)
    updates, wanted = (one.update(gradients, held, params)[0] for one, held in ((tx, state), (reference, dense)))
    rms = lambda u: jnp.sqrt(jnp.mean(jnp.square(jnp.abs(u.astype(jnp.promote_types(u.dtype, jnp.float32))))))
    pairs = zip(named(updates), named(wanted), strict=True)
    return {f"{path}/update_ratio": _ratio(rms(u), rms(v)) for (path, u), (_, v) in pairs if u.size}


def _ratio(one: jax.Array, other: jax.Array) -> jax.Array:
    return jnp.where(one == other, 1.0, one / other)
