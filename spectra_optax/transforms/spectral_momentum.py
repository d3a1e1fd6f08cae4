"""Momentum that remembers only the kept frequencies of what it is fed; the rest passes through at matched noise.

    z   <- kept coefficients of u
    mu  <- b1 mu + (1 - b1) z
    out <- synthesis(mu / (1 - b1^t)) + noise_t (u - synthesis(z))

`noise_t = sqrt((1 - b1)(1 + b1^t) / ((1 + b1)(1 - b1^t)))` is the gain of bias-corrected momentum on white noise, 1 at
the first step and `sqrt((1 - b1) / (1 + b1))` in the long run, so kept and unkept frequencies move the weights by the
same amount where gradients are noise. With every coefficient kept this is `optax.ema`.

Feed it normalised updates: a lossy momentum that is divided by `sqrt(nu)` afterwards leaks large columns into small
ones.

State: `keep` coefficients per parameter (0.5 bytes at a quarter in bfloat16), and a few integers per matrix.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spectra_optax import arguments
from spectra_optax.arguments import Scalar
from spectra_optax.codecs.blocks import Layout
from spectra_optax.codecs.fourier import analyse, carry_over, synthesise
from spectra_optax.codecs.spectrum import Spectrum, energies, strongest
from spectra_optax.leaves import Leaf, LeafRules, wide
from spectra_optax.lift import lift
from spectra_optax.lifted_readings import ArrayReading, lifted
from spectra_optax.readings import EMA, Numbers, readable
from spectra_optax.sharding import Slot, slot


class SpectralMomentumState(NamedTuple):
    """State of `scale_by_spectral_momentum`.

    `n` blocks of each matrix keep `k` coefficients each, which stand where the axis that was cut stood; `m` masks of
    `f` frequencies are 1 or `n`.
    """

    count: jax.Array  # int32 []
    mu: Any  # [..., n k, c] or [..., r, n k] of the spectrum's dtype, or codes; a dense leaf's own shape in float32
    mu_scales: Any  # [..., g, c] or [..., r, g], only of companded coefficients: a scale for each of `g` groups
    index: Any  # int32 [..., m, k], which coefficients those are
    energy: Any  # float32 [..., m, f], averaged energy of every frequency; only of masks that follow it
    settings: jax.Array  # uint8 [n], what the state was built with


_NAMES = {"coefficients": "mu", "scales": "mu_scales"}  # of the spectrum's arrays in the state


def _slots(leaf: Leaf, *, spectrum: Spectrum) -> dict[str, Slot]:
    if not leaf.is_matrix:
        full = {} if leaf.kind == "empty" else {"mu": slot(leaf.shape, wide(leaf.dtype), range(len(leaf.shape)))}
        return full
    layout, (*batch, _, _) = spectrum.leaf_layout(leaf), leaf.matrix_shape
    own = spectrum.mask == "topk"
    masks = layout.count if own else 1
    along = (*leaf.matrix_axes[:-2], leaf.matrix_axes[leaf.cut_axis] if own else None, None)
    slots = {_NAMES[name]: held for name, held in spectrum.slots(leaf).items()}
    slots["index"] = slot((*batch, masks, layout.kept), jnp.int32, along, value=spectrum.first_index(layout))
    if spectrum.is_dynamic:
        slots["energy"] = slot((*batch, masks, layout.frequencies), jnp.float32, along)
    return slots


def _choose(layout: Layout, spectrum: Spectrum, decay: jax.Array, blocks, mu, index, energy):
    """Averages the energy of each frequency and moves the momentum to the frequencies that now have the most."""
    remains = decay**spectrum.period  # of an average over steps that is only looked at once a period
    energy = remains * energy + (1.0 - remains) * energies(blocks, layout, spectrum)
    new = strongest(energy, layout)
    return carry_over(mu, index, new), new, energy


def _spectral(leaf: Leaf, count: jax.Array, u: jax.Array, decay: jax.Array, spectrum: Spectrum, **held: jax.Array):
    layout = spectrum.leaf_layout(leaf)
    blocks = layout.split(leaf.to_matrix(u), leaf.cut_axis)
    mu = spectrum.held(leaf, {name: held[field] for name, field in _NAMES.items() if field in held})
    if spectrum.is_dynamic:
        due = (count - 1) % spectrum.period == 0
        choose = functools.partial(_choose, layout, spectrum, decay, blocks)
        mu, held["index"], held["energy"] = jax.lax.cond(
            due, choose, lambda *same: same, mu, held["index"], held["energy"]
        )
    index = held["index"] if spectrum.is_stored else spectrum.first_index(layout)[None]
    kept = analyse(blocks, index, spectrum.lowering)
    mu = decay * mu.astype(kept.dtype) + (1.0 - decay) * kept
    unbias, noise = 1.0 - decay**count, noise_gain(decay, decay**count)
    out = noise * blocks + synthesise(mu / unbias - noise * kept, index, layout.block, spectrum.lowering)
    held |= {_NAMES[name]: array for name, array in spectrum.hold(leaf, mu, count).items()}
    return leaf.from_matrix(layout.join(out, leaf.cut_axis)), held


def noise_gain(decay: Scalar, faded: Scalar = 0.0) -> jax.Array:
    """What bias-corrected momentum leaves of white noise, in the long run or once `decay^t` is `faded`."""
    return jnp.sqrt((1.0 - decay) * (1.0 + faded) / ((1.0 + decay) * (1.0 - faded)))


@functools.partial(jax.jit, static_argnames=("leaf", "spectrum"))
def _step(leaf: Leaf, count: jax.Array, u: jax.Array, *, decay: Scalar, spectrum: Spectrum, **held: jax.Array):
    decay = jnp.asarray(decay, jnp.float32)
    if leaf.is_matrix:
        return _spectral(leaf, count, u, decay, spectrum, **held)
    if leaf.kind == "empty":
        return u, held
    mu = decay * held["mu"] + (1.0 - decay) * u
    return mu / (1.0 - decay**count), {"mu": mu}


def _average(leaf: Leaf, numbers: Numbers, held: dict[str, jax.Array], *, spectrum: Spectrum) -> tuple[jax.Array, ...]:
    if not leaf.is_matrix:
        return (held["mu"],)
    layout = spectrum.leaf_layout(leaf)
    mu = spectrum.held(leaf, {name: held[field] for name, field in _NAMES.items() if field in held})
    index = held["index"] if spectrum.is_stored else spectrum.first_index(layout)[None]
    blocks = synthesise(mu.astype(wide(leaf.dtype)), index, layout.block, spectrum.lowering)
    return (leaf.from_matrix(layout.join(blocks, leaf.cut_axis)),)


def _kept(leaf: Leaf, numbers: Numbers, count: jax.Array, ema: jax.Array, *, spectrum: Spectrum):
    """The coefficients of an average; a mask that follows gradients starts where the average has its energy."""
    if not leaf.is_matrix:
        return {"mu": ema}
    layout = spectrum.leaf_layout(leaf)
    blocks = layout.split(leaf.to_matrix(ema), leaf.cut_axis)
    index, energy = jnp.asarray(spectrum.first_index(layout))[None], {}
    if spectrum.is_dynamic:
        energy = {"energy": energies(blocks, layout, spectrum)}
        index = strongest(energy["energy"], layout)
    held = spectrum.hold(leaf, analyse(blocks, index, spectrum.lowering), count)
    held = {_NAMES[name]: array for name, array in held.items()}
    return held | energy | {"index": jnp.broadcast_to(index, (*leaf.matrix_shape[:-2], *index.shape[-2:]))}


def scale_by_spectral_momentum(
    decay: Scalar = 0.9, *, spectrum: Spectrum = Spectrum(), leaves: LeafRules = LeafRules()
) -> optax.GradientTransformationExtraArgs:
    """Momentum held as kept coefficients of a block Fourier transform along one axis of each matrix.

    The axis is -2, the inputs of a Flax kernel; for embeddings it is -1, so that a row whose gradient is always 0
    never moves. Dense leaves get an ordinary bias-corrected average. One update that is not finite makes the
    momentum of its block (the same rows, all kept frequencies) not finite: guard with `optax.apply_if_finite`.

    Args:
      decay: of the average, in [0, 1).
      spectrum: which coefficients of which blocks are kept, and how.
      leaves: which leaves are matrices and embeddings.

    Returns:
      An Optax transformation with state `SpectralMomentumState`; updates have the dtype of what it is fed.

    Raises:
      ValueError: if `decay` is outside [0, 1).
      TypeError: if `spectrum` is not a `Spectrum`.

    Example:
      >>> import jax.numpy as jnp
      >>> from spectra_optax import Spectrum, scale_by_spectral_momentum
      >>> params = {"kernel": jnp.ones((256, 128))}
      >>> tx = scale_by_spectral_momentum(0.9, spectrum=Spectrum(keep=0.25, block=64))
      >>> state = tx.init(params)
      >>> state.mu["kernel"].shape, state.mu["kernel"].dtype
      ((64, 128), dtype(bfloat16))
    """
    arguments.instance("spectrum", spectrum, Spectrum)
    step = functools.partial(_step, decay=arguments.decay_rate("decay", decay), spectrum=spectrum)
    slots = functools.partial(_slots, spectrum=spectrum)
    tx = lift(SpectralMomentumState, slots, step, leaves, f"spectral_momentum {spectrum.label}")
    read, write = functools.partial(_average, spectrum=spectrum), functools.partial(_kept, spectrum=spectrum)
    return readable(tx, lifted(SpectralMomentumState, leaves, ArrayReading(((EMA, "ema"),), read, write)))
