"""What Adams with moments shorter than their parameter have in common: slots, averages, the rule of dense leaves.

    mu <- b1 mu + (1 - b1) x,   nu <- b2 nu + (1 - b2) square

A rule maps the gradient of one matrix to an update; what is dense gets Adam itself.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spectra_optax import arguments
from spectra_optax.arguments import Scalar
from spectra_optax.codecs.wavelet import Wavelet
from spectra_optax.leaves import Leaf, LeafRules, wide
from spectra_optax.lift import lift
from spectra_optax.lifted_readings import ArrayReading, lifted
from spectra_optax.readings import ADAM, Numbers, readable
from spectra_optax.sharding import Slot, slot

LARGEST = 3.0  # standard deviations that a number without an average of its own may move by
Mode = Literal["stable", "reference"]
Held = dict[str, jax.Array]


class Settings(NamedTuple):
    """What is the same for every leaf and step."""

    wavelet: Wavelet
    mode: Mode


class Decays(NamedTuple):
    """The numbers of Adam, in the precision of what they are applied to."""

    b1: Any
    b2: Any
    eps: Any


class Views(NamedTuple):
    """How moments of approximations and moments of whole matrices stand for each other.

    Attributes:
      whole: `(n, axis, mu, nu) -> (mu, nu)` of matrices with an axis of length `n`.
      short: `(axis, numbers, mu, nu) -> arrays` of the state.
    """

    whole: Callable[..., tuple[jax.Array, jax.Array]]
    short: Callable[..., Held]


Rule = Callable[[Settings, int, jax.Array, jax.Array, Decays, Held], tuple[jax.Array, Held]]


def short_adam(
    state_type: type,
    rule: Rule,
    settings: Settings,
    hyperparameters: dict[str, Scalar],
    leaves: LeafRules,
    slots: Callable[[Leaf, Settings], dict[str, Slot]],
    views: Callable[[Settings], "Views"],
) -> optax.GradientTransformationExtraArgs:
    """Lifts a rule for one matrix, `(settings, axis, count, gradient, decays, held) -> (update, held)`.

    Raises:
      ValueError: if a hyperparameter is out of range or the mode unknown.
      TypeError: if the wavelet is none.
    """
    arguments.instance("wavelet", settings.wavelet, Wavelet)
    arguments.choice("mode", settings.mode, ("stable", "reference"))
    checks = {"b1": arguments.decay_rate, "b2": arguments.decay_rate}
    checked = {name: checks.get(name, arguments.positive)(name, value) for name, value in hyperparameters.items()}
    label = f"{state_type.__name__} {settings.wavelet.label} {settings.mode}"
    step = partial(_step, rule=rule, settings=settings, **checked)
    tx = lift(state_type, lambda leaf: slots(leaf, settings), step, leaves, label)
    whole, short = views(settings)
    read, write = partial(_whole, settings, whole), partial(_short, settings, short)
    array = ArrayReading(((ADAM, "mu"), (ADAM, "nu")), read, write)
    return readable(tx, lifted(state_type, leaves, array), eps=checked["eps"])


def _whole(settings: Settings, rule: Callable, leaf: Leaf, numbers: Numbers, held: Held):
    moments = (held["mu"].astype(wide(leaf.dtype)), held["nu"].astype(jnp.finfo(wide(leaf.dtype)).dtype))
    if not leaf.is_matrix:
        return moments
    axis = settings.wavelet.cut_axis(leaf)
    return tuple(map(leaf.from_matrix, rule(leaf.matrix_shape[axis], axis, *moments)))


def _short(settings: Settings, rule: Callable, leaf: Leaf, numbers: Numbers, count: jax.Array, mu, nu) -> Held:
    nu = jnp.real(nu)
    if not leaf.is_matrix:
        return {"mu": mu, "nu": nu}
    return rule(settings.wavelet.cut_axis(leaf), numbers, leaf.to_matrix(mu), leaf.to_matrix(nu))


def moment_slots(leaf: Leaf, settings: Settings) -> dict[str, Slot]:
    """Both moments of a leaf: of its approximation if it is a matrix, else of itself.

    The published methods hold them in the parameter's dtype, where b2 of 0.999 is 1 if that is bfloat16.
    """
    if leaf.kind == "empty":
        return {}
    dtype = wide(leaf.dtype) if settings.mode == "stable" else leaf.dtype
    of = settings.wavelet.slot if leaf.is_matrix else lambda leaf, d: slot(leaf.shape, d, range(len(leaf.shape)))
    return {"mu": of(leaf, dtype), "nu": of(leaf, jnp.finfo(dtype).dtype)}


def averaged(x: jax.Array, square: jax.Array, decays: Decays, held: Held) -> tuple[jax.Array, jax.Array]:
    """The moments after one more `x`, in its precision."""
    mu = decays.b1 * held["mu"].astype(x.dtype) + (1.0 - decays.b1) * x
    nu = decays.b2 * held["nu"].astype(square.dtype) + (1.0 - decays.b2) * square
    return mu, nu


def squared(x: jax.Array) -> jax.Array:
    """Squared magnitudes."""
    return jnp.square(x.real) + jnp.square(x.imag) if jnp.iscomplexobj(x) else jnp.square(x)


@partial(jax.jit, static_argnames=("leaf", "rule", "settings"))
def _step(
    leaf: Leaf, count: jax.Array, g: jax.Array, *, rule: Rule, settings: Settings, b1, b2, eps, alpha, **held: jax.Array
):
    if leaf.kind == "empty":
        return g, held
    *numbers, alpha = (jnp.asarray(h, jnp.finfo(g.dtype).dtype) for h in (b1, b2, eps, alpha))
    decays = Decays(*numbers)
    if leaf.is_matrix:
        u, new = rule(settings, settings.wavelet.cut_axis(leaf), count, leaf.to_matrix(g), decays, held)
        u = leaf.from_matrix(alpha * u)
    else:
        mu, nu = averaged(g, squared(g), decays, held)
        u = mu / (1.0 - decays.b1**count) / (jnp.sqrt(nu / (1.0 - decays.b2**count)) + decays.eps)
        new = {"mu": mu, "nu": nu}
    return u, {name: array.astype(held[name].dtype) for name, array in new.items()}
