"""What takes most time of a traced step, and what to try: at most five lines, the most expensive first."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from pretrax.tables import read_table
from pretrax.view.trace.device_time import COMMUNICATION, COMPUTATION
from pretrax.view.trace.steps import TracedSteps

_MOST, _NAMED = 5, 3  # lines, and scopes that a line names
_WORTH = 0.05  # share of the step below which nothing is said

_ADVICE: dict[str, dict[str, str]] = read_table(Path(__file__).with_suffix('.yaml'))
_AXES, _PHASES = _ADVICE['axes'], _ADVICE['phases']


def advice(steps: TracedSteps) -> list[str]:
    """Lines for the terminal, the most expensive first."""
    whole = steps.seconds
    phases = [(seconds, f'{phase}: {_PHASES[phase]}') for phase, seconds in steps.phases().items() if phase in _PHASES]
    found = [*_communication(steps), *phases, *_computation(steps)]
    found = sorted((one for one in found if one[0] >= _WORTH * whole), reverse=True)
    return [f'{seconds / whole:.0%}  {line}' for seconds, line in found[:_MOST]]


def _communication(steps: TracedSteps) -> Iterator[tuple[float, str]]:
    exposed: dict[str, float] = defaultdict(float)
    for row in steps.operations:
        if row.rank == COMMUNICATION:
            known = steps.program.operations.get(row.name) if steps.program else None
            axes = known.collective.axes if known is not None and known.collective is not None else ()
            exposed[' '.join(axes)] += row.seconds
    if steps.limits.name == 'cpu' and sum(exposed.values()) > 0:
        advised = 'simulated devices wait here for the cores that they share: fewer devices are faster'
        yield sum(exposed.values()), f'communication between devices: {advised}'
        return
    for axes, seconds in exposed.items():
        over = f'exposed communication over {axes}' if axes else 'exposed communication'
        advised = _AXES.get(axes, 'fewer mesh axes, or a mesh whose inner axes stay inside one node or slice')
        yield seconds, f'{over}: {advised}'


def _computation(steps: TracedSteps) -> Iterator[tuple[float, str]]:
    """Scopes with computation that is far from its limit, or limited by the bandwidth of the memory, by what to try."""
    limits = steps.limits
    narrow = '' if limits.compute in ('bf16', 'fp16') else ', precision.compute=bf16'
    larger = f'larger products (batch.micro, batch.tokens), sizes that are multiples of 128{narrow}'
    fewer = f'fewer bytes: a fused kernel, or model.loss_chunks for the loss{narrow}'
    longer = 'small or strided operations: larger micro-batches (batch.micro)'
    found: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for row in steps.rows('scope'):
        if row.rank != COMPUTATION or row.phase in _PHASES:
            continue
        work = (row.flops or 0.0) / limits.peak if limits.peak else 0.0
        traffic = (row.bytes or 0.0) / limits.bandwidth if limits.bandwidth else 0.0
        if row.best is None:
            found[fewer].append((row.seconds, f'{row.name} ({row.phase})'))
        elif row.roofline is None:
            continue  # faster than the limits that are known
        elif work >= traffic and row.roofline < 0.5:
            found[larger].append((row.seconds, f'{row.name} ({row.phase}, {row.roofline:.0%} of the peak FLOP/s)'))
        elif traffic > work:
            part = f'{row.roofline:.0%} of the bandwidth'
            tried = fewer if row.roofline >= 0.5 else longer
            found[tried].append((row.seconds, f'{row.name} ({row.phase}, {part})'))
    for tried, scopes in found.items():
        names = [name for _, name in scopes[:_NAMED]] + ['...'] * (len(scopes) > _NAMED)
        yield sum(seconds for seconds, _ in scopes), f'{", ".join(names)}: {tried}'
