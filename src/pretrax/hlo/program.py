"""A compiled program as XLA optimized it: its operations with scope, phase, source line, work, traffic and runs per
step.

Reads `compiled.as_text()`, of programs for CPUs, GPUs and TPUs; needs no JAX. Syntax that it does not know is left out.
"""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping

from pretrax.hlo.parse import (
    ENTRY,
    Collective,
    Instruction,
    bytes_of,
    calls_of,
    computations_of,
    find_collectives,
    times_of,
)
from pretrax.hlo.scopes import Phase, places_of
from pretrax.hlo.work import CONTROL, FREE, flops_with_contents, inside, products_in, traffic_of

MESH = '// mesh '  # begins the first line of a saved program
_LIBRARIES = ('/site-packages/', '/shardlib/', '/model/matmul.py')  # their callers say more about an operation


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """A place in the source code. `caller` is the number of the frame that called it, 0 if there is none."""

    function: str
    file: str
    line: int
    caller: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Operation:
    """An instruction of the program and what is known about it."""

    name: str  # unique in the program; profilers report it
    operation: str  # XLA's name, such as 'fusion'
    result: str  # type as XLA writes it, with layout
    operands: tuple[str, ...]  # names
    computation: str  # the computation that contains it
    calls: tuple[str, ...]  # the computations that it runs: the contents of a fusion, the body of a loop
    scope: tuple[str, ...]  # named scopes from the outermost to the innermost, such as ('layer_0', 'attention')
    phase: Phase  # part of the step. Inputs are parameters and constants of the whole program.
    frame: int  # number of the innermost place in the source code, for `Program.stack`; 0 if unknown
    times: int  # runs per step
    flops: float  # FLOPs of products in one run, those in a fusion included
    read: float  # bytes that one run reads from memory; slices count only themselves
    written: float  # bytes that one run writes
    is_kernel: bool  # whether it takes time of the device and is not part of a fusion
    collective: Collective | None  # what it communicates
    detail: str  # operands and attributes as XLA writes them

    @property
    def bytes(self) -> float:
        """Bytes that one run reads and writes."""
        return self.read + self.written

    @property
    def size(self) -> float:
        """Bytes of the result."""
        return bytes_of(self.result, '')

    @property
    def shape(self) -> str:
        """The type of the result without layouts, such as 'bf16[8,128]'; of a tuple, '(bf16[8,128], f32[8])'."""
        return plain_type(self.result)


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program."""

    name: str  # name of the module
    # Operations by computation, in the order in which they run; the main one is `ENTRY`
    computations: Mapping[str, tuple[Operation, ...]]
    turns: Mapping[str, int]  # iterations of each loop, by the name of its body
    mesh: Mapping[str, int]  # size of each mesh axis
    frames: Mapping[int, Frame]  # places in the source code by number
    # Computations whose operations run by themselves: not the contents of fusions and of asynchronous operations, nor
    # reducers
    running: frozenset[str]

    @functools.cached_property
    def operations(self) -> dict[str, Operation]:
        """Operations by name. If two have the same name, the operation that runs by itself."""
        inside = {one.name: one for body in self.computations.values() for one in body}
        return inside | {one.name: one for name in self.running for one in self.computations[name]}

    def kernels(self) -> Iterator[Operation]:
        """Operations that take time of the device."""
        return (one for body in self.computations.values() for one in body if one.is_kernel)

    def contents(self, one: Operation) -> tuple[Operation, ...]:
        """The operations inside a fusion, a call or a loop."""
        return tuple(inner for name in one.calls for inner in self.computations.get(name, ()))

    def stack(self, one: Operation) -> list[Frame]:
        """The places in the source code that made an operation, innermost first."""
        found, number = [], one.frame
        while number in self.frames and len(found) < 100:
            found.append(self.frames[number])
            number = self.frames[number].caller
        return found

    def source(self, one: Operation) -> str:
        """The innermost place outside of the libraries, such as 'pretrax/model/mlp.py:23'; '' if unknown."""
        stack = self.stack(one)
        own = [frame for frame in stack if not any(part in frame.file for part in _LIBRARIES)]
        place = next((f'{frame.file}:{frame.line}' for frame in (*own, *stack)), '')
        return re.sub(r'^.*/(?:site-packages|src|lib/python[\d.]+)/', '', place)  # from its package on

    @property
    def flops(self) -> float:
        """FLOPs of the products of one step on one device."""
        return sum(one.flops * one.times for one in self.kernels())


def parse_program(text: str, mesh: Mapping[str, int] | None = None) -> Program:
    """Reads a program.

    Args:
        text: `compiled.as_text()`, or that of a saved program.
        mesh: {axis: size} in the order of the mesh; None: as the text says, otherwise one axis of all devices.
    """
    computations = computations_of(text)
    mesh = _mesh_of(text) if mesh is None else dict(mesh)
    times, _ = times_of(computations)
    communication = {one.name: one.collective for one in find_collectives(computations, mesh)}
    running = _running(computations)
    frames = frames_of(text)
    places, donors = places_of(computations)
    numbers = {
        one.name: _frame_number(one, inside(one, computations), frames)
        for body in computations.values()
        for one in body
    }
    parsed, turns = {}, {}
    for name, body in computations.items():
        types = {one.name: one.result for one in body}
        operations = []
        for one in body:
            if one.operation == 'while':
                turns.update(calls_of(one, computations))
            scope, phase = places[one.name]
            place = one.name
            while not numbers[place] and place in donors:
                place = donors[place]
            is_kernel = name in running and times[name] > 0 and one.operation not in FREE and bool(one.operation)
            inner = inside(one, computations)
            flops = flops_with_contents(one, types, inner)
            read, written = traffic_of(one, types, computations) if is_kernel else (0.0, 0.0)
            operations.append(
                Operation(
                    name=one.name,
                    operation=one.operation,
                    result=one.result,
                    operands=tuple(one.operands),
                    computation=name,
                    calls=tuple(called for called, _ in calls_of(one, computations)),
                    scope=scope,
                    phase=phase,
                    frame=numbers[place],
                    times=times[name],
                    flops=flops,
                    read=read,
                    written=written,
                    is_kernel=is_kernel,
                    collective=communication.get(one.name)
                    or next((communication[x.name] for x in inner if x.name in communication), None),
                    detail=one.rest,
                )
            )
        parsed[name] = tuple(operations)
    module = re.match(r'(?://.*\n)*HloModule ([^\s,]+)', text)
    return Program(module[1] if module else 'program', parsed, turns, mesh, frames, frozenset(running))


def plain_type(written: str) -> str:
    """A type without layouts, such as 'bf16[8,128]'."""
    return re.sub(r'\{[^{}]*\}|/\*.*?\*/', '', written)


def _mesh_of(text: str) -> dict[str, int]:
    first = re.match(rf'{MESH}(.*)', text)
    written = re.search(r'replica_groups=mesh\[([^\]]*)\]', text)
    found = first or written
    if found is not None and (axes := re.findall(r"'?(\w+)'?=(\d+)", found[1])):
        return {axis: int(size) for axis, size in axes}
    several = re.search(r'num_partitions=(\d+)', text) or re.search(r'replica_count=(\d+)', text)
    return {'devices': int(several[1]) if several else 1}


def _running(computations: Mapping[str, list[Instruction]]) -> set[str]:
    """Computations whose instructions run by themselves."""
    found: set[str] = set()
    waiting = [ENTRY] if ENTRY in computations else []
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        found.add(name)
        for one in computations[name]:
            if one.operation in CONTROL:
                waiting += [called for called, _ in calls_of(one, computations) if called in computations]
    return found


def frames_of(text: str) -> dict[int, Frame]:
    """The places in the source code, from the tables at the head of the program."""

    def section(name: str) -> dict[int, str]:
        head = text.partition(f'\n{name}\n')[2].partition('\n\n')[0]
        return {int(n): rest for n, _, rest in (line.partition(' ') for line in head.splitlines()) if n.isdigit()}

    def numbers(line: str) -> dict[str, int]:
        return {key: int(n) for key, n in re.findall(r'(\w+)=(\d+)', line)}

    files = {n: name.strip('"') for n, name in section('FileNames').items()}
    functions = {n: name.strip('"') for n, name in section('FunctionNames').items()}
    places = {n: numbers(line) for n, line in section('FileLocations').items()}
    found = {}
    for n, line in section('StackFrames').items():
        of_frame = numbers(line)
        place = places.get(of_frame.get('file_location_id', 0), {})
        function = functions.get(place.get('function_name_id', 0), '')
        file = files.get(place.get('file_name_id', 0), '')
        found[n] = Frame(function, file, place.get('line', 0), of_frame.get('parent_frame_id', 1) - 1)
    return found


def _frame_number(one: Instruction, inner: list[Instruction], frames: dict[int, Frame]) -> int:
    """The frame of a product inside, otherwise its own, otherwise the first inside."""
    for candidate in (*products_in(inner), one, *inner):
        if found := re.search(r'stack_frame_id=(\d+)', candidate.rest):
            return int(found[1])
        if found := re.search(r'source_file="([^"]*)" source_line=(\d+)', candidate.rest):  # older versions of XLA
            place = Frame('', found[1], int(found[2]))
            number = next((n for n, frame in frames.items() if frame == place), len(frames) + 1)
            frames[number] = place
            return number
    return 0
