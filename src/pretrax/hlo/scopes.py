"""The named scope and the phase of every instruction of a compiled program,
from the paths that JAX gave its operations.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

from pretrax.hlo.parse import ENTRY, Instruction
from pretrax.hlo.work import CONTROL, inside, products_in

Phase = Literal['forward', 'recomputation', 'backward', 'update', 'input']
Place = tuple[tuple[str, ...], Phase]  # named scopes from the outermost to the innermost, and the part of the step
_WRAPPER = re.compile(r'(\w+)\((.*)\)')  # jvp(layer_0), transpose(jvp(loss)), jit(silu)
_STRUCTURE = re.compile(
    r'shard_map|while|body|cond|eval_jaxpr|checkpoint|remat\d?|rematted_computation|closed_call|core_call|pjit|scan|'
    r'custom_[jv][jv]p_call\w*|branch_\d+_fun|jit|main|gradients'
)
# Functions whose names differ from the words of the documentation.
_WORDS = {'embed': 'embedding', 'unembed': 'unembedding', 'mixture': 'mixture_of_experts'}
_METRICS = ('metrics',)  # what the step computes outside of every scope: metrics and counters
_WEAK = ((), _METRICS)  # of a fusion, its contents say more
_PASSED_THROUGH = {'context_parallel_attention'}  # scopes that add nothing to those inside


def place_of(op_name: str) -> Place | None:
    """The scope and the phase of an operation by the path that JAX gave it; None if the path says nothing.

    'jit(step)/gradients/transpose(jvp(layer_0))/block/attention/dot_general' is ('layer_0', 'attention') in the
    backward pass.
    """
    path = _split(op_name.split(';')[0])
    if len(path) < 2 and not path[0].startswith(('state.', 'batch.')):
        return None
    if len(path) == 1:
        return _scope_of_input(path[0]), 'input'
    scope: list[str] = []
    for part in path[:-1]:
        inner = part
        while (wrapped := _WRAPPER.fullmatch(inner)) is not None:
            inner = '' if wrapped[1] in ('jit', 'pjit') else wrapped[2]
        if inner == 'gradients':
            scope = []  # a recomputation repeats the path of the forward pass
        if not inner or '->' in inner or _STRUCTURE.fullmatch(inner) or inner in _PASSED_THROUGH:
            continue
        if inner == 'block':
            if scope[-1:] and scope[-1].startswith('layer_'):
                continue
            inner = 'layer'
        scope.append(_WORDS.get(inner, inner))
    for half in range(1, len(scope) // 2 + 1):
        if scope[:half] == scope[half : 2 * half]:
            scope = scope[half:]
            break
    phase = _phase(op_name, scope, path)
    return (tuple(scope) if scope or phase != 'update' else _METRICS), phase


def _phase(op_name: str, scope: Sequence[str], path: Sequence[str]) -> Phase:
    if 'rematted_computation' in op_name:
        return 'recomputation'
    if 'transpose(' in op_name or scope[:1] == ['gradient_reduction']:
        return 'backward'
    if scope[:1] == ['optimizer']:
        return 'update'
    in_gradient = any(part.startswith(('jvp(', 'gradients', 'shard_map', 'jit(per_device)')) for part in path)
    return 'forward' if in_gradient or scope else 'update'


def _split(op_name: str) -> list[str]:
    """The parts of a path; a slash in parentheses does not separate."""
    parts, depth = [''], 0
    for letter in op_name:
        depth += (letter == '(') - (letter == ')')
        if letter == '/' and depth <= 0:
            parts.append('')
        else:
            parts[-1] += letter
    return parts


def _scope_of_input(name: str) -> tuple[str, ...]:
    """'state.optimizer.mu.layers.q' is ('optimizer state',)."""
    if name.startswith('state.weights'):
        return ('weights',)
    if name.startswith('state.optimizer'):
        return ('optimizer state',)
    return ('batch',) if name.startswith('batch') else ('counters',)


def places_of(computations: Mapping[str, list[Instruction]]) -> tuple[dict[str, Place], dict[str, str]]:
    """The place of every instruction, and the instruction from which it has it, if not from its own path.

    It is that which JAX wrote, otherwise that of what is inside, of a user, or of an operand.
    """
    found: dict[str, Place] = {}
    donors: dict[str, str] = {}
    for name, body in computations.items():
        for one in body:
            if (place := _own_place(one, name, computations)) is not None:
                found[one.name] = place
        _inherit(body, found, donors)
        for one in body:
            found.setdefault(one.name, ((), 'update' if name == ENTRY else 'forward'))
    return found, donors


def _own_place(one: Instruction, name: str, computations: Mapping[str, list[Instruction]]) -> Place | None:
    if one.operation == 'constant' or (one.operation == 'parameter' and name != ENTRY):
        return None
    if one.operation == 'parameter':
        written = re.search(r'op_name="([^"]*)"', one.rest)
        path = written[1] if written else one.name.replace('_', '.', 1)
        return _scope_of_input(path.replace('_', '.') if written is None else path), 'input'
    if one.operation in CONTROL:
        return _written_place(one)  # not that of its users, which may be anything
    inner = inside(one, computations) if one.operation == 'fusion' else []
    for candidate in (*products_in(inner), one):
        if (place := _written_place(candidate)) is not None and place[0] not in _WEAK:
            return place
    votes = Counter(place for x in inner if (place := _written_place(x)) is not None and place[0] not in _WEAK)
    if votes:
        return votes.most_common(1)[0][0]
    own = _written_place(one)
    return own if own is not None and own[1] == 'update' else None


def _written_place(one: Instruction) -> Place | None:
    written = re.search(r'op_name="([^"]*)"', one.rest)
    return place_of(written[1]) if written and written[1] else None


def _inherit(body: list[Instruction], found: dict[str, Place], donors: dict[str, str]) -> None:
    """Gives instructions without a place that of their first user that has one, otherwise of their operands."""
    users: dict[str, list[str]] = defaultdict(list)
    for one in body:
        for operand in one.operands:
            users[operand].append(one.name)
    for one in body:
        if one.operation == 'tuple':  # packs what a loop takes
            for operand in one.operands:
                users[operand] += users[one.name]

    def take(one: Instruction, others: Iterable[str], needs_scope: bool) -> None:
        is_shared = one.operation in ('tuple', 'parameter')  # its operands or users may be anything
        for other in () if one.name in found or is_shared else others:
            scope, phase = found.get(other, ((), 'input'))
            if (scope or not needs_scope) and phase != 'input':
                found[one.name], donors[one.name] = (scope, phase), other
                return

    for needs_scope in (True, False):
        for one in reversed(body):  # users come later
            take(one, users[one.name], needs_scope)
        for one in body:
            take(one, one.operands, needs_scope)
