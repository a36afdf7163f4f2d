"""`pretrax compile` in words: does it fit, what takes the memory, what travels, and what to change."""

import math
from collections.abc import Iterator

import jax

from ..model.axes import ROWS, along
from ..scale.hlo import collectives, summed
from ..scale.memory import Memory, size
from ..train.setup import memory_with
from .activations import named_bytes
from .step import Ahead, memory_of, temporaries_of


def report(ahead: Ahead) -> list[str]:
    """The lines of the report."""
    run = ahead.run
    where = str(ahead.topology) if ahead.topology else f'{run.mesh.size} x {run.mesh.devices.flat[0].device_kind}, here'
    return [
        f'compiled for {where} in {ahead.seconds[1]:.1f} s, after {ahead.seconds[0]:.1f} s of tracing',
        '',
        *_verdict(ahead),
        *_memory(ahead),
        '',
        *_work(ahead),
        *(['', *_communication(ahead)] if ahead.compiled is not None else []),
        *([] if ahead.fits else ['', *_what_to_change(ahead)]),
    ]


def _verdict(ahead: Ahead) -> list[str]:
    takes = f'{size(ahead.needed)} a device'
    if ahead.limit is None:
        return [f'memory: {takes}; how much there is, is not known']
    if ahead.fits:
        return [f'FITS: {takes} of {size(ahead.limit)} ({ahead.needed / ahead.limit:.0%})']
    return [f'DOES NOT FIT: {takes} are needed, and there are {size(ahead.limit)}']


def _memory(ahead: Ahead) -> Iterator[str]:
    """By class, of one device: what the state is made of is exact, temporaries are the compiler's sum."""
    weights, optimizer = _state_bytes(ahead)
    rows = [('weights, f32', weights), ('optimizer', optimizer)]
    if ahead.compiled is not None:
        stats = ahead.compiled.memory_analysis()
        rows.append(('batch and counters', max(0, stats.argument_size_in_bytes - weights - optimizer)))
        rows.append(('temporaries, in all', temporaries_of(ahead.compiled)))
        rest = memory_of(ahead.compiled) - sum(n for _, n in rows)
        rows.append(('program and results', rest))
    yield from (f'    {name:<36}{size(n):>10}' for name, n in rows)
    yield '  in the temporaries, at most'
    yield f'    {"gradients, f32":<36}{size(weights):>10}'
    saved = getattr(ahead.run.recipe.model, 'saved', None)
    for name, n in named_bytes(ahead.run).items():
        becomes = 'as XLA decides' if saved is None else saved.get(name, 'recompute')
        yield f'    {name + " (" + becomes + ")":<36}{size(n):>10}'
    for one in ahead.largest[:5]:
        yield f'  large: {size(one.bytes)} {one.shape} {one.operation[-60:]}'


def _state_bytes(ahead: Ahead) -> tuple[int, int]:
    """Of the weights and of the optimizer's state, on one device."""

    def held(tree) -> int:
        return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(tree))

    return held(ahead.run.like.weights), held(ahead.run.like.optimizer)


def _work(ahead: Ahead) -> Iterator[str]:
    run = ahead.run
    tokens = run.config.batch.tokens
    if run.flops is not None:
        each = run.flops.causal * tokens / run.mesh.size
        yield f"work: {each / 1e12:,.3g} TFLOP a step and device (the model's, attention causal; recomputation comes on top)"
        device = ahead.topology.device if ahead.topology else None
        if device is not None:
            seconds = each / device.peak('bf16')
            yield f'    at the peak of {device.name}, {device.bf16 / 1e12:,.4g} TFLOP/s, {seconds:.3g} s a step or {tokens / seconds:,.0f} tokens/s: the bound that MFU 1 would be'


def _communication(ahead: Ahead) -> Iterator[str]:
    mesh = dict(ahead.run.mesh.shape)
    assert ahead.compiled is not None
    rows = summed(collectives(ahead.compiled.as_text(), mesh))
    if not rows:
        yield 'communication: none'
        return
    yield f'communication, of one device in a step{"":<6}{"times":>8}{"bytes":>10}  behind other work'
    for kind, axes, times, n, behind in rows:
        yield f'    {kind + " over " + " ".join(axes):<40}{times:>8}{size(n):>10}{behind:>9}'


def _what_to_change(ahead: Ahead) -> Iterator[str]:
    """The next knobs, each with what the memory formula says that it would save."""
    run = ahead.run
    now = memory_with(run)
    if now is None:
        return
    yield f'to change (now {size(now.total)} by the formula of docs/scaling.md):'
    for change, what, then in _choices(ahead):
        yield f'    {change:<28}{what:<44}saves {size(max(0, now.total - then.total))} a device'


def _choices(ahead: Ahead) -> Iterator[tuple[str, str, Memory]]:
    run = ahead.run
    sizes = dict(run.mesh.shape)
    micro = run.rows // run.recipe.accumulation // along(ROWS, sizes)

    def having(**changes):
        found = memory_with(run, **changes)
        assert found is not None
        return found

    if getattr(run.recipe.model, 'saved', None) != {}:
        yield 'model.save=none', 'the backward pass computes each layer again', having(recompute=True)
    if micro > 1:
        less = max(n for n in range(1, micro) if micro % n == 0)
        yield (
            f'batch.micro={less}',
            f'sequences a pass, not {micro}; more passes',
            having(accumulation=run.rows // along(ROWS, sizes) // less),
        )
    if sizes['r'] > 1:
        yield (
            f'mesh.r=1 mesh.d={sizes["d"] * sizes["r"]}',
            'weights are shared out further',
            having(mesh=sizes | {'r': 1, 'd': sizes['d'] * sizes['r']}),
        )
    if sizes['d'] % 2 == 0:
        yield (
            f'mesh.d={sizes["d"] // 2} mesh.t={sizes["t"] * 2}',
            'layers are shared out as well',
            having(mesh=sizes | {'d': sizes['d'] // 2, 't': sizes['t'] * 2}),
        )
    yield 'optimizer.name=lion', 'one moment, not two', having(moments=1.0)
