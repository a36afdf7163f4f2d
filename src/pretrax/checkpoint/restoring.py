"""Restores arrays of a checkpoint onto devices. Every file is read once, and its digest is checked as it is read.

Orbax reads these files at a third of this module's speed or less, and only after each file was read once for its digest
(benchmarks/lab-notes.md). Here bytes go straight from the file to the memory of the device, and are digested on the
way.

Each process reads what its own devices need and verifies the digests of a share of all chunks. Chunks are assigned in
the order of the array, so on the mesh that wrote them a process mostly verifies what it reads.
"""

import collections
import concurrent.futures
import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from pretrax.checkpoint.agreement import agree, from_process_0, gather
from pretrax.checkpoint.chunks import Chunks, Index, bounds, check_file, overlap
from pretrax.checkpoint.files import Files, Place
from pretrax.checkpoint.keep import has_finite_state, is_good
from pretrax.checkpoint.manifest import (
    STATE,
    Array,
    DamagedError,
    Manifest,
    assign_to_processes,
    is_training_only,
    named_arrays,
    named_leaves,
    read_manifest,
    shape_text,
    steps_in,
    unreadable,
)
from pretrax.checkpoint.memory_pieces import PiecedState
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
    with _together():
        if isinstance(place, PiecedState):
            manifest = place.manifest({name: _held_by(leaf) for name, leaf in named_leaves(like)})
        return _read_arrays(place, manifest, like)


@contextlib.contextmanager
def _together() -> Iterator[None]:
    """Raises DamagedError in all processes if the block raises it in one of them."""
    problem = ''
    try:
        yield
    except DamagedError as error:
        problem = str(error)
    if problem := agree('restore', problem):
        raise DamagedError(problem)


def _read_agreed(directory: AnyPath, step: int) -> tuple[Place, Manifest]:
    """Where a checkpoint is, and its manifest. Raises DamagedError in all processes if one of them cannot read it."""
    with _together():
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
        like: the state, as for `restore`.
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
                restored = _restore(place, manifest, like)
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
    with _together():
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


def _read_arrays(place: Place, manifest: Manifest, like: Any) -> Any:
    """Reads the arrays of a checkpoint that `like` names, with its dtypes and shardings.

    Raises DamagedError if a file differs from what was written.
    """
    # The digests of files in memory are checked when they are opened.
    assigned = {} if isinstance(place, Files) else assign_to_processes(manifest.files, jax.process_count())
    mine = {file for file, number in assigned.items() if number == jax.process_index()}
    leaves, structure = named_leaves(like), jax.tree.structure(like)
    waiting: collections.deque[_Incoming] = collections.deque()
    arrays: list[jax.Array] = []
    folders = {f'{STATE}/{name}' for name in manifest.arrays}
    with concurrent.futures.ThreadPoolExecutor(_THREADS, 'restore') as pool:
        try:
            names = [name for name in mine if name.rpartition('/')[0] not in folders]
            others = [pool.submit(check_file, place, manifest, name) for name in names]
            opened = {name: pool.submit(Chunks, place, manifest, name) for name, _ in leaves}
            for name, leaf in leaves:
                while waiting and sum(incoming.size for incoming in waiting) > _AHEAD:
                    arrays.append(waiting.popleft().arrived())
                waiting.append(_Incoming(opened[name].result(), leaf, mine, pool))
            arrays += [incoming.arrived() for incoming in waiting]
            for other in others:
                other.result()
        except OSError as error:
            raise unreadable(place, error) from error
        finally:
            pool.shutdown(cancel_futures=True)
    return jax.tree.unflatten(structure, arrays)


class _Incoming:
    """An array that is being read."""

    def __init__(self, chunks: 'Chunks', like: Any, mine: set[str], pool: concurrent.futures.Executor):
        self.like = like
        self.held = {index: _aligned(index, chunks.dtype) for index in _held_by(like)}
        self.size = sum(array.nbytes for array in self.held.values())
        self.futures = [
            pool.submit(chunks.read, file, at, targets, file in mine)
            for file, at in chunks
            if (targets := [(index, array) for index, array in self.held.items() if overlap(index, at) is not None])
            or file in mine
        ]

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


def _held_by(like: Any) -> set[Index]:
    """The parts of an array that the devices of this process hold."""
    indices = like.sharding.addressable_devices_indices_map(like.shape).values()
    return {bounds(index, like.shape) for index in indices}


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
