"""Engines call a function for each shard: in this process, in local processes, or in tasks of a Ray cluster.

All engines give the same results. They call `function(*arguments, progress)`. The function and its arguments must be
picklable, and the function may report `progress(bytes, tokens)`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from pretrax.data.corpus.corpus import Shard
from pretrax.data.tokenize.encode_shard import Job, Progress
from pretrax.data.tokenize.tokenized_shards import TokenizedShard, write_shard
from pretrax.machine.cores import usable_cores

type EngineName = Literal['local', 'ray']


class Engine(Protocol):
    """Calls functions for shards, possibly in parallel."""

    @property
    def name(self) -> str:
        """The kind and number of workers, for messages."""
        ...

    def unordered(
        self, function: Callable[..., Any], calls: Sequence[tuple], progress: Progress
    ) -> Iterator[tuple[int, Any]]:
        """Yields (number, result) of each call when it finishes. The first UserError of a call stops the rest."""
        ...

    def tokenize(
        self, job: Job, directory: Path, shards: Sequence[tuple[int, Shard]], progress: Progress
    ) -> Iterator[tuple[int, TokenizedShard]]:
        """Yields (number, totals) of each numbered shard when it is written to `directory`."""
        ...

    def close(self) -> None:
        """Stops the workers."""
        ...


class InProcess:
    """An `Engine` that runs all calls in this process."""

    name = 'this process'

    def unordered(
        self, function: Callable[..., Any], calls: Sequence[tuple], progress: Progress
    ) -> Iterator[tuple[int, Any]]:
        for number, arguments in enumerate(calls):
            yield number, function(*arguments, progress)

    def tokenize(
        self, job: Job, directory: Path, shards: Sequence[tuple[int, Shard]], progress: Progress
    ) -> Iterator[tuple[int, TokenizedShard]]:
        for number, shard in shards:
            yield number, write_shard(job, directory, number, shard, progress)

    def close(self) -> None:
        pass


def make_engine(name: EngineName, workers: int | None, n_shards: int) -> Engine:
    """Makes an engine for `n_shards` shards; `workers` None: one per core, or per CPU of the cluster."""
    if name == 'ray':
        from pretrax.data.tokenize.engine_ray import Ray

        return Ray(workers)
    n_workers = min(workers or usable_cores(), n_shards)
    if n_workers <= 1:
        return InProcess()
    from pretrax.data.tokenize.engine_local import Processes

    return Processes(n_workers)


def in_order(engine: Engine, function: Callable[..., Any], calls: Iterable[tuple], progress: Progress) -> Iterator[Any]:
    """Yields the results of the calls in order."""
    waiting: dict[int, Any] = {}
    position = 0
    for number, result in engine.unordered(function, list(calls), progress):
        waiting[number] = result
        while position in waiting:
            yield waiting.pop(position)
            position += 1
