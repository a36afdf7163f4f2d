"""What to print when the memory of a device is full: what is alive, by owner and name, and what to change."""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from pretrax.amounts import size
from pretrax.config.batch import sequences_per_device
from pretrax.cost.memory import temporaries_of
from pretrax.cost.step_facts import StepFacts
from pretrax.errors import UserError, first_line
from pretrax.model.axes import along
from pretrax.observe.device_memory import bytes_per_device, memory_by_owner
from pretrax.run.devices import memory_limit
from pretrax.run.directory import local_directory
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
        less = replace(now, mesh=wider, update=replace(now.update, state=now.update.state / mesh['r']))
        yield f'mesh.r=1 mesh.d={wider["d"]}', 'weights are sharded over more devices', less
    if mesh['d'] % 2 == 0:
        split = mesh | {'d': mesh['d'] // 2, 't': mesh['t'] * 2}
        yield f'mesh.d={split["d"]} mesh.t={split["t"]}', 'layers are sharded as well', replace(now, mesh=split)
    average = run.recipe.ema_decay is not None
    weights = sum(map(bytes_per_device, jax.tree.leaves(run.like.weights)))
    if average:
        without = replace(now.update, state=now.update.state - weights)
        yield 'optimizer.ema_decay=null', 'no average of the weights', replace(now, update=without)
    one = replace(now.update, state=weights * (1 + average))
    yield 'optimizer.name=lion', 'one moment, not two', replace(now, update=one)


def named_bytes(run: Run) -> dict[str, tuple[int, int]]:
    """{name: (bytes per device in a forward pass, bytes of the largest array)} of arrays named with `save`."""
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


FILE = 'out_of_memory.txt'
_MOST = 4  # changes in the message
_MEMORY = re.compile(r'out of memory|ran out|allocat|\bhbm\b|exceeds? .*memory', re.IGNORECASE)


class FullMemoryError(UserError):
    """The memory of a device is full."""


@contextlib.contextmanager
def explaining_full_memory(run: Run, doing: str, compiled: Any = None) -> Iterator[None]:
    """Turns an error of JAX that says that memory is full into a `FullMemoryError`, and writes `out_of_memory.txt`.

    Args:
        run: the run, whose names arrays get.
        doing: what needs the memory, such as 'training'.
        compiled: the compiled step; None if it does not run.
    """
    try:
        yield
    except (jax.errors.JaxRuntimeError, MemoryError) as error:
        if not is_full_memory(error):
            raise
        raise FullMemoryError(_explain(run, doing, compiled, error)) from error


def is_full_memory(error: BaseException) -> bool:
    """Whether an error says that a device has no memory left."""
    text = str(error)
    return isinstance(error, MemoryError) or ('RESOURCE_EXHAUSTED' in text and _MEMORY.search(text) is not None)


def _explain(run: Run, doing: str, compiled: Any, error: BaseException) -> str:
    limit = memory_limit(run.mesh.local_devices)
    of_device = f'; it has {size(limit)}' if limit else ''
    lines = [
        f'out of memory on a device while {doing}{of_device}',
        f'  JAX: {first_line(error)[:160] or type(error).__name__}',
    ]
    owners = owners_of(run, compiled)
    lines.append('  alive per device: ' + ', '.join(f'{name} {size(n)}' for name, n in owners.items() if n > 1000))
    changes = knobs(run)
    if changes:
        lines.append('try, with what each is expected to save per device:')
        lines += [f'  {change} ({effect}): {size(saved)}' for change, effect, saved in changes[:_MOST]]
    path = local_directory(run.run_dir) / FILE
    try:
        path.write_text('\n'.join([*lines, '', *details(run, compiled), '', str(error), '']))
        lines.append(f'all arrays by name: {path}')
    except OSError:
        pass  # the message has what matters
    return '\n'.join(lines)


def owners_of(run: Run, compiled: Any) -> dict[str, int]:
    """Bytes on a device by owner: the fields of the state, other arrays, and what the step needs besides them."""
    owners = dict(memory_by_owner(run.like))
    owners['other arrays'] = sum(n for _, n in _other_arrays(run))
    if compiled is not None and compiled.memory_analysis() is not None:
        owners['temporaries of the step'] = temporaries_of(compiled)
    expected = memory_of_run(run)
    if expected is not None:
        parts = {name: n for name, n in expected.parts().items() if name not in ('weights', 'moments')}
        owners |= {f'{name} (expected)': n for name, n in parts.items()}
    return dict(sorted(owners.items(), key=lambda item: -item[1]))


def knobs(run: Run) -> list[Change]:
    """Changes of the configuration that save memory, the largest saving first."""
    found = memory_changes(run)
    if run.mesh.devices.flat[0].platform != 'cpu' and 'optimizer' not in run.recipe.offload:
        owners = memory_by_owner(run.like)
        moments = owners.get('optimizer', 0) + owners.get('ema', 0)
        found.append(Change('memory.offload=[optimizer]', 'moments in host memory', moments))
    return sorted(found, key=lambda one: -one.saved)


def details(run: Run, compiled: Any) -> Iterator[str]:
    """Every array of the state, other arrays that are alive, and named activations, largest first."""
    yield 'state, bytes per device'
    leaves = jax.tree_util.tree_leaves_with_path(run.like)
    rows = [
        (bytes_per_device(leaf), jax.tree_util.keystr(path, simple=True, separator='.'), leaf) for path, leaf in leaves
    ]
    for n, name, leaf in sorted(rows, key=lambda row: (-row[0], row[1])):
        yield f'  {size(n):>10}  {name}  {leaf.dtype.name}{list(leaf.shape)}'
    others = _other_arrays(run)
    if others:
        yield 'other arrays that are alive'
        yield from (f'  {size(n):>10}  {what}' for what, n in others[:50])
    yield 'activations that the model names, in one forward pass; the memory that they need follows from model.save'
    with contextlib.suppress(jax.errors.JaxRuntimeError, TypeError, ValueError, AttributeError):
        named = sorted(named_bytes(run).items(), key=lambda item: -item[1][0])
        yield from (f'  {size(total):>10}  {name} (the largest array {size(one)})' for name, (total, one) in named)
    if compiled is not None and compiled.memory_analysis() is not None:
        analysis = compiled.memory_analysis()
        yield (
            f'compiled step: arguments {size(analysis.argument_size_in_bytes)}, temporaries '
            f'{size(temporaries_of(compiled))}'
        )


def _other_arrays(run: Run) -> list[tuple[str, int]]:
    """Arrays that are alive and not part of the state, by shape, with their bytes on a device."""
    state = Counter((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(run.like))
    found: Counter[str] = Counter()
    for array in jax.live_arrays():
        kind = array.shape, array.dtype.name
        if state[kind] > 0:
            state[kind] -= 1
        else:
            found[f'{kind[1]}{list(kind[0])}'] += bytes_per_device(array)
    return found.most_common()
