"""Adam on the means of `2^level` neighbours, with denominators that know what the means leave out (FOAM).

    m     = fold(g), means of neighbours,   r = g - spread(m)
    mu    <- b1 mu + (1 - b1) m,   nu <- b2 nu + (1 - b2) fold(|g|^2)
    u     = (spread(mu / (1 - b1^t)) + r) / (sqrt(spread(nu / (1 - b2^t)) + |r|^2) + eps)

The remainder stands in its own denominator: alone it moves no weight by more than 1, and a first step has a root mean
square of at most 1, without bound or limiter. The published update (`mode="reference"`) takes `mu` and `nu` as they are
and multiplies by `sqrt(1 - b2^t) / (1 - b1^t)`, by which the weight of `r` beside `nu` drifts; neighbours beyond an
end count as zeros, and moments have the dtype of the parameter.

State: `8 / 2^level` bytes per parameter. Source: arXiv:2512.07112.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spectra_optax import arguments
from spectra_optax.arguments import Scalar
from spectra_optax.codecs.wavelet import Wavelet
from spectra_optax.leaves import LINEAR_LAYERS, LeafRules
from spectra_optax.transforms.neighbours import completing, means
from spectra_optax.transforms.short_moments import (
    Decays,
    Held,
    Mode,
    Settings,
    Views,
    averaged,
    moment_slots,
    short_adam,
    squared,
)


class FoamState(NamedTuple):
    """State of `scale_by_foam`."""

    count: jax.Array  # int32 []
    mu: Any  # [..., r / 2^level, c], averaged means of neighbours; of dense leaves, averaged gradients
    nu: Any  # real, the same shape: averaged means of squares
    settings: jax.Array  # uint8 [n], what the state was built with


def _fold(settings: Settings, axis: int, x: jax.Array) -> jax.Array:
    """Means of neighbours; in the reference, of zeros too beyond the end of the axis."""
    mean = means(settings.wavelet, x, axis)
    return mean if settings.mode == "reference" else mean * completing(settings.wavelet, x.shape[axis], axis, x.ndim)


def _folded(settings: Settings, axis: int, count: jax.Array, x: jax.Array, decays: Decays, held: Held):
    mean = _fold(settings, axis, x)
    mu, nu = averaged(mean, _fold(settings, axis, squared(x)), decays, held)
    faded, seen = 1.0 - decays.b1**count, 1.0 - decays.b2**count
    step = 1.0
    if settings.mode == "reference":
        step, faded, seen = jnp.sqrt(seen) / faded, 1.0, 1.0
    spread = functools.partial(settings.wavelet.spread, n=x.shape[axis], axis=axis)
    rest = x - spread(mean)
    u = step * (spread(mu / faded) + rest) / (jnp.sqrt(spread(nu / seen) + squared(rest)) + decays.eps)
    return u, {"mu": mu, "nu": nu}


def _views(settings: Settings) -> Views:
    """The mean of an average is the average of means: what is folded is exact."""
    wavelet = settings.wavelet

    def whole(n, axis, mu, nu):
        weight = completing(wavelet, n, axis, mu.ndim) if settings.mode == "reference" else 1.0
        return wavelet.spread(mu * weight, n, axis), wavelet.spread(nu * weight, n, axis)

    def short(axis, numbers, mu, nu):
        return {"mu": _fold(settings, axis, mu), "nu": _fold(settings, axis, nu)}

    return Views(whole, short)


def scale_by_foam(
    wavelet: Wavelet = Wavelet(),
    *,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    alpha: Scalar = 0.25,
    mode: Mode = "stable",
    leaves: LeafRules = LINEAR_LAYERS,
) -> optax.GradientTransformationExtraArgs:
    """Adam on means of neighbours; what they leave out moves weights by itself, without momentum.

    Dense leaves (vectors, small matrices, and by default embeddings and heads) get Adam, without `alpha`.

    Args:
      wavelet: Haar's, whose level says how many neighbours share a moment: `2^level`.
      b1: decay of the momentum, in [0, 1).
      b2: decay of the second moment, in [0, 1); the published setting is 0.95.
      eps: added to the denominator.
      alpha: scale of the updates of matrices.
      mode: "stable"; "reference" is the published update with its moments in the parameters' dtype.
      leaves: which leaves are matrices.

    Returns:
      An Optax transformation with state `FoamState`; updates have the gradients' dtype.

    Raises:
      ValueError: if `wavelet` is not Haar's, `b1` or `b2` is outside [0, 1), `eps` or `alpha` is not above 0, or `mode`
        is unknown; at `init` if the axis of a matrix is too short for the level.
      TypeError: if `wavelet` is no `Wavelet`.

    Example:
      >>> import jax.numpy as jnp
      >>> from spectra_optax import scale_by_foam
      >>> params = {"kernel": jnp.ones((256, 128))}
      >>> tx = scale_by_foam(alpha=1.0)
      >>> updates, state = tx.update(params, tx.init(params))
      >>> print(updates["kernel"].mean(), state.nu["kernel"].shape)
      1.0 (64, 128)

    References:
      FOAM, 2025: https://arxiv.org/abs/2512.07112
    """
    arguments.instance("wavelet", wavelet, Wavelet)
    if not wavelet.is_haar:
        raise ValueError(f"wavelet must be of kind 'haar', whose approximations are means, got {wavelet}.")
    numbers = {"b1": b1, "b2": b2, "eps": eps, "alpha": alpha}
    return short_adam(FoamState, _folded, Settings(wavelet, mode), numbers, leaves, moment_slots, _views)
