"""Keeps the newest state of a run in the memory of its hosts, where it outlives the processes that train.

Every process writes what its own devices hold as a piece (`memory_pieces.py`), in the background. It removes the piece
before the newest one only when all processes have agreed that the newest one is whole everywhere. So the memory holds
at most two states, and one of them is whole.
"""

import collections
import concurrent.futures
import contextlib
import math
import pathlib
import secrets
import shutil
import socket
import time
from typing import Any

import jax

from pretrax.checkpoint.agreement import broadcast, decide, first_problem
from pretrax.checkpoint.directory import write_synced
from pretrax.checkpoint.manifest import Array, named_arrays, named_leaves, partial_directory, publish, steps_in
from pretrax.checkpoint.memory_pieces import Piece, PiecedState, keep_only, line_of, piece_facts, remove_piece
from pretrax.checkpoint.peers import Peers
from pretrax.checkpoint.state_files import HostFiles, copy_to_host, held_shards
from pretrax.errors import Report
from pretrax.system.cores import available_memory

_METADATA = 64 << 20  # bytes of a piece besides arrays, at most
_STATES = 2  # that the memory holds at most
_USABLE = 0.75  # of the free memory of a host
_SHARE = 0.01  # of the time of steps that states in memory may cost
_SPARE = 1.5  # times as many steps between states as needed, so that the number seldom changes
_FASTER = 4  # times as many steps between states as before, at most: one measurement may be wrong


