"""A debugger attaches to a run that waits for it, and stops at a breakpoint, as docs/editors.md says."""

import contextlib
import os
import socket
import subprocess
import sys
import time

import pytest

from messages import read_message, write_message
from repository.commands import REPOSITORY

STEP = REPOSITORY / 'src' / 'pretrax' / 'train' / 'step.py'
WAITING = 'python -m debugpy --listen 5678 --wait-for-client -m pretrax train configs/quickstart.yaml'
SMALL = [
    'steps=1',
    'schedule.warmup=1',
    'data={name: synthetic, vocab_size: 64}',
    'model.n_layers=1',
    'mesh.d=1',
    'eval.every=0',
]


class Debugger:
    """Speaks the Debug Adapter Protocol, as an editor does."""

    def __init__(self, stream):
        self._stream, self._sent, self._events = stream, 0, []

    def send(self, command, **arguments):
        self._sent += 1
        write_message(self._stream, {'seq': self._sent, 'type': 'request', 'command': command, 'arguments': arguments})
        return self._sent

    def ask(self, command, **arguments):
        number = self.send(command, **arguments)
        while (message := read_message(self._stream)).get('request_seq') != number:
            self._events.append(message)
        assert message['success'], message
        return message.get('body')

    def wait(self, event):
        while not (found := [message for message in self._events if message.get('event') == event]):
            self._events.append(read_message(self._stream))
            assert self._events[-1].get('event') != 'terminated', self._events
        return found[0].get('body')


@pytest.mark.slow
def test_a_debugger_attaches_to_a_waiting_run_and_stops_in_the_step(tmp_path):
    assert f'uv run {WAITING}' in (REPOSITORY / 'docs' / 'editors.md').read_text()
    with socket.create_server(('127.0.0.1', 0)) as opened:
        port = opened.getsockname()[1]
    words = WAITING.replace('5678', str(port)).split()[1:]
    command = [sys.executable, *words, *SMALL, f'run_dir={tmp_path / "run"}']
    environment = {name: value for name, value in os.environ.items() if name != 'XLA_FLAGS'}  # one device
    line = 1 + STEP.read_text().partition(' = gradients(')[0].count('\n')
    with subprocess.Popen(command, cwd=REPOSITORY, env=environment) as process:
        try:
            with connected(port, process) as stream:
                debugger = Debugger(stream)
                debugger.ask('initialize', adapterID='debugpy')
                debugger.send('attach', connect={'host': '127.0.0.1', 'port': port})
                debugger.wait('initialized')
                [placed] = debugger.ask('setBreakpoints', source={'path': str(STEP)}, breakpoints=[{'line': line}])[
                    'breakpoints'
                ]
                assert placed['verified']
                debugger.ask('configurationDone')
                stopped = debugger.wait('stopped')
                assert stopped['reason'] == 'breakpoint'
                frames = debugger.ask('stackTrace', threadId=stopped['threadId'])['stackFrames']
                assert (frames[0]['source']['path'], frames[0]['line']) == (str(STEP), line)
        finally:
            process.kill()


@contextlib.contextmanager
def connected(port, process):
    """A connection to a port, once the process listens."""
    while process.poll() is None:
        with contextlib.suppress(ConnectionRefusedError):
            with socket.create_connection(('127.0.0.1', port)) as connection, connection.makefile('rwb') as stream:
                yield stream
            return
        time.sleep(0.1)
    raise AssertionError(f'the run ended with {process.returncode}')
