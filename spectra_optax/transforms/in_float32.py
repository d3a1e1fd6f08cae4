"""Runs any Optax transformation in float32, whatever the dtype of parameters and gradients.

    update(g) = inner.update(float32(g)) in the dtype of g

Adam's eps is 0 in float16, and a second moment in bfloat16 stops following; in float32 both are what they should be.
Wider and complex dtypes pass unchanged. No state of its own.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax

from spectra_optax import sharding
from spectra_optax.leaves import inexact
from spectra_optax.lift import dtype_of, named, wide


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Runs a transformation in float32 or wider, whatever the dtype of parameters and gradients.

    Its state is that of float32 parameters; its updates come back in the gradients' dtype. Gradients that do not match
    the parameters or the state, which broadcasting would let through, are refused with a `ValueError`.
    """
    inner = optax.with_extra_args_support(inner)

    def init(params):
        for path, x in named(params):
            inexact(path, dtype_of(path, x))
        return first_state(inner.init, params)

    def update(updates, state, params=None, **extra_args):
        if params is not None:
            check_alike("updates", updates, "params", params)
        _check_kinds(jax.eval_shape(init, updates if params is None else params), state)
        wide_updates, wide_params = (jax.tree.map(lambda x: x.astype(wide(x.dtype)), t) for t in (updates, params))
        new_updates, new_state = inner.update(wide_updates, state, wide_params, **extra_args)
        check_alike("updates", updates, "the state's parameters", new_updates)
        check_alike("the state", state, "the state after this update", new_state)
        return jax.tree.map(lambda u, g: u.astype(g.dtype), new_updates, updates), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def first_state(init: Callable[[Any], Any], params: Any) -> Any:
    """The inner state of float32 parameters.

    Most need shapes only, and a float32 copy of all parameters may be the largest allocation of all. Some need arrays:
    `optax.contrib.schedule_free` keeps them, `optax.inject_hyperparams` takes their dtypes.
    """
    try:
        state = init(jax.tree.map(_widened, params))
        if not any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(state)):
            return state
    except (TypeError, AttributeError):  # what a shape raises where an array is needed
        pass
    return init(jax.tree.map(lambda x: x.astype(wide(x.dtype)), params))


def _widened(x: Any) -> Any:
    """A leaf as `init` should see it: itself, or its float32 shape (no copy is made of 16-bit parameters)."""
    if x.dtype == wide(x.dtype):
        return x
    return jax.ShapeDtypeStruct(x.shape, wide(x.dtype), sharding=sharding.of(x))


def _check_kinds(expected: Any, state: Any, path: str = "") -> None:
    """Refuses a state whose parts or arrays are of other kinds than those that `init` builds.

    A part that carries its own settings is left to the transformation that wrote them, which can say more.
    """
    if isinstance(expected, tuple) and type(expected) is type(state) and len(expected) == len(state):
        if not hasattr(expected, "settings"):
            names = getattr(expected, "_fields", range(len(expected)))
            for name, one, two in zip(names, expected, state, strict=True):
                _check_kinds(one, two, f"{path}/{name}")
    elif isinstance(expected, dict) and isinstance(state, dict):
        for key in expected.keys() & state.keys():
            _check_kinds(expected[key], state[key], f"{path}/{key}")
    elif isinstance(expected, tuple) or _kind(expected) != _kind(state):
        raise ValueError(
            "The state was built under other settings, or for other parameters than those of the gradients: "
            f"expected {_kind(expected)} at {path.strip('/') or 'its root'!r}, got {_kind(state)}."
        )


def _kind(part: Any) -> str:
    return (
        f"{part.dtype}{list(part.shape)}"
        if hasattr(part, "dtype")
        else f"{type(part).__name__} of {len(part)}"
        if isinstance(part, tuple)
        else type(part).__name__
    )


def check_alike(name: str, tree: Any, other_name: str, other: Any) -> None:
    """Refuses trees of which a leaf differs in path or shape."""
    ours, theirs = ([(path, x.shape) for path, x in named(t)] for t in (tree, other))
    for one, two in zip(ours, theirs, strict=False):
        if one != two:
            raise ValueError(f"{name} and {other_name} do not match: {one} against {two}.")
    if len(ours) != len(theirs):
        raise ValueError(f"{name} have {len(ours)} leaves, {other_name} {len(theirs)}.")
