"""Ordinary runs as processes of a search, of repeats with other seeds, or of a fit of scaling laws.

A run is started by `pretrax train CONFIG`, or by an engine: `pretrax launch ENGINE CONFIG`. If it is killed or fails, it is
started again, and resumes from its newest checkpoint. A local process ends with the process that started it, after it has
saved. Nothing here imports JAX, which would occupy the devices that the runs need.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pretrax.config import RunConfig, resolved_yaml
from pretrax.errors import DONE, MISTAKE, UserError, install_extra
from pretrax.launch.engines import engine_of
from pretrax.launch.local import devices_of, pretrax_command
from pretrax.launch.record import FILE, read_record
from pretrax.launch.restarts import Restarts, newest_checkpoint, outcome
from pretrax.machine.atomic import write_file
from pretrax.machine.children import prepare_training
from pretrax.machine.locks import DirectoryLock, LockedError, holder_of, lock_directory
from pretrax.observe.metrics import read_metrics

FOREGROUND = ('local', 'ssh', 'ray')  # engines whose launcher runs as long as the run
_LOOK = 0.2  # seconds between two checks of the processes
_LOOK_AT_ENGINE = 10.0  # of a job, which takes a request to a scheduler
_STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Training:
    """A run that trains, from its start to its end, over any number of attempts.

    Args:
        config: the run; `run_dir` is on a disk.
        place: directory for its configuration and the output of its processes.
        launch: words after `pretrax launch`, such as ['slurm', '--nodes', '1']; none: `pretrax train`.
        environment: of its processes, besides that of this one.
        retries: attempts without a new checkpoint that may be followed by another one.

    Attributes:
        why: the reason why it has failed; '' if it has not.
    """

    def __init__(
        self, config: RunConfig, place: pathlib.Path, launch: Sequence[str] = (),
        environment: dict[str, str] | None = None, retries: int = 3,
    ):  # fmt: skip
        assert isinstance(config.run_dir, pathlib.Path)
        self.config, self.run_dir, self.why = config, config.run_dir, ''
        self._launch, self._environment = list(launch), environment or {}
        self._file = place / 'configs' / f'{config.name}.yaml'
        self._output = place / 'output' / f'{config.name}.txt'
        self._process: subprocess.Popen[bytes] | None = None
        self._restarts = Restarts(retries, newest_checkpoint(self.run_dir))
        self._next = 0.0  # time of the next start, or of the next question to the engine
        self._submitted = self._stopping = False

    @property
    def steps_done(self) -> int:
        """The last step with a line of metrics; 0: none."""
        return max((record['step'] for record in self.records()), default=0)

    def records(self) -> list[dict[str, Any]]:
        """The lines of metrics so far."""
        path = self.run_dir / 'metrics.jsonl'
        return read_metrics(path, lambda text: None) if path.is_file() else []

    def is_over(self) -> bool:
        """Starts the next attempt if it is time, and returns whether the run has finished, has failed or was stopped."""
        if self._process is not None:
            return self._process_is_over(self._process)
        if time.monotonic() < self._next:
            return self._stopping and not self._submitted
        if self._runs_elsewhere():
            return False
        if self._submitted:
            return self._attempt_is_over(DONE)
        if self._stopping or self._is_finished():
            return True
        self._start()
        return False

    def stop(self, leave_jobs: bool = False) -> None:
        """Asks the run to save and to end. `is_over` says when it has. `leave_jobs`: jobs of a scheduler continue."""
        if self._stopping:
            return
        self._stopping = True
        if leave_jobs and self._submitted:
            self._submitted, self._next = False, math.inf
            return
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        elif self._submitted:
            with contextlib.suppress(UserError):  # it has just ended
                record = read_record(self.run_dir)
                engine_of(record).stop(record)

    def _is_finished(self) -> bool:
        return self.steps_done >= self.config.steps and newest_checkpoint(self.run_dir) >= self.config.steps

    def _start(self) -> None:
        for path in (self._file, self._output):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_file(self._file, resolved_yaml(self.config).encode())
        verb = ['launch', self._launch[0], str(self._file), *self._launch[1:]] if self._launch else None
        with self._output.open('ab') as output:
            self._process = subprocess.Popen(
                pretrax_command(*(verb or ['train', str(self._file)])), env=os.environ | self._environment,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                preexec_fn=prepare_training,
            )  # fmt: skip

    def _process_is_over(self, process: subprocess.Popen[bytes]) -> bool:
        code = process.poll()
        if code is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # and the processes that it has started
        self._process = None
        if code == DONE and self._launch and self._launch[0] not in FOREGROUND:
            self._submitted, self._next = True, 0.0
            return False
        return self._attempt_is_over(code)

    def _attempt_is_over(self, code: int) -> bool:
        self._submitted = False
        if self._stopping or (code == DONE and self._is_finished()):
            return True
        if code == MISTAKE and holder_of(self.run_dir) is not None:  # an earlier process of this run saves and ends
            self._next = time.monotonic() + 1
            return False
        ended = outcome({0: code}, (), newest_checkpoint(self.run_dir))
        if code == DONE:  # somebody has stopped it
            ended = dataclasses.replace(ended, code=75)
        wait = self._restarts.wait(ended)
        if wait is None:
            self.why = f'{self._last_line() or ended.why}; see {self._output}'
            return True
        self._next = time.monotonic() + wait
        return False

    def _runs_elsewhere(self) -> bool:
        """Whether a job, or a process of an earlier search that still saves, trains this run."""
        if not self.run_dir.is_dir():
            return False
        if holder_of(self.run_dir) is not None:
            self._next = time.monotonic() + 0.5
            return True
        if not (self.run_dir / FILE).is_file():
            return False
        record = read_record(self.run_dir)
        runs = engine_of(record).is_running(record)
        if runs:
            self._submitted = record.engine not in FOREGROUND
            self._next = time.monotonic() + (_LOOK_AT_ENGINE if self._submitted else 0.5)
            if self._stopping and self._submitted:
                engine_of(record).stop(record)
        return runs

    def _last_line(self) -> str:
        text = self._output.read_text(errors='replace') if self._output.is_file() else ''
        return next((line.strip()[:200] for line in reversed(text.splitlines()) if line.strip()), '')


def share_of(slot: int, devices: int | None) -> dict[str, str]:
    """Environment of a process that has the devices of a slot: GPUs, or simulated devices of the CPU. None: all devices."""
    if devices is None:
        return {}
    numbers = range(slot * devices, (slot + 1) * devices)
    seen = [name for name in os.environ.get('CUDA_VISIBLE_DEVICES', '').split(',') if name] or list(
        map(str, range(numbers.stop))
    )
    return devices_of(0, devices) | {'CUDA_VISIBLE_DEVICES': ','.join(seen[numbers.start : numbers.stop])}


class StopRequest:
    """Whether somebody has asked this process to stop, inside `listening`. A second request ends it at once."""

    def __init__(self) -> None:
        self.number: int | None = None

    @contextlib.contextmanager
    def listening(self) -> Iterator['StopRequest']:
        """Handles signals inside this context."""
        before = {number: signal.signal(number, self._asked) for number in _STOP}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _asked(self, number: int, frame: object) -> None:
        del frame
        if self.number is not None:
            raise SystemExit(128 + number)
        self.number = number


def train_all(
    configs: Sequence[RunConfig], place: pathlib.Path, *, launch: Sequence[str] = (), at_once: int = 1,
    devices: int | None = None, retries: int = 3, say: Callable[[str], None] = print,
) -> list[Training]:  # fmt: skip
    """Trains runs to their end, the first `at_once` at once. Runs that are finished are not started.

    Args:
        configs: the runs, each with a name and a run directory of its own.
        place: directory for their configurations and output, which is locked.
        launch, retries: see `Training`.
        at_once: number of runs at once.
        devices: devices of each run; None: all.
        say: receives a line when a run ends.

    Returns:
        The runs in this order; `why` says which have failed.

    Raises:
        UserError: another process works in this directory.
        SystemExit: a signal has asked this process to stop; the runs have saved.
    """
    runs: dict[int, Training] = {}
    waiting, going, slots = list(range(len(configs))), {}, list(range(at_once))
    with locked(place), StopRequest().listening() as request:
        while waiting or going:
            while waiting and slots and request.number is None:
                number, slot = waiting.pop(0), slots.pop(0)
                runs[number] = Training(configs[number], place, launch, share_of(slot, devices), retries)
                going[number] = slot
            for number in list(going):
                if request.number is not None:
                    runs[number].stop(leave_jobs=True)
                if runs[number].is_over():
                    slots.append(going.pop(number))
                    slots.sort()
                    how = f'failed: {runs[number].why}' if runs[number].why else f'{runs[number].steps_done} steps'
                    say(f'{configs[number].name}: {how}')
            if request.number is not None and not going:
                say('stopped; the same command continues')
                raise SystemExit(128 + request.number)
            time.sleep(_LOOK)
    return [runs[number] for number in range(len(configs))]


def locked(directory: pathlib.Path) -> DirectoryLock:
    """The lock of a directory in which runs are started. Raises UserError if another process has it."""
    try:
        return lock_directory(directory, warn=lambda reason: None)
    except LockedError as error:
        raise UserError(
            f'{directory}: another process works here ({error.holder})\nwait until it ends, or give another --out'
        ) from None
    except OSError as error:
        raise UserError(
            f'{directory} cannot be written: {error.strerror}\ngive another directory: --out DIR'
        ) from error


def check_launch(words: Sequence[str]) -> None:
    """Raises UserError if these are not words after `pretrax launch`."""
    known = (*FOREGROUND, 'slurm', 'kubernetes', 'tpu-vm')
    if words and words[0] not in known:
        raise UserError(f'launch: {words[0]!r} is not an engine; expected one of {", ".join(known)}')


def needs_extra(what: str, package: str, extra: str) -> UserError:
    """The error for a package that is not installed."""
    return UserError(f'{what} needs {package}\n  {install_extra(extra)}')
