"""Trains 16-bit parameters in float32: what their 16 bits leave out is state, 1 or 2 bytes of it.

    w      = join(p, correction)                    float32, exact
    w     <- w + inner's update of (g, w)           float32
    p, correction <- split(w)                       `codecs/weight_split.py`

Optax adds the update u to p and rounds the sum. So u is float32, the new 16-bit weight minus the old one, and p + u is
the new one. Only a step that cancels all but 2^-13 of a weight may need a 25th bit; it ends within a float32 ULP of the
old weight, with a correction of 0.

State: 1 byte per parameter at 24 bits, 2 at 32, beside the inner one. 24 bits are rounded at random: an update below
half a step of their grid, 2^-17 of a weight, moves the weight in the mean, where the nearest number would lose it.
Source: Gonzalez Ortiz et al. 2026 (arXiv:2602.23349).
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spectra_optax import arguments, sharding
from spectra_optax.codecs.rounding import random_bits
from spectra_optax.codecs.weight_split import BITS, CORRECTION_DTYPES, Bits, is_narrow, join, pattern, split
from spectra_optax.leaves import inexact, wide
from spectra_optax.lift import FORMAT, check_settings, check_type, encode_settings, is_box, named, start_beside
from spectra_optax.tiling import local_of, tiled, untiled
from spectra_optax.transforms.in_float32 import check_alike, first_state

Rounding = Literal["nearest", "stochastic"]


class SplitWeightsState(NamedTuple):
    """State of `split_master_weights`."""

    step: jax.Array  # int32 [], how many updates were made; not `count`, which is the inner transformation's
    correction: Any  # int8 or int16 of the parameter's shape, of 16-bit leaves
    inner_state: Any  # of the inner transformation, for float32 parameters
    settings: jax.Array  # uint8 [n], what the state was built with


_is_ours = lambda node: isinstance(node, SplitWeightsState)


def split_master_weights(
    inner: optax.GradientTransformation, bits: Bits = 24, *, rounding: Rounding | None = None
) -> optax.GradientTransformationExtraArgs:
    """Trains bfloat16 and float16 parameters as if they were float32.

    `inner`, a whole optimizer, sees float32 weights and gradients; other leaves pass to it and back unchanged. Nothing
    but `optax.MultiSteps` goes around it, `optax.apply_if_finite` goes inside; then `optax.apply_updates`. Weights
    start as the parameters; `with_master_weights` starts from float32 ones instead, `master_weights` exports them.

    Rounding weights of 24 bits at random moves them from those of 32 by at most `sqrt(steps) / 2` units in the last
    place, 2^-15 of a weight (one standard deviation; `tests/test_long_run.py`).

    Args:
      inner: any Optax transformation whose updates are added to the parameters.
      bits: of the weights; 24 keeps an int8 beside each 16-bit parameter, 32 an int16, which is exact for bfloat16.
      rounding: to 24 bits: "stochastic" (the default), or "nearest", which loses updates below 2^-17 of a weight.

    Returns:
      An Optax transformation with state `SplitWeightsState`. Its updates are float32 on 16-bit leaves, whatever the
      gradients' dtype, and have the gradients' dtype on others.

    Raises:
      ValueError: if `bits` is neither 24 nor 32, or `rounding` is unknown or has no effect; at `init` if no parameter
        is 16-bit; at `update` if `params` are missing or gradients, parameters and state do not belong together.
      TypeError: if `inner` is no `optax.GradientTransformation`, or a parameter is not floating or complex.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from spectra_optax import master_weights, split_master_weights
      >>> params, gradients = jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.bfloat16)
      >>> tx = split_master_weights(optax.sgd(2**-12))
      >>> updates, state = tx.update(gradients, tx.init(params), params)
      >>> params = optax.apply_updates(params, updates)
      >>> print(params, master_weights(params, state))
      [1 1] [0.99975586 0.99975586]
    """
    lenient = split_leaves(inner, bits, rounding)

    def init(params):
        found = sorted({str(x.dtype) for _, x in named(params)})
        if found and not any(map(is_narrow, found)):
            raise ValueError(f"split_master_weights has no effect: no parameter is bfloat16 or float16, only {found}.")
        return lenient.init(params)

    plain = optax.GradientTransformationExtraArgs(init, lenient.update)
    local = local_of(inner)
    if local is None:
        return plain
    build = local.build
    return tiled(plain, local._replace(build=lambda rules: split_leaves(build(rules), bits, rounding)))


def split_leaves(
    inner: optax.GradientTransformation, bits: Bits, rounding: Rounding | None
) -> optax.GradientTransformationExtraArgs:
    """`split_master_weights` that accepts trees without 16-bit leaves too."""
    arguments.instance("inner", inner, optax.GradientTransformation)
    if not isinstance(bits, int) or bits not in CORRECTION_DTYPES:
        raise ValueError(f"bits must be 24 or 32, got {bits!r}.")
    if rounding is not None:
        arguments.choice("rounding", rounding, ("nearest", "stochastic"))
        if bits == 32:
            raise ValueError(f"rounding={rounding!r} has no effect at 32 bits, which hold float32 weights whole.")
    is_random = bits == 24 and rounding != "nearest"
    inner = optax.with_extra_args_support(untiled(inner))
    # Under jit only the lengths of labels are compared: the dtype's name makes them differ.
    label = f"spectra_optax {FORMAT} split_master_weights {bits} {CORRECTION_DTYPES[bits]}"

    def init(params):
        for path, x in named(params):
            inexact(path, x.dtype)
        correction, inner_state = _first_corrections(params, bits), first_state(inner.init, params)
        return SplitWeightsState(jnp.zeros([], jnp.int32), correction, inner_state, encode_settings(label))

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError("split_master_weights needs the parameters: call update(updates, state, params).")
        check_alike("updates", updates, "params", params)
        check_type(state, SplitWeightsState)
        check_settings(state.settings, label)
        count = optax.safe_increment(state.step)
        masters = master_weights(params, state)
        gradients, masters = (jax.tree.map(lambda x: x.astype(wide(x.dtype)), t) for t in (updates, masters))
        changes, inner_state = inner.update(gradients, state.inner_state, masters, **extra_args)
        check_alike("updates of the inner transformation", changes, "params", params)
        leaves = (jax.tree.leaves(tree) for tree in (changes, updates, params, masters))
        outputs, corrections = [], []
        for change, gradient, p, master in zip(*leaves, strict=True):
            u = change.astype(gradient.dtype)
            if is_narrow(p.dtype):
                u, correction = _land(p, master, change, count, bits=bits, is_random=is_random)
                corrections.append(correction)
            outputs.append(u)
        correction = jax.tree.structure(state.correction).unflatten(corrections)
        state = state._replace(step=count, correction=correction, inner_state=inner_state)
        return jax.tree.structure(updates).unflatten(outputs), state

    return optax.GradientTransformationExtraArgs(init, update)


def master_weights(params: Any, state: Any) -> Any:
    """The float32 weights that 16-bit parameters stand for, exactly as the optimizer sees them.

    Args:
      params: the parameters.
      state: the state of an optimizer that contains one `SplitWeightsState`, however deep.

    Returns:
      A tree like the parameters: float32 where they are 16-bit, the parameters themselves elsewhere.

    Raises:
      ValueError: if the state contains no `SplitWeightsState` or several, or belongs to other parameters.
    """
    corrections = iter(_held(params, _only(state)))
    return jax.tree.map(lambda p: join(p, next(corrections)) if is_narrow(p.dtype) else p, params)


def with_master_weights(master: Any, params: Any, state: Any) -> tuple[Any, Any]:
    """Starts or continues from float32 weights: 16-bit parameters and state together keep their low bits.

    Inner states are left alone, even the few that hold a copy of the parameters.

    Args:
      master: a tree like the parameters, float32 where they are 16-bit; NumPy arrays will do.
      params: the parameters; only their dtypes, shapes and shardings matter.
      state: the optimizer's state, fresh or not, which contains one `SplitWeightsState`.

    Returns:
      The parameters and the state that stand for `master`: exactly at 32 bits, rounded to the nearest at 24. Leaves
      that are not 16-bit are those of `master`.

    Raises:
      ValueError: if the state contains no `SplitWeightsState` or several, or the three do not belong together.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from spectra_optax import split_master_weights, with_master_weights
      >>> master = {"kernel": jnp.full((4, 2), 1.001)}
      >>> params = jax.tree.map(lambda w: w.astype(jnp.bfloat16), master)
      >>> state = split_master_weights(optax.adamw(1e-3), bits=32).init(params)
      >>> params, state = with_master_weights(master, params, state)
      >>> print(params["kernel"][0, 0], master_weights(params, state)["kernel"][0, 0])
      1 1.001
    """
    check_alike("master", master, "params", params)
    old = _only(state)
    held = _held(params, old)
    leaves, corrections = [], []
    for m, p in zip(jax.tree.leaves(master), jax.tree.leaves(params), strict=True):
        if is_narrow(p.dtype):
            layout = None if isinstance(p, jax.core.Tracer) else sharding.of(p)
            weight = jax.device_put(m, layout).astype(jnp.float32)
            m, correction = split(weight, p.dtype, BITS[held[0].dtype])
            corrections.append(correction)
        leaves.append(m)
    new = old._replace(correction=jax.tree.structure(old.correction).unflatten(corrections))
    state = jax.tree.map(lambda node: new if _is_ours(node) else node, state, is_leaf=_is_ours)
    return jax.tree.structure(params).unflatten(leaves), state


@functools.partial(jax.jit, static_argnames=("bits", "is_random"))
def _land(p, master, change, count, *, bits: Bits, is_random: bool):
    """The float32 update under which `p` becomes the 16-bit half of `master + change`, and the correction beside it."""
    change = change.astype(jnp.float32)
    # Adding 0 would flush a subnormal weight and turn -0 into +0.
    weight = jnp.where(change == 0, master, master + change)
    noise = random_bits(weight, count, salt=1) if is_random else None
    high, correction = split(weight, p.dtype, bits, noise)
    u = high.astype(jnp.float32) - p.astype(jnp.float32)
    u = jnp.where(pattern(high) == pattern(p), -0.0, u)  # adding -0 keeps either zero
    # As bits: XLA may elide a cast to 16 bits and back. Tied to what lands, the correction shares its pass on TPUs.
    lands = pattern(optax.apply_updates(p, u)) == pattern(high)
    return u, jnp.where(lands, correction, 0)


def _first_corrections(params: Any, bits: Bits) -> Any:
    """Corrections of 0, sharded and boxed like the 16-bit leaves they belong to."""

    def start(node):
        shapes = [x.shape for x in jax.tree.leaves(node) if is_narrow(x.dtype)]  # one, or none
        slots = [sharding.slot(shape, CORRECTION_DTYPES[bits], range(len(shape))) for shape in shapes]
        return start_beside(slots[0] if slots else None, node)

    return jax.tree.map(start, params, is_leaf=is_box)


def _only(state: Any) -> SplitWeightsState:
    found = [node for node in jax.tree.leaves(state, is_leaf=_is_ours) if _is_ours(node)]
    if len(found) != 1:
        raise ValueError(f"The optimizer's state must contain one SplitWeightsState, but contains {len(found)}.")
    return found[0]


def _held(params: Any, state: SplitWeightsState) -> list[jax.Array]:
    """The corrections of the 16-bit leaves, in order, checked against them."""
    narrow = jax.tree.map(lambda p: p if is_narrow(p.dtype) else optax.MaskedNode(), params)
    check_alike("16-bit parameters", narrow, "the state's corrections", state.correction)
    return jax.tree.leaves(state.correction)
