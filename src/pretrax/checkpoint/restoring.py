"""Restores arrays of a checkpoint onto devices. Every file is read once, and its digest is checked as it is read.

Orbax reads these files at a third of this module's speed or less, and only after each file was read once for its digest
(benchmarks/lab-notes.md). Here bytes go straight from the file to the memory of the device, and are digested on the
way.

If replicas are in several processes, one of them reads an array (replicas.py). If several processes need parts of a
chunk, the one that needs its first number verifies its digest. So the mesh that wrote a checkpoint reads it once.
"""

import collections
import concurrent.futures
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from pretrax.checkpoint.agreement import from_process_0, gather, together
from pretrax.checkpoint.chunks import Chunks, Index, bounds, check_file, overlap
from pretrax.checkpoint.files import Files, Place
from pretrax.checkpoint.keep import has_finite_state, is_good
from pretrax.checkpoint.manifest import (
    STATE,
    Array,
    DamagedError,
    Manifest,
    is_training_only,
    named_arrays,
    named_leaves,
    read_manifest,
    shape_text,
    steps_in,
    unreadable,
)
from pretrax.checkpoint.memory_pieces import PiecedState
from pretrax.checkpoint.replicas import Reader, parts_of, readers
from pretrax.errors import UserError
from pretrax.storage import AnyPath
from pretrax.system.process_hosts import described

_AHEAD = 8 << 30  # bytes of arrays that may wait in host memory for their device
_THREADS = 8
# Fields of a state, and the keys that decide which arrays they have
_KEYS = {
    'ema': 'optimizer.ema_decay has to stay as it was (null: no average); another run can start from this one with '
    'init_from',
    'optimizer': 'optimizer.name, freeze and groups have to stay as they were; another run can start from this one '
    'with init_from',
    'island': 'federation.bucket and encoding have to stay as they were; another run can start from this one with '
    'init_from',
    'loss_scale': 'precision.compute has to stay as it was; another run can start from this one with init_from',
}
_ALIGNED = 64  # bytes; the CPU backend takes an array with this alignment without a copy


def restore(directory: AnyPath, step: int, like: Any) -> Any:
    """Restores the state of a step with the shapes, dtypes and shardings of `like`.

    To restore part of a state, pass a dict with some of its fields, such as {'weights': ...}. Only their files are
    read.

    Raises:
        DamagedError: a file differs from what was written, in this process or another one.
        UserError: the arrays do not match `like`.
    """
    return _restore(*_read_agreed(directory, step), like)


def _restore(place: Place, manifest: Manifest, like: Any) -> Any:
    fields = like.keys() if isinstance(like, dict) else {name.split('.')[0] for name in manifest.arrays}
    _check_arrays(place, manifest.arrays, named_arrays(like), set(fields))
    leaves, structure = named_leaves(like), jax.tree.structure(like)
    # What is in memory is near each process, and its digests are checked when it is opened.
    reading = readers([leaf for _, leaf in leaves], are_shared=not isinstance(place, Files))
    with together('restore', DamagedError):
        if isinstance(place, PiecedState):
            manifest = place.manifest({name: set(parts_of(leaf).values()) for name, leaf in leaves})
        arrays = _read_arrays(place, manifest, dict(zip((name for name, _ in leaves), reading, strict=True)))
    # Once all processes have what they read: a process that found damage would be missing in the exchange.
    return jax.tree.unflatten(structure, [reader.send(arrays.pop(0)) for reader in reading])


def _read_agreed(directory: AnyPath, step: int) -> tuple[Place, Manifest]:
    """Where a checkpoint is, and its manifest. Raises DamagedError in all processes if one of them cannot read it."""
    with together('restore', DamagedError):
        manifest = read_manifest(directory, step)
        return manifest.place, manifest


