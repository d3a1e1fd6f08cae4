"""Switches a run from one optimizer to another without losing its moments.

A state is read as that of its dense twin and written in the target's form (`readings.py`). With Adam's `mu` and `nu`,
averages that are not yet corrected for their bias, `t` updates behind them, and equal decays on both sides:

    compress_state    codes of mu and nu: what encoding them gives
    spectra_adamw     rms_row^2, rms_col^2 = means of nu over rows and columns: exact, means of averages are averages
                      mu = kept coefficients of clip(mu / sqrt(nu_hat)), nu_hat = factored(nu) / (1 - b2^t): as if
                      nu_hat had been what it is for the last 1 / (1 - b1) steps
    foam_adamw        means of neighbours of mu and nu: exact
    gwt_adamw         mu = approximation of mu: exact
                      nu = mean of nu over the neighbours: the second moment of the approximation if gradients of
                      neighbours are uncorrelated
    gwt_adafactor     rms_row, rms_col as above; mu = approximation of mu / sqrt(nu_hat)

and back: `mu` and `nu` are what the compact form decodes to, with nothing in what it does not hold. What a form holds
comes back from there bit for bit, where the arithmetic is by powers of two: codes that are rounded to the nearest, and
subspaces of even levels whose neighbours are complete; to rounding elsewhere, but for spectral blocks that are padded.
"""

from typing import Any

import jax
import optax

from spectra_optax.lift import named
from spectra_optax.readings import filled, parts
from spectra_optax.transforms.in_float32 import check_alike


def convert_state(
    source: optax.GradientTransformation,
    target: optax.GradientTransformation,
    state: Any,
    params: Any,
    *,
    target_params: Any = None,
) -> Any:
    """The state of `target` that stands for the same moments as a running state of `source`.

    Counts go on, so bias corrections, schedules and stochastic rounding do not start again. Give both optimizers the
    same b1 and b2. Hyperparameters that live in a state (`optax.inject_hyperparams`) are the target's own.

    Args:
      source: the transformation whose state it is: one of Optax's, or of this package, in any chain.
      target: the one to go on with. A state of a type that `source` has too is copied field by field; the optimizers
        of this package also take Adam's moments, and `optax.adam`'s family takes theirs.
      state: the running state.
      params: the parameters that it belongs to.
      target_params: those to go on with, if their dtypes are others: 16-bit ones for `split_master_weights`, whose low
        bits `with_master_weights` then sets; float32 ones from `master_weights` on the way back.

    Returns:
      A state for `target`, laid out over devices as `target.init` does it. Works under `jit`, where the full state of
      neither side need be held.

    Raises:
      ValueError: if the state is not one of `source`, or does not tell a field that the target holds: both are named.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from spectra_optax import convert_state, flash_adamw
      >>> params = {"kernel": jnp.ones((64, 64))}
      >>> dense, compact = optax.adamw(1e-3), flash_adamw(1e-3)
      >>> _, state = dense.update({"kernel": jnp.full((64, 64), 0.5)}, dense.init(params), params)
      >>> state = convert_state(dense, compact, state, params)
      >>> mu = convert_state(compact, dense, state, params)[0].mu["kernel"]
      >>> print(f"{mu.mean():.3f}")
      0.050
    """
    if target_params is None:
        target_params = params
    check_alike("target_params", target_params, "params", params)
    _check_source(source, state, params)
    fresh = target.init(target_params)
    return jax.tree.map(_placed, filled(target, fresh, target_params, parts(source, state, params)), fresh)


def _check_source(source: optax.GradientTransformation, state: Any, params: Any) -> None:
    """Refuses a state of another transformation, by its structure, and by what its own update says to it."""
    expected = jax.eval_shape(source.init, params)
    check_alike("state", state, "a state of source", expected)
    ours, theirs = jax.tree.structure(state), jax.tree.structure(expected)
    if ours != theirs:
        raise ValueError(f"state must be one of source, {theirs}, got {ours}.")
    dtypes = [(path, x.dtype, y.dtype) for (path, x), (_, y) in zip(named(state), named(expected), strict=True)]
    for path, found, wanted in dtypes:
        if found != wanted:
            raise ValueError(f"state must be one of source, with {wanted} at {path!r}, got {found}.")
    jax.eval_shape(lambda g, p: source.update(g, state, p), params, params)  # settings: by those who wrote them


def _placed(new: Any, fresh: Any) -> Any:
    """An array laid out as that of a fresh state."""
    traced = any(isinstance(x, jax.core.Tracer) for x in (new, fresh))
    return new if traced or new.sharding == fresh.sharding else jax.device_put(new, fresh.sharding)
