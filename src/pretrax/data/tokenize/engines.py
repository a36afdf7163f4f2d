"""Engines call a function for each shard: in this process, in local processes, or in tasks of a Ray cluster.

All engines give the same results. They call `function(*arguments, progress)`. The function and its arguments must be
picklable, and the function may report `progress(bytes, tokens)`.

A local process is a fresh interpreter (data/tokenize/worker.py) that imports neither JAX nor the caller's program, so a
script needs no `if __name__ == '__main__'`.
"""

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast

from pretrax.data.corpus.corpus import Shard
from pretrax.data.tokenize.encode_shard import Job, Progress
from pretrax.data.tokenize.tokenized_shards import TokenizedShard, write_shard
from pretrax.data.tokenize.worker import send
from pretrax.errors import UserError
from pretrax.storage.connection import s3_access

type EngineName = Literal['local', 'ray']


class Engine(Protocol):
    """Calls functions for shards, possibly in parallel."""

    name: str  # the kind and number of workers, for messages

    def unordered(
        self, function: Callable[..., Any], calls: Sequence[tuple], progress: Progress
    ) -> Iterator[tuple[int, Any]]:
        """Yields (number, result) of each call when it finishes. The first UserError of a call stops the rest."""
        ...

    def tokenize(
        self, job: Job, directory: Path, shards: Sequence[tuple[int, Shard]], progress: Progress
    ) -> Iterator[tuple[int, TokenizedShard]]:
        """Yields (number, totals) of each numbered shard when it is written to `directory`."""
        calls = [(job, directory, number, shard) for number, shard in shards]
        for call, tokenized in self.unordered(write_shard, calls, progress):
            yield shards[call][0], tokenized

    def map(self, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        """Yields the function of each item, in order."""
        waiting: dict[int, Any] = {}
        position = 0
        calls = [(function, item) for item in items]
        for number, result in self.unordered(_without_progress, calls, lambda *_: None):
            waiting[number] = result
            while position in waiting:
                yield waiting.pop(position)
                position += 1

    def close(self) -> None:
        """Stops the workers."""


def _without_progress(function: Callable[[Any], Any], argument: Any, progress: Progress) -> Any:
    return function(argument)


class InProcess(Engine):
    """Runs all calls in this process."""

    name = 'this process'

    def unordered(
        self, function: Callable[..., Any], calls: Sequence[tuple], progress: Progress
    ) -> Iterator[tuple[int, Any]]:
        for number, arguments in enumerate(calls):
            yield number, function(*arguments, progress)


class Processes(Engine):
    """Calls functions in n processes."""

    def __init__(self, n: int):
        self._n = n
        self._workers: list[subprocess.Popen] = []
        self._threads: list[threading.Thread] = []
        self.name = f'{n} processes'

    def unordered(
        self, function: Callable[..., Any], calls: Sequence[tuple], progress: Progress
    ) -> Iterator[tuple[int, Any]]:
        waiting = iter(enumerate(calls))
        lock = threading.Lock()
        answers: queue.SimpleQueue[tuple[int, str, Any]] = queue.SimpleQueue()

        def serve(worker: subprocess.Popen) -> None:
            while True:
                with lock:
                    number, arguments = next(waiting, (-1, ()))
                if number < 0:
                    return
                for kind, answer in _ask(worker, function, arguments):
                    answers.put((number, kind, answer))
                    if kind in ('user error', 'failure'):
                        return

        while len(self._workers) < min(self._n, len(calls)):
            self._workers.append(_start())
        self._threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in self._workers]
        for thread in self._threads:
            thread.start()
        left = len(calls)
        while left:
            number, kind, answer = answers.get()
            match kind:
                case 'progress':
                    progress(*answer)
                case 'result':
                    left -= 1
                    yield number, answer
                case 'user error':
                    raise UserError(answer)
                case _:
                    raise RuntimeError(f'a worker failed:\n{answer}')

    def close(self) -> None:
        """Kills the processes."""
        for worker in self._workers:
            worker.kill()
        for thread in self._threads:  # each reads the stream of a worker until it ends
            thread.join()
        for worker in self._workers:
            worker.wait()
            for stream in (worker.stdin, worker.stdout):
                with contextlib.suppress(OSError):  # unsent data is not needed
                    assert stream is not None
                    stream.close()
        self._workers.clear()


def _ask(worker: subprocess.Popen, function: Callable[..., Any], arguments: tuple) -> Iterator[tuple[str, Any]]:
    """Yields the answers to one call: progress reports, then the result or the error."""
    assert worker.stdout is not None
    try:
        send(cast(BinaryIO, worker.stdin), (function, arguments))
        kind = ''
        while kind in ('', 'progress'):
            kind, answer = pickle.load(worker.stdout)
            yield kind, answer
    except (EOFError, BrokenPipeError, pickle.UnpicklingError):
        code = worker.wait()
        how = signal.Signals(-code).name if code < 0 else f'exit code {code}'
        yield (
            'user error',
            f'data: a worker process has ended ({how})\n'
            '  if it ran out of memory, use fewer processes: data.workers=1\n'
            '  the next run continues with the unfinished shards',
        )


def _start() -> subprocess.Popen:
    # Each worker uses one core, so libraries must not start threads. Workers also need the caller's import paths, and
    # the section `storage` of the configuration, which they do not read.
    of_storage = zip(('AWS_ENDPOINT_URL', 'AWS_REGION', 'AWS_PROFILE'), s3_access(), strict=True)
    environment = os.environ | {
        'RAYON_NUM_THREADS': '1',
        'TOKENIZERS_PARALLELISM': 'false',
        'PYTHONPATH': os.pathsep.join(path for path in sys.path if path),
        **{name: value for name, value in of_storage if value},
    }
    return subprocess.Popen(
        [sys.executable, '-m', 'pretrax.data.tokenize.worker'],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
