"""The report of `pretrax compile`: whether the step fits, what needs the memory,
what is communicated, what to change.
"""

from collections.abc import Iterator

from pretrax.amounts import size
from pretrax.cost.memory import temporaries_of
from pretrax.hlo.costs import costs, total
from pretrax.hlo.parse import collectives, summarize
from pretrax.hlo.schedule import Schedule
from pretrax.plan.step import PlannedStep, bytes_held, schedule_of
from pretrax.run.out_of_memory import memory_changes, named_bytes
from pretrax.run.setup import Run, memory_of_run


def report(planned: PlannedStep) -> list[str]:
    """The lines of the report."""
    run, text = planned.run, '' if planned.compiled is None else planned.compiled.as_text()
    where = (
        str(planned.topology)
        if planned.topology
        else f'{run.mesh.size} x {run.mesh.devices.flat[0].device_kind} in this machine'
    )
    return [
        f'compiled for {where} in {planned.seconds[1]:.1f} s, after {planned.seconds[0]:.1f} s of tracing',
        '',
        *_compiler_options(run),
        *_verdict(planned),
        *_memory(planned),
        '',
        *_work(planned),
        *_phases(planned, text),
        *(['', *_communication(planned, text)] if text else []),
        *([] if planned.fits else ['', *_what_to_change(planned.run)]),
    ]


def _compiler_options(run: Run) -> Iterator[str]:
    """What was set, with reasons; nothing on a CPU."""
    if text := str(run.compiler_options):
        yield f'compiler options: {text}'
        yield from run.compiler_options.lines()
        yield ''


def _verdict(planned: PlannedStep) -> list[str]:
    needed = f'{size(planned.needed)} per device'
    if planned.limit is None:
        return [f'memory: {needed}; the memory of this device is unknown']
    if planned.fits:
        return [f'FITS: {needed} of {size(planned.limit)} ({planned.needed / planned.limit:.0%})']
    return [f'DOES NOT FIT: {needed} needed, {size(planned.limit)} available']


def _memory(planned: PlannedStep) -> Iterator[str]:
    """Memory per device by class. The state is exact; temporaries are the compiler's total."""
    weights, optimizer = bytes_held(planned.run.like.weights), bytes_held(planned.run.like.optimizer)
    rows = [('weights, f32', weights), ('optimizer', optimizer)]
    if planned.compiled is None:
        rows.append(('temporaries, total', planned.needed - bytes_held(planned.run.like)))
    else:
        arguments, temporaries = (
            planned.compiled.memory_analysis().argument_size_in_bytes,
            temporaries_of(planned.compiled),
        )
        rows.append(('batch and counters', max(0, arguments - weights - optimizer)))
        rows.append(('temporaries, total', temporaries))
        rows.append(('program and results', planned.needed - arguments - temporaries))
    yield from (f'    {name:<44}{size(n):>10}' for name, n in rows)
    yield '  parts of the temporaries, at most'
    saved = planned.run.recipe.model.plan.saved
    parts = [('gradients, f32', weights)]
    if (expected := memory_of_run(planned.run)) is not None and expected.head:
        parts.append(('logits and their input', expected.head))
    for name, (n, one) in named_bytes(planned.run).items():
        becomes = 'XLA decides' if saved is None else saved.get(name, 'recompute')
        again = becomes == 'recompute'
        parts.append((f'{name} ({becomes}{", one at a time" * again})', one if again else n))
    yield from (f'    {name:<44}{size(n):>10}' for name, n in sorted(parts, key=lambda part: -part[1]))


def _work(planned: PlannedStep) -> Iterator[str]:
    run = planned.run
    tokens = run.size.tokens
    if run.flops is not None:
        each = run.flops.causal * tokens / run.mesh.size
        yield (
            f'work: {each / 1e12:,.3g} TFLOP per step and device (of the model, causal attention, without '
            'recomputation)'
        )
        device = planned.topology.device if planned.topology else None
        if device is not None:
            seconds = each / device.peak('bf16')
            yield (
                f'    at the peak of {device.name}, {device.bf16 / 1e12:,.4g} TFLOP/s: {seconds:.3g} s per step or '
                f'{tokens / seconds:,.0f} tokens/s (MFU 100%)'
            )


def _phases(planned: PlannedStep, text: str) -> Iterator[str]:
    """Work and traffic of the kernels by phase. Only for GPUs: programs for TPUs describe products in another form."""
    if not text or planned.topology is None or planned.topology.device.name.startswith('TPU'):
        return
    found = costs(text, planned.topology.device)
    yield ''
    yield f'kernels by phase, per device and step{"":<7}{"kernels":>8}{"TFLOP":>9}{"bytes":>10}{"ms, best":>10}'
    for one in (*found, total(found)):
        yield (
            f'    {one.phase:<40}{one.kernels:>8}{one.flops / 1e12:>9.3g}'
            f'{size(one.bytes):>10}{one.seconds * 1e3:>10.3g}'
        )


def _communication(planned: PlannedStep, text: str) -> Iterator[str]:
    """The collectives; with the time of each on hardware that is not in this machine."""
    mesh = planned.run.mesh
    if (schedule := schedule_of(planned)) is not None:
        yield from _schedule(schedule)
        return
    rows = summarize(collectives(text, dict(mesh.shape)))
    if not rows:
        yield 'communication: none'
        return
    yield f'communication, per device and step{"":<10}{"times":>8}{"bytes":>10}  overlapped'
    for kind, axes, times, n, behind in rows:
        yield f'    {kind + " over " + " ".join(axes):<40}{times:>8}{size(n):>10}{behind:>9}'


def _schedule(schedule: Schedule) -> Iterator[str]:
    if not schedule.transfers:
        yield 'communication: none'
        return
    head = 'communication, per device and step'
    yield f'{head:<66}{"times":>6}{"bytes":>10}{"sent":>10}{"ms":>9}{"exposed":>9}{"behind work":>13}'
    for row in schedule.rows():
        name = f'{row.kind} over {" ".join(row.axes)}: {row.form}'
        share = row.behind / row.bytes if row.bytes else 0.0
        yield (
            f'    {name:<62}{row.times:>6}{size(row.size):>10}{size(row.bytes):>10}{row.seconds * 1e3:>9.3g}'
            f'{row.exposed * 1e3:>9.3g}{share:>13.0%}'
        )
    yield (
        f'    exposed {schedule.exposed * 1e3:.3g} ms of {schedule.seconds * 1e3:.3g} ms of communication; '
        f"the step's compute is {schedule.compute * 1e3:.3g} ms at best"
    )


def _what_to_change(run: Run) -> Iterator[str]:
    """Changes that save memory, the largest saving first, each with the saving that the memory formula predicts."""
    now = memory_of_run(run)
    if now is None:
        return
    yield f'to change (now {size(now.total)} by the formula of docs/scaling.md):'
    for one in memory_changes(run):
        yield f'    {one.change:<28}{one.effect:<48}saves {size(one.saved)} per device'
