"""Cuts gradients into the blocks of a state before anything is computed from them, for TPUs.

There a change of shape ends a pass: what was computed before it is stored and read back. Behind a cut that XLA cannot
move the whole step has one shape, and what it needs of a gradient is computed from the gradient each time. Numbers are
those of the step without the cut. No state of its own.
"""

from typing import Any

import jax
import optax

from spectra_optax import backend
from spectra_optax.codecs.blocks import apart
from spectra_optax.codecs.companding import Companded
from spectra_optax.codecs.spectrum import Spectrum
from spectra_optax.leaves import Leaf, LeafRules
from spectra_optax.lift import leaves_of


def in_blocks(
    inner: optax.GradientTransformation, form: Companded | Spectrum, leaves: LeafRules
) -> optax.GradientTransformationExtraArgs:
    """Feeds a transformation gradients that were cut into the blocks of `form` and joined again.

    It goes around whatever casts them, because the cut itself ends a pass.
    """
    inner = optax.with_extra_args_support(inner)

    def update(updates, state, params=None, **extra_args):
        if backend.name() == "tpu":
            arrays, treedef = jax.tree.flatten(updates)
            decided = leaves_of(updates, leaves)
            updates = treedef.unflatten([_cut(form, leaf, g) for leaf, g in zip(decided, arrays, strict=True)])
        return inner.update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def _cut(form: Companded | Spectrum, leaf: Leaf, g: Any) -> Any:
    if not leaf.is_matrix or leaf.is_complex:
        return g
    layout = form.leaf_layout(leaf)
    if layout.count * layout.block != layout.length:
        return g
    blocks = apart(layout.split(leaf.to_matrix(g), leaf.cut_axis))
    return leaf.from_matrix(layout.join(blocks, leaf.cut_axis))
