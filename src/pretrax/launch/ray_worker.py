"""What a Ray actor does for a launcher: it runs `pretrax launch node` on its node. It needs no Ray."""

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from pretrax.doctor.host_facts import Facts, facts
from pretrax.system.children import Child

_PATIENCE = 10.0  # seconds for the node command to end its training
_LOOK = 0.1  # seconds between two looks for output


class RayWorker:
    """The process of one node. Several methods run at once."""

    def __init__(self) -> None:
        self._process: Child | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  until the actor ends

    def facts(self, directory: str, words: Sequence[str], token: str) -> Facts:
        """See `pretrax.doctor.host_facts`."""
        try:
            os.chdir(directory)
        except OSError as error:
            return {'problem': f'{directory}: {error.strerror}\nuse a directory that all nodes share: --directory PATH'}
        return facts(words[0], words[1:], token)

    def free_port(self) -> int:
        """A free port of this machine."""
        with socket.socket() as free:
            free.bind(('', 0))
            return free.getsockname()[1]

    def run(self, arguments: Sequence[str], directory: str, environment: Mapping[str, str]) -> int:
        """Runs Python to its end, and returns its exit code."""
        streams = {'stdin': subprocess.PIPE, 'stdout': self._output, 'stderr': subprocess.STDOUT}
        command, variables = [sys.executable, *arguments], {**os.environ, **environment}
        self._process = Child(command, variables, cwd=directory, **streams)
        return self._process.wait()

    def send(self, number: int) -> None:
        """Passes a signal to the training."""
        if self._process is not None:
            self._process.tell(number)

    def end(self) -> None:
        """Kills the process, and what it has started."""
        if self._process is None:
            return
        self._process.close_input()
        self._process.wait_up_to(_PATIENCE)
        self._process.kill_all()
        self._process.wait_up_to(_PATIENCE)

    def read(self, begin: int, seconds: float) -> bytes:
        """The output from an offset on. If there is none, it waits for some seconds."""
        until = time.monotonic() + seconds
        while not (piece := os.pread(self._output.fileno(), 1 << 16, begin)) and time.monotonic() < until:
            time.sleep(_LOOK)
        return piece
