"""Checks of factory arguments, so that a wrong value is refused where it was written."""

import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Scalar = float | jax.Array
_LARGEST_DECAY = 1.0 - 2.0**-24  # the largest float32 below 1


def decay_rate(name: str, value: Scalar) -> Scalar:
    """Returns a decay rate in [0, 1), refusing every other Python number.

    An array (a hyperparameter injected by `optax.inject_hyperparams`, perhaps traced) cannot be refused. It is
    clipped below 1 instead: 0.999 injected beside bfloat16 parameters arrives as exactly 1, which would divide by 0.

    Args:
      name: the argument's name, for the message.
      value: the rate; a Python number passes unchanged, an array becomes float32.

    Raises:
      ValueError: if a Python number lies outside [0, 1), or is 1 in float32.
      TypeError: if it is no number.
    """
    number(name, value)
    if isinstance(value, numbers.Real):
        if not 0.0 <= float(value) <= _LARGEST_DECAY:
            raise ValueError(f"{name} must lie in [0, 1) in float32, got {value!r}.")
        return value  # pyrefly: ignore
    return jnp.clip(jnp.asarray(value, jnp.float32), 0.0, _LARGEST_DECAY)


def positive(name: str, value: Scalar) -> Scalar:
    """Returns `value`, refusing Python numbers that are not above 0 (arrays pass unchecked)."""
    number(name, value)
    if isinstance(value, numbers.Real) and not float(value) > 0.0:
        raise ValueError(f"{name} must be above 0, got {value!r}.")
    return value


def number(name: str, value: Any) -> None:
    """Refuses what is neither a real number nor an array."""
    if not isinstance(value, (numbers.Real, jax.Array, np.ndarray)):
        raise TypeError(f"{name} must be a number or an array, got {value!r}.")


def integer(name: str, value: Any, smallest: int) -> None:
    """Refuses what is no integer, or one below the smallest that is accepted."""
    if not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    if value < smallest:
        raise ValueError(f"{name} must be at least {smallest}, got {value!r}.")


def dtype_name(name: str, value: Any, accepted: tuple[str, ...]) -> str:
    """The name of a dtype, refusing those that are not accepted."""
    try:
        value = jnp.dtype(value).name
    except TypeError:
        pass
    choice(name, value, accepted)
    return value


def instance(name: str, value: Any, *accepted: type) -> None:
    """Refuses a value that is of none of the accepted types."""
    if not isinstance(value, accepted):
        names = " or ".join(kind.__name__ for kind in accepted)
        raise TypeError(f"{name} must be a {names}, got {value!r}.")


def choice(name: str, value: Any, accepted: tuple[str | None, ...]) -> None:
    """Refuses a value that is not one of the accepted words."""
    if value not in accepted:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, accepted))}, got {value!r}.")
