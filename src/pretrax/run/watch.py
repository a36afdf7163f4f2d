"""What watches over a training process: signals that ask it to stop or to save, and a clock that notices a hang.

Exit codes (docs/reliability.md): 0 done, or stopped as asked; 75 there is more to do, start the same command again.
"""

import contextlib
import faulthandler
import os
import pathlib
import signal
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from pretrax.errors import TRY_AGAIN

TIME_LIMIT = 'time limit'
_AGREE_EVERY = 20  # steps, where several processes have to come to one answer


class Requests:
    """What signals and the time limit ask for. The first SIGINT or SIGTERM: save and end; one a second later: end at
    once. Those in between are the same one: `uv run`, `timeout` and Slurm pass on what the whole process group has got.
    SIGUSR1: save and go on.

    Attributes:
        why: in words, why the run is to end; None where it is not.
    """

    def __init__(self, time_limit: float | None):
        self.why: str | None = None
        self._save = False
        self._signalled: float | None = None
        self._limit = time_limit
        self._began = self._newest = time.monotonic()
        self._longest = 0.0

    def stop(self, number: int) -> bool:
        """Whether step `number` is the last. Call it once a step; all processes get the same answer."""
        now = time.monotonic()
        self._longest, self._newest = max(self._longest, now - self._newest), now
        if self._limit is not None and now - self._began + 2 * self._longest > self._limit and not self.why:
            self.why = TIME_LIMIT
        if jax.process_count() == 1:
            return self.why is not None
        from jax.experimental import multihost_utils

        if multihost_utils.reached_preemption_sync_point(number):  # SIGTERM in any process, at the same step in all
            self.why = 'signal'
            return True
        if number % _AGREE_EVERY == 0:
            asked = np.array([self.why is not None, self._save])
            stop, self._save = multihost_utils.process_allgather(asked).any(axis=0).tolist()
            self.why = (self.why or 'another process') if stop else None
            return stop
        return False

    def save(self, number: int) -> bool:
        """Whether a checkpoint was asked for; in several processes all get the same answer."""
        if self._save and (jax.process_count() == 1 or number % _AGREE_EVERY == 0):
            self._save = False
            return True
        return False

    @contextlib.contextmanager
    def listening(self) -> Iterator['Requests']:
        """Signals reach this inside of the block."""
        handlers = {signal.SIGINT: self._asked_to_stop, signal.SIGUSR1: self._asked_to_save}
        if jax.process_count() == 1:  # otherwise JAX listens for it, see `stop`
            handlers[signal.SIGTERM] = self._asked_to_stop
        try:
            before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        except ValueError:  # not the main thread, as in a notebook's worker: signals are someone else's
            before = {}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _asked_to_stop(self, number: int, frame: Any) -> None:
        del frame
        if self._signalled is None:
            self._signalled = time.monotonic()
            self.why = 'signal'
            os.write(2, b'\nstopping: this step ends, and the state is saved; once more: at once, without saving\n')
            if jax.process_count() > 1:
                signal.raise_signal(signal.SIGTERM)  # which JAX tells to all processes
        elif time.monotonic() - self._signalled > 1:
            os._exit(128 + number)

    def _asked_to_save(self, number: int, frame: Any) -> None:
        del number, frame
        self._save = True


class Watchdog:
    """Notices a step that does not end: says so, writes the stacks of all threads, and at last ends the process.

    Args:
        directory: of the run; stacks go to `<directory>/stacks/process-<i>.txt`.
        hang_seconds: without a sign of life for so long (or 20 times the median step, if that is more) the process ends
            with code 75, so that whoever started it starts it again.
        interval: seconds between stacks that are written whether or not something is wrong; 0 for none.
        say: told about a slow step.
    """

    SLOW = 10.0  # times the median step, and at least so many seconds, is worth a line and a look

    def __init__(self, directory: pathlib.Path, hang_seconds: float, interval: float, say: Callable[[str], None]):
        self.path = directory / 'stacks' / f'process-{jax.process_index()}.txt'
        self._hang, self._interval, self._say = hang_seconds, interval, say
        self._steps: deque[float] = deque(maxlen=100)
        self._alive = time.monotonic()
        self._told = False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name='watchdog', daemon=True)

    def __enter__(self) -> 'Watchdog':
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open('ab', buffering=0)  # nothing waits to be written when a disk is full
        if jax.process_count() == 1:  # otherwise it is on, see `processes.py`, and stays on to the end of the process
            faulthandler.enable(self._file)
        faulthandler.register(signal.SIGUSR2, self._file)
        if self._interval:
            faulthandler.dump_traceback_later(self._interval, repeat=True, file=self._file)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        faulthandler.unregister(signal.SIGUSR2)
        if jax.process_count() == 1:
            faulthandler.enable(sys.__stderr__ or 2)
        self._file.close()

    def alive(self, step: bool = False) -> None:
        """A sign of life; `step`: it has been a step since the last one, whose length counts."""
        now = time.monotonic()
        if step:
            self._steps.append(now - self._alive)
        self._alive, self._told = now, False

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self._hang / 4)):
            usual = statistics.median(self._steps) if self._steps else 0.0
            silent = time.monotonic() - self._alive
            if silent > max(self._hang, 20 * usual):
                self._say(f'no step has ended for {silent:.0f} s: the process gives up; stacks are in {self.path}')
                self._dump()
                os._exit(TRY_AGAIN)
            if self._steps and silent > max(self.SLOW, self.SLOW * usual) and not self._told:
                self._told = True
                self._say(
                    f'this step has taken {silent:.0f} s so far, usually {usual:.2g} s; stacks are in {self.path}'
                )
                self._dump()

    def _dump(self) -> None:
        head = f'\n{time.strftime("%Y-%m-%d %H:%M:%S")} after {time.monotonic() - self._alive:.0f} s\n'.encode()
        try:
            self._file.write(head)
        except OSError as error:  # a full disk does not keep the watchdog from ending a process that hangs
            self._say(f'WARNING: {self.path} cannot be written: {error.strerror}; the stacks follow')
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        else:
            faulthandler.dump_traceback(self._file, all_threads=True)
