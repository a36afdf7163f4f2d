"""What a Ray actor does for a launcher: it runs `pretrax launch node` on its node. It needs no Ray."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence

from pretrax.launch.host_facts import Facts, facts

_PATIENCE = 10.0  # seconds for the node command to end its training
_LOOK = 0.1  # seconds between two looks for output


class RayWorker:
    """The process of one node. Several methods run at once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._output = tempfile.TemporaryFile()  # noqa: SIM115  until the actor ends

    def facts(self, directory: str, words: Sequence[str], token: str) -> Facts:
        """See `pretrax.launch.host_facts`."""
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
        self._process = subprocess.Popen(
            [sys.executable, *arguments], cwd=directory, env={**os.environ, **environment}, stdin=subprocess.PIPE,
            stdout=self._output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        return self._process.wait()

    def send(self, number: int) -> None:
        """Passes a signal to the training."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it has ended
                self._process.stdin.write(f'{signal.Signals(number).name}\n'.encode())
                self._process.stdin.flush()

    def end(self) -> None:
        """Kills the process, and what it has started."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it waits for a device or a file server
            self._process.wait(_PATIENCE)

    def read(self, begin: int, seconds: float) -> bytes:
        """The output from an offset on. If there is none, it waits for some seconds."""
        until = time.monotonic() + seconds
        while not (piece := os.pread(self._output.fileno(), 1 << 16, begin)) and time.monotonic() < until:
            time.sleep(_LOOK)
        return piece