class Memory(contextlib.AbstractContextManager['Memory']):
    """Writes the pieces of this process. All processes call every method, in the same order.

    Args:
        directory: for the pieces on this host; None: no launcher has made one.
        every: steps between states; 0: none; None: as many as keep the cost below 1 % of the time.
        copies: of each piece on other hosts; None: 1.
    """

    def __init__(self, directory: pathlib.Path | None, every: int | None, report: Report, copies: int | None = None):
        self._directory, self._fixed, self._report = directory, every, report
        self._own = (directory or pathlib.Path()) / str(jax.process_index())  # the pieces of this process
        self._token, self._rollbacks = broadcast('memory', secrets.token_hex(4)), 0
        self._peers = Peers(directory, copies)
        self._without_copy = ''  # why a process could not copy the last state
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix='memory')
        self._writing: concurrent.futures.Future[tuple[int, str]] | None = None
        self._every, self._due = 0, 0  # steps between states, 0: none are kept; and the next of these steps
        self._last: tuple[int, float] | None = None  # step of the newest state, and seconds of all steps before it
        self._cost = 0.0  # seconds that the newest state has taken from the steps
        self._source: list[Piece] = []  # on this host, which the state was restored from

    def begin(self, step: int, state: Any, description: dict[str, Any]) -> str:
        """Training continues from this step. Removes all pieces but those that it was restored from.

        Args:
            description: of what the state was restored from; {}: it is new.

        Returns:
            What is kept where, or why nothing is, for the start-up report.
        """
        size = sum(shard.data.nbytes for _, leaf in named_leaves(state) for shard in held_shards(leaf))
        place, used, free = '', 0, 0.0
        if self._directory is not None:
            self._source = keep_only(self._directory, step, line_of(description))
            place = f'{self._directory} on {socket.gethostname()}'
            used = sum(sum(piece.manifest.sizes.values()) for piece in self._source)
            free = min(shutil.disk_usage(self._directory).free, _USABLE * available_memory())

        def why_not_and_largest(said: list[Any]) -> list[Any]:
            return [_why_not(self._fixed, said, self._peers.copies), max(each[1] for each in said)]

        why_not, largest = decide('memory', [place, size, used, free], why_not_and_largest)
        if why_not:
            return f'none: {why_not}'
        self._peers.begin(2 * largest + _METADATA)
        self._every = self._fixed or 1
        self._due = step + self._every
        often = f'every {self._fixed} steps' if self._fixed else f'for less than {_SHARE:.0%} of the time'
        copies = f'; copies of it: {self._peers.description}' if self._peers.description else ''
        states = _STATES * (1 + self._peers.copies)
        return f'{often}, in {self._directory}; at most {states} x {size / 1e9:.3g} GB of each process{copies}'

    def states(self) -> list[PiecedState]:
        """The states that can be restored from memory, the oldest first."""
        return self._peers.states()

    def is_due(self, step: int) -> bool:
        """Whether to save the state of a step."""
        return bool(self._every) and step >= self._due

    def settle(self) -> None:
        """With a fixed interval, waits until the newest state is whole.

        Call it before a step is logged whose state is due: a kill then costs no more steps than the interval.
        """
        if self._fixed:
            self.wait()

    def save(self, step: int, state: Any, description: dict[str, Any], is_finite: jax.Array) -> None:
        """Starts to write this process's piece, and returns when the next step may reuse the memory of the state.

        Args:
            description: as of a checkpoint; `productive_seconds`: of all steps so far.
            is_finite: whether the state has only finite values; another one is not kept.
        """
        self.wait()
        if not self._every:
            return
        began, seconds = time.perf_counter(), description['productive_seconds']
        per_step = (seconds - self._last[1]) / (step - self._last[0]) if self._last else 0.0
        files = HostFiles(copy_to_host(state, replicas=True))
        line = f'{self._token}.{self._rollbacks}'
        described = description | piece_facts(line, jax.process_index())
        arrays = named_arrays(state)
        self._writing = self._thread.submit(
            self._finish, step, described, arrays, files, is_finite=is_finite, per_step=per_step
        )
        if _shares_memory():  # the next step copies the arrays that are not written yet
            files.wait_until_few(self._writing.done)
        self._last, self._due = (step, seconds), step + self._every
        self._cost = time.perf_counter() - began

    def wait(self) -> None:
        """Waits until the newest state is whole in all processes, or given up."""
        writing, self._writing = self._writing, None
        if writing is not None:
            self._every, message = writing.result()
            if message:
                self._report(message)

    def roll_back_to(self, step: int) -> None:
        """Removes this process's pieces of later steps, which will be trained again."""
        self.wait()
        self._rollbacks += 1
        self._last, self._due = None, step + self._every
        for later in steps_in(self._own):
            if later > step:
                remove_piece(self._own / str(later))

    def __exit__(self, kind: object, *_: object) -> None:
        # After an error in one of several processes the others may be gone, and would be waited for forever.
        if kind is None or jax.process_count() == 1:
            self.close()

    def close(self) -> None:
        """Waits until the newest state is whole."""
        self.wait()
        self._thread.shutdown()
        self._peers.close()

    def _finish(
        self,
        step: int,
        description: dict[str, Any],
        arrays: dict[str, Array],
        files: HostFiles,
        *,
        is_finite: jax.Array,
        per_step: float,
    ) -> tuple[int, str]:
        """Runs in the background. Returns the steps between states from the next one on, and what to report."""
        began, cost, problem = time.perf_counter(), self._cost, ''
        place = partial_directory(self._own, step)
        try:
            if bool(is_finite):
                for older in steps_in(self._own)[:-1]:
                    remove_piece(self._own / str(older))
                self._own.mkdir(exist_ok=True)
                place.mkdir()
                written = files.write(lambda name, content: write_synced(place / name, content))
                publish(place, self._own, step, description, arrays, written)
        except Exception as error:  # the memory is full, or the launcher has ended
            problem = f'{place}: {error.strerror if isinstance(error, OSError) else error}'
        is_whole = step in steps_in(self._own)
        not_copied = self._peers.copy(f'{jax.process_index()}/{step}') if is_whole else ''
        write = time.perf_counter() - began
        if _shares_memory():
            cost = max(cost, write)
        if not_copied:
            not_copied = f'step {step} has no copy in the memory of {not_copied}'
        every, message = decide('memory', [problem, cost, write, per_step, not_copied], self._decide)
        useless = [] if every else list(self._own.glob('*'))
        while every and is_whole and self._source:
            useless.append(self._source.pop().place)
        for each in useless:
            remove_piece(each)
        return every, message

    def _decide(self, said: list[tuple[str, float, float, float, str]]) -> tuple[int, str]:
        """The steps between states from now on, and what to report. Runs in process 0.

        Args:
            said: of each process the problem with its piece, seconds that steps waited for it, seconds of writing,
                seconds per step, and why the piece has no copy.
        """
        if problem := first_problem([each[0] for each in said]):
            return 0, f'WARNING: states are not kept in memory any more: {problem}. Training continues'
        every, message = self._every, ''
        wanted = [max(cost / _SHARE, write) / per_step for _, cost, write, per_step, _ in said if per_step > 0]
        least = max(1, math.ceil(max(wanted, default=every)))
        if self._fixed is None and not every / 3 <= least <= every:
            every = min(math.ceil(_SPARE * least) if least > 1 else 1, _FASTER * every)
            _, cost, _, per_step, _ = said[0]
            if every >= least:
                message = (
                    f'states are kept in memory every {every} steps: one takes {1000 * cost:.3g} ms, and a step '
                    f'{1000 * per_step:.3g} ms'
                )
        without_copy = first_problem([each[4] for each in said])
        if without_copy and not self._without_copy:
            message = f'WARNING: {without_copy}. Training continues, and copies the next state'
        self._without_copy = without_copy
        return every, message


def _shares_memory() -> bool:
    """Whether the devices of this process are the CPU: they share memory and cores with the writing."""
    return jax.local_devices()[0].platform == 'cpu'


def _why_not(every: int | None, said: list[tuple[str, int, int, int]], copies: int) -> str:
    """Why no states are kept; '': they are. Runs in process 0.

    Args:
        said: of each process the place of its pieces, the bytes of a state, bytes of pieces that are there, and free
            bytes.
    """
    if every == 0:
        return 'checkpoint.memory.every is 0'
    sizes: dict[str, int] = collections.defaultdict(int)
    for place, size, _, _ in said:
        sizes[place] += size * (1 + copies)
    if '' in sizes:
        return 'no launcher keeps it; `pretrax launch` does'
    for place, _, used, free in said:
        needed = max(sizes[place], _STATES * sizes[place] - used)
        if needed > free:
            return f'{_STATES} states need {needed / 1e9:.3g} GB of memory in {place}, and {free / 1e9:.3g} GB are free'
    return ''
