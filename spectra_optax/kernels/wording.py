"""Operations that Pallas lowers for a platform with another meaning, or not at all, in other words.

Mosaic lowers neither signs nor products with two batch axes without a chip to ask. Triton has no batches of products,
and its maxima and minima lose NaNs, which XLA's keep.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spectra_optax.kernels import launching
from spectra_optax.kernels.shards import NotLocalError


def compute(equation: Any, inputs: list[Any]) -> Any:
    """The results of an equation inside a kernel."""
    name = equation.primitive.name
    words = (_FOR_TRITON if launching.is_gpu() else _FOR_MOSAIC).get(name)
    return (words or equation.primitive.bind)(*inputs, **equation.params)


def checked(equations: Sequence[Any]) -> list[Any]:
    """The equations of a kernel, as far as its platform's compiler knows them.

    Raises:
      NotLocalError: if it does not, long before it is asked.
    """
    if not launching.is_gpu():
        return list(equations)
    made_by = {v: equation for equation in equations for v in equation.outvars}
    return [_checked_for_triton(equation, made_by) for equation in equations]


def _checked_for_triton(equation: Any, made_by: dict[Any, Any]) -> Any:
    name, shapes = equation.primitive.name, [v.aval.shape for v in (*equation.invars, *equation.outvars)]
    if name not in _KNOWN_TO_TRITON:
        raise NotLocalError(f"Triton does not know {name}.")
    if any(n & (n - 1) for shape in shapes for n in shape):
        raise NotLocalError(f"Triton has no arrays of the shapes {shapes}.")
    if name != "dot_general" or math.prod(shapes[0][:-2]) == 1:
        return equation
    if equation.params["dimension_numbers"] != _by_rows(len(shapes[0]) - 2):
        raise NotLocalError("Triton has no batches of products.")
    return equation._replace(primitive=_SPREAD, invars=[_spread(equation.invars[0], made_by), equation.invars[1]])


def _spread(stack: Any, made_by: dict[Any, Any]) -> Any:
    """The one matrix, `[1, p, q]` or `[p, q]`, of which all of a stack are copies."""
    source = made_by.get(stack)
    while source is not None and source.primitive.name in ("reshape", "squeeze"):
        [v] = source.invars
        source = made_by.get(v) if v.aval.shape[-2:] == stack.aval.shape[-2:] else None
    if source is not None and source.primitive.name == "broadcast_in_dim":
        [matrix], axes = source.invars[:1], source.outvars[0].aval.ndim
        in_place = source.params["broadcast_dimensions"][-2:] == (axes - 2, axes - 1)
        if in_place and math.prod(matrix.aval.shape[:-2]) == 1:
            return matrix
    raise NotLocalError("Triton has no batches of products.")


def _by_rows(batch: int) -> Any:
    """The dimension numbers of `x @ y` on stacks with so many axes before the matrices."""
    axes = tuple(range(batch))
    return (((batch + 1,), (batch,)), (axes, axes))


def _sign(x: jax.Array) -> jax.Array:
    one = jnp.ones_like(x)
    return jnp.where(x > 0, one, jnp.where(x < 0, -one, x))


def _dot_general(x: jax.Array, y: jax.Array, *, dimension_numbers, **settings) -> jax.Array:
    """Stacks of stacks of matrices as one stack."""
    (from_x, from_y), (batch, _) = dimension_numbers
    extra = len(batch) - 1
    if extra < 1:
        return jax.lax.dot_general_p.bind(x, y, dimension_numbers=dimension_numbers, **settings)
    stacked = [z.reshape(-1, *z.shape[extra + 1 :]) for z in (x, y)]
    moved = tuple(tuple(a - extra for a in axes) for axes in (from_x, from_y))
    out = jax.lax.dot_general_p.bind(*stacked, dimension_numbers=(moved, ((0,), (0,))), **settings)
    return out.reshape(*x.shape[: extra + 1], *out.shape[1:])


def _product(x: jax.Array, y: jax.Array, *, dimension_numbers, **settings) -> jax.Array:
    """Of stacks of one matrix each."""
    (from_x, from_y), (batch, _) = dimension_numbers
    moved = tuple(tuple(a - len(batch) for a in axes) for axes in (from_x, from_y))
    matrices = [z.reshape(z.shape[len(batch) :]) for z in (x, y)]
    out = jax.lax.dot_general_p.bind(*matrices, dimension_numbers=(moved, ((), ())), **settings)
    return out.reshape((1,) * len(batch) + out.shape)


def _spread_product(x: jax.Array, y: jax.Array, *, dimension_numbers, **settings) -> jax.Array:
    """`x @ y` for one matrix `[1, p, q]` and a stack `[..., q, c]`, as the product with all of it side by side."""
    (*_, p, q), (*batch, _, c) = x.shape, y.shape
    beside = y.reshape(-1, q, c).transpose(1, 0, 2).reshape(q, -1)
    out = jax.lax.dot_general_p.bind(x.reshape(p, q), beside, dimension_numbers=_by_rows(0), **settings)
    return out.reshape(p, -1, c).transpose(1, 0, 2).reshape(*batch, p, c)


class _Operation(NamedTuple):
    """Stands where a primitive stands in an equation."""

    name: str
    bind: Callable[..., jax.Array]


_SPREAD = _Operation("spread_product", _spread_product)


def _keeping_nan(operation: Any) -> Callable[..., jax.Array]:
    def chosen(x: jax.Array, y: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return operation.bind(x, y)
        return jnp.where((x != x) | (y != y), x + y, operation.bind(x, y))

    return chosen


_max, _min = _keeping_nan(jax.lax.max_p), _keeping_nan(jax.lax.min_p)
_FOR_MOSAIC = {"sign": _sign, "dot_general": _dot_general}
_FOR_TRITON = {
    "sign": _sign,
    "dot_general": _product,
    "max": _max,
    "min": _min,
    "is_finite": lambda x: jnp.abs(x) < jnp.inf,
    "clamp": lambda low, x, high: _min(_max(low, x), high),
}
_KNOWN_TO_TRITON = frozenset(
    "abs add and atan2 bitcast_convert_type broadcast_in_dim ceil clamp convert_element_type copy cos div "
    "dot_general eq exp exp2 floor ge gt integer_pow iota is_finite le log log1p logistic lt max min mul ne "
    "neg not or pow reduce_max reduce_min reduce_sum rem reshape rsqrt select_n shift_left "
    "shift_right_arithmetic shift_right_logical sign sin sqrt square squeeze stop_gradient sub tan tanh "
    "transpose xor".split()
)
