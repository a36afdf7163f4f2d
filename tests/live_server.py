"""The server of the live page in a thread, for tests, and runs that a test writes."""

import asyncio
import contextlib
import math
import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pretrax.observe.attempts import note
from pretrax.observe.metrics import MetricsLog
from pretrax.observe.step_lines import SampleLog
from pretrax.serve.access import Keys
from pretrax.serve.listen import bind
from pretrax.view.live.runs import Places
from pretrax.view.live.server import watch_in_browser


@contextlib.contextmanager
def watching(*paths: object, port: int = 0, keys: Keys | None = None) -> Iterator[str]:
    """Serves the live page of these paths, and yields its address."""
    listening, made = threading.Event(), {}

    async def serve() -> None:
        made['stop'], made['loop'] = asyncio.Event(), asyncio.get_running_loop()
        await watch_in_browser(
            Places([str(path) for path in paths]), opened,
            keys=keys, local=True, report=print, listening=listening.set, stop=made['stop'],
        )  # fmt: skip

    with bind('127.0.0.1', port) as opened:
        number = opened.getsockname()[1]
        thread = threading.Thread(target=lambda: asyncio.run(serve()))
        thread.start()
        assert listening.wait(30)
        try:
            yield f'http://127.0.0.1:{number}'
        finally:
            made['loop'].call_soon_threadsafe(made['stop'].set)
            thread.join()


class Relay:
    """Passes connections on to a server, until they are cut."""

    def __init__(self, server: str):
        self._to = ('127.0.0.1', int(server.rpartition(':')[2]))
        self._listening = socket.create_server(('127.0.0.1', 0))
        self._open: list[socket.socket] = []
        self.url = f'http://127.0.0.1:{self._listening.getsockname()[1]}'

    def __enter__(self) -> 'Relay':
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self.cut()

    def cut(self) -> None:
        """Cuts the connections that are open."""
        while self._open:
            with contextlib.suppress(OSError):
                self._open[-1].shutdown(socket.SHUT_RDWR)
            self._open.pop().close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                pair = self._listening.accept()[0], socket.create_connection(self._to)
                self._open += pair
                for source, target in (pair, pair[::-1]):
                    threading.Thread(target=self._pass_on, args=(source, target), daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while content := source.recv(65536):
                target.sendall(content)


class WrittenRun:
    """A run directory that a test writes as a training does."""

    def __init__(self, directory: Path, steps: int = 100):
        self.started = time.time()
        self.directory, self._random = directory, random.Random(directory.name)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / 'config.yaml').write_text(f'name: {directory.name}\nsteps: {steps}\n')
        self.begin(0)

    def begin(self, step: int) -> None:
        """Begins an attempt after this step, as a run that resumes: later lines are removed."""
        self.step = step
        note(self.directory, 'began', step=step)
        MetricsLog(self.directory / 'metrics.jsonl', resumed_step=step, say=lambda _: None).close()

    def train(self, steps: int, **values: float) -> None:
        """Writes a line for each step; `values` replace those of the last one."""
        with MetricsLog(self.directory / 'metrics.jsonl', resumed_step=self.step, say=lambda _: None) as log:
            for number in range(steps):
                self.step += 1
                line: dict[str, Any] = {
                    'step': self.step, 'time': self.started + self.step, 'tokens': 512 * self.step,
                    'loss': 3 + math.exp(-self.step / 20) + self._random.gauss(0, 0.05),
                    'grad_norm': 1 + self._random.random(), 'tokens_per_second': 1000.0, 'mfu': 0.4,
                }  # fmt: skip
                log.write(line | (values if number == steps - 1 else {}))

    def sample(self, prompt: str, continuation: str) -> None:
        with contextlib.closing(SampleLog(self.directory, self.step, lambda _: None)) as log:
            log.write(self.step, [prompt], [prompt + continuation])

    def end(self, event: str, **what: Any) -> None:
        """Writes how the attempt ended."""
        note(self.directory, event, step=self.step, **what)
