"""Runs the training process of one machine, as every engine starts it: under `srun`, over ssh, in a pod or Ray actor.

It passes signals on, copies the output of the training to its own, and leaves a crash report in the run directory when
the training fails. It exits with the code of the training; of one that was killed by signal n, with 128+n.
"""

import contextlib
import functools
import json
import os
import queue
import re
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any

from pretrax.config import RunConfig
from pretrax.errors import DONE, TRY_AGAIN, Report
from pretrax.launch.crash import Crash, StackFiles, write_crash_report
from pretrax.launch.host_memory import HostMemory
from pretrax.launch.restarts import newest_checkpoint
from pretrax.storage.locate import working_directory
from pretrax.system.children import PASSED_ON, STOP, Child, handling, prepare_training
from pretrax.system.standby import Training, Trainings

_TAIL = 200  # lines of output in a crash report
_PATIENCE = 5.0  # seconds for the last output
_LOOK = 0.5  # seconds between two looks for the first step
# What a lasting node reads and writes, besides `request` and names of signals.
PREPARE = b'{}'  # start a standby
END = b'END'  # end the training
ENDED = re.compile(rb'\0ended (-?\d+)\n')  # a training has ended, with this exit code
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
        lasting: train as often as standard input asks for it, see `request`. The exit code of each training is written
            to standard output, as `ENDED` reads it.
        until_done: the run is continued if its training stops early, also without a request to this process.
        waiting: signals that have arrived already, from `system.children.signals_from_now_on`.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        attempt: str,
        controlled: bool,
        lasting: bool = False,
        until_done: bool = False,
        waiting: list[int] | None = None,
        say: Report = print,
    ):
        self._config, self._attempt, self._say = config, attempt, say
        self._controlled, self._lasting, self._until_done = controlled or lasting, lasting, until_done
        self._variables: Mapping[str, str] = {}  # of this attempt
        self._process: Child | None = None
        self._waiting = waiting if waiting is not None else []  # signals that arrived before there was a process
        self._sending = threading.RLock()  # a signal handler may interrupt the thread that holds it
        self._is_asked = any(number in STOP for number in self._waiting)  # to stop, by the engine
        self._is_over = False  # the launcher has ended this attempt, or the connection
        self._requests: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()  # None: there is no other one
        self._lines: deque[bytes] = deque([b''], maxlen=_TAIL)

    def run(self, command: Sequence[str], check: Sequence[str] | None = None, standbys: bool = True) -> int:
        """Trains. Returns the exit code; 0 if it is lasting.

        Args:
            command: program and arguments of the training.
            check: those of a check of this machine before it. If it fails, nothing is trained, and its exit code is
                returned.
            standbys: if it is lasting, keep a standby.
        """
        # A lasting node outlives its trainings, so it can keep their newest states in memory.
        memory = HostMemory() if self._lasting else contextlib.nullcontext()
        trainings = Trainings(command, lambda place: _ENVIRONMENT | os.environ, standbys)
        with handling(PASSED_ON, self._pass_on), memory as held, contextlib.closing(trainings):
            os.environ.update(held.environment if held is not None else {})
            if self._controlled:
                threading.Thread(target=self._obey, name='control', daemon=True).start()
            if not self._lasting:
                return self._train(trainings, check)
            while (request := self._requests.get()) is not None:
                if request:
                    self._attempt, self._variables = request['attempt'], request['environment']
                    os.environ.update(self._variables)
                    os.write(1, b'\0ended %d\n' % self._train(trainings, check))
                else:
                    trainings.prepare([0])
            return DONE

    def _train(self, trainings: Trainings, check: Sequence[str] | None) -> int:
        number = process_number(os.environ)
        directory = working_directory(self._config.run_dir, number)
        if check is not None and (failed := self._run(lambda output: self._check(check, output))):
            is_passing = self._is_asked or failed == TRY_AGAIN or failed < 0
            return TRY_AGAIN if is_passing else failed
        if self._is_asked:
            return TRY_AGAIN
        stacks, began = StackFiles(directory, [number]), time.monotonic()
        prepare = functools.partial(trainings.prepare, [0]) if self._lasting else None
        code = self._run(lambda output: trainings.start(0, self._variables, output, output), prepare)
        if not self._is_over and (code not in (DONE, TRY_AGAIN) or stacks.new(number)):
            self._report(number, code, time.monotonic() - began, stacks)
        if (
            code == DONE
            and (self._is_asked or self._until_done)
            and newest_checkpoint(self._config.run_dir) < self._config.steps
        ):
            return 128 + signal.SIGTERM if self._until_done else TRY_AGAIN
        return 128 - code if code < 0 else code

    def _check(self, command: Sequence[str], output: int) -> Child:
        return Child(command, _ENVIRONMENT | os.environ, prepare_training, stdout=output, stderr=output)

    def _run(self, start: Callable[[int], Child], prepare: Callable[[], None] | None = None) -> int:
        """Runs a program, and copies its output. Returns its exit code; negative: the signal that killed it.

        Args:
            start: starts the program, which writes to this file descriptor.
            prepare: called once the first step of a training is done.
        """
        reading, writing = os.pipe()
        with open(reading, 'rb', 0) as output:
            try:
                process = start(writing)
            finally:
                os.close(writing)
            with self._sending:
                self._process = process
                while self._waiting:
                    process.send_signal(self._waiting.pop(0))
            copier = threading.Thread(target=self._copy_output, args=(output,), name='output', daemon=True)
            copier.start()
            try:
                if self._is_over:
                    process.kill_all()
                while isinstance(process, Training) and prepare and not process.has_stepped():
                    process.wait_up_to(_LOOK)
                    if process.returncode is not None:
                        return process.returncode
                if prepare:
                    prepare()
                return process.wait()
            finally:
                process.kill_all()  # what it has started has the same output, and may still run
                copier.join(_PATIENCE)  # a service that has left the session may keep the output open
                self._process = None
                process.end(_PATIENCE)

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
        """Follows standard input: names of signals, and if this lasts, requests. Its end is that of the launcher, or of
        the connection to it.
        """
        rest = b''
        while piece := os.read(0, 1 << 12):
            *lines, rest = (rest + piece).split(b'\n')
            for line in lines:
                if line == END:
                    self._end()
                elif line.startswith(b'{'):
                    self._waiting.clear()
                    self._is_over = self._is_asked = False
                    self._requests.put(json.loads(line))
                else:
                    with contextlib.suppress(KeyError):
                        self._send(signal.Signals[line.decode(errors='replace').strip()])
        self._requests.put(None)
        self._end()

    def _end(self) -> None:
        with self._sending:
            self._is_over = True
            if self._process is not None:
                self._process.kill_all()

    def _copy_output(self, output: IO[bytes]) -> None:
        self._lines = deque([b''], maxlen=_TAIL)
        with contextlib.suppress(OSError):  # closed, since something that the training has started still has it
            while piece := os.read(output.fileno(), 1 << 16):
                first, *more = piece.split(b'\n')
                self._lines[-1] += first
                self._lines.extend(more)
                with contextlib.suppress(OSError):  # nobody reads it any more
                    os.write(1, piece)

    def _report(self, number: int, code: int, seconds: float, stacks: StackFiles) -> None:
        output = [line.decode(errors='replace').rpartition('\r')[2] for line in self._lines]
        step = newest_checkpoint(self._config.run_dir)
        crash = Crash(number, socket.gethostname(), code, seconds, step, output, stacks=stacks.new(number))
        try:
            path = write_crash_report(self._config.run_dir, self._attempt, crash)
        except OSError as error:
            self._say(f'WARNING: process {number}: no crash report: {error.strerror}')
        else:
            self._say(f'process {number}: crash report in {path}')


def request(attempt: str, environment: Mapping[str, str]) -> bytes:
    """The line that asks for a training, with the label of its attempt and its identity."""
    return json.dumps({'attempt': attempt, 'environment': dict(environment)}).encode()


def process_number(environment: Mapping[str, str]) -> int:
    """The number of this process, as its engine says it; 0 if none does."""
    return next((int(environment[name]) for name in _NUMBERS if environment.get(name, '').isdecimal()), 0)
