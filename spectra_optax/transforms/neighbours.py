"""What numbers of a wavelet subspace share with the `2^level` neighbours that each stands for.

An approximation `a = sum_j h_j g_j` has `sum_j h_j^2 = 1`, so where neighbours are uncorrelated

    E |a|^2 = sum_j h_j^2 E |g_j|^2 ~ the mean of nu over the neighbours

zeros beyond the end of the axis included, which approximations count too.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from spectra_optax.codecs.wavelet import Wavelet


def means(wavelet: Wavelet, x: jax.Array, axis: int) -> jax.Array:
    """Means of `2^level` neighbours along an axis, zeros beyond its end included."""
    return wavelet.sums(x, axis) * 2.0**-wavelet.level


def completing(wavelet: Wavelet, n: int, axis: int, ndim: int) -> np.ndarray | float:
    """What the means of an axis of length `n` are multiplied by, so that zeros beyond its end do not count."""
    neighbours = 2**wavelet.level
    if not wavelet.is_haar or n % neighbours == 0:
        return 1.0
    weight = np.ones(wavelet.length(n), np.float32)
    weight[-1] = neighbours / (n % neighbours)
    return np.expand_dims(weight, tuple(a for a in range(-ndim, 0) if a != axis))


def power(wavelet: Wavelet, nu: jax.Array, axis: int) -> jax.Array:
    """Second moments of approximations, given those of what is transformed."""
    if wavelet.is_haar:
        return means(wavelet, nu, axis)
    haar = dataclasses.replace(wavelet, kind="haar")
    mean = means(haar, nu, axis) * completing(haar, nu.shape[axis], axis, nu.ndim)
    more = [(0, wavelet.length(nu.shape[axis]) - mean.shape[axis]), (0, 0)]  # of filters that reach beyond the end
    return jnp.pad(mean, [(0, 0)] * (nu.ndim - 2) + (more if axis == -2 else more[::-1]), mode="edge")


def spread_power(wavelet: Wavelet, nu: jax.Array, n: int, axis: int) -> jax.Array:
    """The second moments, alike among neighbours, for which `power` gives these."""
    return wavelet.spread(nu * completing(wavelet, n, axis, nu.ndim), n, axis)


def expansion(wavelet: Wavelet, mu: jax.Array, n: int, axis: int) -> jax.Array:
    """What has these approximations and no details, up to the end of the axis."""
    return wavelet.expansion(mu * completing(wavelet, n, axis, mu.ndim), n, axis)
