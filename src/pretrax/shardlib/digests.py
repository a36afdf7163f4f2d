"""Digests of the values that each device sends to others or returns, taken before any reduction, to compare two runs.

A device that computes something wrong sends a wrong value sooner or later. Until then no other device knows of it. So
the first digest that differs between two runs of one program, in the order of the program, is that of the device which
erred; later ones differ on many devices.

`digest_sent` evaluates the traced program of a `typed_shard_map` once more, and adds the digests: of the operands of
every collective, in every turn of a loop, and of the results.
"""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from pretrax.shardlib.ops import ppermute, vary
from pretrax.shardlib.replication import communicates_along, inner_programs, scan_counts

# How a value changes if the batch moves one device ahead along an axis. It stays (0), it moves with the batch, it
# belongs to a device, or it is made of values of several devices, so that sums are in another order.
MOVES, OWN, MIXED = 1, 2, 4
_SAME_EVERYWHERE = ('psum', 'psum_invariant', 'pmax', 'pmin', 'all_gather', 'all_gather_invariant')


@dataclasses.dataclass(frozen=True)
class Digested:
    """What a digest is of, and how it changes if the batch moves."""

    name: str
    label: int


@dataclasses.dataclass(frozen=True)
class Loop:
    """The places in each turn of a loop, in the order in which the turns run."""

    turns: int
    places: 'Sequence[Digested | Loop]'


def labels_of(places: Sequence[Digested | Loop]) -> np.ndarray:
    """The label of every digest."""
    each = [np.tile(labels_of(one.places), one.turns) if isinstance(one, Loop) else [one.label] for one in places]
    return np.concatenate([np.zeros(0, np.int64), *each])


