"""Lower bounds for the time of each phase of a compiled step, computed from its program only. Nothing is run.

Each instruction that XLA runs as a kernel has FLOPs, if it is a product or fused attention, and bytes that it reads
from and writes to the device's memory. It takes at least as long as the slower of the two. Its phase follows from the
functions in which it was traced: XLA keeps the call stack of every operation, and operations of the backward pass have
that of the forward pass. A program does not show what overlaps, what a cache serves, or how far a kernel is from its
limit.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from pretrax.cost.devices import Device, Reach
from pretrax.hlo.parse import KINDS, Instruction, computations_of, times_of
from pretrax.hlo.program import frames_of
from pretrax.hlo.work import FREE, bodies, flops_with_contents, in_main_memory, inside, traffic_of
from pretrax.tables import read_table

# The phase of each function
PHASES, OF_LIBRARIES = (
    {function: phase for phase, functions in rows.items() for function in functions.split()}
    for rows in read_table(Path(__file__).with_suffix('.yaml')).values()
)
# What a compiled program is assumed to reach. The plan has constants of each chip, which were fitted to whole steps.
ASSUMED = {'cuda': Reach(0.79, 0.52, 0.9), 'tpu': Reach(0.92, 0.45, 0.9)}


@dataclasses.dataclass
class Cost:
    """Cost of a phase per step and device. `kernels`: number of kernels that run."""

    phase: str
    kernels: int = 0
    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0  # sum over the kernels of the slower of work and traffic


def costs(text: str, device: Device) -> list[Cost]:
    """Costs of the phases of an optimized program, most expensive first. Communication has no phase: see `schedule.py`.

    Args:
        text: `compiled.as_text()`.
        device: the device that it was compiled for. The share of its peak and bandwidth that is usually reached counts
            (`ASSUMED`).
    """
    assert device.bandwidth is not None
    computations = computations_of(text)
    times, _ = times_of(computations)
    fused = {name for body in computations.values() for one in body for name in bodies(one)}
    phases = _phases_of_frames(text)
    speed = Speed(device, computations)
    found: dict[str, Cost] = {}
    for name, body in computations.items():
        if name in fused or not times[name]:
            continue
        for one in body:
            if one.operation in FREE or re.sub('-(start|done)$', '', one.operation) in KINDS:
                continue
            flops, moved, seconds = speed.cost(one, name)
            phase = _phase(one, inside(one, computations), phases)
            cost = found.setdefault(phase, Cost(phase))
            cost.kernels += times[name]
            cost.flops += times[name] * flops
            cost.bytes += times[name] * moved
            cost.seconds += times[name] * seconds
    return sorted(found.values(), key=lambda cost: -cost.seconds)


class Speed:
    """How long the operations of a program take at least on a device.

    The share of the device's peak and bandwidth that is usually reached counts (`ASSUMED`). On TPUs, arrays in
    the on-chip memory cost no traffic, and copies between the memories run at the same time as the work.
    """

    def __init__(self, device: Device, computations: Mapping[str, list[Instruction]]) -> None:
        assert device.bandwidth is not None
        self.computations, self.device = computations, device
        self.is_tpu = device.name.startswith('TPU')
        self.reach = ASSUMED['tpu' if self.is_tpu else 'cuda']
        self.bandwidth = device.bandwidth * self.reach.memory
        self.types = {name: {one.name: one.result for one in body} for name, body in computations.items()}
        self.stored = in_main_memory(computations) if self.is_tpu else computations
        self.stored_by_name = {name: {one.name: one for one in body} for name, body in self.stored.items()}
        self.stored_types = {name: {one.name: one.result for one in body} for name, body in self.stored.items()}

    def cost(self, one: Instruction, computation: str) -> tuple[float, float, float]:
        """FLOPs, bytes of traffic, and seconds of one run of an instruction."""
        if one.operation in FREE or (self.is_tpu and one.operation.endswith(('-start', '-done', '-update'))):
            return 0.0, 0.0, 0.0
        types = self.types[computation]
        flops = flops_with_contents(one, types, inside(one, self.computations))
        stored = self.stored_by_name[computation][one.name]
        moved = sum(traffic_of(stored, self.stored_types[computation], self.stored))
        share = self.reach.attention if 'fmha' in one.rest or 'splash_mha' in one.name else self.reach.products
        read = ' '.join(types.get(name, '') for name in one.operands) if one.operation == 'custom-call' else ''
        peak = self.device.peak('nvfp4' if 'f4e' in read else 'fp8' if 'f8e' in read else 'bf16')
        return flops, moved, max(flops / (peak * share), moved / self.bandwidth)

    def seconds(self, one: Instruction, computation: str) -> float:
        """Seconds of one run of an instruction."""
        return self.cost(one, computation)[2]


def total(found: Sequence[Cost]) -> Cost:
    """The sum of all phases."""
    kernels, flops = sum(one.kernels for one in found), sum(one.flops for one in found)
    return Cost('total', kernels, flops, sum(one.bytes for one in found), sum(one.seconds for one in found))


def _phase(one: Instruction, inner: list[Instruction], phases: Mapping[int, str]) -> str:
    """Phase by the call stack of a product inside, else by its own call stack, else the most frequent phase inside."""
    products = [x for x in inner if x.operation in ('dot', 'custom-call')]
    for candidate in (*products, one):
        if here := _frame(candidate, phases):
            return here
    votes: dict[str, int] = defaultdict(int)
    for x in inner:
        if phase := _frame(x, phases):
            votes[phase] += 1
    return max(votes, key=lambda phase: votes[phase]) if votes else 'other'


def _frame(one: Instruction, phases: Mapping[int, str]) -> str | None:
    found = re.search(r'stack_frame_id=(\d+)', one.rest)
    return phases.get(int(found[1])) if found else None


def _phases_of_frames(text: str) -> dict[int, str]:
    """The phase of every call stack."""
    known, found = OF_LIBRARIES | PHASES, dict[int, str]()
    for number, frame in frames_of(text).items():  # a frame follows its caller
        own = next((known[part] for part in frame.function.split('.') if part in known), None)
        if phase := own or found.get(frame.caller):
            found[number] = phase
    return found
