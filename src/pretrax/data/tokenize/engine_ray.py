"""Tasks of a Ray cluster, for text that outgrows a machine.

Every node has to see the text, under the same paths or URLs. Tokens come back through Ray's object store, so that only
the machine that started it writes: no directory has to be shared.
"""

import concurrent.futures
import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pretrax.data.corpus.corpus import Shard
from pretrax.data.corpus.selection import Counts as Rows
from pretrax.data.tokenize.pieces import Block, Job, Piece, PieceWriter, Progress, blocks
from pretrax.errors import UserError

_BLOCKS_AHEAD = 4  # of each task, before it waits for them to be written


class Ray:
    """An `Engine` on the cluster of RAY_ADDRESS, or on a Ray of this machine where none is named.

    workers: how many tasks at a time; None: as many as the cluster has CPUs.
    """

    def __init__(self, workers: int | None):
        try:
            import ray
        except ImportError:
            raise UserError("data.engine: ray is not installed\n  pip install 'pretrax[ray]'") from None
        self._ray: Any = ray
        self._started = not ray.is_initialized()
        if self._started:
            try:
                ray.init(include_dashboard=False)
            except ConnectionError as error:
                raise UserError(f'data.engine: no Ray cluster answers: {error}\n  see RAY_ADDRESS') from None
        self._n = workers or max(1, int(ray.cluster_resources().get('CPU', 1)))
        self.name = f'{self._n} tasks of Ray on {len(ray.nodes())} nodes'

    def unordered(
        self, function: Callable[..., Any], calls: Sequence[tuple], progress: Progress
    ) -> Iterator[tuple[int, Any]]:
        remote = self._ray.remote(_call)
        yield from self._together(calls, lambda arguments: self._ray.get(remote.remote(function, arguments)))

    def pieces(
        self, job: Job, directory: Path, shards: Sequence[tuple[int, Shard]], progress: Progress
    ) -> Iterator[tuple[int, Piece]]:
        remote = self._ray.remote(_tokenise).options(
            num_returns='streaming', _generator_backpressure_num_objects=_BLOCKS_AHEAD
        )
        told: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()

        def piece(number: int, shard: Shard) -> Piece:
            with PieceWriter(directory, number) as writer:
                for reference in remote.remote(job, shard):
                    block = self._ray.get(reference)
                    if not isinstance(block, Block):
                        return writer.finish(*block)
                    writer.append(block)
                    told.put((block.n_bytes, len(block.encoded)))
            raise AssertionError('a task ends with its counts')

        for call, made in self._together(shards, lambda arguments: piece(*arguments)):
            while not told.empty():
                progress(*told.get())
            yield shards[call][0], made

    def close(self) -> None:
        """Leave a Ray alone that the caller has started."""
        if self._started:
            self._ray.shutdown()

    def _together(self, calls: Sequence[tuple], run: Callable[[tuple], Any]) -> Iterator[tuple[int, Any]]:
        """(number, result), with as many calls under way as there are workers, each attended by a thread."""
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
                said = (str(error).splitlines() or ['no reason given'])[0]
                raise UserError(
                    f'data.engine: Ray gave up: {said[:200]}\n  the next run continues from what is finished'
                ) from error
            finally:
                for future in futures:
                    future.cancel()


def _call(function: Callable[..., Any], arguments: tuple) -> Any:
    return function(*arguments, lambda n_bytes, n_tokens: None)


def _tokenise(job: Job, shard: Shard) -> Iterator[Block | tuple[Rows, int]]:
    rows, cut = Rows(), []
    yield from blocks(job, shard, rows, cut)
    yield rows, len(cut)