def restore_newest(
    directory: AnyPath,
    like: Any,
    say: Callable[[str], None],
    check: Callable[[dict[str, Any]], None] = lambda description: None,
    good: bool = False,
    memory: Sequence[PiecedState] = (),
) -> tuple[int, Any, dict[str, Any]] | None:
    """Restores the newest undamaged checkpoint with a finite state, or a newer state in memory. Reports what it skips.

    Args:
        like: the state, as for `restore`; or a function that returns it for the description of a checkpoint.
        say: reports each skipped checkpoint.
        check: receives the description of a state before it is read; raises UserError if the state must not be used.
        good: restores only checkpoints that a rollback may return to. Otherwise, if no state is finite, the newest one
            is restored as it is.
        memory: states in memory, the same ones in all processes.

    Returns:
        Step, state and description, or None if there is no such checkpoint.

    Raises:
        UserError: there are checkpoints, but none is readable. Training from step 0 over them would lose the run.
    """
    # A shared file system may show different processes different files for a while.
    steps = from_process_0('steps', lambda: steps_in(directory))
    candidates = sorted([(step, '') for step in steps] + [(state.step, state.line) for state in memory])
    damaged: set[int] = set()
    not_finite: list[int] = []

    def attempt(step: int, line: str, may_use: Callable[[Any], bool]) -> tuple[int, Any, dict[str, Any]] | None:
        try:
            place, manifest = _read(memory, step, line) if line else _read_agreed(directory, step)
            if may_use(manifest.description):
                check(manifest.description)
                restored = _restore(place, manifest, like(manifest.description) if callable(like) else like)
                where = {'where': _where(place)} if isinstance(place, PiecedState) else {}
                return step, restored, manifest.description | where
            if not has_finite_state(manifest.description):
                not_finite.append(step)
        except DamagedError as error:
            if not line:
                damaged.add(step)
            say('WARNING: ' + '; '.join(str(error).splitlines()))
        return None

    for step, line in reversed(candidates):
        if restored := attempt(step, line, is_good if good else has_finite_state):
            if not_finite:
                say(f'WARNING: the state of step {not_finite[0]} has non-finite values: its checkpoint is not used')
            return restored
    for step in () if good else not_finite:
        if restored := attempt(step, '', lambda description: True):
            return restored
    if damaged:
        raise UserError(
            f'none of the {len(steps)} checkpoints in {directory} is readable\n'
            'restore one from a backup, or move the directory away to start at step 0'
        )
    return None


def _read(memory: Sequence[PiecedState], step: int, line: str) -> tuple[PiecedState, Manifest]:
    """A state in memory and the manifest of a piece. Raises DamagedError in all processes if one can reach no piece."""
    with together('restore', DamagedError):
        state = next((state for state in memory if (state.step, state.line) == (step, line)), None)
        if state is None:
            raise DamagedError(f'the checkpoint of step {step} in memory is out of reach')
        return state, state.manifest({})


def _where(state: PiecedState) -> str:
    """Whose memory the processes have read, in process 0: 'memory of this machine (process 0), memory of b (1)'."""
    groups = collections.defaultdict(list)
    for process, text in enumerate(gather('where', ' and '.join(sorted(state.read)))):
        groups[text].append(process)
    return ', '.join(
        text if len(groups) == 1 else f'{text} ({described(processes, {})})' for text, processes in groups.items()
    )


def _read_arrays(place: Place, manifest: Manifest, reading: dict[str, Reader]) -> list[jax.Array]:
    """Reads the arrays of a checkpoint that this process has to read. The others have any values.

    Raises DamagedError if a file differs from what was written.
    """
    waiting: collections.deque[_Incoming] = collections.deque()
    arrays: list[jax.Array] = []
    folders = {f'{STATE}/{name}' for name in manifest.arrays}
    with concurrent.futures.ThreadPoolExecutor(_THREADS, 'restore') as pool:
        try:
            names = [name for name in manifest.files if name.rpartition('/')[0] not in folders]
            others = [pool.submit(check_file, place, manifest, name) for name in names if jax.process_index() == 0]
            opened = {name: pool.submit(Chunks, place, manifest, name) for name, it in reading.items() if it.parts()}
            for name, reader in reading.items():
                while waiting and sum(incoming.size for incoming in waiting) > _AHEAD:
                    arrays.append(waiting.popleft().arrived())
                chunks = opened[name].result() if name in opened else None
                waiting.append(_Incoming(chunks, reader, pool))
            arrays += [incoming.arrived() for incoming in waiting]
            for other in others:
                other.result()
        except OSError as error:
            raise unreadable(place, error) from error
        finally:
            pool.shutdown(cancel_futures=True)
    return arrays


