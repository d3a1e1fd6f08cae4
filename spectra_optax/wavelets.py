"""Finished optimizers whose moments live in a wavelet subspace, each a chain of the transformations below it.

    gwt_adamw        Adam on approximations, details by the same roots      [8 / 2^level bytes of state per parameter]
    foam_adamw       Adam on means of neighbours, the rest in its own root  [8 / 2^level]
    gwt_adafactor    factored second moment, momentum of approximations     [4 / 2^level + 4 (r + c) / (r c)]

Vectors, small matrices, embeddings and heads are `optax.adamw` in float32, unless `leaves` says otherwise.
"""

import functools
from collections.abc import Callable
from typing import Any

import optax

from spectra_optax import arguments
from spectra_optax.arguments import Scalar
from spectra_optax.codecs.wavelet import Wavelet
from spectra_optax.leaves import LINEAR_LAYERS, LeafRules
from spectra_optax.locality import Local
from spectra_optax.masks import aligned_mask
from spectra_optax.tiling import tiled
from spectra_optax.transforms.folded_adam import scale_by_foam
from spectra_optax.transforms.given_scale import prepared
from spectra_optax.transforms.in_float32 import in_float32
from spectra_optax.transforms.normalised_first import Adam, normalised_before, normalised_first
from spectra_optax.transforms.spectral_momentum import noise_gain
from spectra_optax.transforms.wavelet_adam import scale_by_gwt
from spectra_optax.transforms.wavelet_subspace import in_wavelet_subspace


def gwt_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    wavelet: Wavelet = Wavelet(),
    leaves: LeafRules = LINEAR_LAYERS,
) -> optax.GradientTransformationExtraArgs:
    """AdamW with moments for one number in `2^level`: the Gradient Wavelet Transform.

    Its state is float32. With moments in 8 bits by `compress_state`, weights stay within 10 % of their way from its own
    over 20,000 steps at b2 up to 0.9999, as gradients drop a thousandfold (`tests/test_long_run.py`).

    Args:
      learning_rate: a number or a schedule.
      b1: decay of the momentum, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to the root of the second moment.
      weight_decay: decoupled, multiplied by the learning rate; a number or a schedule.
      mask: which leaves decay: a tree of booleans like the parameters, a prefix of it, or a function of the parameters.
        With `optax.inject_hyperparams`, name it in `static_args`.
      wavelet: the transform; `Wavelet(level=2)` keeps a quarter.
      leaves: which leaves are transformed, and along which axes.

    Returns:
      An Optax transformation; its updates have the gradients' dtype. `scale_by_gwt` is its heart, for chains with
      another scale or the published update.

    Raises:
      ValueError: if `b1` or `b2` is outside [0, 1) or `eps` is not above 0; at `init` if `mask` does not fit the
        parameters, or the axis of a matrix is too short for the wavelet's level.
      TypeError: if `wavelet` or `leaves` is of another type, or a parameter is not floating or complex.

    Example:
      >>> import jax
      >>> from spectra_optax import gwt_adamw, state_bytes
      >>> params = {"kernel": jax.ShapeDtypeStruct((1024, 1024), "float32")}
      >>> round(state_bytes(gwt_adamw(1e-3), params) / 1024**2, 3)
      2.0

    References:
      Gradient Wavelet Transform, 2025: https://arxiv.org/abs/2501.07237
    """
    rest = _rest(learning_rate, weight_decay, mask)
    return _adamw(lambda leaves: scale_by_gwt(wavelet, b1=b1, b2=b2, eps=eps, leaves=leaves), rest, wavelet, leaves)


def foam_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    wavelet: Wavelet = Wavelet(),
    leaves: LeafRules = LINEAR_LAYERS,
) -> optax.GradientTransformationExtraArgs:
    """AdamW with moments of means of `2^level` neighbours: FOAM.

    Its state is float32. With moments in 8 bits by `compress_state`, weights stay within 10 % of their way from its own
    over 20,000 steps at b2 up to 0.9999, as gradients drop a thousandfold (`tests/test_long_run.py`).

    Args:
      learning_rate: a number or a schedule.
      b1: decay of the momentum, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to the denominator.
      weight_decay: decoupled, multiplied by the learning rate; a number or a schedule.
      mask: which leaves decay: a tree of booleans like the parameters, a prefix of it, or a function of the parameters.
        With `optax.inject_hyperparams`, name it in `static_args`.
      wavelet: Haar's; `Wavelet(level=2)` shares moments among four.
      leaves: which leaves are folded, and along which axes.

    Returns:
      An Optax transformation; its updates have the gradients' dtype. `scale_by_foam` is its heart, for chains with
      another scale or the published update.

    Raises:
      ValueError: if `wavelet` is not Haar's, `b1` or `b2` is outside [0, 1) or `eps` is not above 0; at `init` if
        `mask` does not fit the parameters, or the axis of a matrix is too short for the wavelet's level.
      TypeError: if `wavelet` or `leaves` is of another type, or a parameter is not floating or complex.

    Example:
      >>> import jax.numpy as jnp
      >>> from spectra_optax import foam_adamw
      >>> params = {"kernel": jnp.ones((64, 64))}
      >>> tx = foam_adamw(1e-2, weight_decay=0.0)
      >>> updates, state = tx.update(params, tx.init(params), params)
      >>> print(f"{updates['kernel'].mean():.4f}")
      -0.0025

    References:
      FOAM, 2025: https://arxiv.org/abs/2512.07112
    """
    rest = _rest(learning_rate, weight_decay, mask)
    return _adamw(lambda leaves: scale_by_foam(wavelet, b1=b1, b2=b2, eps=eps, leaves=leaves), rest, wavelet, leaves)


