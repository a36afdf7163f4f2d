"""What the communication of a compiled step costs: how much of it other work hides, and how much the step waits for it.

Reads an optimized, scheduled program, in which the order of the instructions is the order in which they run. A
collective begins at its start and must be complete at its end. Work between the two hides it: each operation takes the
slower of its FLOPs and its traffic at the usual share of the peaks (`costs.py`), and collectives that use the same
links share the time, the one that ends first before the others. What is not transferred at its end is exposed: the step
waits. Synchronous collectives are exposed whole. Latency, and memory bandwidth that a collective takes from the work,
are left out.
"""

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from pretrax.cost.links import Network, rings_of, wire_bytes
from pretrax.cost.topology import Topology
from pretrax.hlo.all_reduces import stands_for
from pretrax.hlo.costs import Speed
from pretrax.hlo.parse import KINDS, Found, Instruction, calls_of, computations_of, find_collectives, times_of
from pretrax.hlo.work import CONTROL, bodies, inside


@dataclasses.dataclass(frozen=True)
class Transfer:
    """A collective of a step."""

    name: str  # name of its instruction
    kind: str  # one of `hlo.KINDS`
    axes: tuple[str, ...]  # mesh axes that its groups span
    form: str  # see `hlo.Found`
    # Of an all-reduce: 'scatter' if each device uses only a slice of the sum, 'gather' if each contributes only a
    # slice, otherwise ''
    stands_for: str
    times: int  # runs per step
    size: float  # bytes of the whole array (`hlo.Collective.bytes`)
    bytes: float  # that a device sends in one run
    seconds: float  # seconds of one run, at the bandwidth of its links
    exposed: float  # seconds of one run in which the step waits


