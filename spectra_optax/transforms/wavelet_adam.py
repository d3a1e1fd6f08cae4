"""Adam on the approximation of each gradient's wavelet transform: the Gradient Wavelet Transform (GWT).

    a     = the approximation of g, one number in 2^level
    mu    <- b1 mu + (1 - b1) a,   nu <- b2 nu + (1 - b2) |a|^2
    root  = sqrt(nu / (1 - b2^t)) + eps
    u     = g / spread(root) + expansion((mu / (1 - b1^t) - a) / root),  |u| at most min(3, sqrt((1 - b2^t) / (1 - b2)))

So the approximation of u is Adam's, and the rest of g, its details, is divided by the root that stands where it stands:
details have no average of their own. The bound is Adam's (a
`nu` of the number's own would not be below `(1 - b2) |g|^2`) and three standard deviations of noise, because a block
whose gradients cancel in its approximation would divide by next to nothing for ever. Where gradients are noise, `u` has
a root mean square of 0.73, 0.88, 0.94 at levels 1, 2, 3 (Adam: 0.23), so a quarter of it, `alpha`, is Adam's step.

The published update (`mode="reference"`) differs: it starts at a root mean square of 10^3, because details are divided
by a root of one sample and multiplied by the bias correction of an average; a limiter on the growth of `u`'s norm
keeps one number a matrix, and needs a thousand steps to recover if the first gradient was 0. Moments have the dtype of
the parameter.

State: `8 / 2^level` bytes per parameter. Source: arXiv:2501.07237.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spectra_optax import sharding
from spectra_optax.arguments import Scalar
from spectra_optax.codecs.wavelet import Wavelet
from spectra_optax.leaves import LINEAR_LAYERS, Leaf, LeafRules
from spectra_optax.sharding import Slot, slot
from spectra_optax.transforms import neighbours
from spectra_optax.transforms.factored_rms import bounded
from spectra_optax.transforms.short_moments import (
    LARGEST,
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

_GROWTH, _FLOOR = 1.01, 1e-8  # of the reference's limiter


class GwtState(NamedTuple):
    """State of `scale_by_gwt`."""

    count: jax.Array  # int32 []
    mu: Any  # [..., r / 2^level, c], averaged approximations; of dense leaves, averaged gradients
    nu: Any  # real, the same shape: averaged squares
    norm: Any  # [...], the last norm of mu / sqrt(nu) of each matrix; only in the reference mode
    settings: jax.Array  # uint8 [n], what the state was built with


def _slots(leaf: Leaf, settings: Settings) -> dict[str, Slot]:
    slots = moment_slots(leaf, settings)
    if settings.mode == "reference" and leaf.is_matrix:
        slots["norm"] = slot(leaf.matrix_shape[:-2], slots["nu"].dtype, leaf.matrix_axes[:-2])
    return slots


def _stable(settings: Settings, axis: int, count: jax.Array, x: jax.Array, decays: Decays, held: Held):
    wavelet = settings.wavelet
    a = wavelet.approximation(x, axis)
    mu, nu = averaged(a, squared(a), decays, held)
    seen = 1.0 - decays.b2**count
    inverse = 1.0 / (jnp.sqrt(nu / seen) + decays.eps)
    # All of x over the root, and in place of its approximation the momentum's.
    swapped = (mu / (1.0 - decays.b1**count) - a) * inverse
    whole = lambda rule, y: sharding.like(rule(y, x.shape[axis], axis), x)
    u = x * whole(wavelet.spread, inverse) + whole(wavelet.expansion, swapped)
    return bounded(u, jnp.minimum(LARGEST, jnp.sqrt(seen / (1.0 - decays.b2)))), {"mu": mu, "nu": nu}


def _reference(settings: Settings, axis: int, count: jax.Array, x: jax.Array, decays: Decays, held: Held):
    a, *details = settings.wavelet.transform(x, axis)
    mu, nu = averaged(a, squared(a), decays, held)
    root = jnp.sqrt(nu) + decays.eps
    size = _norm(mu / root)
    before = held["norm"].astype(size.dtype)
    limit = jnp.where(count == 1, 1.0, jnp.maximum(size / (before + _FLOOR), _GROWTH) / _GROWTH)
    inverse = 1.0 / (root * limit[..., None, None])
    scaled = [mu * inverse]
    for d in details:
        inverse = inverse if inverse.shape == d.shape else _doubled(inverse, d.shape[axis], axis)
        scaled.append(d * inverse)
    unbias = jnp.sqrt(1.0 - decays.b2**count) / (1.0 - decays.b1**count)
    u = unbias * settings.wavelet.inverse(scaled, x.shape[axis], axis)
    return sharding.like(u, x), {"mu": mu, "nu": nu, "norm": size / limit}


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(squared(x), axis=(-2, -1)))


def _views(settings: Settings) -> Views:
    wavelet = settings.wavelet

    def whole(n, axis, mu, nu):
        return neighbours.expansion(wavelet, mu, n, axis), neighbours.spread_power(wavelet, nu, n, axis)

    def short(axis, numbers, mu, nu):
        mu, nu = wavelet.approximation(mu, axis), neighbours.power(wavelet, nu, axis)
        norm = {"norm": _norm(mu / (jnp.sqrt(nu) + numbers["eps"]))} if settings.mode == "reference" else {}
        return {"mu": mu, "nu": nu} | norm

    return Views(whole, short)


def _doubled(x: jax.Array, n: int, axis: int) -> jax.Array:
    """Each number twice along an axis, `n` in all."""
    return jax.lax.slice_in_dim(jnp.repeat(x, 2, axis=axis), 0, n, axis=axis)


def scale_by_gwt(
    wavelet: Wavelet = Wavelet(),
    *,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    alpha: Scalar = 0.25,
    mode: Mode = "stable",
    leaves: LeafRules = LINEAR_LAYERS,
) -> optax.GradientTransformationExtraArgs:
    """Adam on the approximations of a wavelet transform; details are divided by the same roots, without momentum.

    Dense leaves (vectors, small matrices, and by default embeddings and heads) get Adam, without `alpha`.

    Args:
      wavelet: the transform; its level says what is kept, one number in `2^level`.
      b1: decay of the momentum, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to the root of the second moment; the published setting is 1e-6.
      alpha: scale of the updates of matrices. At a quarter, noise moves weights as far as under Adam.
      mode: "stable"; "reference" is the published update with its moments in the parameters' dtype.
      leaves: which leaves are matrices.

    Returns:
      An Optax transformation with state `GwtState`; updates have the gradients' dtype.

    Raises:
      ValueError: if `b1` or `b2` is outside [0, 1), `eps` or `alpha` is not above 0, or `mode` is unknown; at `init` if
        the axis of a matrix is too short for the level.
      TypeError: if `wavelet` is no `Wavelet`.

    Example:
      >>> import jax.numpy as jnp
      >>> from spectra_optax import Wavelet, scale_by_gwt
      >>> params = {"kernel": jnp.ones((256, 128))}
      >>> tx = scale_by_gwt(Wavelet("haar", level=3))
      >>> tx.init(params).mu["kernel"].shape
      (32, 128)

    References:
      Gradient Wavelet Transform, 2025: https://arxiv.org/abs/2501.07237
    """
    rule = _reference if mode == "reference" else _stable
    numbers = {"b1": b1, "b2": b2, "eps": eps, "alpha": alpha}
    return short_adam(GwtState, rule, Settings(wavelet, mode), numbers, leaves, _slots, _views)