class _Incoming:
    """An array that is being read. `chunks`: None if this process reads nothing of it."""

    def __init__(self, chunks: 'Chunks | None', reader: Reader, pool: concurrent.futures.Executor):
        self.like = reader.like
        dtype = chunks.dtype if chunks else self.like.dtype
        self.held = {index: _aligned(index, dtype) for index in set(parts_of(self.like).values())}
        self.size = sum(array.nbytes for array in self.held.values())
        read = [(index, self.held[index]) for index in reader.parts()]
        self.futures = []
        for file, at in chunks or ():
            assert chunks is not None
            targets = [(index, array) for index, array in read if overlap(index, at) is not None]
            compare = not isinstance(chunks.place, Files) and _has_first(targets, at)
            if targets:
                self.futures.append(pool.submit(chunks.read, file, at, targets, compare))

    def arrived(self) -> jax.Array:
        for future in self.futures:
            future.result()
        dtype = self.like.dtype

        def shard(index: Any) -> np.ndarray:
            held = self.held[bounds(index, self.like.shape)]
            return held.astype(dtype, copy=False)

        array = jax.make_array_from_callback(self.like.shape, self.like.sharding, shard)
        if next(iter(array.sharding.device_set)).platform != 'cpu':
            array.block_until_ready()  # then the host memory can be freed
        self.held.clear()
        return array


def _has_first(targets: list[tuple[Index, np.ndarray]], chunk: Index) -> bool:
    """Whether the first number of a chunk is in a target: of the processes that read it, one checks its digest."""
    first = tuple((start, start + 1) for start, _ in chunk)
    return any(overlap(index, first) is not None for index, _ in targets)


def _aligned(index: Index, dtype: Any) -> np.ndarray:
    shape = [stop - start for start, stop in index]
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNED, np.uint8)
    first = -memory.ctypes.data % _ALIGNED
    return memory[first : first + size].view(dtype).reshape(shape)


def _check_arrays(place: Place, stored: dict[str, Array], wanted: dict[str, Array], fields: set[str]) -> None:
    """Raises UserError unless the stored arrays of these fields match. Other fields of the state are ignored."""
    missing = sorted(wanted.keys() - stored)
    of_fields = {name for name in stored if name.split('.')[0] in fields and not is_training_only(name)}
    surplus = sorted(of_fields - wanted.keys())
    other = [name for name in sorted(wanted.keys() & stored) if wanted[name].shape != stored[name].shape]
    if not missing and not surplus and not other:
        return
    missing, surplus, other = (
        sorted(x, key=lambda name: not name.startswith('weights')) for x in (missing, surplus, other)
    )
    lines = [f'{name}: missing in the checkpoint' for name in missing]
    lines += [f'{name}: only the checkpoint has it' for name in surplus]
    lines += [
        f'{name}: {shape_text(stored[name].shape)} in the checkpoint, {shape_text(wanted[name].shape)} in the model'
        for name in other
    ]
    more = [f'and {len(lines) - 4} more'] if len(lines) > 4 else []
    changed = {name.split('.')[0] for name in (*missing, *surplus)}
    hints = [hint for field, hint in _KEYS.items() if field in changed and 'weights' not in changed]
    head = f'the checkpoint {place} does not match the model or optimizer of the configuration:'
    raise UserError('\n'.join([head, *lines[:4], *more, *hints]))