def gwt_adafactor(
    learning_rate: optax.ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    wavelet: Wavelet = Wavelet(),
    leaves: LeafRules = LINEAR_LAYERS,
) -> optax.GradientTransformationExtraArgs:
    """Adafactor with momentum for one number in `2^level`.

    Gradients are divided by the root of their factored second moment first, details included, which the published
    form passes undivided; then approximations are averaged, and details pass at what an average leaves of noise.

    Its state is float32. Behind `split_master_weights` it stays within what 24 bits round, and 0.1 % of the way, over
    20,000 steps at b2 up to 0.9999, as gradients drop a thousandfold (`tests/test_long_run.py`).

    Args:
      learning_rate: a number or a schedule.
      b1: decay of the momentum, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to denominators, relative to the matrix's own root mean square; absolute on dense leaves.
      weight_decay: decoupled, multiplied by the learning rate; a number or a schedule.
      mask: which leaves decay: a tree of booleans like the parameters, a prefix of it, or a function of the parameters.
        With `optax.inject_hyperparams`, name it in `static_args`.
      wavelet: the transform; `Wavelet(level=2)` keeps momentum for a quarter.
      leaves: which leaves are transformed, and along which axes.

    Returns:
      An Optax transformation; its updates have the gradients' dtype.

    Raises:
      ValueError: if `b1` or `b2` is outside [0, 1) or `eps` is not above 0; at `init` if `mask` does not fit the
        parameters, or the axis of a matrix is too short for the wavelet's level.
      TypeError: if `wavelet` or `leaves` is of another type, or a parameter is not floating or complex.

    Example:
      >>> import jax
      >>> from spectra_optax import gwt_adafactor, state_bytes
      >>> params = {"kernel": jax.ShapeDtypeStruct((1024, 1024), "float32")}
      >>> round(state_bytes(gwt_adafactor(1e-3), params) / 1024**2, 3)
      1.008

    References:
      Shazeer and Stern, Adafactor, 2018: https://arxiv.org/abs/1804.04235

      Gradient Wavelet Transform, 2025: https://arxiv.org/abs/2501.07237
    """
    b1, b2 = arguments.decay_rate("b1", b1), arguments.decay_rate("b2", b2)
    rest = _rest(learning_rate, weight_decay, mask)

    adam = Adam(b1, b2, eps)
    average = lambda rules: (in_wavelet_subspace(optax.ema(b1), wavelet, gain=noise_gain(b1), leaves=rules),)
    plain, on_tiles = (
        lambda rules, order=order: in_float32(optax.chain(order(average, adam, rules), *rest))
        for order in (normalised_first, normalised_before)
    )
    given = functools.partial(prepared, b2=b2, eps=eps)
    return tiled(plain(leaves), Local(on_tiles, (leaves,), wavelet.whole_block, (optax.chain(*rest),), given))


Rest = tuple[optax.GradientTransformation, ...]


def _rest(learning_rate: optax.ScalarOrSchedule, weight_decay: optax.ScalarOrSchedule, mask: Any) -> Rest:
    """Decoupled weight decay and a learning rate."""
    if not callable(weight_decay):
        arguments.number("weight_decay", weight_decay)
    return (optax.add_decayed_weights(weight_decay, aligned_mask(mask)), optax.scale_by_learning_rate(learning_rate))


def _adamw(
    rule: Callable[[LeafRules], optax.GradientTransformation], rest: Rest, wavelet: Wavelet, leaves: LeafRules
) -> optax.GradientTransformationExtraArgs:
    """A rule that is local to blocks, and the rest."""
    build = lambda leaves: in_float32(optax.chain(rule(leaves), *rest))
    return tiled(build(leaves), Local(build, (leaves,), wavelet.whole_block, (optax.chain(*rest),)))
