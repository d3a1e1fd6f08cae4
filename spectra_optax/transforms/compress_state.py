"""Any Optax transformation with fields of its state held compactly.

    state  = decode(codes)                 float32, as the inner transformation knows it
    u      = inner(g, state), untouched
    codes  = encode(state)                 once, after the update was made with the exact new state

The named fields (`mu`, `nu`, `trace`, ...) are found wherever they are: in chains, partitions, wrappers. Where the code
of a companded second moment is 0, those of the fields beside it are, so that a remainder is never divided by nothing.

Bytes per parameter: those of the codecs; AdamW with `mu=Companded(), nu=Companded("unsigned")` takes 2.125 instead of
8. Leaves that are dense under `LeafRules`, and complex ones, stay in float32.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from spectra_optax import arguments, fields
from spectra_optax.codecs.codec import Codec
from spectra_optax.codecs.companding import Companded
from spectra_optax.leaves import LeafRules
from spectra_optax.lift import FORMAT, check_settings, check_type, described, encode_settings, leaves_of
from spectra_optax.locality import Local
from spectra_optax.readings import Reading, counted, filled, parts, readable
from spectra_optax.tiling import local_of, tiled, untiled
from spectra_optax.transforms.compact_fields import decode, encode, leaves_by_path, zeros
from spectra_optax.transforms.fitting_forms import check_codecs, check_fields
from spectra_optax.transforms.in_blocks import in_blocks
from spectra_optax.transforms.in_float32 import in_float32
from spectra_optax.transforms.zero_start import starts_at_zero, without_zeros


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
        leaf_of, shapes = leaves_by_path(leaves, treated), jax.eval_shape(inner.init, params)
        check_fields(codecs, fields.nodes(shapes))
        if starts_at_zero(inner.init, codecs, params, shapes):
            held = without_zeros(inner.init, zeros(codecs, leaf_of, shapes, params), codecs, params)
        else:
            held = encode(codecs, leaf_of, inner.init(params), count)
        return CompressedState(count, held, encode_settings(described(label, treated)))

    def update(updates, state, params=None, **extra_args):
        check_type(state, CompressedState)
        treated, count = leaves_of(updates, leaves), jnp.asarray(optax.safe_increment(state.step))
        check_settings(state.settings, described(label, treated))
        leaf_of = leaves_by_path(leaves, treated)
        shapes = jax.eval_shape(inner.init, updates if params is None else params)
        full = decode(codecs, leaf_of, state.inner_state, shapes)
        updates, full = inner.update(updates, full, params, **extra_args)
        return updates, CompressedState(count, encode(codecs, leaf_of, full, count), state.settings)

    def read(state, params, numbers):
        del numbers
        leaf_of = leaves_by_path(leaves, leaves_of(params, leaves))
        full = decode(codecs, leaf_of, state.inner_state, jax.eval_shape(inner.init, params))
        return parts(inner, full, params) | {(CompressedState.__name__, "step", ""): lambda: state.step}

    def write(fresh, params, found, numbers):
        del numbers
        leaf_of = leaves_by_path(leaves, leaves_of(params, leaves))
        count = counted(found, CompressedState.__name__, fresh.step)
        full = decode(codecs, leaf_of, fresh.inner_state, jax.eval_shape(inner.init, params))
        full = filled(inner, full, params, found)
        return CompressedState(count, encode(codecs, leaf_of, full, count), fresh.settings)

    plain = optax.GradientTransformationExtraArgs(init, update)
    return in_float32(readable(plain, Reading(read, write)))


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
