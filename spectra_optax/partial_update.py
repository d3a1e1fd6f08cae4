"""One step of an optimizer, of which the part is run that belongs to some leaves.

The optimizer is called as ever, for the whole tree, but only traced. Of the trace the operations are kept that lead to
the wanted leaves; what those do not depend on need not exist yet.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import optax


class PartialUpdate:
    """A step `(gradients, state, params) -> (params, state)`, traced once.

    Leaves are named by their places in the flat list of all leaves of `(params, state)`.
    """

    def __init__(self, tx: optax.GradientTransformation, params: Any, state: Any):
        """Traces the step for parameters and state like these."""

        def updated(gradients, state, params):
            updates, state = tx.update(gradients, state, params)
            return optax.apply_updates(params, updates), state

        self._closed = jax.make_jaxpr(updated)(params, state, params)
        self._count = len(jax.tree.leaves(params))

    def run(self, places: Sequence[int], gradients: Sequence[Any], leaves: Sequence[Any]) -> list[Any]:
        """The new leaves at some places.

        Args:
          places: of the wanted leaves, in order.
          gradients: of the parameters among them, in order.
          leaves: all leaves; those that the wanted ones do not depend on may be any arrays of their type.
        """
        given = dict(zip(places, gradients, strict=False))
        params, state = leaves[: self._count], leaves[self._count :]
        arguments = [*(given.get(i, p) for i, p in enumerate(params)), *state, *params]
        return jex.jaxpr_as_fun(jex.ClosedJaxpr(self._pruned(places), self._closed.consts))(*arguments)

    def _pruned(self, places: Sequence[int]) -> jex.Jaxpr:
        jaxpr = self._closed.jaxpr
        results = [jaxpr.outvars[i] for i in places]
        is_var = lambda v: isinstance(v, jex.Var)
        needed, kept = set(filter(is_var, results)), []
        for eqn in reversed(jaxpr.eqns):
            if not needed.isdisjoint(eqn.outvars):
                kept.append(eqn)
                needed.update(filter(is_var, eqn.invars))
        info = jaxpr.debug_info._replace(result_paths=None)
        return jaxpr.replace(eqns=kept[::-1], outvars=results, debug_info=info)
