"""Launches a run on one machine: starts N processes of `pretrax train`, ends them together, and restarts them.

Process 0 writes to the terminal. The others write to `<run_dir>/output/process-<i>.txt`. If one of them causes a failure,
the end of its output is shown.
"""

import contextlib
import ctypes
import dataclasses
import functools
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from pretrax.config import RunConfig
from pretrax.errors import CONFIGURATION, DONE, MISTAKE, TRY_AGAIN, UserError
from pretrax.launch.elastic import Slots
from pretrax.launch.notices import LaunchNotices
from pretrax.launch.restarts import Outcome, Restarts, newest_checkpoint, outcome
from pretrax.launch.sizes import misfit
from pretrax.observe.attempts import note
from pretrax.storage import BucketPath
from pretrax.storage.lease import FILE, HeldError, Lease, LostError
from pretrax.storage.mirror import Mirror
from pretrax.storage.working_directory import working_directory

_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed
_LOOK = 0.05  # seconds between two checks of the processes
_AFTER_FAILURE = 0.3  # seconds in which others may end too, so that the cause is among them
_AFTER_END = 5.0  # seconds for the others after an orderly end: they save the same step
_GROWS = 'trying all processes again'
_TAIL = 20  # lines shown of the output of a process
# Ends with its standard input, which is when the launcher ends. A stopped process then runs again, and handles the SIGTERM
# that Linux sends to each process of a launcher that was killed.
_GUARD = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
sys.stdin.read()
for process in sys.argv[1:]:
    try:
        os.kill(int(process), signal.SIGCONT)
    except OSError:  # it has ended
        pass
