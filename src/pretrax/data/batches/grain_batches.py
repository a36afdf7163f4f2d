"""The batches of a source as a Grain dataset, for custom pipelines with more threads and further processing.

batches = grain_batches(source, batch_rows=64, steps=10_000)[1_000:]  # from step 1,000 on
for batch in batches.map(mine).to_iter_dataset(grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)): ...
"""

import grain.python as grain

from pretrax.data.batches.source import HostBatch, Source


def grain_batches(source: Source, batch_rows: int, steps: int, rows: slice = slice(None)) -> grain.MapDataset:
    """Returns a dataset whose element i is the `HostBatch` of step i, in any order of access.

    Args:
        source: any source. Sources of prepared tokens may be read by several threads.
        batch_rows: rows of a step over all processes.
        steps: steps of the run, the length of the dataset.
        rows: the rows of each batch that this process needs.
    """
    return grain.MapDataset.source(_Batches(source, batch_rows, steps, rows))


class _Batches:
    def __init__(self, source: Source, batch_rows: int, steps: int, rows: slice):
        self._source, self._batch_rows, self._steps, self._rows = source, batch_rows, steps, rows

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: int) -> HostBatch:
        return self._source.batch(index, self._rows, self._batch_rows)

    def __repr__(self) -> str:
        return f'batches of {self._batch_rows} rows, {self._source.fingerprint}'  # Grain's checkpoints compare it
