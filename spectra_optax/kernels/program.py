"""A rule as a flat program of two parts: what needs only scalars, and the rest, which runs on tiles.

A kernel computes on tiles. Bias corrections, schedules and whatever else depends on scalars alone is computed before it
and handed over. An `iota` says in which row or column a number stands, which a tile is told.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.sharding import AbstractMesh

from spectra_optax.kernels import wording

# Calls that are opened, with the name of what they call.
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


class Variable:
    """A place in a program that holds a value.

    Attributes:
      aval: the value's shape and dtype.
    """

    __slots__ = ("aval",)

    def __init__(self, aval: Any):
        """A place for values of the shape and dtype of `aval`."""
        self.aval = aval


class Equation(NamedTuple):
    """One operation: `outvars = primitive(*invars, **params)`, on variables and literals."""

    primitive: Any
    params: dict[str, Any]
    invars: list[Any]
    outvars: list[Variable]


class Program(NamedTuple):
    """A flat program without calls.

    Attributes:
      inputs: its variables, one for each argument.
      outputs: its results: variables, or literals.
      constants: values of variables that are no arguments.
      before: equations on scalars alone.
      inside: the other equations.
    """

    inputs: list[Variable]
    outputs: list[Any]
    constants: dict[Variable, Any]
    before: list[Equation]
    inside: list[Equation]


def program(rule: Callable, arguments: Sequence[jax.ShapeDtypeStruct]) -> Program:
    """Traces `rule(*arguments) -> list of arrays`."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # tiles lie on no mesh
        closed = jax.make_jaxpr(rule)(*arguments)
    inputs, constants, equations = [Variable(v.aval) for v in closed.jaxpr.invars], {}, []
    outputs = _opened(closed.jaxpr, closed.consts, inputs, constants, equations)
    scalars = {v for v in (*inputs, *constants) if v.aval.ndim == 0}
    before, inside = [], []
    for equation in equations:
        is_scalar = scalars.issuperset(variables(equation.invars))
        if is_scalar and all(v.aval.ndim == 0 for v in equation.outvars):
            before.append(equation)
            scalars.update(equation.outvars)
        else:
            inside.append(equation)
    return Program(inputs, outputs, constants, before, inside)


