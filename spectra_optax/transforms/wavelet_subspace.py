"""Any Optax transformation on the approximations of gradients, which have one number in `2^level`.

    a  = approximation of g,   r = g - expansion(a), the details
    u  = inner's update of a
    g  -> expansion(u) + r rms(u) / max(rms(a), rms(r)),   number for number; each detail at most 3 rms(u)

Details have no state; they are scaled as the approximation was, and move the weights as far as it does at most: where
gradients are noise just as far, and where details are next to nothing they stay so; while the approximation rests, they
do. A rule that is linear, such as an average, can have them pass at a fixed `gain` instead. State: the inner one's,
divided by `2^level`. Source: GWT (arXiv:2501.07237), whose
Adam is `scale_by_gwt`; the matched norm is that of Fira (arXiv:2410.01623).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spectra_optax import arguments, sharding
from spectra_optax.arguments import Scalar
from spectra_optax.codecs.factored import reciprocal
from spectra_optax.codecs.wavelet import Wavelet
from spectra_optax.leaves import LINEAR_LAYERS, Leaf, LeafRules
from spectra_optax.lift import FORMAT, check_settings, check_type, described, encode_settings, leaves_of
from spectra_optax.readings import Parts, Reading, filled, parts, readable
from spectra_optax.transforms import neighbours
from spectra_optax.transforms.factored_rms import bounded
from spectra_optax.transforms.fitting_forms import SECOND_MOMENTS
from spectra_optax.transforms.in_float32 import in_float32
from spectra_optax.transforms.short_moments import LARGEST, squared

_PROBED = 3  # steps, because a schedule may start at 0


class WaveletSubspaceState(NamedTuple):
    """State of `in_wavelet_subspace`."""

    inner_state: Any  # for parameters with the shapes of approximations
    settings: jax.Array  # uint8 [n], what the state was built with


def in_wavelet_subspace(
    inner: optax.GradientTransformation,
    wavelet: Wavelet = Wavelet(),
    *,
    gain: Scalar | None = None,
    leaves: LeafRules = LINEAR_LAYERS,
) -> optax.GradientTransformationExtraArgs:
    """Runs any transformation on approximations of the gradients; details pass at the size of its updates.

    Args:
      inner: any Optax transformation of gradients that keeps their direction, run in float32 or wider; the learning
        rate goes behind, and so does weight decay, because it would see approximations of the parameters.
      wavelet: the transform of every matrix.
      gain: of the details, above 0; if None, they match the updates of the approximation. `sqrt((1 - b) / (1 + b))` is
        what an average with decay `b` leaves of noise.
      leaves: which leaves are matrices; the others pass to `inner` as they are.

    Returns:
      An Optax transformation with state `WaveletSubspaceState`; updates have the gradients' dtype. Without a
      `gain`, shards of a matrix share root mean squares.

    Raises:
      ValueError: if `gain` is not above 0; at `init` if `inner` turns gradients around, as one with a learning rate
        does, or the axis of a matrix is too short for the level.
      TypeError: if `inner` or `wavelet` is of another type.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from spectra_optax import Wavelet, in_wavelet_subspace
      >>> params = {"kernel": jnp.ones((256, 128))}
      >>> tx = optax.chain(in_wavelet_subspace(optax.scale_by_lion(), Wavelet(level=2)), optax.scale(-1e-4))
      >>> tx.init(params)[0].inner_state.mu["kernel"].shape
      (64, 128)
    """
    arguments.instance("inner", inner, optax.GradientTransformation)
    arguments.instance("wavelet", wavelet, Wavelet)
    arguments.instance("leaves", leaves, LeafRules)
    if gain is not None:
        arguments.positive("gain", gain)
    inner = optax.with_extra_args_support(inner)
    label = f"spectra_optax {FORMAT} wavelet_subspace {wavelet.label}"
    approximations = functools.partial(_map, leaves, functools.partial(_approximation, wavelet))

    def init(params):
        _check_direction(inner)
        settings = encode_settings(described(label, leaves_of(params, leaves)))
        return WaveletSubspaceState(inner.init(approximations(params)), settings)

    def update(updates, state, params=None, **extra_args):
        check_type(state, WaveletSubspaceState)
        check_settings(state.settings, described(label, leaves_of(updates, leaves)))
        a, near = approximations(updates), None if params is None else approximations(params)
        u, inner_state = inner.update(a, state.inner_state, near, **extra_args)
        updates = _map(leaves, functools.partial(_completed, wavelet, gain=gain), updates, a, u)
        return updates, WaveletSubspaceState(inner_state, state.settings)

    viewed = functools.partial(_parts_viewed, leaves, wavelet)

    def read(state, params, numbers):
        del numbers
        return viewed(_whole, parts(inner, state.inner_state, approximations(params)), params)

    def write(fresh, params, found, numbers):
        del numbers
        near, short = approximations(params), viewed(_short, found, params)
        return fresh._replace(inner_state=filled(inner, fresh.inner_state, near, short))

    plain = optax.GradientTransformationExtraArgs(init, update)
    return in_float32(readable(plain, Reading(read, write)))


def _check_direction(inner: optax.GradientTransformationExtraArgs) -> None:
    """Refuses a rule that turns gradients around: details, which follow the gradient, would go uphill beside it."""
    with jax.ensure_compile_time_eval():
        one, moved = {"w": jnp.ones((1, 1))}, 0.0
        try:
            state = inner.init(one)
            for _ in range(_PROBED):
                u, state = inner.update(one, state, one)
                moved += sum(float(jnp.sum(x)) for x in jax.tree.leaves(u))
        except (TypeError, ValueError, KeyError):  # one that wants other parameters cannot be asked
            return
    if moved < 0:
        raise ValueError(
            "inner must map gradients to updates of their own direction, as optax.scale_by_adam does: put the learning "
            "rate behind in_wavelet_subspace, not in it."
        )


def _map(leaves: LeafRules, rule: Callable[..., Any], tree: Any, *others: Any) -> Any:
    """A rule `(leaf, array, *others)` on every matrix; of other leaves, the last of the arrays."""
    arrays, treedef = jax.tree.flatten(tree)
    columns = zip(leaves_of(tree, leaves), arrays, *map(jax.tree.leaves, others), strict=True)
    return treedef.unflatten(rule(leaf, *xs) if leaf.is_matrix else xs[-1] for leaf, *xs in columns)


def _approximation(wavelet: Wavelet, leaf: Leaf, x: Any) -> Any:
    if isinstance(x, jax.ShapeDtypeStruct):
        layout = sharding.carried(wavelet.slot(leaf, x.dtype), x)
        return jax.ShapeDtypeStruct(wavelet.matrix_shape(leaf), x.dtype, sharding=layout)
    wavelet.matrix_shape(leaf)
    return _approximated(wavelet, leaf, x)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _approximated(wavelet: Wavelet, leaf: Leaf, x: jax.Array) -> jax.Array:
    return wavelet.approximation(leaf.to_matrix(x), wavelet.cut_axis(leaf))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _completed(
    wavelet: Wavelet, leaf: Leaf, g: jax.Array, a: jax.Array, u: jax.Array, gain: Scalar | None
) -> jax.Array:
    """The update of a matrix: that of its approximation, and details at a gain or of at most its root mean square."""
    x, axis = leaf.to_matrix(g), wavelet.cut_axis(leaf)
    expand = lambda y: sharding.like(wavelet.expansion(y, x.shape[axis], axis), x)
    details = x - expand(a)
    if gain is not None:
        return leaf.from_matrix(expand(u) + gain * details)
    share = (x.shape[axis] - a.shape[axis]) / x.shape[axis]  # of the coefficients
    mean = lambda y: jnp.mean(squared(y), axis=(-2, -1), keepdims=True)
    size = jnp.sqrt(jnp.maximum(mean(a), mean(details) / share))
    wanted = jnp.sqrt(mean(u))
    # A gradient of a few entries beside a large momentum would have all of its size in them.
    return leaf.from_matrix(expand(u) + bounded(details * (wanted * reciprocal(size)), LARGEST * wanted))


def _parts_viewed(
    leaves: LeafRules, wavelet: Wavelet, rule: Callable[..., jax.Array], found: Parts, params: Any
) -> Parts:
    """Parts with a rule `(leaf, is_second_moment, array)` on those of matrices."""
    matrices, new = {leaf.path: leaf for leaf in leaves_of(params, leaves) if leaf.is_matrix}, dict(found)
    for part in found:
        if part[2] in matrices:
            second = part[1] in SECOND_MOMENTS
            new[part] = functools.partial(_viewed, rule, wavelet, matrices[part[2]], second, found[part])
    return new


def _viewed(rule: Callable[..., jax.Array], wavelet: Wavelet, leaf: Leaf, second: bool, x: Callable[[], jax.Array]):
    return rule(wavelet, leaf, second, x())


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _whole(wavelet: Wavelet, leaf: Leaf, second: bool, x: jax.Array) -> jax.Array:
    """An inner array of approximations as one of the parameter's shape."""
    if x.shape != wavelet.matrix_shape(leaf):
        return x
    axis = wavelet.cut_axis(leaf)
    view = neighbours.spread_power if second else neighbours.expansion
    return leaf.from_matrix(view(wavelet, x, leaf.matrix_shape[axis], axis))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _short(wavelet: Wavelet, leaf: Leaf, second: bool, x: jax.Array) -> jax.Array:
    if x.shape != leaf.shape:
        return x
    view = neighbours.power if second else Wavelet.approximation
    return view(wavelet, leaf.to_matrix(x), wavelet.cut_axis(leaf))
