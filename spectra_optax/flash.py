"""FlashOptim's optimizers: Optax's own, with states in 8 bits and 16-bit parameters trained in full precision.

    flash_x = split_master_weights(compress_state(optax.x, mu=Companded(), nu=Companded("unsigned")))

Bytes per 16-bit parameter, weight and 16-bit gradient included, on large matrices:

    adam, adamw    2 + 1 + 2 + 2.125 = 7.125    (float32: 16)
    sgd, lion      2 + 1 + 2 + 1.0625 = 6.0625  (float32: 12)

Behind 16-bit parameters are weights of 24 bits; parameters in float32 are their own and get the 8-bit states alone. For
weights of 32 bits, other codes or any other optimizer put the two wrappers around it yourself.

Source: Gonzalez Ortiz et al. 2026 (arXiv:2602.23349).
"""

import functools
from typing import Any

import optax

from spectra_optax import arguments
from spectra_optax.arguments import Scalar
from spectra_optax.codecs.codec import Codec
from spectra_optax.codecs.companding import Companded
from spectra_optax.leaves import LeafRules
from spectra_optax.masks import aligned_mask
from spectra_optax.tiling import tiled
from spectra_optax.transforms.compress_state import compressed_state, local_to_blocks
from spectra_optax.transforms.in_blocks import in_blocks
from spectra_optax.transforms.split_weights import split_leaves

_MOMENTS: dict[str, Codec] = {"mu": Companded(), "nu": Companded("unsigned")}


def flash_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    weight_decay: Scalar = 1e-4,
    mask: Any = None,
    leaves: LeafRules = LeafRules(),
) -> optax.GradientTransformationExtraArgs:
    """`optax.adamw` at 7 bytes per parameter instead of 16, gradients and weights included.

    Over 20,000 steps at b2 up to 0.9999, through gradients that drop a thousandfold and learning rates that restart,
    weights stay within 10 % of their way from float32's (`tests/test_long_run.py`), and within what 24 bits round.

    Args:
      learning_rate: a number or a schedule; AdamW's.
      b1: decay of the momentum, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to the root of the second moment.
      weight_decay: decoupled, multiplied by the learning rate; decays the full-precision weights.
      mask: which leaves decay: a tree of booleans like the parameters, a prefix of it, or a function of the parameters.
      leaves: which leaves have their moments in 8 bits; name those that should not, such as a head, in `dense`.

    Returns:
      An Optax transformation. Its updates are float32 for 16-bit parameters, whatever the gradients' dtype, and come
      last in a chain; `master_weights` and `with_master_weights` read and set the full-precision weights.

    Raises:
      ValueError: if `b1` or `b2` is outside [0, 1) or `eps` is not above 0.
      TypeError: if a parameter is not floating or complex.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from spectra_optax import flash_adamw, state_bytes
      >>> params = {"kernel": jax.ShapeDtypeStruct((1024, 1024), "bfloat16")}
      >>> round(state_bytes(flash_adamw(1e-3), params) / 1024**2, 3)  # 1 of them completes the weights
      3.125

    References:
      Gonzalez Ortiz et al., FlashOptim, 2026: https://arxiv.org/abs/2602.23349
    """
    b1, b2 = arguments.decay_rate("b1", b1), arguments.decay_rate("b2", b2)
    eps, mask = arguments.positive("eps", eps), aligned_mask(mask)
    inner = optax.adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=mask)
    return _flash(inner, leaves, _MOMENTS)


def flash_adam(
    learning_rate: optax.ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    nesterov: bool = False,
    leaves: LeafRules = LeafRules(),
) -> optax.GradientTransformationExtraArgs:
    """`optax.adam` at 7 bytes per parameter instead of 16, gradients and weights included.

    It stays as near to float32's as `flash_adamw` does.

    Args:
      learning_rate: a number or a schedule; Adam's.
      b1: decay of the momentum, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to the root of the second moment.
      nesterov: whether the momentum looks ahead.
      leaves: as in `flash_adamw`.

    Returns:
      An Optax transformation, as `flash_adamw`; it raises the same errors.
    """
    b1, b2 = arguments.decay_rate("b1", b1), arguments.decay_rate("b2", b2)
    inner = optax.adam(learning_rate, b1, b2, arguments.positive("eps", eps), nesterov=nesterov)
    return _flash(inner, leaves, _MOMENTS)


