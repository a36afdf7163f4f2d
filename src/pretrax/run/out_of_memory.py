"""What to print when the memory of a device is full: what is alive, by owner and name, and what to change."""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax

from pretrax.amounts import size
from pretrax.cost.memory import temporaries_of
from pretrax.errors import UserError, first_line
from pretrax.observe.device_memory import bytes_per_device, memory_by_owner
from pretrax.run.devices import memory_limit
from pretrax.run.directory import local_directory
from pretrax.run.memory_changes import Change, memory_changes, named_bytes
from pretrax.run.setup import Run, memory_of_run

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
