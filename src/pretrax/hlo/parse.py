"""Collectives of a compiled program: kind, mesh axes, size and number of runs.

Reads XLA's text of an optimized program. The body of a loop counts once per iteration.
"""

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping

import numpy as np

ENTRY = 'ENTRY'  # the name of the main computation
KINDS = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'ragged-all-to-all', 'collective-permute')
_SCATTER = 'all-reduce-scatter'  # name of a TPU fusion that sums and keeps a slice
_ASYNC = ('async-start', 'call-start')  # run a computation while others run


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective in the program."""

    kind: str  # one of `KINDS`
    axes: tuple[str, ...]  # mesh axes that its groups span, in the mesh's order
    bytes: int  # size of the gathered array per device: the result of an all-gather, the operand of a reduce-scatter
    times: int  # runs per step
    asynchronous: bool  # whether other work runs between its start and its end


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction of a computation."""

    name: str
    result: str  # its type
    operation: str
    rest: str  # operands and attributes

    @property
    def operands(self) -> list[str]:
        """Names of the operands."""
        depth = 1
        for bracket in re.finditer(r'[(){}\[\]]', self.rest):
            depth += 1 if bracket[0] in '({[' else -1
            if not depth:
                return re.findall(r'%([\w.\-]+)', self.rest[: bracket.start()])
        return []


@dataclasses.dataclass(frozen=True)
class Found:
    """A collective, and how the program performs it."""

    name: str  # name of its instruction; if it takes several steps, of that in the first
    computation: str  # the computation that contains it
    collective: Collective  # what is communicated
    # 'waits'; 'start, done'; 'in fusions', whose work runs meanwhile (TPU); 'SparseCore'; 'hosts', between TPU slices
    form: str
    # The devices of its first group, by their place in the mesh; of a permute, sources and targets in turn
    group: tuple[int, ...]
    detail: str  # operands and attributes


def collectives(text: str, mesh: Mapping[str, int]) -> list[Collective]:
    """Collectives of a program.

    Args:
        text: `compiled.as_text()`.
        mesh: {axis: size} in the order of the mesh. Collectives within single devices are left out.
    """
    return [one.collective for one in find_collectives(computations_of(text), mesh)]


