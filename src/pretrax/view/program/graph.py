"""Groups in the picture of a compiled program: operations by phase, loop and scope, and the arrays between them."""

import dataclasses
import sys
from collections import Counter
from collections.abc import Iterator

from pretrax.hlo.parse import ENTRY, bytes_of
from pretrax.hlo.program import Operation, Program, plain_type
from pretrax.hlo.work import CONTROL, PLUMBING

# Operations that are left out. Edges pass through them.
_PLUMBING = PLUMBING | {'opt-barrier', 'optimization-barrier', 'domain'}
_ROOTS = {
    'forward': 'forward',
    'backward': 'backward',
    'recomputation': 'backward',
    'update': 'update',
    'input': 'inputs',
}


@dataclasses.dataclass
class Group:
    """A box of the picture that opens."""

    name: str
    phase: str = 'forward'  # most frequent phase of its kernels
    turns: int = 1  # iterations, of a loop
    groups: dict[str, 'Group'] = dataclasses.field(default_factory=dict)
    operations: list[Operation] = dataclasses.field(default_factory=list)
    kernels: int = 0  # number of kernels that run in one step
    flops: float = 0.0  # FLOPs of one step
    bytes: float = 0.0  # read and written in one step
    # Bytes of collectives in one step, by kind and axes.
    communication: Counter[str] = dataclasses.field(default_factory=Counter)

    def everything(self) -> Iterator[Operation]:
        """All operations inside, also in groups."""
        yield from self.operations
        for group in self.groups.values():
            yield from group.everything()


@dataclasses.dataclass(frozen=True)
class Edge:
    """An array that an operation makes and another one reads."""

    source: str
    target: str
    type: str  # such as 'bf16[8,128]'
    bytes: float


def groups_of(program: Program) -> Group:
    """The tree of groups, with totals."""
    root = Group(program.name)
    _fill(program, ENTRY, root)
    _add_up(root)
    return _without_single_groups(root, is_root=True)


def edges_of(program: Program) -> list[Edge]:
    """The arrays between the operations that the picture shows."""
    resolve, hidden = _Sources(program), _PLUMBING | CONTROL
    found: dict[tuple[str, str, str], Edge] = {}
    for name in program.running:
        for one in program.computations[name]:
            if one.operation in hidden or (one.operation == 'parameter' and name != ENTRY):
                continue
            for operand in one.operands:
                for source, written in resolve(name, operand, ()):
                    if source != one.name:
                        edge = Edge(source, one.name, plain_type(written), bytes_of(written, ''))
                        found.setdefault((source, one.name, edge.type), edge)
    return list(found.values())


def _fill(
    program: Program, computation: str, group: Group, inside_loop: bool = False, above: tuple[str, ...] = ()
) -> None:
    """Puts the operations of a computation into groups. `above`: scopes that the loops around it show."""
    body = program.computations[computation]
    for one in body:
        if one.operation in _PLUMBING or (one.operation == 'parameter' and computation != ENTRY) or not one.operation:
            continue
        if one.operation in CONTROL:
            for called in dict.fromkeys(one.calls):
                if called in program.running:
                    _fill_loop(program, one, called, group, inside_loop, above)
            continue
        here = group if inside_loop else _child(group, _ROOTS[one.phase])
        scope = _below(one.scope, above)
        if not scope and not inside_loop:
            here = _child(here, 'without a scope')
        for depth, part in enumerate(scope):
            if one.phase == 'recomputation' and depth == (0 if inside_loop else 1):
                here = _child(here, 'recomputation')
            here = _child(here, part)
        here.operations.append(one)


def _fill_loop(
    program: Program, one: Operation, called: str, group: Group, inside_loop: bool, above: tuple[str, ...]
) -> None:
    """A loop is a group; the body of a call or a branch belongs to the group around it."""
    if one.operation != 'while':
        _fill(program, called, group, inside_loop, above)
        return
    turns = program.turns.get(called, 1)
    phases = _phases_in(program, called)
    if not inside_loop and {'forward', 'backward'} <= set(phases):  # gradients of micro-batches are summed
        loop = _child(group, f'micro-batches ({one.name})', f'micro-batches × {turns}')
        loop.turns = turns
        _fill(program, called, loop)
        return
    phase = phases.most_common(1)[0][0] if phases else one.phase
    outer = group if inside_loop else _child(group, _ROOTS[phase])
    if one.phase == 'recomputation':
        outer = _child(outer, 'recomputation')
    common = _common_scope(program, called, above)
    for part in _below(one.scope, above):
        outer = _child(outer, part) if part != common else outer
    name = common or 'loop'
    loop = _child(outer, f'{name} ({one.name})', f'{name} × {turns}')
    loop.turns = turns
    _fill(program, called, loop, True, (*above, common) if common else above)


def _below(scope: tuple[str, ...], above: tuple[str, ...]) -> tuple[str, ...]:
    """The scopes that loops around an operation do not show already."""
    for part in above:
        scope = scope[1:] if scope[:1] == (part,) else scope
    return scope


def _child(group: Group, key: str, name: str | None = None) -> Group:
    return group.groups.setdefault(key, Group(name or key.replace('_', ' ')))


