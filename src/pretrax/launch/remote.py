"""Processes on other machines, each behind a local one: `ssh HOST ...`, or `srun -w NODE ...`.

The command on the machine is `pretrax launch node`. With `--lasting` it is an agent that outlives the attempts: it is
asked for each training, and keeps a standby. With `--controlled` it trains once. It ends when its standard input ends,
which is when the local process or the connection does, and takes signals from there.
"""

import os
import pathlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import batched
from typing import Any, NamedTuple

from pretrax.launch.group import Group, copy_output, last_lines, output_file
from pretrax.launch.node import END, ENDED, PREPARE
from pretrax.system.children import Child

_PATIENCE = 10.0  # seconds for a machine to end its processes
_MARK = 20  # bytes of the longest `ENDED`


class RemoteProcess(NamedTuple):
    """How a process on another machine is started."""

    host: str  # the machine, as the user names it
    command: Sequence[str]  # the local program and its arguments; it ends with the exit code of the remote one
    environment: Mapping[str, str] | None = None  # environment of the local program
    request: bytes | None = None  # what asks an agent for the training; None: the command trains, and ends with it
    program: Callable[..., Any] = Child  # starts the command; what it returns has the methods of a `Child`


class Agent:
    """The program on another machine, and the output of its trainings.

    Args:
        directory: see `Agents`.
    """

    def __init__(self, process: RemoteProcess, directory: pathlib.Path):
        self._directory, self._lasts = directory, process.request is not None
        self._number, self._begin = 0, 0
        self._code: int | None = None  # of the training
        self._has_ended = threading.Event()  # the training, or the program
        streams: dict[str, Any] = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'stderr': subprocess.STDOUT}
        self._program = process.program(process.command, process.environment, **streams)
        self._copier = threading.Thread(target=self._copy, name='output', daemon=True)

    def begin(self, number: int, request: bytes | None) -> None:
        """Lets it train as the process of this number."""
        self._number, self._code = number, None
        self._has_ended.clear()
        file = output_file(self._directory, number)
        self._begin = file.stat().st_size if file.exists() else 0
        if not self._copier.ident:
            self._copier.start()
        if request is not None:
            self.write(request)

    def write(self, line: bytes) -> None:
        """Writes a line to its standard input."""
        self._program.write_line(line)

    def is_ready(self) -> bool:
        """Whether it can be asked for another training."""
        return self._lasts and self._program.poll() is None

    def code(self) -> int | None:
        """The exit code of its training, or of the program if that has ended; None: it trains."""
        code = self._program.poll() if self._code is None else self._code
        return None if code is None else from_shell(code)

    def ask_to_end(self, and_leave: bool = False) -> None:
        """Asks it to end the training, and perhaps itself."""
        if and_leave or not self.is_ready():
            self._program.close_input()
        elif self._code is None:
            self.write(END)

    def end_by(self, until: float) -> None:
        """Waits for the end of its training, and kills it if that takes too long."""
        if self.is_ready():
            self._has_ended.wait(max(0.0, until - time.monotonic()))
        if not self.is_ready() or self._code is None:
            self.close(until)

    def close(self, until: float) -> None:
        """Ends its standard input, on which its machine kills what runs there, and then the local program."""
        self._program.close_input()
        self._program.wait_up_to(until - time.monotonic())
        self._program.end(_PATIENCE)
        if self._copier.ident:
            self._copier.join(_PATIENCE)

    def tail(self) -> list[str]:
        """The last lines of its training."""
        file = output_file(self._directory, self._number)
        return last_lines(file, self._begin) if file.exists() else []

    def _copy(self) -> None:
        assert self._program.stdout is not None
        held = b''
        with self._program.stdout as received:
            while piece := os.read(received.fileno(), 1 << 16):
                *ended, held = ENDED.split(held + piece)
                for output, code in batched(ended, 2):
                    copy_output(self._directory, self._number, output)
                    self._code = int(code)
                    self._has_ended.set()
                begins = held.find(b'\0', max(0, len(held) - _MARK))  # perhaps the beginning of a mark
                whole, held = (held, b'') if begins < 0 else (held[:begins], held[begins:])
                copy_output(self._directory, self._number, whole)
        copy_output(self._directory, self._number, held)
        self._has_ended.set()


class Agents:
    """The agents of a run, which outlive its attempts.

    Args:
        directory: the run directory on this machine. The output of process i is in `output/process-<i>.txt`; that of
            process 0 also goes to the terminal.
    """

    def __init__(self, directory: pathlib.Path):
        self._directory = directory
        self._of_hosts: dict[str, Agent] = {}

    def begin(self, number: int, process: RemoteProcess) -> Agent:
        """Lets the agent of a host train as the process of this number. It is started if it does not run."""
        (self._directory / 'output').mkdir(parents=True, exist_ok=True)
        agent = self._ready(process)
        agent.begin(number, process.request)
        return agent

    def prepare(self, process: RemoteProcess) -> None:
        """Starts an agent that keeps a standby on a host where nothing trains, if it does not run."""
        if not ((agent := self._of_hosts.get(process.host)) and agent.is_ready()):
            self._ready(process).write(PREPARE)

    def _ready(self, process: RemoteProcess) -> Agent:
        agent = self._of_hosts.get(process.host)
        if agent is None or not agent.is_ready():
            agent = self._of_hosts[process.host] = Agent(process, self._directory)
        return agent

    def close(self) -> None:
        """Ends all of them."""
        for agent in self._of_hosts.values():
            agent.ask_to_end(and_leave=True)
        until = time.monotonic() + _PATIENCE
        while self._of_hosts:
            self._of_hosts.popitem()[1].close(until)


class RemoteGroup(Group):
    """Processes on other machines.

    Args:
        processes: how each is started, in the order of their numbers.
        agents: those of the earlier attempts.
        at_once: start the processes now, instead of with `start_all`.
    """

    def __init__(self, processes: Sequence[RemoteProcess], agents: Agents, at_once: bool = True):
        self._remote, self._agents = processes, agents
        self._started: list[Agent] = []
        if at_once:
            self.start_all()

    def start_all(self) -> None:
        """Starts all processes."""
        try:
            for number, process in enumerate(self._remote):
                self._started.append(self._agents.begin(number, process))
        except BaseException:
            self.end()
            raise

    def __len__(self) -> int:
        return len(self._remote)

    def codes(self) -> dict[int, int]:
        found = {number: agent.code() for number, agent in enumerate(self._started)}
        return {number: code for number, code in found.items() if code is not None}

    def send(self, number: int) -> None:
        for agent in self._started:
            agent.write(signal.Signals(number).name.encode())

    def end(self) -> None:
        """Ends all trainings, and the agents that do not answer."""
        for agent in self._started:
            agent.ask_to_end()
        until = time.monotonic() + _PATIENCE
        for agent in self._started:
            agent.end_by(until)

    def is_there(self, number: int) -> bool:
        """Whether the agent of a process has outlived the end."""
        return number < len(self._started) and self._started[number].is_ready()

    def host(self, number: int) -> str:
        return self._remote[number].host

    def tail(self, number: int) -> list[str]:
        return self._started[number].tail() if number < len(self._started) else []


def from_shell(code: int) -> int:
    """An exit code as Python writes it: 137 of a shell is a process that was killed by signal 9, which is -9 here."""
    return 128 - code if 128 < code < 128 + signal.NSIG else code