def find_collectives(computations: Mapping[str, list[Instruction]], mesh: Mapping[str, int]) -> Iterator[Found]:
    """The collectives of a program, each once, however many instructions perform it."""
    times, hidden = times_of(computations)
    for name, instructions in computations.items():
        starts = any('AsyncCollectiveStart' in i.rest for i in instructions)  # on TPUs, start, work and end are fusions
        for one in instructions:
            if between := re.search(r'_xla_megascale_transfer_type="(\w+)"', one.rest):
                # TPU slices are connected through their hosts, along the outermost axis of the mesh.
                if one.operation == 'send':
                    kind, size = between[1].lower().replace('_', '-'), bytes_of(one.result, one.operation)
                    outermost = next((axis for axis, n in mesh.items() if n > 1), '')
                    slices = tuple(
                        range(0, math.prod(mesh.values()), math.prod(mesh.values()) // mesh.get(outermost, 1))
                    )
                    found = Collective(kind, (outermost,), int(size), times[name], True)
                    yield Found(one.name, name, found, 'hosts', slices, one.rest)
                continue
            kind = one.operation.removesuffix('-start')
            if _SCATTER in name and kind == 'all-reduce':
                kind = 'reduce-scatter'
            if kind not in KINDS or not times[name] or (hidden[name] == 'AsyncCollective' and not starts):
                continue
            groups = _groups(one.rest, mesh)
            if not (axes := _axes(groups, mesh)):
                continue
            group = _along(axes, mesh) if isinstance(groups, tuple) else tuple(max(groups, key=len))
            n = len(group) if one.operation.startswith('reduce-scatter') else 1
            if one.operation.endswith('-start') or hidden[name] == 'async-start':
                form = 'start, done'
            else:
                form = 'in fusions' if starts else hidden[name] or 'waits'
            found = Collective(kind, axes, int(bytes_of(one.result, one.operation) * n), times[name], form != 'waits')
            if kind == 'collective-permute' and not isinstance(groups, tuple):
                group = tuple(device for pair in groups for device in pair)
            yield Found(one.name, name, found, form, group, one.rest)


def summarize(found: list[Collective]) -> list[tuple[str, tuple[str, ...], int, int, int]]:
    """(kind, axes, runs per step, bytes per step, asynchronous runs per step), largest first."""
    counts: dict[tuple[str, tuple[str, ...]], Counter[str]] = defaultdict(Counter)
    for one in found:
        counts[one.kind, one.axes].update(
            times=one.times, bytes=one.times * one.bytes, behind=one.times if one.asynchronous else 0
        )
    rows = [(kind, axes, c['times'], c['bytes'], c['behind']) for (kind, axes), c in counts.items()]
    return sorted(rows, key=lambda row: -row[3])


def computations_of(text: str) -> dict[str, list[Instruction]]:
    """Instructions of every computation by name; the main computation is named `ENTRY`."""
    found: dict[str, list[Instruction]] = {}
    here: list[Instruction] = []
    for line in text.splitlines():
        if line and not line[0].isspace():
            if header := re.match(r'(ENTRY )?%?([\w.\-]+) .*\{$', line):
                here = found.setdefault(ENTRY if header[1] else header[2], [])
        elif ' = ' in line:
            here.append(_instruction(*line.split(' = ', 1)))
    return found


def _instruction(name: str, text: str) -> Instruction:
    name, end, depth = name.strip().removeprefix('ROOT ').removeprefix('%'), 0, 0
    if text.startswith('('):  # a tuple, whose type contains blanks
        for bracket in re.finditer(r'[()]', text):
            depth += 1 if bracket[0] == '(' else -1
            if not depth:
                end = bracket.end()
                break
    result, _, after = text[end:].partition(' ')
    operation, _, rest = after.partition('(')
    return Instruction(name, text[:end] + result, operation, rest)


def times_of(computations: Mapping[str, list[Instruction]]) -> tuple[Counter[str], dict[str, str]]:
    """Runs of each computation per step, and what overlaps it:
    'async-start', 'SparseCore', 'AsyncCollective' (a fusion), or ''.
    """
    times: Counter[str] = Counter({ENTRY: 1})
    hidden: dict[str, str] = defaultdict(str)
    callers: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for name, instructions in computations.items():
        for one in instructions:
            for called, turns in calls_of(one, computations):
                callers[called].append((name, turns))
                if one.operation in _ASYNC:
                    hidden[called] = 'SparseCore' if 'thread="sparsecore"' in one.rest else 'async-start'
                elif (
                    one.operation == 'fusion'
                    and _SCATTER not in called
                    and any('AsyncCollective' in i.rest or i.operation in KINDS for i in computations.get(called, ()))
                ):
                    hidden[called] = 'AsyncCollective'

    def count(name: str) -> int:
        if name not in times:
            times[name] = sum(count(caller) * turns for caller, turns in callers[name])
        return times[name]

    for name in computations:
        count(name)
    return times, hidden


def calls_of(one: Instruction, computations: Mapping[str, list[Instruction]]) -> Iterator[tuple[str, int]]:
    """The computations that an instruction runs, and how often. Branches count as if all ran; reducers do not count."""
    if one.operation == 'while':
        body, condition = re.search(r'body=%?([\w.\-]+)', one.rest), re.search(r'condition=%?([\w.\-]+)', one.rest)
        if body is not None:
            yield body[1], _turns(one, computations.get(condition[1], []) if condition else [], computations)
        return
    by_name = '|to_apply' if one.operation in ('call', 'call-start') else ''
    pattern = r'(?:calls|branch_computations|called_computations|true_computation|false_computation'
    for called in re.finditer(pattern + by_name + r')=\{?([^}\s,]+(?:, %[\w.\-]+)*)', one.rest):
        for name in re.findall(r'%?([\w.\-]+)', called[1]):
            yield name, 1


def _turns(loop: Instruction, condition: list[Instruction], computations: Mapping[str, list[Instruction]]) -> int:
    """Iterations of a loop, as XLA writes them; else from the start of the counter to the constant of the condition."""
    if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.rest):
        return int(known[1])
    constants = [int(i.rest.split(')')[0]) for i in condition if _is_constant(i)]
    return constants[0] - _start(loop, condition, computations) if len(constants) == 1 else 1