@dataclasses.dataclass(frozen=True)
class Row:
    """Transfers of one kind, axes and form, per device and step. `behind`: bytes that were sent behind other work."""

    kind: str
    axes: tuple[str, ...]
    form: str
    times: int
    size: float
    bytes: float
    seconds: float
    exposed: float
    behind: float


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The communication of a step on one device. `compute`: seconds of its other operations, at best."""

    transfers: tuple[Transfer, ...]
    compute: float

    @property
    def seconds(self) -> float:
        """Seconds of communication."""
        return sum(one.times * one.seconds for one in self.transfers)

    @property
    def exposed(self) -> float:
        """Seconds in which the step waits for communication."""
        return sum(one.times * one.exposed for one in self.transfers)

    def rows(self) -> list[Row]:
        """Sums by kind, axes and form, the longest exposed first."""
        groups: dict[tuple[str, tuple[str, ...], str], list[Transfer]] = defaultdict(list)
        for one in self.transfers:
            form = one.form + (f', stands for a {one.stands_for}' if one.stands_for else '')
            groups[one.kind, one.axes, form].append(one)
        rows = [
            Row(
                *key,
                times=sum(one.times for one in group),
                size=sum(one.times * one.size for one in group),
                bytes=sum(one.times * one.bytes for one in group),
                seconds=sum(one.times * one.seconds for one in group),
                exposed=sum(one.times * one.exposed for one in group),
                behind=sum(one.times * one.bytes * (1 - one.exposed / one.seconds) for one in group if one.seconds),
            )
            for key, group in groups.items()
        ]
        return sorted(rows, key=lambda row: (-row.exposed, -row.seconds))

    def over(self, axis: str) -> Row:
        """The sum of all transfers over axes that include one."""
        rows = [row for row in self.rows() if axis in row.axes]
        names = ('times', 'size', 'bytes', 'seconds', 'exposed', 'behind')
        sums = {name: sum(getattr(row, name) for row in rows) for name in names}
        return Row('all', (axis,), 'all', **sums)


def read_schedule(
    text: str, mesh: Mapping[str, int], topology: Topology, places: Sequence[Sequence[int]] | None = None
) -> Schedule:
    """Reads the communication of a program.

    Args:
        text: `compiled.as_text()`, of a program for a TPU or an NVIDIA GPU.
        mesh: {axis: size} in the order of the mesh.
        topology: the hardware that it was compiled for.
        places: see `links.Network`.
    """
    return _Reader(text, mesh, topology, places).read()


@dataclasses.dataclass
class _Flight:
    """A collective under way."""

    name: str
    left: float  # seconds
    links: frozenset[str]
    end: float  # place of its end in the order of the computation


@dataclasses.dataclass
class _Event:
    """What happens at one instruction, in this order."""

    ends: str = ''
    work: float = 0.0
    inner: tuple[tuple[str, int], ...] = ()  # computations that run here, and how often
    begins: str = ''
    waits: str = ''  # begins and ends here


@dataclasses.dataclass
class _Span:
    """Seconds of a computation, and those in which it uses each link."""

    seconds: float
    busy: dict[str, float]


class _Reader:
    def __init__(
        self, text: str, mesh: Mapping[str, int], topology: Topology, places: Sequence[Sequence[int]] | None
    ) -> None:
        self.computations = computations_of(text)
        self.times, _ = times_of(self.computations)
        self.network = Network(topology, places)
        self.speed = Speed(topology.device, self.computations)
        self.found = {one.name: self._placed(one) for one in find_collectives(self.computations, mesh)}
        self.by_computation: dict[str, list[Found]] = defaultdict(list)
        for one in self.found.values():
            self.by_computation[one.computation].append(one)
        self.chains = {
            key: one.name for one in self.found.values() if one.form == 'in fusions' and (key := _chain(one.detail))
        }
        self.hosts = {_rendezvous(one.detail): one.name for one in self.found.values() if one.form == 'hosts'}
        self.costs = {one.name: self._cost(one) for one in self.found.values()}
        self.begun: dict[str, tuple[str, Instruction]] = {}  # where each collective begins: computation, instruction
        self.ended: dict[str, str] = {}  # the instruction with its result, if it is another one
        self.exposed: dict[str, float] = {}
        self.spans: dict[str, _Span] = {}
        self.compute = 0.0

    def _placed(self, one: Found) -> Found:
        """A transfer between slices with a device of each; what it does inside a slice is a collective of its own."""
        if one.form != 'hosts':
            return one
        group, collective = self.network.one_per_slice(), one.collective
        if collective.kind == 'all-gather':  # the program has the bytes of one part
            collective = dataclasses.replace(collective, bytes=collective.bytes * len(group))
        return dataclasses.replace(one, group=group, collective=collective)

    def _cost(self, one: Found) -> tuple[float, frozenset[str]]:
        return self.network.transfer(one.collective.kind, one.group, one.collective.bytes, rings_of(one.detail))

    def read(self) -> Schedule:
        self._span('ENTRY')
        transfers = []
        for one in self.found.values():
            seconds = self.costs[one.name][0]
            c = one.collective
            transfers.append(
                Transfer(
                    name=one.name,
                    kind=c.kind,
                    axes=c.axes,
                    form=one.form,
                    stands_for=self._stands_for(one),
                    times=c.times,
                    size=c.bytes,
                    bytes=wire_bytes(c.kind, c.bytes, len(one.group)),
                    seconds=seconds,
                    exposed=self.exposed.get(one.name, seconds),
                )
            )
        return Schedule(tuple(transfers), self.compute)

    def _span(self, name: str) -> _Span:
        """Runs through a computation."""
        if name in self.spans:
            return self.spans[name]
        events, carried = self._events(name)
        ends = {event.ends: place for place, event in enumerate(events) if event.ends}
        flights: dict[str, _Flight] = {}
        span = _Span(0.0, {})
        for _ in range(2 if carried else 1):  # the second time, what the iteration before has started is under way
            span = _Span(0.0, defaultdict(float))
            for flight in flights.values():
                flight.end -= len(events)
            for event in events:
                if event.ends in flights:
                    self._wait(flights.pop(event.ends), flights, span)
                _pass_time(event.work, {}, flights, span)
                for inner, turns in event.inner:
                    within = self._span(inner)
                    busy = {link: turns * seconds for link, seconds in within.busy.items()}
                    _pass_time(turns * within.seconds, busy, flights, span)
                    for link, seconds in busy.items():
                        span.busy[link] += seconds
                for begun in filter(None, (event.begins, event.waits)):
                    seconds, links = self.costs[begun]
                    for link in links:
                        span.busy[link] += seconds
                    end = ends.get(begun, len(events)) + (len(events) if begun in carried else 0)
                    flight = _Flight(begun, seconds, links, end)
                    if begun == event.waits:
                        self._wait(flight, flights, span)
                    else:
                        flights[begun] = flight
            for begun in [begun for begun in flights if begun not in carried]:
                self._wait(flights.pop(begun), flights, span)
        self.compute += self.times[name] * sum(event.work for event in events)
        self.spans[name] = span
        return span

    def _wait(self, flight: _Flight, others: Mapping[str, _Flight], span: _Span) -> None:
        self.exposed[flight.name] = flight.left
        seconds = flight.left
        flight.end = -math.inf
        _pass_time(seconds, {}, {flight.name: flight, **others}, span)

    def _events(self, name: str) -> tuple[list[_Event], set[str]]:
        """The events of a computation, and the collectives that end in the iteration of the loop after their start."""
        body = self.computations.get(name, [])
        here = {one.name: one for one in body}
        root = body[-1] if body else None
        updates = {
            one.operands[0]: one.name for one in body if one.operation.endswith('-update') and len(one.operands) > 1
        }
        starts: dict[str, str] = {}  # instruction -> collective
        carried: set[str] = set()
        events = []
        for one in body:
            event = _Event()
            events.append(event)
            collective = self._collective_of(one)
            if collective is not None:
                self.begun[collective.name] = name, one
                if collective.form == 'waits':
                    event.waits = collective.name
                elif one.name in updates:
                    starts[updates[one.name]] = collective.name
                else:
                    starts[one.name] = event.begins = collective.name
                continue
            if one.name in starts:  # the update that brings the operands
                event.begins = starts[one.name]
                continue
            if one.operation in CONTROL:
                event.inner = tuple(calls_of(one, self.computations))
                continue
            if end := self._end_of(one, here, root, starts):
                event.ends = end[0]
                self.ended[end[0]] = one.name
                carried |= {end[0]} if end[1] else set()
                continue
            event.work = self.speed.seconds(one, name)
        return events, carried

    def _collective_of(self, one: Instruction) -> Found | None:
        """The collective that an instruction starts or performs."""
        if one.name in self.found:
            return self.found[one.name]
        for called in _called(one, self.computations):
            for found in self.by_computation.get(called, ()):
                return found
        return None

    def _end_of(
        self, one: Instruction, here: Mapping[str, Instruction], root: Instruction | None, starts: Mapping[str, str]
    ) -> tuple[str, bool] | None:
        """The collective that an instruction completes, and whether an earlier iteration of the loop started it."""
        if one.operation == 'fusion':
            contents = inside(one, self.computations)
            if any('"AsyncCollectiveDone"' in x.rest for x in contents):
                key = next((_chain(x.rest) for x in contents if x.operation in KINDS), '')
                return (self.chains[key], False) if key in self.chains else None
            return None
        if one.operation == 'recv-done' and (received := here.get(one.operands[0])) is not None:
            sent = self.hosts.get(_rendezvous(received.rest))
            return (sent, False) if sent else None
        if not one.operation.endswith('-done') or not one.operands:
            return None
        name, is_carried = one.operands[0], False
        for _ in range(len(here)):
            if name in starts:
                return starts[name], is_carried
            step = here.get(name)
            if step is None or not step.operands:
                return None
            source = here.get(step.operands[0])
            if step.operation == 'get-tuple-element' and source is not None and source.operation == 'parameter':
                index = re.search(r'index=(\d+)', step.rest)
                if is_carried or root is None or root.operation != 'tuple' or index is None:
                    return None
                name, is_carried = root.operands[int(index[1])], True
                last = self._starts_at(here, name)
                if last is not None:
                    return last, True
            elif step.operation in ('get-tuple-element', 'bitcast', 'optimization-barrier') or step.operation.endswith(
                '-update'
            ):
                name = step.operands[0]
            else:
                return None
        return None

    def _starts_at(self, here: Mapping[str, Instruction], name: str) -> str | None:
        """The collective that an instruction further down starts."""
        one = here.get(name)
        if one is None:
            return None
        found = self._collective_of(one)
        return found.name if found is not None and found.form != 'waits' else None

    def _stands_for(self, one: Found) -> str:
        """What an all-reduce stands for."""
        if one.collective.kind != 'all-reduce' or one.form == 'hosts' or one.name not in self.begun:
            return ''
        computation, start = self.begun[one.name]
        return stands_for(
            start, self.ended.get(one.name, start.name), self.computations[computation], self.computations
        )


def _pass_time(seconds: float, busy: Mapping[str, float], flights: Mapping[str, _Flight], span: _Span) -> None:
    """Advances the collectives under way by some seconds. `busy`: seconds in which other collectives use each link."""
    span.seconds += seconds
    free: dict[str, float] = {}
    for flight in sorted(flights.values(), key=lambda flight: flight.end):
        room = min(free.setdefault(link, max(0.0, seconds - busy.get(link, 0.0))) for link in flight.links)
        used = min(flight.left, room)
        flight.left -= used
        for link in flight.links:
            free[link] -= used


def _called(one: Instruction, computations: Mapping[str, list[Instruction]]) -> Iterator[str]:
    """The computations inside an instruction that runs them as one: a fusion, or the start of an asynchronous one."""
    if one.operation in CONTROL:
        return
    for name in bodies(one):
        yield name
        for x in computations.get(name, ()):
            yield from _called(x, computations)


def _chain(detail: str) -> str:
    """What the steps of one collective in fusions have in common."""
    found = re.search(r'chain_id="(\d+)"', detail) or re.search(r'channel_id=(\d+)', detail)
    return found[0] if found else ''


def _rendezvous(detail: str) -> str:
    found = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', detail)
    return found[1] if found else ''
