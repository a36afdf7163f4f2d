"""What the memory of a step is for: its named activations, and changes of a configuration that save memory."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from pretrax.config.batch import sequences_per_device
from pretrax.cost.step_facts import StepFacts
from pretrax.model.axes import along
from pretrax.run.setup import Run, memory_of_run, step_facts
from pretrax.train.validation import make_evaluate

CHUNKS = 8  # proposed for the loss


class Change(NamedTuple):
    """A change that saves memory: key=value, what it does, and the bytes per device that it saves."""

    change: str
    effect: str
    saved: int


def memory_changes(run: Run) -> list[Change]:
    """Changes that save memory, the largest saving first; none for a model without an architecture."""
    now, found = memory_of_run(run), []
    if now is None:
        return []
    for change, effect, step in _candidates(run):
        then = memory_of_run(run, step)
        if then is not None and then.total < now.total:
            found.append(Change(change, effect, now.total - then.total))
    return sorted(found, key=lambda one: -one.saved)


def _candidates(run: Run) -> Iterator[tuple[str, str, StepFacts]]:
    """Changes of the configuration that may save memory: key=value, what it does, and the step that it makes."""
    batch, now = run.size, step_facts(run)
    mesh, sequences = dict(now.mesh), sequences_per_device(batch, now.mesh)
    micro = sequences // now.passes
    if now.saved != {}:
        yield 'model.save=none', 'the backward pass recomputes each layer', replace(now, saved={})
    if micro > 1:
        less = max(n for n in range(1, micro) if micro % n == 0)
        passes = sequences // less
        fewer = replace(now, passes=passes, tokens=batch.tokens // (passes * now.micro_batches))
        yield f'batch.micro={less}', f'sequences per pass, not {micro}; more passes', fewer
    if now.loss_chunks == 1 and (batch.sequence_length // along('c t', mesh)) % CHUNKS == 0:
        yield f'model.loss_chunks={CHUNKS}', 'logits of one part of each sequence', replace(now, loss_chunks=CHUNKS)
    if mesh['r'] > 1:
        wider = mesh | {'r': 1, 'd': mesh['d'] * mesh['r']}
        yield f'mesh.r=1 mesh.d={wider["d"]}', 'weights are sharded over more devices', replace(now, mesh=wider)
    if mesh['d'] % 2 == 0:
        split = mesh | {'d': mesh['d'] // 2, 't': mesh['t'] * 2}
        yield f'mesh.d={split["d"]} mesh.t={split["t"]}', 'layers are sharded as well', replace(now, mesh=split)
    average = run.recipe.ema_decay is not None
    if average:
        yield 'optimizer.ema_decay=null', 'no average of the weights', replace(now, moments=now.moments - 1)
    yield 'optimizer.name=lion', 'one moment, not two', replace(now, moments=1.0 + average)


def named_bytes(run: Run) -> dict[str, tuple[int, int]]:
    """{name: (bytes per device in one forward pass,
    bytes of the largest array)} of the arrays that the model names with `save`.
    """
    with jax.set_mesh(run.mesh):
        batch = run.abstract_batch()
        rows = batch.tokens.shape[0] // run.recipe.accumulation
        micro = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype, sharding=x.sharding), batch)
        traced = jax.make_jaxpr(make_evaluate(run.recipe.model))(run.like.weights, micro)
    found: dict[str, tuple[int, int]] = {}
    for name, one, times in _named(traced.jaxpr, 1):
        total, largest = found.get(name, (0, 0))
        found[name] = total + times * one, max(largest, one)
    return found


def _named(jaxpr: Any, times: int) -> Iterator[tuple[str, int, int]]:
    """(name, bytes, count). Shapes inside a shard_map are per device; the body of a scan counts once per iteration."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == 'name':
            value = equation.outvars[0].aval
            yield equation.params['name'], value.size * value.dtype.itemsize, times
        turns = times * equation.params['length'] if equation.primitive.name == 'scan' else times
        for below in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(below):
                yield from _named(getattr(below, 'jaxpr', below), turns)


def _is_jaxpr(x: Any) -> bool:
    return hasattr(x, 'eqns') or hasattr(getattr(x, 'jaxpr', None), 'eqns')
