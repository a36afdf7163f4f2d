"""What calls a function for each shard of a text: this process, processes of this machine, or tasks of a Ray cluster.

Results are the same whichever it is. A function is called as `function(*arguments, progress)`; it and its arguments are
picklable, and it may tell `progress(bytes, tokens)` meanwhile.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from pretrax.data.corpus.corpus import Shard
from pretrax.data.tokenize.pieces import Job, Piece, Progress, write_piece
from pretrax.machine.cores import usable_cores

type EngineName = Literal['local', 'ray']


class Engine(Protocol):
    @property
    def name(self) -> str:
        """What works, in words."""
        ...

    def unordered(
        self, function: Callable[..., Any], calls: Sequence[tuple], progress: Progress
    ) -> Iterator[tuple[int, Any]]:
        """(number, result) of each call, as they finish. Raises UserError for the first that fails; the rest stops."""
        ...

    def pieces(
        self, job: Job, directory: Path, shards: Sequence[tuple[int, Shard]], progress: Progress
    ) -> Iterator[tuple[int, Piece]]:
        """(shard number, piece) of each numbered shard, as they are finished."""
        ...

    def close(self) -> None: ...


class InProcess:
    """One call after the other, here."""

    name = 'this process'

    def unordered(
        self, function: Callable[..., Any], calls: Sequence[tuple], progress: Progress
    ) -> Iterator[tuple[int, Any]]:
        for number, arguments in enumerate(calls):
            yield number, function(*arguments, progress)

    def pieces(
        self, job: Job, directory: Path, shards: Sequence[tuple[int, Shard]], progress: Progress
    ) -> Iterator[tuple[int, Piece]]:
        for number, shard in shards:
            yield number, write_piece(job, directory, number, shard, progress)

    def close(self) -> None:
        pass


def make_engine(name: EngineName, workers: int | None, n_shards: int) -> Engine:
    """The engine that a configuration names, for so many shards; `workers` None takes every core (of the cluster)."""
    if name == 'ray':
        from pretrax.data.tokenize.engine_ray import Ray

        return Ray(workers)
    n_workers = min(workers or usable_cores(), n_shards)
    if n_workers <= 1:
        return InProcess()
    from pretrax.data.tokenize.engine_local import Processes

    return Processes(n_workers)


def in_order(engine: Engine, function: Callable[..., Any], calls: Iterable[tuple], progress: Progress) -> Iterator[Any]:
    """The results of the calls, in their order."""
    waiting: dict[int, Any] = {}
    position = 0
    for number, result in engine.unordered(function, list(calls), progress):
        waiting[number] = result
        while position in waiting:
            yield waiting.pop(position)
            position += 1
