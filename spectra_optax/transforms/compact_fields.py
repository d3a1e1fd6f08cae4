"""Fields of a state in compact forms, wherever chains and wrappers hold them.

A field that has a codec, a tree like the parameters, becomes a dict of such trees: the codec's arrays, and "dense" for
leaves that are held as they are.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spectra_optax import fields, sharding
from spectra_optax.codecs.codec import Codec
from spectra_optax.leaves import Leaf, LeafRules, wide
from spectra_optax.lift import named

LeafOf = Callable[[str, tuple[int, ...]], Leaf | None]

_SHORTEST = 8  # sides that are worth a scale: an average of 32 rows in a subspace may have fewer than `min_dim`
_DENSE = "dense"  # the tree, beside those of the codec, of the leaves that are held as they are


def leaves_by_path(rules: LeafRules, treated: list[Leaf]) -> LeafOf:
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


def encode(codecs: dict[str, Codec], leaf_of: LeafOf, state: Any, count: jax.Array) -> Any:
    """A state with the fields that have a codec encoded."""

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


def zeros(codecs: dict[str, Codec], leaf_of: LeafOf, shapes: Any, params: Any) -> Any:
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


def decode(codecs: dict[str, Codec], leaf_of: LeafOf, state: Any, shapes: Any) -> Any:
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
