"""Processes on other machines, each behind a local one: `ssh HOST ...`, or `srun -w NODE ...`.

The command on the machine is `pretrax launch node --controlled`. It ends when its standard input ends, which is when
the local process or the connection does, and takes signals from there.
"""

import os
import pathlib
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pretrax.launch.group import Group, copy_output, last_lines, output_file
from pretrax.system.children import Child

_PATIENCE = 10.0  # seconds for a machine to end its processes


class RemoteProcess(NamedTuple):
    """How a process on another machine is started."""

    host: str  # the machine, as the user names it
    command: Sequence[str]  # the local program and its arguments; it ends with the exit code of the remote one
    environment: Mapping[str, str] | None = None  # environment of the local program


class RemoteGroup(Group):
    """Processes on other machines.

    Args:
        processes: how each is started, in the order of their numbers.
        directory: the run directory on this machine. The output of process i is in `output/process-<i>.txt`; that of
            process 0 also goes to the terminal.
        at_once: start the processes now, instead of with `start_all`.
    """

    def __init__(self, processes: Sequence[RemoteProcess], directory: pathlib.Path, at_once: bool = True):
        self._remote, self._directory = processes, directory
        self._processes: list[Child] = []
        self._begins: list[int] = []  # offset at which the output of this attempt begins, per process
        self._copier: threading.Thread | None = None
        (directory / 'output').mkdir(parents=True, exist_ok=True)
        if at_once:
            self.start_all()

    def start_all(self) -> None:
        """Starts all processes."""
        try:
            for number, process in enumerate(self._remote):
                self._start(number, process)
        except BaseException:
            self.end()
            raise

    def _start(self, number: int, process: RemoteProcess) -> None:
        with output_file(self._directory, number).open('ab') as output:
            self._begins.append(output.tell())
            streams = {'stdin': subprocess.PIPE, 'stdout': output if number else subprocess.PIPE}
            self._processes.append(Child(process.command, process.environment, stderr=subprocess.STDOUT, **streams))
        if number == 0:
            self._copier = threading.Thread(target=self._copy, name='output', daemon=True)
            self._copier.start()

    def _copy(self) -> None:
        received = self._processes[0].stdout
        assert received is not None
        with received:
            while piece := os.read(received.fileno(), 1 << 16):
                copy_output(self._directory, 0, piece)

    def __len__(self) -> int:
        return len(self._remote)

    def codes(self) -> dict[int, int]:
        found = {number: process.poll() for number, process in enumerate(self._processes)}
        return {number: from_shell(code) for number, code in found.items() if code is not None}

    def send(self, number: int) -> None:
        for process in self._processes:
            process.tell(number)

    def end(self) -> None:
        """Ends the standard input of all processes, on which their machines kill them, and then the local processes."""
        for process in self._processes:
            process.close_input()
        until = time.monotonic() + _PATIENCE
        for process in self._processes:
            process.wait_up_to(until - time.monotonic())
            process.kill_all()
            process.wait_up_to(_PATIENCE)
        if self._copier is not None:
            self._copier.join(_PATIENCE)
            self._copier = None

    def host(self, number: int) -> str:
        return self._remote[number].host

    def tail(self, number: int) -> list[str]:
        if number >= len(self._begins):  # it was not started
            return []
        return last_lines(output_file(self._directory, number), self._begins[number])


def from_shell(code: int) -> int:
    """An exit code as Python writes it: 137 of a shell is a process that was killed by signal 9, which is -9 here."""
    return 128 - code if 128 < code < 128 + signal.NSIG else code