def name_of(places: Sequence[Digested | Loop], number: int) -> str:
    """The name of a digest, such as 'all_gather over d in block/attention, turn 3 of 24'."""
    for one in places:
        count = len(labels_of([one]))
        if number >= count:
            number -= count
        elif isinstance(one, Digested):
            return one.name
        else:
            turn, rest = divmod(number, count // one.turns)
            return f'{name_of(one.places, rest)}, turn {turn + 1} of {one.turns}'
    raise IndexError(number)


def digest(x: jax.Array, by_row: bool = False) -> jax.Array:
    """u32[1], a digest of the bits of an array; u32[rows] of each row. A change of one element always changes it.

    Every element is mixed with its position by a bijection (the finalizer of MurmurHash3), and the results are added.
    So the order of the sum does not matter, and exchanged elements are seen.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    bits = jnp.finfo(x.dtype).bits if jnp.issubdtype(x.dtype, jnp.floating) else 8 * x.dtype.itemsize
    if x.dtype == jnp.bool_ or bits < 8:
        x, bits = x.astype(jnp.float32), 32
    words = jax.lax.bitcast_convert_type(x, {8: jnp.uint8, 16: jnp.uint16}.get(bits, jnp.uint32)).astype(jnp.uint32)
    words = words if by_row else words[None]
    position, stride = jnp.zeros((), jnp.uint32), 1
    for dimension in reversed(range(1, words.ndim)):
        shape = [size if i == dimension else 1 for i, size in enumerate(words.shape)]
        position = position + jax.lax.broadcasted_iota(jnp.uint32, shape, dimension) * jnp.uint32(stride % 2**32)
        stride *= words.shape[dimension]
    mixed = (words ^ (position * jnp.uint32(0x9E3779B1))) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum(mixed ^ (mixed >> 16), axis=tuple(range(1, words.ndim)), dtype=jnp.uint32)


def digest_sent(
    function: Callable[..., Any], args: tuple, kwargs: dict[str, Any], *, moving: Any, axis: str, ahead: jax.Array
) -> tuple[jax.Array, list[Digested | Loop]]:
    """u32[devices, digests] of what each device sends in a call of `function`, and returns; and the places of these.

    Runs under `jit`. They are in the order of the program, with a row for each device of the mesh. The digests of a
    result in a field `layers` are those of its rows.

    Args:
        function: a `typed_shard_map`, which does nothing outside of it.
        moving: for each argument, whether it moves with the batch: a prefix of (args, kwargs).
        axis: the mesh axis along which the batch moves.
        ahead: bool[], whether the batch of each device moves to the next one.
    """
    traced = jax.jit(function).trace(*args, **kwargs)
    program, (results, _) = traced.jaxpr, jax.tree.flatten_with_path(traced.out_info)
    flags = jax.tree.map(lambda flag, part: jax.tree.map(lambda _: flag, part), moving, (args, kwargs))
    known = list(zip(jax.tree.leaves((args, kwargs)), jax.tree.leaves(flags), strict=True))
    while True:  # into the `jit` around the `shard_map`
        (equation,), variables = program.eqns, [*program.jaxpr.constvars, *program.jaxpr.invars]
        values = dict(zip(variables, [*((x, False) for x in program.consts), *known], strict=True))
        known = [(x.val, False) if hasattr(x, 'val') else values[x] for x in equation.invars]
        if equation.primitive.name == 'shard_map':
            break
        program = equation.params['jaxpr']
    specs, inner, sizes = equation.params['in_specs'], equation.params['jaxpr'], dict(equation.params['mesh'].shape)
    own = [OWN if axis in _axes_of(spec) else 0 for spec in specs]
    labels = [MOVES if moves else label for (_, moves), label in zip(known, own, strict=True)]
    seen: dict[int, int] = {}
    of_results = _flow(inner, labels, axis, seen)
    places: list[Digested | Loop] = []

    def per_device(ahead: jax.Array, *values: jax.Array) -> jax.Array:
        evaluation = _Evaluation(sizes, axis, ahead, seen)
        moved = [evaluation.move(x, 1) if moves else x for x, (_, moves) in zip(values, known, strict=True)]
        outputs, digests, places[:] = evaluation(inner, moved)
        for (path, _), output, label in zip(results, outputs, of_results, strict=True):
            name = jax.tree_util.keystr(path, simple=True, separator='.')
            rows, place = 'layers' in name.split('.'), Digested(f'the result {name}', label)
            digests.append(digest(output, rows))
            places.append(Loop(len(output), [place]) if rows else place)
        return _together(digests)[None]

    specs = (PartitionSpec(), *specs)
    mapped = jax.shard_map(per_device, in_specs=specs, out_specs=PartitionSpec(tuple(sizes)), check_vma=True)
    return mapped(ahead, *(value for value, _ in known)), places


def digest_shards(tree: Any, shardings: Any) -> tuple[jax.Array, jax.Array]:
    """u32[devices, arrays], digests of what each device has of every array, and bool of whether its replicas differ.

    Runs under `jit`.

    Args:
        shardings: the `NamedSharding` of every array.
    """
    specs = [sharding.spec for sharding in jax.tree.leaves(shardings)]
    axes = jax.sharding.get_abstract_mesh().axis_names

    def per_device(*arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
        digests = [_together([digest(x)])[0] for x in arrays]
        differ = []
        for one, spec in zip(digests, specs, strict=True):
            same = tuple(axis for axis in axes if axis not in _axes_of(spec))
            largest = jax.lax.pmax(jnp.stack([one, ~one]), same)
            differ.append(vary(largest[0] != ~largest[1], axes))
        return jnp.stack(digests)[None], jnp.stack(differ)[None]

    rows = PartitionSpec(axes)
    return jax.shard_map(per_device, in_specs=tuple(specs), out_specs=(rows, rows))(*jax.tree.leaves(tree))


type _Evaluated = tuple[list[Any], list[jax.Array], list[Digested | Loop]]  # results, digests, and the places of these


@dataclasses.dataclass(frozen=True)
class _Evaluation:
    """Evaluates jaxprs on one device of a mesh of these sizes, and digests what it sends."""

    sizes: dict[str, int]
    axis: str  # along which the batch moves
    ahead: jax.Array  # bool[], whether it has moved
    seen: dict[int, int]  # the labels of collectives, by id

    def __call__(self, program: Any, values: Sequence[Any], turns: tuple[jax.Array, ...] = ()) -> _Evaluated:
        """`turns`: the numbers of the turns of the loops around the program."""
        digests: list[jax.Array] = []
        places: list[Digested | Loop] = []
        program, constants = getattr(program, 'jaxpr', program), getattr(program, 'consts', ())
        known = dict(zip([*program.constvars, *program.invars], [*constants, *values], strict=True))

        def read(atom: Any) -> Any:
            return atom.val if hasattr(atom, 'val') else known[atom]

        for equation in program.eqns:
            results, found, where = self._run(equation, list(map(read, equation.invars)), turns)
            known |= zip(equation.outvars, results, strict=True)
            digests += found
            places += where
        return list(map(read, program.outvars)), digests, places

    def move(self, x: Any, shift: int) -> Any:
        """The value of the device before this one for 1, of the one after it for -1, if the batch has moved."""
        moves = self.sizes[self.axis] > 1
        return jnp.where(self.ahead, ppermute(self.axis, x, shift=shift), x) if moves else x

    def _run(self, equation: Any, operands: list[Any], turns: tuple[jax.Array, ...]) -> _Evaluated:
        name, inner = equation.primitive.name, inner_programs(equation)
        if not any(_sends(program, tuple(self.sizes.items())) for program in inner):
            return self._send(equation, operands, turns)
        if name == 'scan':
            return self._loop(equation, operands, turns)
        if name == 'cond':
            return self._branch(inner, operands, turns)
        if name == 'remat2' and equation.params['differentiated']:  # keeps XLA from merging it with the forward pass
            operands = list(jax.lax.optimization_barrier(operands)) if equation.params['prevent_cse'] else operands
        if len(inner) == 1 and name != 'while':
            return self(inner[0], operands, turns)
        return self._bind(equation, operands, turns), [], []  # a loop of unknown length: what follows is digested

    def _send(self, equation: Any, operands: list[Any], turns: tuple[jax.Array, ...]) -> _Evaluated:
        axes = [axis for axis in communicates_along(equation) if self.sizes[axis] > 1]
        if not axes:
            return self._bind(equation, operands, turns), [], []
        name, scope = equation.primitive.name, str(equation.source_info.name_stack) or 'the loss'
        place = Digested(f'{name} over {" ".join(axes)} in {scope}', self.seen.get(id(equation), MIXED))
        digests = [digest(operand) for operand in operands]
        if _keeps_order(equation, self.axis) and place.label == MOVES:
            operands = [self.move(operand, -1) for operand in operands]
        return self._bind(equation, operands, turns), digests, [place] * len(digests)

    def _bind(self, equation: Any, operands: Sequence[Any], turns: tuple[jax.Array, ...]) -> list[Any]:
        """The results of an equation. Another function here can flip a bit, in some turn of the loops."""
        del turns
        results = equation.primitive.bind(*operands, **equation.primitive.get_bind_params(equation.params))
        return results if equation.primitive.multiple_results else [results]

    def _loop(self, equation: Any, operands: list[Any], turns: tuple[jax.Array, ...]) -> _Evaluated:
        params, where = equation.params, []
        n_constants, n_carries = scan_counts(equation)
        first = n_constants + n_carries

        def turn(carry: Any, x: Any) -> tuple[Any, Any]:
            values = [*operands[:n_constants], *carry, *x[1]]
            results, found, where[:] = self(params['jaxpr'], values, (*turns, x[0]))
            return results[:n_carries], (results[n_carries:], _together(found))

        slices = jnp.arange(params['length'], dtype=jnp.int32), operands[first:]
        options = {key: params[key] for key in ('length', 'reverse', 'unroll')}
        carry, (outputs, found) = jax.lax.scan(turn, operands[n_constants:first], slices, **options)
        digests = (found[::-1] if params['reverse'] else found).reshape(-1)
        return [*carry, *outputs], [digests], [Loop(params['length'], list(where))]

    def _branch(self, programs: Sequence[Any], operands: list[Any], turns: tuple[jax.Array, ...]) -> _Evaluated:

        def count(program: Any) -> int:
            return jax.eval_shape(lambda *xs: _together(self(program, xs)[1]), *operands[1:]).size

        longest, where = max(map(count, programs)), []

        def case(program: Any, *values: Any) -> Any:
            results, found, places = self(program, values, turns)
            together = _together(found)
            where[:] = places if together.size == longest else where
            return results, jnp.pad(together, (0, longest - together.size))

        cases = [functools.partial(case, program) for program in programs]
        results, digests = jax.lax.switch(operands[0], cases, *operands[1:])
        return results, [digests], list(where)


@functools.cache
def _sends(program: Any, sizes: tuple[tuple[str, int], ...]) -> bool:
    """Whether something in a jaxpr communicates along an axis of several devices."""
    return any(
        any(dict(sizes).get(axis, 1) > 1 for axis in communicates_along(equation))
        or any(_sends(inner, sizes) for inner in inner_programs(equation))
        for equation in program.eqns
    )


def _keeps_order(equation: Any, axis: str) -> bool:
    """Whether a reduction is so small that its operands move back before it: it then adds in the same order."""
    is_sum = equation.primitive.name in ('psum', 'psum_invariant') and axis in communicates_along(equation)
    return is_sum and sum(variable.aval.size for variable in equation.invars) <= 1 << 16


def _flow(program: Any, labels: Sequence[int], axis: str, seen: dict[int, int]) -> list[int]:
    """The labels of the results of a jaxpr. Collects those of the operands of its collectives in `seen`, by id."""
    program = getattr(program, 'jaxpr', program)
    known = dict(zip(program.invars, labels, strict=True))

    def read(atom: Any) -> int:
        return 0 if hasattr(atom, 'val') else known.get(atom, 0)  # constants: 0

    for equation in program.eqns:
        known |= zip(equation.outvars, _labels(equation, list(map(read, equation.invars)), axis, seen), strict=True)
    return list(map(read, program.outvars))


def _labels(equation: Any, labels: list[int], axis: str, seen: dict[int, int]) -> list[int]:
    name, inner, count = equation.primitive.name, inner_programs(equation), len(equation.outvars)
    every = functools.reduce(operator.or_, labels, 0)
    if name == 'scan':
        first, n_carries = scan_counts(equation)
        while True:
            results = _flow(inner[0], labels, axis, seen)
            joined = list(map(operator.or_, labels[first : first + n_carries], results))
            if joined == labels[first : first + n_carries]:
                return results
            labels[first : first + n_carries] = joined
    if name == 'cond':
        results = [_flow(one, labels[1:], axis, seen) for one in inner]
        return [functools.reduce(operator.or_, each, labels[0]) for each in zip(*results, strict=True)]
    if len(inner) == 1 and len(getattr(inner[0], 'jaxpr', inner[0]).invars) == len(labels):
        return _flow(inner[0], labels, axis, seen)
    if inner:  # a loop of unknown length, a kernel
        return [every | (MIXED if any(_sends(one, ((axis, 2),)) for one in inner) else 0)] * count
    if name == 'optimization_barrier':
        return labels
    if name == 'axis_index':
        return [OWN if axis in equation.params['axis_name'] else 0]
    axes = communicates_along(equation)
    if not axes:
        return [every] * count
    seen[id(equation)] = seen.get(id(equation), 0) | every
    if axis not in axes:
        return [every] * count
    if (every == MOVES and _keeps_order(equation, axis)) or (name in ('pmax', 'pmin') and not every & MIXED):
        return [0] * count
    mixed = MIXED if every & (MOVES | MIXED) else 0
    return [mixed | (0 if name in _SAME_EVERYWHERE else every & OWN)] * count


def _axes_of(spec: Any) -> set[str]:
    return {axis for axes in spec or () for axis in (axes if isinstance(axes, tuple) else (axes,))}


def _together(digests: Sequence[jax.Array]) -> jax.Array:
    """Digests in one array, which varies over all axes."""
    axes = jax.sharding.get_abstract_mesh().manual_axes
    return jnp.concatenate([vary(one, axes) for one in digests] or [vary(jnp.zeros(0, jnp.uint32), axes)])
