"""Statistics of layers while a run trains: computed before a step, and read after it."""

import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pretrax.config.batch import rows_of
from pretrax.data.batches.sequences import sources_of_sequences
from pretrax.errors import Report
from pretrax.model.axes import ROWS
from pretrax.model.loss import Batch
from pretrax.run.clock import Clock
from pretrax.run.out_of_memory import explaining_full_memory
from pretrax.run.program_cache import compile_or_load
from pretrax.run.setup import Run
from pretrax.train.layer_statistics import make_layer_statistics
from pretrax.train.step import TrainState

_DOING = 'computing layer statistics (log.layers)'  # when the memory of a device is full


class StepStatistics:
    """Computes the statistics of every `log.layers` steps, the first and the last, if `log.layers` is not 0.

    Args:
        run: the run.
        clock: does not count the compilation.
        report: receives a line about the compilation.
    """

    def __init__(self, run: Run, clock: Clock, report: Report):
        self._run, self._clock, self._report = run, clock, report
        self._pending: dict[int, dict[str, jax.Array]] = {}  # by step; a step is read after the next one has begun
        self._program: jax.stages.Compiled | None = None

    def compute(self, number: int, index: int, state: TrainState, batch: Batch) -> None:
        """Starts to compute the statistics of a step that is about to be taken, if they are due."""
        config = self._run.config
        if not config.log.layers:
            return
        is_due = number % config.log.layers == 0 or number in (1, config.steps)
        if not is_due and self._program is not None:
            return
        sources = row_sources(self._run, index)
        program = self._program
        with explaining_full_memory(self._run, _DOING):
            if program is None:  # compiled at the first step, so that no later step is slow
                with self._clock.paused('compile', number):
                    program = self._program = self._compile(state, batch, sources)
            if is_due:
                self._clock.interruptions += 1
                self._pending[number] = program(state, batch, sources)

    def read(self, number: int) -> dict[str, np.ndarray]:
        """The statistics of a step that has ended; {}: none were due."""
        with explaining_full_memory(self._run, _DOING):
            return jax.device_get(self._pending.pop(number, {}))

    def forget(self) -> None:
        """Forgets the steps that have not been read."""
        self._pending = {}

    def _compile(self, state: TrainState, batch: Batch, sources: jax.Array) -> jax.stages.Compiled:
        began = time.perf_counter()
        program = make_layer_statistics(self._run.recipe, len(self._run.source.source_names))
        compiled, cache = compile_or_load(program.lower(state, batch, sources))
        how = f'loaded the layer statistics from {cache}' if cache else 'compiled the layer statistics'
        self._report(f'{how} in {time.perf_counter() - began:.1f} s')
        return compiled


def row_sources(run: Run, index: int) -> jax.Array:
    """The number of the source of each row of a batch, i32[rows], sharded as the rows are; zeros if there is one source."""
    sharding = NamedSharding(run.mesh, PartitionSpec(tuple(ROWS.split())))

    def shard(rows: Any) -> np.ndarray:
        return sources_of_sequences(run.source, *rows_of(run.config.batch, index), rows[0]).astype(np.int32)

    return jax.make_array_from_callback((run.rows,), sharding, shard)


def curves(values: Mapping[str, np.ndarray], sources: tuple[str, ...]) -> dict[str, float]:
    """The few statistics that are one number per step: for `metrics.jsonl` and the trackers."""
    found = {name: float(values[name]) for name in ('logit_max', 'log_partition') if name in values}
    if 'attention_logit_max' in values:
        found['attention_logit_max'] = float(np.nanmax(values['attention_logit_max']))
        found['attention_entropy'] = float(np.nanmean(values['attention_entropy']))
    if 'dead_units' in values:
        found['dead_units'] = float(np.nanmean(values['dead_units']))
    by_source = values.get('loss_by_source', ())
    return found | {f'loss/{name}': float(loss) for name, loss in zip(sources, by_source, strict=False)}
