"""Finds out which values are replicated, beyond what JAX's own types express.

Inside `shard_map`, JAX tracks the mesh axes over which a value varies (`jax.typeof(x).manual_axis_type`). It treats the
results of `all_gather` and `pcast` as varying because their gradients vary: each device has its own partial sum. The
values themselves, and everything computed only from them, are replicated.

Therefore, if a value that varies for JAX must be replicated (or the reverse), a claim marks it in the traced program
with an identity primitive, which compiles to nothing. `verify` follows the values through the program once, before it
is compiled, and raises the error of the first claim that is false.
"""

import contextlib
import contextvars
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from pretrax.shardlib.errors import ShardingError

_claims_are_verified: contextvars.ContextVar[bool] = contextvars.ContextVar('claims_are_verified', default=False)


@contextlib.contextmanager
def verified_later() -> Iterator[None]:
    """Defers claims made inside to `verify`, which the caller runs on the traced program."""
    token = _claims_are_verified.set(True)
    try:
        yield
    finally:
        _claims_are_verified.reset(token)


def varying_axes(x: Any) -> frozenset[str]:
    """The mesh axes over which a value varies according to JAX; none outside shard_map."""
    return jax.typeof(x).manual_axis_type.varying


def claim_same(x: Any, axes: frozenset[str], error: Callable[[], ShardingError]) -> Any:
    """Returns x and claims that it is replicated along axes over which it varies according to JAX."""
    if not _claims_are_verified.get():
        raise error()
    return _claim.bind(x, kind='same', axes=tuple(sorted(axes)), error=_with_place(error))


def claim_differs(x: Any, axes: frozenset[str], error: Callable[[], ShardingError]) -> Any:
    """Returns x and claims that it differs along each of the axes."""
    if not varying_axes(x) >= axes:
        raise error()
    axes = frozenset(axis for axis in axes if jax.lax.axis_size(axis) > 1)  # an axis of size 1 cannot differ
    if not axes or not _claims_are_verified.get():
        return x
    return _claim.bind(x, kind='differs', axes=tuple(sorted(axes)), error=_with_place(error))


def known_same(x: Any, axes: Iterable[str]) -> Any:
    """Returns x, which the caller knows to be replicated along the axes."""
    return _known_same.bind(x, axes=tuple(sorted(axes))) if axes else x


def settle(x: Any, axes: Iterable[str]) -> Any:
    """Makes a value that is replicated along the axes replicated for JAX too. Its gradient goes to the first device."""
    return _settle.bind(x, axes=tuple(sorted(axes))) if axes else x


def varies_with(x: Any, *operands: Any) -> Any:
    """Returns x, a result of operands that vary alike for JAX, by a primitive that JAX does not know to vary."""
    return _varies_with.bind(x, *operands)


Varies = frozenset[str]  # mesh axes over which a value varies, plus INPUT if it depends on an input
INPUT = '(an input)'


def verify(program: Any, inputs: Sequence[Varies] | None = None, final: bool = True) -> list[Varies]:
    """Raises the error of the first false claim in a jaxpr. Returns the axes over which each result varies.

    A result varies over an axis if an operand does or if communication introduces it. JAX's types are an upper bound.

    Args:
        program: a jaxpr, open or closed.
        inputs: the axes over which each input varies (default: according to JAX).
        final: whether the inputs are exact. While a loop is iterated to a fixed point, they are a lower bound.
    """
    program = getattr(program, 'jaxpr', program)
    if inputs is None:
        inputs = [_varies_for_jax(variable) for variable in program.invars]
    varies = dict(zip(program.invars, inputs, strict=True))

    def read(atom: Any) -> Varies:
        return frozenset() if hasattr(atom, 'val') else varies.get(atom, frozenset())  # literals, constants

    for equation in program.eqns:
        results = _results(equation, [read(atom) for atom in equation.invars], final)
        for variable, axes in zip(equation.outvars, results, strict=True):
            varies[variable] = axes & _varies_for_jax(variable)
    return [read(atom) for atom in program.outvars]


def _varies_for_jax(variable: Any) -> Varies:
    kind = getattr(variable.aval, 'manual_axis_type', None)
    return (kind.varying if kind is not None else frozenset()) | {INPUT}


def _results(equation: Any, operands: list[Varies], final: bool) -> list[Varies]:
    params = equation.params
    union = frozenset().union(*operands)
    match equation.primitive.name:
        case 'claim':
            _check_claim(union, final, **params)
            return [union]
        case 'pvary' | 'settle':
            return [union]
        case 'known_same':
            return [union - _axes(params)]
        case 'all_gather' if params['axis_index_groups'] is None:
            return [union - _axes(params)]
        case 'ppermute' if len(params['perm']) == math.prod(
            jax.sharding.get_abstract_mesh().shape[axis] for axis in _axes(params)
        ):
            return [union]  # a permutation: every device receives a value
        case 'optimization_barrier':
            return operands
        case 'scan':
            return _scan(equation, operands, final)
        case 'while':
            return _while(params, operands, final)
        case 'cond':
            branches = [verify(branch, operands[1:], final) for branch in params['branches']]
            return [operands[0].union(*results) for results in zip(*branches, strict=True)]
    programs = inner_programs(equation)
    if len(programs) == 1:
        inner = getattr(programs[0], 'jaxpr', programs[0])
        if (len(inner.invars), len(inner.outvars)) == (len(operands), len(equation.outvars)):
            return verify(inner, operands, final)  # a call: jit, checkpoint, custom_vjp
    for program in programs:
        verify(program)
    # Communication along an axis can make a value vary along that axis only.
    return [union | _axes(params)] * len(equation.outvars)