def _start(loop: Instruction, condition: list[Instruction], computations: Mapping[str, list[Instruction]]) -> int:
    """The first value of a loop's counter: XLA may run iterations before the loop."""
    counters = [re.search(r'index=(\d+)', i.rest) for i in condition if i.operation == 'get-tuple-element']
    here = next((body for body in computations.values() if loop in body), [])
    named = {one.name: one for one in here}
    one = named.get(loop.operands[0]) if loop.operands else None
    if len(counters) != 1 or counters[0] is None or one is None or one.operation != 'tuple':
        return 0
    one = named.get(one.operands[int(counters[0][1])])
    while one is not None and one.operation == 'copy':
        one = named.get(one.operands[0])
    return int(one.rest.split(')')[0]) if one is not None and _is_constant(one) else 0


def _is_constant(one: Instruction) -> bool:
    return one.operation == 'constant' and one.result.startswith('s32[]')


def _groups(rest: str, mesh: Mapping[str, int]) -> list[list[int]] | tuple[str, ...]:
    """The groups of devices, or the axes, which newer versions of XLA write."""
    if named := re.search(r'replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}', rest):
        axes, own = tuple(re.findall(r"'(\w+)'", named[2])), re.findall(r"'(\w+)'=(\d+)", named[1])
        if set(axes) <= mesh.keys():
            return axes
        # Without an axis of ours: XLA made a mesh of its own, such as mesh['axis_0'=8], over the same devices.
        ids = np.arange(math.prod(int(size) for _, size in own)).reshape([int(size) for _, size in own])
        inside = [number for number, (axis, _) in enumerate(own) if axis in axes]
        ids = np.moveaxis(ids, inside, range(-len(inside), 0))
        return ids.reshape(-1, math.prod(ids.shape[ids.ndim - len(inside) :])).tolist()
    if iota := re.search(r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', rest):
        shape, of, turned = ([int(n) for n in part.split(',')] if part else None for part in iota.groups())
        ids = np.arange(math.prod(of or ())).reshape(of or ())
        return np.transpose(ids, turned).reshape(shape or ()).tolist()
    if written := re.search(r'(?:replica_groups|source_target_pairs)=\{(\{[\d,{} ]*\})\}', rest):
        return [[int(n) for n in group.split(',') if n.strip()] for group in re.findall(r'\{([\d, ]*)\}', written[1])]
    return [list(range(math.prod(mesh.values())))]  # replica_groups={}: all


def _along(axes: tuple[str, ...], mesh: Mapping[str, int]) -> tuple[int, ...]:
    """The devices of the first group along axes, in the order of the mesh."""
    numbers = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values()))
    return tuple(numbers[tuple(slice(None) if axis in axes else 0 for axis in mesh)].ravel().tolist())


def _axes(groups: list[list[int]] | tuple[str, ...], mesh: Mapping[str, int]) -> tuple[str, ...]:
    if isinstance(groups, tuple):
        return tuple(axis for axis in mesh if axis in groups and mesh[axis] > 1)
    if any(device >= math.prod(mesh.values()) for group in groups for device in group):
        return tuple(mesh)  # the mesh is not known
    places = [np.array(np.unravel_index(group, tuple(mesh.values()))) for group in groups if len(group) > 1]
    return tuple(axis for number, axis in enumerate(mesh) if any(np.ptp(place[number]) > 0 for place in places))


def bytes_of(result: str, operation: str) -> float:
    """Bytes of a result. For a pair of operands and results, the bytes of the results."""
    sizes = [
        (int(bits) / 8 if bits else 1) * math.prod(int(n) for n in dims.split(',') if n)
        for bits, dims in re.findall(r'\b[a-z]+(\d*)\w*\[([\d,]*)\]', re.sub(r'/\*.*?\*/', '', result))
    ]
    if operation in ('collective-permute-start', 'send'):
        return max(sizes)
    if operation in ('all-gather-start', 'all-to-all-start', 'reduce-scatter-start') or (
        operation == 'all-reduce-start' and result.startswith('((')  # with its operands in newer versions of XLA
    ):
        return sum(sizes[len(sizes) // 2 :])
    return sum(sizes)
