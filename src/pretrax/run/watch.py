"""Watches a training process: signals that ask it to stop or to save, and steps that hang.

Exit codes (docs/reliability.md): 0 done, or stopped on request; 75 start the same command again to continue.
"""

import contextlib
import faulthandler
import os
import pathlib
import signal
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import IO, Any

import jax
import numpy as np

from pretrax.config.schema import Faults
from pretrax.errors import TRY_AGAIN, Report, UserError
from pretrax.storage import locate_local

TIME_LIMIT = 'time limit'
_STOPPING = b'\nstopping after this step, and saving the state; press again to stop at once without saving\n'
_AGREE_EVERY = 20  # steps, if several processes have to agree


def exit_code(stopped: str | None) -> int:
    """The exit code of a run that has saved its state, by the reason why it stopped early; None: all steps are done."""
    return TRY_AGAIN if stopped == TIME_LIMIT else 0


class Requests:
    """Requests to stop or to save, from signals and from a time limit.

    The first SIGINT, SIGTERM or SIGHUP (a closed terminal) saves and stops; another SIGINT or SIGTERM, more than a
    second later, ends the process at once; in a notebook, it raises KeyboardInterrupt. Signals within that second are
    copies of the first: `uv run`, `timeout` and Slurm forward signals that the whole process group has received. Before
    `begin` there is nothing to save, and the first one ends the process. SIGUSR1 saves and continues. `nohup` ignores
    SIGHUP, and so does this.

    Args:
        minutes: the time limit; None or 0: none.

    Attributes:
        why: the reason to stop; None: continue.
    """

    def __init__(self, minutes: float | None):
        self.why: str | None = None
        self._begun = self._save = self._saves = self._stops = False
        self._calls = 0  # of `stop`: JAX misses a signal if it sees no consecutive numbers
        self._signalled: float | None = None
        self._limit = 60 * minutes if minutes else None
        self._began = self._newest = time.monotonic()
        self._longest = 0.0

    def begin(self) -> None:
        """From now on there are steps to save."""
        self._begun = True

    def stop(self, number: int, is_waiting: bool = False) -> bool:
        """Whether to stop after step `number`. Call it once per step; the answer is the same in all processes.

        Args:
            is_waiting: this is one more call, while the processes wait for something before the next step.
        """
        now = time.monotonic()
        self._longest, self._newest = max(self._longest, now - self._newest), now
        if self._limit is not None and now - self._began + 2 * self._longest > self._limit and not self.why:
            self.why = TIME_LIMIT
        if jax.process_count() == 1:
            return self.why is not None
        from jax.experimental import multihost_utils

        self._calls += 1
        # SIGTERM in any process; true at the same call in all
        if multihost_utils.reached_preemption_sync_point(self._calls):
            self.why, self._stops = 'signal', True
        elif number % _AGREE_EVERY == 0 or is_waiting:
            asked = np.array([self.why is not None, self._save])
            stop, self._saves = multihost_utils.process_allgather(asked).any(axis=0).tolist()
            self.why, self._stops = (self.why or 'another process') if stop else None, self._stops or stop
        return self._stops

    def save(self, is_time: bool = False) -> bool:
        """Whether a checkpoint is requested. Call it after `stop`; the answer is the same in all processes.

        Args:
            is_time: whether it is time for one by the clock of this process, which may be early or late.
        """
        self._save |= is_time
        is_requested = self._save if jax.process_count() == 1 else self._saves
        if is_requested:
            self._save = self._saves = False
        return is_requested

    @contextlib.contextmanager
    def listening(self) -> Iterator['Requests']:
        """Handles signals inside this context."""
        handlers = {signal.SIGINT: self._asked_to_stop, signal.SIGUSR1: self._asked_to_save}
        if jax.process_count() == 1:  # otherwise JAX handles it, see `stop`
            handlers[signal.SIGTERM] = self._asked_to_stop
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            handlers[signal.SIGHUP] = self._asked_to_stop
        try:
            before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        except ValueError:  # not the main thread, for example in a notebook: others handle the signals
            before = {}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _asked_to_stop(self, number: int, frame: Any) -> None:
        del frame
        if not self._begun:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        if self._signalled is None:
            self._signalled = time.monotonic()
            self.why = 'signal'
            with contextlib.suppress(OSError):  # the terminal is closed
                os.write(2, _STOPPING)
            if jax.process_count() > 1:
                signal.raise_signal(signal.SIGTERM)  # JAX passes it on to all processes
        elif time.monotonic() - self._signalled > 1 and number != signal.SIGHUP:
            if hasattr(sys, 'ps1'):  # a notebook, whose variables the end of the process would lose
                raise KeyboardInterrupt
            os._exit(128 + number)

    def _asked_to_save(self, number: int, frame: Any) -> None:
        del number, frame
        self._save = True