def _phases_in(program: Program, computation: str) -> Counter[str]:
    """The phases of the products in a computation, otherwise of its kernels, loops inside included."""
    products: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    for one in program.computations[computation]:
        phase = 'backward' if one.phase == 'recomputation' else one.phase
        if one.operation in CONTROL:
            for called in one.calls:
                if called in program.running:
                    products += _phases_in(program, called)
        elif one.is_kernel:
            kernels[phase] += 1
            products[phase] += bool(one.flops)
    return +products or kernels


def _common_scope(program: Program, computation: str, above: tuple[str, ...]) -> str:
    """The first scope of most operations of a loop, such as 'layer'."""
    inner = [called for one, called in _control_flow(program, computation)]
    scopes = [_below(one.scope, above) for name in (computation, *inner) for one in program.computations[name]]
    first = Counter(scope[0] for scope in scopes if scope)
    name, count = first.most_common(1)[0] if first else ('', 0)
    return name if count > 0.5 * first.total() else ''


def _control_flow(program: Program, computation: str) -> Iterator[tuple[Operation, str]]:
    """The loops, calls and branches in a computation, each with the computations that it runs."""
    for one in program.computations[computation]:
        if one.operation in CONTROL:
            yield from ((one, called) for called in one.calls if called in program.running)


def _add_up(group: Group) -> None:
    phases: Counter[str] = Counter()
    for one in group.operations:
        phases[one.phase] += 1
        if one.is_kernel:
            group.kernels += one.times
            group.flops += one.times * one.flops
            group.bytes += one.times * one.bytes
        if one.collective is not None:
            group.communication[communication_name(one)] += one.times * one.collective.bytes
    for inner in group.groups.values():
        _add_up(inner)
        group.kernels += inner.kernels
        group.flops += inner.flops
        group.bytes += inner.bytes
        group.communication += inner.communication
        phases[inner.phase] += 1
    if phases:
        group.phase = phases.most_common(1)[0][0]
    if group.phase == 'recomputation' and phases['backward']:
        group.phase = 'backward'


def communication_name(one: Operation) -> str:
    """The name of a transfer, as in 'all-gather over d'; '' if an operation does not communicate."""
    return f'{one.collective.kind} over {" ".join(one.collective.axes)}' if one.collective else ''


def _without_single_groups(group: Group, is_root: bool = False) -> Group:
    """A group that contains only one group becomes one with it."""
    group.groups = {key: _without_single_groups(inner) for key, inner in group.groups.items()}
    if not is_root and not group.operations and len(group.groups) == 1:
        (inner,) = group.groups.values()
        if inner.turns == 1 and group.turns == 1 and inner.name != 'recomputation':
            inner.name = f'{group.name} / {inner.name}'
            return inner
    return group


class _Sources:
    """Finds the operations that make an array: (name, type) through tuples, loops and names without work."""

    def __init__(self, program: Program):
        self.program = program
        self.bodies = {name: {one.name: one for one in program.computations[name]} for name in program.running}
        self.callers: dict[str, tuple[str, Operation]] = {
            called: (name, one) for name in program.running for one, called in _control_flow(program, name)
        }
        self.known: dict[tuple[str, str, tuple[int, ...]], tuple[tuple[str, str], ...]] = {}
        sys.setrecursionlimit(max(sys.getrecursionlimit(), 20_000))

    def __call__(self, computation: str, name: str, path: tuple[int, ...]) -> tuple[tuple[str, str], ...]:
        key = computation, name, path
        if key not in self.known:
            self.known[key] = ()  # a loop may pass a value on unchanged
            self.known[key] = tuple(dict.fromkeys(self._find(computation, name, path)))
        return self.known[key]

    def _find(self, computation: str, name: str, path: tuple[int, ...]) -> Iterator[tuple[str, str]]:
        one = self.bodies[computation].get(name)
        if one is None or one.operation in ('constant', 'iota', 'after-all', 'partition-id', 'replica-id'):
            return
        if one.operation == 'get-tuple-element':
            index = one.detail.partition('index=')[2].split(',')[0].strip()
            path = (int(index), *path) if index.isdigit() else path
            for source, written in self(computation, one.operands[0], path):
                yield source, one.result if written.startswith('(') else written
        elif one.operation == 'tuple':
            chosen = [one.operands[path[0]]] if path and path[0] < len(one.operands) else one.operands
            for operand in chosen:
                yield from self(computation, operand, path[1:])
        elif one.operation in _PLUMBING:
            for operand in one.operands[:1]:
                yield from self(computation, operand, path)
        elif one.operation == 'parameter' and computation != ENTRY:
            caller, call = self.callers.get(computation, (ENTRY, None))
            number = one.detail.split(')')[0]
            if call is not None and number.isdigit():
                operand = 0 if call.operation == 'while' else int(number)
                if operand < len(call.operands):
                    yield from self(caller, call.operands[operand], path)
        elif one.operation in CONTROL:
            yield from self._results(one, path)
        else:
            yield one.name, one.result

    def _results(self, call: Operation, path: tuple[int, ...]) -> Iterator[tuple[str, str]]:
        for called in call.calls:
            if called in self.bodies and self.program.computations[called]:
                yield from self(called, self.program.computations[called][-1].name, path)
