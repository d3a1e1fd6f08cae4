"""Which part of an optimizer belongs to which layer, and whether its rule keeps the layers apart.

Both are read off the trace of `update` on shapes, so no list of known optimizers is needed. Values that come from the
gradients, parameters or state of one group of leaves carry its name through the trace; an update or an array of the
state that carries two names mixes groups. Within a stack of layers the trace is made for a number of layers that no
other axis has: a value that comes from the stack and has no axis of that length was summed over the layers.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import optax

from spectra_optax.lift import path_name

REST = ""  # the name of the leaves that are in no layer

Names = frozenset[str]
_NONE: Names = frozenset()
_PROBES = (31, 29, 23, 19, 17, 13, 11, 7)  # below `LeafRules.min_dim`: a stack of vectors must look like one vector
_VECTORS = "stacked vectors may have been taken for a matrix (`LeafRules(dense=...)` names them)"
_ALONG = ("axis", "dimension")  # parameters of operations that run along one axis, such as a sort
_CONSTANT = ("broadcast_in_dim", "iota")  # operations that may make the axis of layers out of nothing


class Mixes(Exception):
    """What in a trace joins two groups or two layers."""


def stacked_state(tx: optax.GradientTransformation, resized: Callable[[int], Any], count: int) -> list[bool]:
    """Which arrays of a state hold one entry for each layer of a stack, seen on stacks of several heights.

    Args:
      tx: the optimizer.
      resized: the parameters' shapes with that many layers.
      count: the true number of layers.

    Returns:
      For each array of the state whether its leading axis is that of the layers.

    Raises:
      ValueError: if an array depends on the number of layers in another way.
    """
    one, other, true = (_state(tx, resized(n)) for n in (1, probe(resized(1)), count))
    paths = [[path for path, _ in flat] for flat in (one, other, true)]
    if not paths[0] == paths[1] == paths[2]:
        raise ValueError(
            refusal(f"its state for {count} stacked layers has other arrays than that for one: {_VECTORS}")
        )
    height = probe(resized(1))
    is_stacked = []
    for (path, a), (_, b), (_, c) in zip(one, other, true, strict=True):
        is_stacked.append(a.shape != b.shape)
        expected = [(1, *a.shape[1:]), (height, *a.shape[1:]), (count, *a.shape[1:])]
        if (a.shape != b.shape or a.shape != c.shape) and [a.shape, b.shape, c.shape] != expected:
            raise ValueError(
                refusal(
                    f"its state at {path_name(path)!r} is {list(c.shape)} for {count} stacked layers but "
                    f"{list(a.shape)} for one: {_VECTORS}"
                )
            )
    return is_stacked


def probe(params: Any) -> int:
    """A number of layers that no axis of the parameters has or is divided by."""
    axes = [n for x in jax.tree.leaves(params) for n in x.shape if n > 1]
    return next((p for p in _PROBES if all(n % p for n in axes)), _PROBES[-1])


def owners(
    tx: optax.GradientTransformation, params: Any, names: Sequence[str], known: Sequence[str], height: int | None = None
) -> list[str]:
    """The group that each array of a state belongs to.

    Args:
      tx: the optimizer.
      params: shapes of the parameters.
      names: the group of each of the parameters' leaves.
      known: groups of the state's arrays as far as they are known, `REST` elsewhere.
      height: the number of stacked layers, if one group is a stack.

    Returns:
      Names, `REST` for what belongs to no layer, such as counts.

    Raises:
      ValueError: if the rule mixes groups, or the layers of a stack.
    """
    state = jax.eval_shape(tx.init, params)
    try:
        closed = jax.make_jaxpr(tx.update)(params, state, params)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(refusal(f"its update fails on parameters and gradients alone ({error})")) from error
    paths = [path_name(path) for path, _ in jax.tree_util.tree_flatten_with_path((params, state))[0]]
    own: list[Names] = [frozenset({name}) for name in names]
    held: list[Names] = [frozenset({name}) if name != REST else _NONE for name in known]
    if len(closed.jaxpr.outvars) != len(own) + len(held):
        raise ValueError(refusal("its updates or its new state are not like the parameters and the old state"))
    while True:
        try:
            found = _flow(closed.jaxpr, [*own, *held, *own], height)
        except Mixes as problem:
            raise ValueError(refusal(str(problem))) from None
        for path, expected, out in zip(paths, [*own, *(h or _NONE for h in held)], found, strict=True):
            if len(out | expected) > 1:
                others = ", ".join(sorted(name or "the leaves outside the layers" for name in out | expected))
                raise ValueError(refusal(f"its result at {path!r} depends on several of: {others}"))
        grown = [h | out for h, out in zip(held, found[len(own) :], strict=True)]
        if grown == held:
            return [next(iter(h), REST) for h in held]
        held = grown


def refusal(reason: str) -> str:
    """Says why an optimizer cannot run layer by layer."""
    return (
        f"tx must update every layer from that layer's gradient alone, but {reason}. Where it clips by a global norm, "
        "leave that out of tx and pass clip=ExactClip(...) or clip=LaggedClip(...)."
    )


def _state(tx: optax.GradientTransformation, params: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(jax.eval_shape(tx.init, params))[0]


def _flow(jaxpr: Any, inputs: Sequence[Names], height: int | None) -> list[Names]:
    """The names that the results of a program carry, given those of its inputs."""
    held = dict(zip(jaxpr.invars, inputs, strict=True))
    read = lambda v: _NONE if isinstance(v, jex.Literal) else held.get(v, _NONE)
    for eqn in jaxpr.eqns:
        held.update(zip(eqn.outvars, _through(eqn, [read(v) for v in eqn.invars], height), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _through(eqn: Any, inputs: list[Names], height: int | None) -> list[Names]:
    """The names of the results of one operation, from those of its operands."""
    inner = [getattr(j, "jaxpr", j) for j in jex.jaxprs_in_params(eqn.params)]
    if eqn.primitive.name == "cond":
        branches = zip(*(_flow(branch, inputs[1:], height) for branch in inner), strict=True)
        return [inputs[0].union(*names) for names in branches]
    if eqn.primitive.name == "scan" and height != eqn.params["length"]:
        fixed = eqn.params["num_consts"]
        return _loop(inner[0], inputs[:fixed], inputs[fixed:], eqn.params["num_carry"], height)
    if eqn.primitive.name == "while":
        skipped, fixed = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        body, inner = eqn.params["body_jaxpr"].jaxpr, [eqn.params["cond_jaxpr"].jaxpr]
        carry = _loop(body, inputs[skipped : skipped + fixed], inputs[skipped + fixed :], len(eqn.outvars), height)
        until = _flow(inner[0], [*inputs[:skipped], *carry], height)[0]
        return [names | until for names in carry]
    if len(inner) == 1 and len(inner[0].invars) == len(inputs) and eqn.primitive.name != "scan":
        return _flow(inner[0], inputs, height)
    together = _NONE.union(*inputs)
    if height is not None:
        _check_layers_apart(eqn, inputs, together, height)
    return [together] * len(eqn.outvars)


def _loop(body: Any, fixed: list[Names], moving: list[Names], carried: int, height: int | None) -> list[Names]:
    """The names of a loop's results: the carry's grow until they stay."""
    while True:
        found = _flow(body, [*fixed, *moving], height)
        grown = [a | b for a, b in zip(moving[:carried], found[:carried], strict=True)]
        if grown == moving[:carried]:
            return grown + found[carried:]
        moving = grown + moving[carried:]


def _check_layers_apart(eqn: Any, inputs: list[Names], together: Names, height: int) -> None:
    """Refuses an operation over the axis of the layers, and one that makes such an axis by itself."""
    shapes = [getattr(v.aval, "shape", ()) for v in eqn.invars]
    results = [getattr(v.aval, "shape", ()) for v in eqn.outvars]
    if together - {REST}:
        contracted = zip(shapes, eqn.params["dimension_numbers"][0], strict=True) if _is_product(eqn) else ()
        is_scan = results[0] == shapes[0]  # a sort or a running sum keeps the shape
        along = [shapes[0][eqn.params[name]] for name in _ALONG if is_scan and isinstance(eqn.params.get(name), int)]
        lost = any(height not in shape for shape in results) or height in itertools.chain(
            (shape[axis] for shape, axes in contracted for axis in axes), along
        )
        if lost:
            raise Mixes(f"its `{eqn.primitive.name}` joins the layers: {_drawn(shapes)} -> {_drawn(results)}")
    elif height not in itertools.chain(*shapes) and height in itertools.chain(*results):
        if eqn.primitive.name not in _CONSTANT and height in _PROBES:
            raise Mixes(f"its `{eqn.primitive.name}` gives each layer numbers of its own, as random noise does")


def _is_product(eqn: Any) -> bool:
    return eqn.primitive.name == "dot_general"


def _drawn(shapes: Sequence[tuple[int, ...]]) -> str:
    return ", ".join(str(list(shape)) for shape in shapes)
