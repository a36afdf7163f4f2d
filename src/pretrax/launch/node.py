"""Runs the training process of one machine, as every engine starts it: under `srun`, over ssh, in a pod or Ray actor.

It passes signals on, copies the output of the training to its own, and leaves a crash report in the run directory when
the training fails. It exits with the code of the training; of one that was killed by signal n, with 128+n.
"""

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence

from pretrax.config import RunConfig
from pretrax.errors import DONE, TRY_AGAIN, Report
from pretrax.launch.crash import Crash, StackFiles, write_crash_report
from pretrax.launch.restarts import newest_checkpoint
from pretrax.storage.locate import working_directory
from pretrax.system.children import PASSED_ON, STOP, Child, handling, prepare_training

_TAIL = 200  # lines of output in a crash report
_PATIENCE = 5.0  # seconds for the last output
# A file server may hold the lock of a machine that is lost for a while: a training that is started again waits for it.
_ENVIRONMENT = {'PRETRAX_LOCK_SECONDS': '120'}
# Where engines write the number of a process.
_NUMBERS = (
    'JAX_PROCESS_ID',
    'PRETRAX_PROCESS',
    'SLURM_PROCID',
    'OMPI_COMM_WORLD_RANK',
    'PMI_RANK',
    'JOB_COMPLETION_INDEX',
    'TPU_WORKER_ID',
)


class Node:
    """The training process of this machine.

    Args:
        controlled: take signals from standard input, one name per line, and kill the training when it ends.
        until_done: the run is continued if its training stops early, also without a request to this process.
        waiting: signals that have arrived already, from `system.children.signals_from_now_on`.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        attempt: str,
        controlled: bool,
        until_done: bool = False,
        waiting: list[int] | None = None,
        say: Report = print,
    ):
        self._config, self._attempt, self._say = config, attempt, say
        self._number = process_number(os.environ)
        self._directory = working_directory(config.run_dir, self._number)
        self._controlled, self._until_done = controlled, until_done
        self._process: Child | None = None
        self._waiting = waiting if waiting is not None else []  # signals that arrived before there was a process
        self._sending = threading.RLock()  # a signal handler may interrupt the thread that holds it
        self._is_asked = any(number in STOP for number in self._waiting)  # to stop, by the engine
        self._is_over = False  # standard input has ended
        self._lines: deque[bytes] = deque([b''], maxlen=_TAIL)

    def run(self, command: Sequence[str], check: Sequence[str] | None = None) -> int:
        """Trains. Returns the exit code.

        Args:
            command: program and arguments of the training.
            check: those of a check of this machine before it. If it fails, nothing is trained, and its exit code is
                returned.
        """
        with handling(PASSED_ON, self._pass_on):
            if self._controlled:
                threading.Thread(target=self._obey, name='control', daemon=True).start()
            if check is not None and (failed := self._run(check)):
                is_passing = self._is_asked or failed == TRY_AGAIN or failed < 0
                return TRY_AGAIN if is_passing else failed
            if self._is_asked:
                return TRY_AGAIN
            stacks, began = StackFiles(self._directory, [self._number]), time.monotonic()
            code = self._run(command)
        if not self._is_over and (code not in (DONE, TRY_AGAIN) or stacks.new(self._number)):
            self._report(code, time.monotonic() - began, stacks)
        if (
            code == DONE
            and (self._is_asked or self._until_done)
            and newest_checkpoint(self._config.run_dir) < self._config.steps
        ):
            return 128 + signal.SIGTERM if self._until_done else TRY_AGAIN
        return 128 - code if code < 0 else code

    def _run(self, command: Sequence[str]) -> int:
        """Runs a program, and copies its output. Returns its exit code; negative: the signal that killed it."""
        streams = {'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT}
        with Child(command, _ENVIRONMENT | os.environ, prepare_training, **streams) as process:
            with self._sending:
                self._process = process
                while self._waiting:
                    process.send_signal(self._waiting.pop(0))
            copier = threading.Thread(target=self._copy_output, args=(process,), name='output', daemon=True)
            copier.start()
            try:
                if self._is_over:
                    process.kill_all()
                return process.wait()
            finally:
                process.kill_all()  # what it has started has the same output, and may still run
                copier.join(_PATIENCE)  # a service that has left the session may keep the output open
                self._process = None

    def _pass_on(self, number: int) -> None:
        self._is_asked = self._is_asked or number in STOP
        self._send(number)

    def _send(self, number: int) -> None:
        with self._sending:
            if self._process is None:
                self._waiting.append(number)
            else:
                self._process.send_signal(number)

    def _obey(self) -> None:
        """Follows standard input: names of signals. Its end is that of the launcher, or of the connection to it."""
        rest = b''
        while piece := os.read(0, 1 << 12):
            *lines, rest = (rest + piece).split(b'\n')
            for line in lines:
                with contextlib.suppress(KeyError):
                    self._send(signal.Signals[line.decode(errors='replace').strip()])
        self._is_over = True
        if self._process is not None:
            self._process.kill_all()

    def _copy_output(self, process: Child) -> None:
        assert process.stdout is not None
        with contextlib.suppress(OSError):  # closed, since something that the training has started still has it
            while piece := os.read(process.stdout.fileno(), 1 << 16):
                first, *more = piece.split(b'\n')
                self._lines[-1] += first
                self._lines.extend(more)
                with contextlib.suppress(OSError):  # nobody reads it any more
                    os.write(1, piece)

    def _report(self, code: int, seconds: float, stacks: StackFiles) -> None:
        output = [line.decode(errors='replace').rpartition('\r')[2] for line in self._lines]
        step = newest_checkpoint(self._config.run_dir)
        crash = Crash(self._number, socket.gethostname(), code, seconds, step, output, stacks=stacks.new(self._number))
        try:
            path = write_crash_report(self._config.run_dir, self._attempt, crash)
        except OSError as error:
            self._say(f'WARNING: process {self._number}: no crash report: {error.strerror}')
        else:
            self._say(f'process {self._number}: crash report in {path}')


def process_number(environment: Mapping[str, str]) -> int:
    """The number of this process, as its engine says it; 0 if none does."""
    return next((int(environment[name]) for name in _NUMBERS if environment.get(name, '').isdecimal()), 0)