def inner_programs(equation: Any) -> list[Any]:
    """The jaxprs, open or closed, that an equation runs."""
    values = [one for value in equation.params.values() for one in (value if isinstance(value, tuple) else (value,))]
    return [value for value in values if hasattr(getattr(value, 'jaxpr', value), 'eqns')]


def communicates_along(equation: Any) -> frozenset[str]:
    """The mesh axes along which a primitive sends its operands."""
    silent = ('axis_index', 'pvary', 'claim', 'known_same', 'settle')
    return frozenset() if equation.primitive.name in silent else _axes(equation.params)


def scan_counts(equation: Any) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carries. The others are slices."""
    program = equation.params['jaxpr']
    program = getattr(program, 'jaxpr', program)

    def differ_in_rank(outside: Any, inside: Any) -> bool:
        return len(outside.aval.shape) != len(inside.aval.shape)

    n_slices = sum(map(differ_in_rank, equation.invars, program.invars))
    n_carries = len(program.outvars) - sum(map(differ_in_rank, equation.outvars, program.outvars))
    return len(equation.invars) - n_slices - n_carries, n_carries


def _check_claim(varies: Varies, final: bool, *, kind: str, axes: tuple[str, ...], error: str) -> None:
    if kind == 'same' and not varies.isdisjoint(axes):
        raise ShardingError(error)
    # Constants, such as the gradient of an unused weight, may be reduced nevertheless.
    if kind == 'differs' and final and INPUT in varies and not varies.issuperset(axes):
        raise ShardingError(error)


def _axes(params: dict[str, Any]) -> frozenset[str]:
    """The mesh axes along which a primitive communicates."""
    named = [params.get('axis_name', ()), params.get('axes', ())]
    flat = [axis for names in named for axis in (names if isinstance(names, tuple | list | frozenset) else (names,))]
    return frozenset(axis for axis in flat if isinstance(axis, str))


def _scan(equation: Any, operands: list[Varies], final: bool) -> list[Varies]:
    """Operands are constants, carries and slices; results carries and slices. Inside, slices lose a dimension."""
    program = getattr(equation.params['jaxpr'], 'jaxpr', equation.params['jaxpr'])
    first, n_carries = scan_counts(equation)
    constants, carries, slices = operands[:first], operands[first : first + n_carries], operands[first + n_carries :]

    def body(carries: list[Varies], final: bool = False) -> list[Varies]:
        return verify(program, [*constants, *carries, *slices], final)

    return body(_until_stable(carries, lambda carries: body(carries)[:n_carries]), final)


def _while(params: dict[str, Any], operands: list[Varies], final: bool) -> list[Varies]:
    """Operands are the condition's constants, the body's constants and the carries."""
    first, second = params['cond_nconsts'], params['cond_nconsts'] + params['body_nconsts']

    def body(carries: list[Varies], final: bool = False) -> list[Varies]:
        (runs_on,) = verify(params['cond_jaxpr'], [*operands[:first], *carries], final)
        results = verify(params['body_jaxpr'], [*operands[first:second], *carries], final)
        return [result | runs_on for result in results]  # the number of iterations affects the result

    carries = _until_stable(operands[second:], body)
    body(carries, final)
    return carries


def _until_stable(carries: list[Varies], body: Callable[[list[Varies]], list[Varies]]) -> list[Varies]:
    while True:
        joined = [before | after for before, after in zip(carries, body(carries), strict=True)]
        if joined == carries:
            return carries
        carries = joined


def _with_place(error: Callable[[], ShardingError]) -> str:
    """The error, with file and line of the innermost caller outside this package and JAX."""
    ours = (str(Path(__file__).parent), str(Path(jax.__file__).parent))
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    return f'{error()}\n  where: {Path(frame.f_code.co_filename).name}, line {frame.f_lineno}'


def _identity(name: str) -> Primitive:
    """A primitive that returns its first operand and compiles to nothing."""
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x, *_, **__: x)
    batching.primitive_batchers[primitive] = lambda operands, dims, **params: (
        primitive.bind(*operands, **params),
        dims[0],
    )
    mlir.register_lowering(primitive, lambda _, x, *__, **___: [x])
    return primitive


_claim, _known_same, _settle, _varies_with = map(_identity, ('claim', 'known_same', 'settle', 'varies_with'))
for _marks in (_claim, _known_same):  # a claim is about the value, not about its tangent
    ad.primitive_jvps[_marks] = lambda primals, tangents, _p=_marks, **params: (_p.bind(*primals, **params), *tangents)


_varies_with.def_abstract_eval(lambda x, operand, *_: operand.update(shape=x.shape, dtype=x.dtype))


@_settle.def_abstract_eval
def _settled(x: Any, *, axes: tuple[str, ...]) -> Any:
    kind = x.manual_axis_type
    return x.update(manual_axis_type=kind.update(varying=kind.varying - set(axes)))


def _settle_transpose(gradient: Any, x: Any, *, axes: tuple[str, ...]) -> list[Any]:
    if isinstance(gradient, ad.Zero):
        return [ad.Zero(x.aval)]
    gradient = jax.lax.pcast(gradient, axes, to='varying')
    if math.prod(map(jax.lax.axis_size, axes)) == 1:
        return [gradient]
    return [jnp.where(jax.lax.axis_index(axes) == 0, gradient, jnp.zeros_like(gradient))]


ad.deflinear2(_settle, _settle_transpose)