def flash_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: Scalar | None = None,
    nesterov: bool = False,
    *,
    weight_decay: Scalar = 0.0,
    mask: Any = None,
    leaves: LeafRules = LeafRules(),
) -> optax.GradientTransformationExtraArgs:
    """`optax.sgd` at 6 bytes per parameter instead of 12, gradients and weights included.

    Over 20,000 steps, through gradients that drop a thousandfold and learning rates that restart, weights stay within
    2 % of their way from float32's (`tests/test_long_run.py`), and within what 24 bits round.

    Args:
      learning_rate: a number or a schedule; SGD's.
      momentum: decay of the trace, in [0, 1); None for no trace.
      nesterov: whether the trace looks ahead; only with `momentum`.
      weight_decay: decoupled, multiplied by the learning rate; decays the full-precision weights.
      mask: which leaves decay, as in `flash_adamw`.
      leaves: as in `flash_adamw`.

    Returns:
      An Optax transformation, as `flash_adamw`.

    Raises:
      ValueError: if `momentum` is outside [0, 1), or `nesterov` or `mask` could have no effect.
      TypeError: if a parameter is not floating or complex.
    """
    if nesterov and momentum is None:
        raise ValueError("nesterov=True has no effect with momentum=None.")
    if mask is not None and isinstance(weight_decay, float | int) and weight_decay == 0:
        raise ValueError("mask has no effect with weight_decay=0.")
    pieces = []
    if momentum is not None:
        pieces.append(optax.trace(arguments.decay_rate("momentum", momentum), nesterov))
    if not (isinstance(weight_decay, float | int) and weight_decay == 0):
        pieces.append(optax.add_decayed_weights(weight_decay, aligned_mask(mask)))
    inner = optax.chain(*pieces, optax.scale_by_learning_rate(learning_rate))
    return split_leaves(inner, 24, None) if momentum is None else _flash(inner, leaves, {"trace": Companded()})


def flash_lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.99,
    *,
    weight_decay: Scalar = 1e-3,
    mask: Any = None,
    leaves: LeafRules = LeafRules(),
) -> optax.GradientTransformationExtraArgs:
    """`optax.lion` at 6 bytes per parameter instead of 12, gradients and weights included.

    Over 20,000 steps at b2 of 0.999 and 0.9999, through gradients that drop a thousandfold and learning rates that
    restart, weights stay within 40 % of their way from float32's (`tests/test_long_run.py`): a sign says nothing of how
    near to 0 its momentum is, so where that hardly differs from 0, codes flip it.

    Args:
      learning_rate: a number or a schedule; Lion's.
      b1: weight of the momentum in the update's sign, in [0, 1).
      b2: decay of the momentum, in [0, 1).
      weight_decay: decoupled, multiplied by the learning rate; decays the full-precision weights.
      mask: which leaves decay, as in `flash_adamw`.
      leaves: as in `flash_adamw`.

    Returns:
      An Optax transformation, as `flash_adamw`.

    Raises:
      ValueError: if `b1` or `b2` is outside [0, 1).
      TypeError: if a parameter is not floating or complex.
    """
    b1, b2 = arguments.decay_rate("b1", b1), arguments.decay_rate("b2", b2)
    inner = optax.lion(learning_rate, b1, b2, weight_decay=weight_decay, mask=aligned_mask(mask))
    return _flash(inner, leaves, {"mu": Companded()})


def _flash(inner: optax.GradientTransformation, leaves: LeafRules, codecs: dict[str, Codec]):
    """The two wrappers around an optimizer, around gradients that are cut into blocks while they still have 16 bits."""
    split = functools.partial(split_leaves, bits=24, rounding=None)
    local = local_to_blocks(inner, leaves, codecs)
    build = local.build
    plain = in_blocks(split(compressed_state(inner, leaves, codecs)), Companded(), leaves)
    return tiled(plain, local._replace(build=lambda rules: split(build(rules))))