"""
_COUNT_FLAG = re.compile(r'--xla_force_host_platform_device_count=\d+\s*')


class LocalLaunch:
    """A run on this machine.

    Args:
        config: the run.
        command: program and arguments of each process.
        processes: number of processes.
        devices: devices per process.
        retries: how many attempts without a new checkpoint may be followed by another one.
        elastic: continue with fewer processes after one is lost twice in a row, and try all of them again later.
        say: receives the launcher's messages.
    """

    def __init__(
        self, config: RunConfig, command: Sequence[str], *, processes: int, devices: int, retries: int, elastic: bool,
        say: Callable[[str], None] = print,
    ):  # fmt: skip
        self._config, self._command, self._devices, self._say = config, command, devices, say
        self._directory = working_directory(config.run_dir)
        self._newest = functools.partial(newest_checkpoint, config.run_dir)
        self._slots = Slots(processes, lambda count: misfit(config, count * devices) is None)
        self._elastic = elastic
        self._notices = LaunchNotices(config, self._directory, say)
        self._restarts = Restarts(retries, self._newest())
        self._asked: int | None = None  # signal that requested a stop
        self._asked_at = 0.0
        self._noticed = 0.0  # time at which the first process of the newest attempt had ended
        self._waiting: list[int] = []  # signals that were not sent to the processes yet

    def run(self) -> int:
        """Trains until the run is done or no attempt is left. Returns the exit code."""
        try:
            (self._directory / 'output').mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f'run_dir: {self._directory} cannot be written: {error.strerror}\ngive another directory: run_dir=PATH'
            ) from error
        with self._handling_signals():
            try:
                return self._run_attempts()
            finally:
                self._notices.close()
                self._upload()

    def _run_attempts(self) -> int:
        attempt, lost = 1, None
        while True:
            began = self._noticed = time.time()
            try:
                ended = self._attempt({'attempt': attempt} | ({} if lost is None else {'lost': lost}))
            except OSError as error:
                ended = Outcome(1, f'the processes cannot be started: {error}', self._newest())
            lost = self._noticed
            self._note('ended', why=ended.why, code=ended.code, step=ended.step, noticed=lost)
            if ended.code == DONE or self._asked is not None:
                return self._last_code(ended)
            is_mistake = ended.code in (MISTAKE, CONFIGURATION)
            wait = None if is_mistake else self._next(ended)
            self._notices.attempt_ended(ended, wait is not None)
            if is_mistake:
                return self._last_code(ended)
            if wait is None:
                self._say(
                    f'launch: {ended.why}; {self._restarts.failures} attempts in a row without a new checkpoint: giving up'
                )
                return ended.exit_code
            attempt += 1
            self._say(
                f'launch: {ended.why}, after {lost - began:.0f} s; '
                f'{f"checkpoint {ended.step} is complete" if ended.step else "there is no checkpoint yet"}; '
                f'starting again{f" in {wait:.0f} s" if wait else ""}: attempt {attempt}, {len(self._slots.used)} processes'
            )
            if not self._sleep(wait):
                return 128 + (self._asked or 0)

    def _next(self, ended: Outcome) -> float | None:
        """Seconds until the next attempt; None: no further attempt. If elastic, chooses its number of processes."""
        wait = self._restarts.wait(ended)
        if not self._elastic:
            return wait
        if ended.why == _GROWS:
            self._slots.grow()
            return 0.0
        if self._slots.ended(ended.step) or (
            ended.lost and self._restarts.failures >= 2 and self._slots.drop(ended.lost)
        ):
            self._restarts.reset()
            return 0.0
        return wait

    def _attempt(self, facts: dict[str, Any]) -> Outcome:
        self._slots.started(self._newest())
        with _Group(self._command, self._slots.used, self._devices, self._directory) as group:
            self._note('started', processes=group.pids(), **facts)
            deadline, seen, grows = None, -1, False
            while True:
                self._forward_signals(group)
                codes = group.codes()
                now = time.monotonic()
                if codes and deadline is None:
                    self._noticed = time.time()
                if len(codes) != seen and codes:
                    orderly = all(code in (DONE, TRY_AGAIN) for code in codes.values())
                    deadline = min(deadline or now + _AFTER_END, now + (_AFTER_END if orderly else _AFTER_FAILURE))
                    seen = len(codes)
                elif self._elastic and not grows and self._asked is None and self._slots.is_time_to_grow(self._newest):
                    grows = True
                    group.send(signal.SIGTERM)  # they save the same step
                if len(codes) == len(group) or (deadline is not None and now >= deadline):
                    break
                time.sleep(_LOOK)
            hung = tuple(number for number in range(len(group)) if number not in codes)
            group.end()
            ended = outcome(codes, hung, self._newest())
            if grows and self._asked is None and set(codes.values()) <= {DONE, TRY_AGAIN}:
                ended = dataclasses.replace(ended, code=TRY_AGAIN, why=_GROWS, lost=())
            culprit = next((number for number, code in codes.items() if code == ended.code), 0)
            if culprit and ended.code not in (DONE, TRY_AGAIN, -signal.SIGKILL) and self._asked is None:
                self._say('\n'.join(f'process {culprit} | {line}' for line in group.tail(culprit)))
        return ended

    def _note(self, event: str, **what: Any) -> None:
        try:
            note(self._directory, event, **what)
        except OSError as error:  # a full disk does not end the training
            self._say(f'WARNING: launch: cannot write to {self._directory}: {error.strerror}. The run continues')

    def _upload(self) -> None:
        """Uploads the history of a run in a bucket and the output of its processes, which process 0 leaves behind."""
        remote = self._config.run_dir
        if not isinstance(remote, BucketPath):
            return
        try:
            with Lease(remote / FILE, self._config.faults.lease_seconds, self._say).held() as lease:
                mirror = Mirror(self._directory, remote, lease.check, self._say)
                mirror.fetch(lease.fence)
                mirror.upload(names=r'attempts\.jsonl|output/.*')
        except (HeldError, LostError, OSError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            self._say(f'WARNING: launch: the last lines of {self._directory} are not uploaded: {reason}')

    def _last_code(self, ended: Outcome) -> int:
        if self._asked is not None and ended.code not in (DONE, TRY_AGAIN, MISTAKE, CONFIGURATION):
            return 128 + self._asked
        return ended.exit_code

    # The handler records signals, and the loop forwards them. Each process has its own session, so that Ctrl-C reaches it
    # once, from here.

    @contextlib.contextmanager
    def _handling_signals(self) -> Iterator[None]:
        numbers = [*_STOP, signal.SIGUSR1, signal.SIGUSR2]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # by `nohup`
            numbers.remove(signal.SIGHUP)
        before = {number: signal.signal(number, lambda number, _: self._waiting.append(number)) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward_signals(self, group: '_Group') -> None:
        while self._waiting:
            number = self._waiting.pop(0)
            now = time.monotonic()
            if number in _STOP:
                if self._asked is None:
                    self._asked, self._asked_at = number, now
                elif now - self._asked_at < 1 or number == signal.SIGHUP:
                    continue  # `uv run`, `timeout` and Slurm forward signals that the process group has received already
                else:
                    self._say('launch: second request to stop: ending all processes immediately')
                    group.end()
                    continue
            group.send(signal.SIGTERM if number == signal.SIGHUP else number)

    def _sleep(self, seconds: float) -> bool:
        """Waits. Returns False if a stop was requested meanwhile."""
        until = time.monotonic() + seconds
        while True:
            for number in self._waiting:
                if number in _STOP:
                    self._asked = number
                    return False
            self._waiting.clear()
            if time.monotonic() >= until:
                return True
            time.sleep(_LOOK)


class _Group:
    """The processes of one attempt. When the block ends, they are killed, with all processes that they have started."""

    def __init__(self, command: Sequence[str], slots: Sequence[int], devices: int, directory: pathlib.Path):
        self._directory = directory
        self._processes: list[subprocess.Popen] = []
        self._guard: subprocess.Popen | None = None
        self._begins: list[int] = []  # offset at which the output of this attempt begins, per process
        address = f'127.0.0.1:{_free_port()}'
        try:
            for index, slot in enumerate(slots):
                environment = identity(index, len(slots), address) | devices_of(slot, devices)
                self._start(index, command, environment)
            guard = [sys.executable, '-c', _GUARD, *map(str, self.pids())]
            self._guard = subprocess.Popen(guard, stdin=subprocess.PIPE, start_new_session=True)
        except BaseException:
            self.end()
            raise

    def _start(self, index: int, command: Sequence[str], environment: dict[str, str]) -> None:
        with contextlib.ExitStack() as stack:
            output: IO[bytes] | None = None  # None: the terminal of the launcher
            if index:
                output = stack.enter_context(self._output(index).open('ab'))
            self._begins.append(output.tell() if output else 0)
            self._processes.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                    stderr=subprocess.STDOUT if output else None, start_new_session=True, preexec_fn=_in_the_child,
                )
            )  # fmt: skip

    def __len__(self) -> int:
        return len(self._processes)

    def __enter__(self) -> '_Group':
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def codes(self) -> dict[int, int]:
        """Exit codes of the processes that have ended, by number."""
        found = {number: process.poll() for number, process in enumerate(self._processes)}
        return {number: code for number, code in found.items() if code is not None}

    def send(self, number: int) -> None:
        """Sends a signal to all processes."""
        for process in self._processes:
            process.send_signal(number)

    def end(self) -> None:
        """Kills all processes, stopped ones too, and the processes that they have started."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        if self._guard is not None:
            self._guard.communicate()

    def tail(self, number: int) -> list[str]:
        """The last lines that a process wrote in this attempt."""
        with self._output(number).open('rb') as output:
            output.seek(self._begins[number])
            return output.read().decode(errors='replace').splitlines()[-_TAIL:]

    def _output(self, number: int) -> pathlib.Path:
        return self._directory / 'output' / f'process-{number}.txt'


