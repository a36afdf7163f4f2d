"""Tokenizes in tasks of a Ray cluster, for text that is too large for one machine.

Every node needs access to the text under the same paths or URLs. Tokens return through Ray's object store, and only the
machine that started the run writes them, so the output directory need not be shared.
"""

import concurrent.futures
import queue
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pretrax.data.corpus.corpus import Shard
from pretrax.data.corpus.selection import RowCounts
from pretrax.data.tokenize.encode_shard import EncodedDocuments, Job, Progress, encode_shard
from pretrax.data.tokenize.engines import Engine
from pretrax.data.tokenize.tokenized_shards import ShardWriter, TokenizedShard
from pretrax.errors import UserError, first_line
from pretrax.system.ray_connection import connect_ray

_RESULTS_AHEAD = 4  # per task, before it waits until they are written


class Ray(Engine):
    """An engine on the cluster of RAY_ADDRESS, or on a local Ray if it is not set.

    Args:
        workers: tasks that run at once; None: one per CPU of the cluster.
    """

    def __init__(self, workers: int | None):
        ray: Any = sys.modules.get('ray')
        self._started = ray is None or not ray.is_initialized()
        self._ray: Any = connect_ray(None, 'data.engine: ') if self._started else ray
        self._n = workers or max(1, int(self._ray.cluster_resources().get('CPU', 1)))
        self.name = f'{self._n} tasks of Ray on {len(self._ray.nodes())} nodes'

    def unordered(
        self, function: Callable[..., Any], calls: Sequence[tuple], progress: Progress
    ) -> Iterator[tuple[int, Any]]:
        remote = self._ray.remote(_call)
        yield from self._run_all(calls, lambda arguments: self._ray.get(remote.remote(function, arguments)))

    def tokenize(
        self, job: Job, directory: Path, shards: Sequence[tuple[int, Shard]], progress: Progress
    ) -> Iterator[tuple[int, TokenizedShard]]:
        remote = self._ray.remote(_tokenize).options(
            num_returns='streaming', _generator_backpressure_num_objects=_RESULTS_AHEAD
        )
        reports: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

        def write(number: int, shard: Shard) -> TokenizedShard:
            with ShardWriter(directory, number) as writer:
                for reference in remote.remote(job, shard):
                    documents = self._ray.get(reference)
                    if not isinstance(documents, EncodedDocuments):
                        return writer.finish(*documents)
                    writer.append(documents)
                    reports.put((documents.n_bytes, len(documents.encoded)))
            raise AssertionError('the last result of a task is its counts')

        for call, made in self._run_all(shards, lambda arguments: write(*arguments)):
            while not reports.empty():
                progress(*reports.get())
            yield shards[call][0], made

    def close(self) -> None:
        """Shuts Ray down, unless the caller had started it."""
        if self._started:
            self._ray.shutdown()

    def _run_all(self, calls: Sequence[tuple], run: Callable[[tuple], Any]) -> Iterator[tuple[int, Any]]:
        """Yields (number, result); one thread per worker waits for its calls."""
        with concurrent.futures.ThreadPoolExecutor(self._n) as pool:
            futures = {pool.submit(run, arguments): number for number, arguments in enumerate(calls)}
            try:
                for future in concurrent.futures.as_completed(futures):
                    yield futures[future], future.result()
            except self._ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, UserError):
                    raise UserError(str(error.cause)) from None
                raise
            except self._ray.exceptions.RayError as error:
                reason = first_line(error) or 'no reason given'
                raise UserError(
                    f'data.engine: Ray failed: {reason[:200]}\n  the next run continues with the unfinished shards'
                ) from error
            finally:
                for future in futures:
                    future.cancel()


def _call(function: Callable[..., Any], arguments: tuple) -> Any:
    return function(*arguments, lambda n_bytes, n_tokens: None)


def _tokenize(job: Job, shard: Shard) -> Iterator[EncodedDocuments | tuple[RowCounts, int]]:
    rows, cut = RowCounts(), []
    yield from encode_shard(job, shard, rows, cut)
    yield rows, len(cut)
