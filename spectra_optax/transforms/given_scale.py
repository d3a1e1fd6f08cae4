"""The division by a factored second moment, and the clip behind it, for tiles: their factors are computed before.

    u = g row col / excess,   row [r, 1], col [1, c], excess [1, 1]

Means over whole matrices are no business of a tile. `prepared` puts the factors where the statistics stand in a state,
and `scale_by_given` is what remains of `scale_by_factored_rms` and `clip_by_block_rms`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding

from spectra_optax.arguments import Scalar
from spectra_optax.codecs import factored
from spectra_optax.kernels.sums import Kept, sums
from spectra_optax.transforms.block_clip import excess, squares
from spectra_optax.transforms.factored_rms import FactoredRmsState, Factors, bounded, factors, scaled, unbiasing


class GivenScaleState(NamedTuple):
    """Stands in for `FactoredRmsState`: one matrix's factors."""

    by: Factors
    excess: jax.Array  # [..., 1, 1]


def scale_by_given(b2: Scalar) -> optax.GradientTransformation:
    """What is left to do on each tile; its state is given, not updated."""

    def init(params):
        [p] = jax.tree.leaves(params)
        zeros = lambda r, c: jnp.zeros((*p.shape[:-2], r, c), jnp.float32)
        return GivenScaleState(Factors(zeros(p.shape[-2], 1), zeros(1, p.shape[-1])), zeros(1, 1))

    def update(updates, state, params=None):
        del params
        rule = lambda g: scaled(g, state.by, jnp.asarray(b2, jnp.float32)) / state.excess
        return jax.tree.map(rule, updates), state

    return optax.GradientTransformation(init, update)


def prepared(
    g: jax.Array, state: Any, layout: NamedSharding | None, *, b2: Scalar, eps: Scalar, threshold: Scalar = 1.0
) -> tuple[Any, Callable[[Any], Any]]:
    """The state of one leaf with the factors for its gradient in it, and what puts the new statistics back."""
    is_held = lambda node: isinstance(node, FactoredRmsState) and jax.tree.leaves(node.rms_row) != []
    [held] = [node for node in jax.tree.leaves(state, is_leaf=is_held) if is_held(node)]
    count = jnp.asarray(optax.safe_increment(held.count))
    [row], [col] = jax.tree.leaves(held.rms_row), jax.tree.leaves(held.rms_col)
    given, statistics = _given(g, count, row, col, b2=b2, eps=eps, threshold=threshold, layout=layout)
    put = lambda old, name: jax.tree.structure(old).unflatten([statistics[name]])
    new = held._replace(count=count, rms_row=put(held.rms_row, "rms_row"), rms_col=put(held.rms_col, "rms_col"))
    is_given = lambda node: isinstance(node, GivenScaleState)

    def replaced(tree, is_old, node):
        return jax.tree.map(lambda x: node if is_old(x) else x, tree, is_leaf=is_old)

    return replaced(state, is_held, given), lambda after: replaced(after, is_given, new)


@functools.partial(jax.jit, static_argnames="layout")
def _given(g: jax.Array, count: jax.Array, rms_row, rms_col, *, b2, eps, threshold, layout):
    r, c = g.shape[-2:]
    b2, eps, threshold = (jnp.asarray(x, jnp.float32) for x in (b2, eps, threshold))
    kept: tuple[Kept, ...] = ("rows", "rows", "columns", "columns")
    both = lambda _, x: [*factored.squares(x, factored.ROW_SCALE), *factored.squares(x, factored.COL_SCALE)]
    row_up, row_down, col_up, col_down = sums(both, g, [], [], kept, layout)
    row = factored.root(row_up[..., 0] / c, row_down[..., 0] / c, factored.ROW_SCALE)
    col = factored.root(col_up[..., 0, :] / r, col_down[..., 0, :] / r, factored.COL_SCALE)
    by, statistics = factors(row, col, unbiasing(count, b2), b2, eps, rms_row, rms_col)
    over = lambda numbers, x, row, col: [squares(bounded(x * row * col, numbers[0]), numbers[1])]
    [total] = sums(over, g, by, [jax.lax.rsqrt(1.0 - b2), threshold], ("none",), layout)
    return GivenScaleState(by, excess(total / (r * c))), statistics