def _opened(jaxpr: Any, values: Iterable[Any], inputs: list[Any], constants: dict, equations: list) -> list[Any]:
    """Appends a program's equations, its calls opened, and returns its results.

    Barriers, which order passes over memory, have no sense in a tile.
    """
    names = dict(zip(jaxpr.invars, inputs, strict=True))
    for v, x in zip(jaxpr.constvars, values, strict=True):
        names[v] = Variable(v.aval)
        constants[names[v]] = x
    read = lambda atom: atom if isinstance(atom, core.Literal) else names[atom]
    for equation in jaxpr.eqns:
        arguments, name = [read(atom) for atom in equation.invars], equation.primitive.name
        if name == "optimization_barrier":
            out = arguments
        elif name in _CALLS:
            inner = equation.params[_CALLS[name]]
            out = _opened(inner.jaxpr, inner.consts, arguments, constants, equations)
        else:
            out = [Variable(v.aval) for v in equation.outvars]
            equations.append(Equation(equation.primitive, equation.params, arguments, out))
        names.update(zip(equation.outvars, out, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def needed(equations: Iterable[Any], outputs: Iterable[Any]) -> tuple[list[Any], list[Any]]:
    """The equations that the outputs depend on, and the variables that those take from elsewhere, in a fixed order."""
    wanted, kept = set(variables(outputs)), []
    for equation in reversed(list(equations)):
        if wanted.intersection(equation.outvars):
            kept.append(equation)
            wanted.update(variables(equation.invars))
    kept.reverse()
    made = {v for equation in kept for v in equation.outvars}
    used = [v for equation in kept for v in variables(equation.invars)] + variables(outputs)
    return kept, [v for v in dict.fromkeys(used) if v not in made]


def signature(equations: Iterable[Any], inputs: Iterable[Any], outputs: Iterable[Any]) -> Hashable:
    """What equations make of inputs, as a value: equal for equal programs, whatever their variables are called."""
    numbers: dict[Any, int] = {}

    def name(v):
        if isinstance(v, core.Literal):
            return str(v.aval), np.asarray(v.val).tobytes()
        return numbers.setdefault(v, len(numbers))

    known = tuple((name(v), v.aval.shape, v.aval.dtype) for v in inputs)
    done = tuple(
        (e.primitive, _frozen(e.params), tuple(map(name, e.invars)), tuple(map(name, e.outvars))) for e in equations
    )
    return known, done, tuple(map(name, outputs))


def _frozen(params: dict[str, Any]) -> Hashable:
    """The settings of an operation as a value; one that cannot be compared equals only itself."""
    settings = tuple(sorted(params.items(), key=lambda setting: setting[0]))
    try:
        hash(settings)
    except TypeError:
        return object()
    return settings


class Place(NamedTuple):
    """Where a tile lies in a matrix of `ndim` axes.

    Attributes:
      ndim: of the matrix; arrays with more axes are stacks of blocks, which count rows within a block.
      rows: int32 `[r, 1]`, numbers of its rows.
      columns: int32 `[1, c]`, numbers of its columns.
    """

    ndim: int
    rows: jax.Array
    columns: jax.Array

    def counted(self, equation: Any) -> jax.Array | None:
        """What an `iota` over rows or columns of the matrix is in the tile; None for any other equation."""
        if equation.primitive.name != "iota":
            return None
        aval = equation.outvars[0].aval
        axis = equation.params["dimension"] - aval.ndim
        if aval.ndim < 2:
            return None
        is_rows = axis == -2 and aval.ndim == self.ndim and aval.shape[-2] == self.rows.shape[-2]
        if not is_rows and not (axis == -1 and aval.shape[-1] == self.columns.shape[-1]):
            return None
        numbers = (self.rows if is_rows else self.columns).astype(aval.dtype)
        return jnp.broadcast_to(numbers.reshape((1,) * (aval.ndim - 2) + numbers.shape), aval.shape)


def evaluate(equations: Iterable[Any], values: dict[Any, Any], place: Place | None = None) -> None:
    """Computes equations in order, adding their results to `values`; in a tile, with its place in the matrix."""
    for equation in equations:
        inputs = [value(v, values) for v in equation.invars]
        counted = place.counted(equation) if place else None
        if counted is not None:
            out = counted
        elif place:
            out = wording.compute(equation, inputs)
        else:
            out = equation.primitive.bind(*inputs, **equation.params)
        values.update(zip(equation.outvars, out if isinstance(out, list | tuple) else [out], strict=True))


def variables(atoms: Iterable[Any]) -> list[Any]:
    """What is no literal."""
    return [v for v in atoms if not isinstance(v, core.Literal)]


def value(variable: Any, values: dict[Any, Any]) -> Any:
    """What a variable or a literal stands for."""
    return variable.val if isinstance(variable, core.Literal) else values[variable]


def meanings(traced: Program, names: Sequence[Any]) -> list[int | None]:
    """What each result is, as a number: equal for equal functions of arguments of the same names, whatever the shapes.

    None for a result that is no combination of numbers of the same place.
    """
    known: dict[Any, int | None] = {v: hash(name) for v, name in zip(traced.inputs, names, strict=True)}
    known |= {v: _meaning_of_constant(v, x) for v, x in traced.constants.items()}
    read = lambda v: hash((str(v.val), str(v.aval))) if isinstance(v, core.Literal) else known[v]
    for equation in (*traced.before, *traced.inside):
        inputs = [read(v) for v in equation.invars]
        meaning = None
        if None not in inputs and _is_elementwise(equation):
            settings = sorted((name, str(x)) for name, x in equation.params.items() if name not in _OF_SHAPE)
            meaning = hash((equation.primitive.name, tuple(settings), tuple(inputs)))
        known.update((v, None if meaning is None else hash((meaning, i))) for i, v in enumerate(equation.outvars))
    return [read(v) for v in traced.outputs]


def _meaning_of_constant(v: Variable, value: Any) -> int | None:
    """That of a number, or of one that only the surrounding program knows."""
    if v.aval.ndim:
        return None
    return hash(id(value)) if isinstance(value, jax.core.Tracer) else hash((str(value), str(v.aval.dtype)))


def _is_elementwise(equation: Equation) -> bool:
    name, ranked = equation.primitive.name, [v.aval.shape for v in equation.invars if v.aval.ndim]
    if not ranked and all(not v.aval.ndim for v in equation.outvars):
        return True
    if name == "broadcast_in_dim":
        return not ranked
    return name in _ELEMENTWISE and all(v.aval.shape == shape for shape in ranked for v in equation.outvars)


_OF_SHAPE = ("shape", "broadcast_dimensions", "sharding")  # parameters of operations
_ELEMENTWISE = frozenset(
    "abs add and atan2 ceil clamp convert_element_type cos div eq erf exp exp2 floor ge gt integer_pow is_finite "
    "le log log1p logistic lt max min mul ne neg not or pow rem round rsqrt select_n sign sin sqrt square "
    "stop_gradient sub tan tanh xor".split()
)
