"""Starts and watches the process that checks the devices (`probe`)."""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence

from pretrax.doctor.checks import DEVICES, JOIN, JOIN_FIX
from pretrax.doctor.findings import Finding, failure
from pretrax.system.children import Child

_NOISE = ('WARNING', 'I0', 'W0', '*** Check', '    @', '===', 'RPC:', 'Fatal Python')


class ProbeProcess:
    """The process, which imports JAX at once and waits for `run`. The end of the block kills it.

    Args:
        arguments: CONFIG and KEY=VALUE of the command line; may be empty.
    """

    def __init__(self, arguments: Sequence[str]):
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end of the block
        variables = {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false', 'PYTHONWARNINGS': 'ignore'}
        command = [sys.executable, '-m', 'pretrax.doctor.probe', *(arguments or [''])]
        streams = {'stdin': subprocess.PIPE, 'stdout': subprocess.PIPE, 'stderr': self._errors}
        self._process = Child(command, variables | os.environ, **streams)

    def __enter__(self) -> 'ProbeProcess':
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill_all()
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._errors):
            assert file is not None
            with contextlib.suppress(OSError):
                file.close()

    def run(self, seconds: float) -> list[Finding]:
        """The findings of all checks.

        Args:
            seconds: for each check.
        """
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f'{seconds}\n'.encode())
            self._process.stdin.flush()
        lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=self._read, args=(lines,), daemon=True).start()
        found: list[Finding] = []
        fixes, at = {check.name: check.fix for check in DEVICES} | {JOIN: JOIN_FIX}, JOIN
        until = time.monotonic() + seconds
        while True:
            try:
                line = lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                found.append(failure(at, f'no result within {seconds:.0f} s', fixes[at]))
                return found
            if not line:
                found.append(failure(at, f'{self._end()}', fixes[at]))
                return found
            value = json.loads(line)
            if value == '':
                return found
            if isinstance(value, str):
                at, until = value, time.monotonic() + seconds
            else:
                found.append(Finding.from_json(value))

    def _read(self, lines: queue.Queue[bytes]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            lines.put(line)
        lines.put(b'')

    def _end(self) -> str:
        """How the process has ended, in a line."""
        self._process.wait_up_to(10)
        code = self._process.poll() or 0
        how = f'ended by {signal.Signals(-code).name}' if code < 0 else f'ended with exit code {code}'
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors='replace').splitlines() if line.strip()]
        useful = [line for line in lines if not line.startswith(_NOISE)] or lines
        return f'{how}: {useful[-1][:200]}' if useful else how
