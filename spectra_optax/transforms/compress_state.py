"""Any Optax transformation with fields of its state held compactly.

    state  = decode(codes)                 float32, as the inner transformation knows it
    u      = inner(g, state), untouched
    codes  = encode(state)                 once, after the update was made with the exact new state

The named fields (`mu`, `nu`, `trace`, ...) are found wherever they are: in chains, partitions, wrappers. Where the code
of a companded second moment is 0, those of the fields beside it are, so that a remainder is never divided by nothing.

Bytes per parameter: those of the codecs; AdamW with `mu=Companded(), nu=Companded("unsigned")` takes 2.125 instead of
8. Leaves that are dense under `LeafRules`, and complex ones, stay in float32.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spectra_optax import arguments, fields, sharding
from spectra_optax.codecs.codec import Codec
from spectra_optax.codecs.companding import Companded
from spectra_optax.leaves import Leaf, LeafRules, wide
from spectra_optax.lift import FORMAT, check_settings, check_type, described, encode_settings, leaves_of, named
from spectra_optax.locality import Local
from spectra_optax.tiling import local_of, tiled, untiled
from spectra_optax.transforms.fitting_forms import check_codecs, check_fields
from spectra_optax.transforms.in_blocks import in_blocks
from spectra_optax.transforms.in_float32 import in_float32
from spectra_optax.transforms.zero_start import starts_at_zero, without_zeros

LeafOf = Callable[[str, tuple[int, ...]], Leaf | None]

_SHORTEST = 8  # sides that are worth a scale: an average of 32 rows in a subspace may have fewer than `min_dim`
_DENSE = "dense"  # the tree, beside those of the codec, of the leaves that are held as they are


class CompressedState(NamedTuple):
    """State of `compress_state`."""

    step: jax.Array  # int32 [], how many updates were made; not `count`, which is the inner transformation's
    inner_state: Any  # the inner state; each compressed field a dict of trees: the codec's arrays, and "dense"
    settings: jax.Array  # uint8 [n], what the state was built with


def compress_state(
    inner: optax.GradientTransformation, *, leaves: LeafRules = LeafRules(), **codecs: Codec
) -> optax.GradientTransformationExtraArgs:
    """Holds fields of an optimizer's state compactly, whichever optimizer it is.

    Args:
      inner: any Optax transformation or chain, run in float32 whatever the dtype of parameters and gradients.
      leaves: which leaves are compressed; the others keep their full state.
      **codecs: the form of each field, by the name that the inner state gives it:
        `mu=Companded(), nu=Companded("unsigned")`.

    Returns:
      An Optax transformation with state `CompressedState`; updates have the gradients' dtype. `init` builds the compact
      state without holding the full one.

    Raises:
      ValueError: if no field is named; if a field that Optax never lets go below 0 gets a form with signs, or the
        reverse; at `init` if the inner state has no field of that name, or a spectral field would be divided by the
        root of a second moment.
      TypeError: if `inner` or a codec is of another type.

    Example:
      >>> import jax, optax
      >>> from spectra_optax import Companded, compress_state, state_bytes
      >>> params = {"kernel": jax.ShapeDtypeStruct((1024, 1024), "float32")}
      >>> tx = compress_state(optax.adamw(1e-3), mu=Companded(), nu=Companded("unsigned"))
      >>> round(state_bytes(tx, params) / 1024**2, 3)
      2.125
    """
    compressed = compressed_state(inner, leaves, codecs)
    cut = [codec for codec in codecs.values() if isinstance(codec, Companded)]
    compressed = in_blocks(compressed, cut[0], leaves) if cut else compressed
    return tiled(compressed, local_to_blocks(inner, leaves, codecs))


def compressed_state(
    inner: optax.GradientTransformation, leaves: LeafRules, codecs: dict[str, Codec]
) -> optax.GradientTransformationExtraArgs:
    """`compress_state` for gradients that were cut into blocks already."""
    arguments.instance("inner", inner, optax.GradientTransformation)
    arguments.instance("leaves", leaves, LeafRules)
    check_codecs(codecs)
    inner = optax.with_extra_args_support(untiled(inner))
    held = ", ".join(f"{name}={getattr(codec, 'label', codec)}" for name, codec in sorted(codecs.items()))
    label = f"spectra_optax {FORMAT} compress_state {held}"

    def init(params):
        treated, count = leaves_of(params, leaves), jnp.zeros([], jnp.int32)
        leaf_of, shapes = _leaf_of(leaves, treated), jax.eval_shape(inner.init, params)
        check_fields(codecs, fields.nodes(shapes))
        if starts_at_zero(inner.init, codecs, params, shapes):
            held = without_zeros(inner.init, _zeros(codecs, leaf_of, shapes, params), codecs, params)
        else:
            held = _encode(codecs, leaf_of, inner.init(params), count)
        return CompressedState(count, held, encode_settings(described(label, treated)))

    def update(updates, state, params=None, **extra_args):
        check_type(state, CompressedState)
        treated, count = leaves_of(updates, leaves), jnp.asarray(optax.safe_increment(state.step))
        check_settings(state.settings, described(label, treated))
        leaf_of = _leaf_of(leaves, treated)
        shapes = jax.eval_shape(inner.init, updates if params is None else params)
        full = _decode(codecs, leaf_of, state.inner_state, shapes)
        updates, full = inner.update(updates, full, params, **extra_args)
        return updates, CompressedState(count, _encode(codecs, leaf_of, full, count), state.settings)

    return in_float32(optax.GradientTransformationExtraArgs(init, update))


def local_to_blocks(inner: optax.GradientTransformation, leaves: LeafRules, codecs: dict[str, Codec]) -> Local:
    """How `compressed_state` looks on tiles."""
    within = local_of(inner)

    def build(rules):
        return compressed_state(within.build(rules) if within else inner, rules, codecs)

    def block(leaf):
        forms = [codec for codec in codecs.values() if isinstance(codec, Companded)]
        own = within.block(leaf) if within else 1
        blocks = [own, *(codec.whole_block(leaf.shape[-2]) for codec in forms)]
        rows = math.lcm(*(b for b in blocks if b))
        # In other tiles than its own, if they are not the whole matrix, the inner one may be cut otherwise.
        alike = not within or rows in (own, leaf.shape[-2])
        return rows if all(blocks) and len(forms) == len(codecs) and alike else None

    if within:
        return within._replace(build=build, rules=(leaves, *within.rules), block=block)
    return Local(build, (leaves,), block, (inner,))


def _leaf_of(rules: LeafRules, treated: list[Leaf]) -> LeafOf:
    """How the array of a state at a path is compressed; None if it is not.

    One that is shorter than its parameter (an average in a subspace) is a matrix over its own last two axes.
    """
    matrices = {leaf.path: leaf for leaf in treated if leaf.is_matrix and not leaf.is_complex}

    def leaf_of(path: str, shape: tuple[int, ...]) -> Leaf | None:
        leaf, n = matrices.get(path), len(shape)
        if leaf is None or leaf.shape == shape:
            return leaf
        if n < 2 or min(shape[-2:]) < min(rules.min_dim, _SHORTEST):
            return None
        return dataclasses.replace(leaf, shape=shape, rows=(n - 2,), cols=(n - 1,), block=None)

    return leaf_of


def _encode(codecs: dict[str, Codec], leaf_of: LeafOf, state: Any, count: jax.Array) -> Any:
    def rule(node):
        held = {name: _encode_field(codecs[name], leaf_of, node[name], count) for name in node if name in codecs}
        forms = {
            name: codec for name, codec in codecs.items() if name in held and getattr(codec, "zero_is_zero", False)
        }
        second = [held[name]["codes"] for name, codec in forms.items() if codec.sign == "unsigned"]
        for name, codec in forms.items():
            if codec.sign == "signed":
                held[name]["codes"] = functools.reduce(_settled, second, held[name]["codes"])
        return held

    return fields.map_nodes(rule, state)


def _settled(codes: Any, second: Any) -> Any:
    """Codes of a momentum, 0 where those of the second moment are: a remainder must not be divided by nothing."""
    # Those of another shape have 4 bits, and are never 0.
    rule = lambda m, v: jnp.where(v == 0, jnp.zeros_like(m), m) if m.shape == v.shape else m
    return jax.tree.map(rule, codes, second)


def _encode_field(codec: Codec, leaf_of: LeafOf, tree: Any, count: jax.Array) -> dict[str, Any]:
    def rule(path: str, x: jax.Array) -> dict[str, tuple[jax.Array, bool]]:
        leaf = leaf_of(path, x.shape)
        if leaf is None:
            return {_DENSE: (x, True)}
        slots = codec.slots(leaf)
        arrays = _encoded(codec, leaf, x, count)
        return {name: (array, sharding.fits(slots[name], x.shape)) for name, array in arrays.items()}

    return fields.spread(tree, (_DENSE, *codec.names), rule)


def _zeros(codecs: dict[str, Codec], leaf_of: LeafOf, shapes: Any, params: Any) -> Any:
    """A state of shapes with the fields that have a codec encoded, as those that start at zero are."""
    owners = dict(named(params))

    def beside(s: sharding.Slot, param: Any) -> jax.Array:
        known = len(s.shape) == len(param.shape)
        return sharding.start(s if known else s._replace(axes=(None,) * len(s.shape)), param)

    def start(codec, path, x):
        leaf, param = leaf_of(path, x.shape), owners.get(path, x)
        if leaf is not None:
            return {n: (beside(s, param), sharding.fits(s, x.shape)) for n, s in codec.slots(leaf).items()}
        axes = range(x.ndim) if param.shape == x.shape else [None] * x.ndim
        return {_DENSE: (sharding.start(sharding.slot(x.shape, x.dtype, axes), param), True)}

    def rule(node):
        spread = lambda name, codec: fields.spread(node[name], (_DENSE, *codec.names), functools.partial(start, codec))
        return {name: spread(name, codec) for name, codec in codecs.items() if name in node}

    return fields.map_nodes(rule, shapes)


def _decode(codecs: dict[str, Codec], leaf_of: LeafOf, state: Any, shapes: Any) -> Any:
    """The full state, whose shapes say what the codes stand for."""
    expected: list[dict[str, Any]] = []

    def collect(node):
        held = {name: node[name] for name in codecs if name in node}
        expected.append(held)
        return held

    def rule(node):
        like = next(following)
        return {name: _decode_field(codecs[name], leaf_of, node[name], like[name]) for name in like}

    fields.map_nodes(collect, shapes)
    following = iter(expected)
    return fields.map_nodes(rule, state)


def _decode_field(codec: Codec, leaf_of: LeafOf, trees: Any, like: Any) -> Any:
    shapes = {path: x.shape for path, x in named(like)}

    def full(path: str, arrays: Mapping[str, jax.Array]) -> jax.Array:
        if _DENSE in arrays:
            return arrays[_DENSE]
        leaf = leaf_of(path, shapes[path])
        assert leaf is not None
        return _decoded(codec, leaf, dict(arrays))

    return fields.gather(trees, like, full)


@functools.partial(jax.jit, static_argnames=("codec", "leaf"))
def _encoded(codec: Codec, leaf: Leaf, x: jax.Array, count: jax.Array) -> dict[str, jax.Array]:
    return codec.encode(leaf, x.astype(jnp.float32), count)


@functools.partial(jax.jit, static_argnames=("codec", "leaf"))
def _decoded(codec: Codec, leaf: Leaf, arrays: dict[str, jax.Array]) -> jax.Array:
    return codec.decode(leaf, arrays).astype(wide(leaf.dtype))