def identity(index: int, count: int, address: str) -> dict[str, str]:
    """Environment that tells JAX the index of this process, their number, and the address of the first."""
    return os.environ | {
        'JAX_COORDINATOR_ADDRESS': address,
        'JAX_COORDINATOR_BIND_ADDRESS': address,
        'JAX_NUM_PROCESSES': str(count),
        'JAX_PROCESS_ID': str(index),
    }


def devices_of(slot: int, count: int) -> dict[str, str]:
    """Environment that restricts a process to the `count` devices of its slot: GPUs, or simulated devices of the CPU."""
    flags = _COUNT_FLAG.sub('', os.environ.get('XLA_FLAGS', ''))
    numbers = range(slot * count, (slot + 1) * count)
    return {
        'JAX_NUM_CPU_DEVICES': str(count),
        'JAX_LOCAL_DEVICE_IDS': ','.join(map(str, numbers)),
        'XLA_FLAGS': flags,
    }


def train_command(arguments: Sequence[str]) -> list[str]:
    """Command that runs `pretrax train` with this Python."""
    return [sys.executable, '-m', 'pretrax', 'train', *arguments]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        return free.getsockname()[1]


def _in_the_child() -> None:
    """Ignores requests to save or to print stacks until the process handles them. Makes it end with its launcher."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    if sys.platform == 'linux':
        die_with_parent = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(die_with_parent, signal.SIGTERM)
