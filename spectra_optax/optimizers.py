"""Finished optimizers, each a chain of the transformations below it.

SpectraAdamW on matrices, bytes of state per parameter in brackets:

    g -> g / sqrt(nu), nu factored      [4 (r + c) / (r c)]
      -> clipped to a root mean square of 1
      -> spectral momentum              [0.27 at a quarter of the coefficients in 8 bits]

The order matters: momentum that is lossy must come after the division by `sqrt(nu)`. Dense leaves are Adam in float32.
"""

import dataclasses
import functools
from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spectra_optax import arguments
from spectra_optax.arguments import Scalar
from spectra_optax.codecs.companding import Companded
from spectra_optax.codecs.spectrum import Spectrum
from spectra_optax.leaves import Leaf, LeafRules
from spectra_optax.locality import Local
from spectra_optax.masks import aligned_mask
from spectra_optax.tiling import tiled
from spectra_optax.transforms.given_scale import prepared
from spectra_optax.transforms.in_blocks import in_blocks
from spectra_optax.transforms.in_float32 import in_float32
from spectra_optax.transforms.normalised_first import Adam, normalised_before, normalised_first
from spectra_optax.transforms.spectral_momentum import scale_by_spectral_momentum


@dataclasses.dataclass(frozen=True)
class FullMomentum:
    """Names momentum that is held whole: one number per parameter.

    Attributes:
      dtype: of the momentum: "float32", "bfloat16" or "float16".
    """

    dtype: str = "float32"

    def __post_init__(self):
        """Checks the settings."""
        name = arguments.dtype_name("dtype", self.dtype, ("float32", "bfloat16", "float16"))
        object.__setattr__(self, "dtype", name)