class Watchdog:
    """Reports a slow step with the stacks of all threads, and ends a process that hangs.

    A step hangs if it takes longer than `faults.hang_seconds` and longer than 20 times the median step. The process
    then exits with code 75, so that its launcher starts it again.

    Args:
        directory: the run directory; stacks are written to `<directory>/stacks/process-<i>.txt`.
        faults: `hang_seconds`, and when and where stacks are written in any case.
    """

    SLOW = 10.0  # times the median step, and at least this many seconds

    def __init__(self, directory: pathlib.Path, faults: Faults, report: Report):
        self.path = directory / 'stacks' / f'process-{jax.process_index()}.txt'
        self._hang, self._faults = faults.hang_seconds, faults
        self._report = report
        self._steps: deque[float] = deque(maxlen=100)
        self._alive = time.monotonic()
        self._reported = self._paused = False
        self._over, self._on_timer = threading.Event(), contextlib.ExitStack()
        self._threads = [threading.Thread(target=self._watch, name='watchdog', daemon=True)]

    def __enter__(self) -> 'Watchdog':
        timed = self._on_timer.enter_context(stacks_on_timer(self._faults.stack_trace_to))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self.path.open('ab', buffering=0)  # unbuffered: a full disk must not delay it
        if jax.process_count() == 1:  # otherwise `processes.py` has enabled it, until the end of the process
            faulthandler.enable(self._file)
        faulthandler.register(signal.SIGUSR2, self._file)
        if interval := self._faults.stack_trace_interval_seconds:
            arguments = interval, timed or self._file
            self._threads.append(threading.Thread(target=self._dump_often, args=arguments, name='stacks', daemon=True))
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._on_timer.close()
        faulthandler.unregister(signal.SIGUSR2)
        if jax.process_count() == 1:
            faulthandler.enable(sys.__stderr__ or 2)
        self._file.close()

    def alive(self, step: bool = False) -> None:
        """Resets the timer. `step`: the time since the last call was a step, and counts for the median."""
        now = time.monotonic()
        if step:
            self._steps.append(now - self._alive)
        self._alive, self._reported = now, False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside this context, such as that of a compilation, is not a step's and has no limit."""
        self._paused = True
        try:
            yield
        finally:
            self.alive()
            self._paused = False

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self._hang / 4)):
            if self._paused:
                continue
            median = statistics.median(self._steps) if self._steps else 0.0
            silent = time.monotonic() - self._alive
            if silent > max(self._hang, 20 * median):
                self._report(f'no step has ended for {silent:.0f} s: the process ends; stacks are in {self.path}')
                self._dump()
                os._exit(TRY_AGAIN)
            if self._steps and silent > max(self.SLOW, self.SLOW * median) and not self._reported:
                self._reported = True
                self._report(
                    f'this step has taken {silent:.0f} s so far, the median is {median:.2g} s; stacks are in '
                    f'{self.path}'
                )
                self._dump()

    def _dump_often(self, interval: float, file: IO[bytes]) -> None:
        # `faulthandler.dump_traceback_later` does not hold the GIL: a thread that runs meanwhile can crash the process.
        while not self._over.wait(interval):
            with contextlib.suppress(OSError):  # a full disk must not end the training
                file.write(f'\n{time.strftime("%Y-%m-%d %H:%M:%S")}\n'.encode())
            faulthandler.dump_traceback(file, all_threads=True)

    def _dump(self) -> None:
        head = f'\n{time.strftime("%Y-%m-%d %H:%M:%S")} after {time.monotonic() - self._alive:.0f} s\n'.encode()
        try:
            self._file.write(head)
        except OSError as error:  # a full disk must not stop the watchdog
            self._report(f'WARNING: {self.path} cannot be written: {error.strerror}; the stacks follow')
            faulthandler.dump_traceback(sys.__stderr__ or 2, all_threads=True)
        else:
            faulthandler.dump_traceback(self._file, all_threads=True)


@contextlib.contextmanager
def stacks_on_timer(to: str | None) -> Iterator[IO[bytes] | None]:
    """The file for the stacks that are written on a timer; None: that for other stacks.

    Args:
        to: `faults.stack_trace_to`: 'console' is the standard error of this process; in a directory each process of
            each machine has a file of its own.

    Raises:
        UserError: the directory cannot be written.
    """
    if to is None:
        yield None
    elif to == 'console':
        with os.fdopen(os.dup(2), 'wb', buffering=0) as console:  # Python's own stream may be a notebook's
            yield console
    else:
        path = locate_local(to) / f'{socket.gethostname()}-process-{jax.process_index()}.txt'
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = path.open('ab', buffering=0)
        except OSError as error:
            raise UserError(
                f'faults.stack_trace_to: {path} cannot be written: {error.strerror}\nuse another directory, or console'
            ) from error
        with file:
            yield file