def spectra_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    *,
    weight_decay: optax.ScalarOrSchedule = 1e-4,
    mask: Any = None,
    momentum: Spectrum | FullMomentum = Spectrum(values=Companded()),
    leaves: LeafRules = LeafRules(),
) -> optax.GradientTransformationExtraArgs:
    r"""SpectraAdamW: AdamW's training at a thirtieth of its state.

    On every matrix `[r, c]`, `t` the step and `eta` the learning rate,

    .. math::

        u_t &= \mathrm{clip}(g_t / \sqrt{\hat\nu_t}), \quad \hat\nu_t \text{ from row and column means}

        m_t &= \mathrm{SpectralMomentum}_{b_1}(u_t) / \sqrt{\mathrm{keep}}

        p_{t+1} &= p_t - \eta (m_t + \lambda p_t)

    Leaves that are no matrices, or small, are `optax.adamw` in float32. The root of the share of coefficients
    that are kept makes AdamW's own learning rates fit; `FullMomentum` keeps all.

    Over 20,000 steps at b2 up to 0.9999, through gradients that drop a thousandfold and learning rates that restart,
    weights stay within 2 % of their way from those of float32 coefficients, 1 % with coefficients in bfloat16, 3 % with
    `FullMomentum("bfloat16")` (`tests/test_long_run.py`).

    Args:
      learning_rate: a number or a schedule; start from AdamW's.
      b1: decay of the momentum, in [0, 1).
      b2: decay of the second moment, in [0, 1).
      eps: added to denominators: absolute on dense leaves, as in Adam, and relative to the matrix's own root mean
        square on matrices, whose updates therefore do not depend on the gradients' scale.
      weight_decay: decoupled, multiplied by the learning rate; a number or a schedule.
      mask: which leaves decay: a tree of booleans like the parameters, a prefix of it, or a function of the parameters.
        With `optax.inject_hyperparams`, name it in `static_args`.
      momentum: `Spectrum(...)` for a spectral momentum, `FullMomentum()` for one that is held whole; by default a
        quarter of the coefficients, in 8 bits.
      leaves: which leaves are compressed, and along which axes.

    Returns:
      An Optax transformation. Its state takes `4 (r + c)` bytes for a matrix, plus 0.27 bytes per parameter, or
      0.5 (`Spectrum()`, in bfloat16) or 4 (`FullMomentum()`); its updates have the gradients' dtype.

    Raises:
      ValueError: if `b1` or `b2` is outside [0, 1) or `eps` is not above 0; at `init` if `mask` does not fit the
        parameters; at `update` if gradients, parameters and state do not belong together, or `params` are missing.
      TypeError: if `momentum` or `leaves` is of another type, or a parameter is not floating or complex.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from spectra_optax import spectra_adamw
      >>> params = {"kernel": jnp.ones((256, 64)), "bias": jnp.zeros((64,))}
      >>> tx = spectra_adamw(1e-2)
      >>> state = tx.init(params)
      >>> loss = lambda p: jnp.mean(jnp.square(jnp.ones((256,)) @ p["kernel"] + p["bias"]))
      >>> for _ in range(3):
      ...     updates, state = tx.update(jax.grad(loss)(params), state, params)
      ...     params = optax.apply_updates(params, updates)
      >>> bool(loss(params) < 256**2)
      True

    References:
      Loshchilov and Hutter, Decoupled weight decay regularization, 2019: https://arxiv.org/abs/1711.05101

      Shazeer and Stern, Adafactor, 2018: https://arxiv.org/abs/1804.04235
    """
    arguments.instance("momentum", momentum, Spectrum, FullMomentum)
    arguments.instance("leaves", leaves, LeafRules)
    b1, b2 = arguments.decay_rate("b1", b1), arguments.decay_rate("b2", b2)
    if not callable(weight_decay):
        arguments.number("weight_decay", weight_decay)
    rest = (optax.add_decayed_weights(weight_decay, aligned_mask(mask)), optax.scale_by_learning_rate(learning_rate))
    adam, average = Adam(b1, b2, eps), functools.partial(_average, b1, momentum)
    plain, on_tiles = (
        lambda rules, order=order: in_float32(optax.chain(order(average, adam, rules), *rest))
        for order in (normalised_first, normalised_before)
    )
    given = functools.partial(prepared, b2=b2, eps=eps)
    tx, block = plain(leaves), functools.partial(_block, momentum)
    local = Local(on_tiles, (leaves,), block, (optax.chain(*rest),), given)
    if isinstance(momentum, FullMomentum):
        return tiled(tx, local)
    return tiled(in_blocks(tx, momentum, leaves), local._replace(bulky=True))


def _average(
    b1: Scalar, momentum: Spectrum | FullMomentum, leaves: LeafRules
) -> tuple[optax.GradientTransformation, ...]:
    """The momentum of matrices, at the scale that makes AdamW's own learning rates fit.

    Frequencies without momentum pass at a quarter of its gain: at a quarter of the coefficients the best learning rate
    would be twice AdamW's. Where every coefficient is kept the scale is 1.
    """
    if isinstance(momentum, FullMomentum):
        return _full_momentum(b1, momentum), optax.scale(1.0)
    spectral = scale_by_spectral_momentum(b1, spectrum=momentum, leaves=leaves)
    return spectral, optax.scale(momentum.keep**-0.5)


def _block(momentum: Spectrum | FullMomentum, leaf: Leaf) -> int | None:
    """How many rows of a matrix belong together; a momentum that is held whole is best left to XLA."""
    return momentum.whole_block(leaf) if isinstance(momentum, Spectrum) else None


def _full_momentum(decay: Scalar, momentum: FullMomentum) -> optax.GradientTransformation:
    whole = optax.ema(decay)
    if momentum.dtype == "float32":
        return whole
    rules: dict[Hashable, optax.GradientTransformation] = {
        "real": optax.ema(decay, accumulator_dtype=momentum.dtype),
        "complex": whole,  # there is no complex number in 32 bits
    }
    return optax.partition(
        rules, lambda params: jax.tree.map(lambda x: "complex" if jnp.iscomplexobj(x) else "real", params)
    )
