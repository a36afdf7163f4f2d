"""Statistics of layers while a run trains: computed before a step, and read after it."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pretrax.config.batch import rows_of
from pretrax.data.batches.sequences import sources_of_sequences
from pretrax.errors import Report
from pretrax.model.axes import ROWS
from pretrax.run.clock import Clock
from pretrax.run.logged_program import LoggedProgram
from pretrax.run.setup import Run
from pretrax.train.layer_statistics import make_layer_statistics


def layer_statistics(run: Run, clock: Clock, report: Report) -> LoggedProgram:
    """The statistics of every `log.layers` steps, by name."""
    return LoggedProgram(
        run=run,
        name='the layer statistics',
        key='layers',
        make=lambda: make_layer_statistics(run.recipe, len(run.source.source_names)),
        arguments=lambda index: (row_sources(run, index),),
        clock=clock,
        report=report,
    )


def row_sources(run: Run, index: int) -> jax.Array:
    """The source of each row of a batch, i32[rows], sharded as the rows are; zeros if there is one source."""
    sharding = NamedSharding(run.mesh, PartitionSpec(tuple(ROWS.split())))

    def shard(rows: Any) -> np.ndarray:
        return sources_of_sequences(run.source, *rows_of(run.sizes, index), rows[0]).astype(np.int32)

    return jax.make_array_from_callback((run.rows,), sharding, shard)


def curves(values: Mapping[str, np.ndarray], sources: tuple[str, ...]) -> dict[str, float]:
    """Statistics that are a number per step, for `metrics.jsonl` and trackers. Without targets, sources have none."""
    found = {name: float(values[name]) for name in ('logit_max', 'log_partition') if name in values}
    if 'attention_logit_max' in values:
        found['attention_logit_max'] = float(np.nanmax(values['attention_logit_max']))
        found['attention_entropy'] = float(np.nanmean(values['attention_entropy']))
    if 'dead_units' in values:
        found['dead_units'] = float(np.nanmean(values['dead_units']))
    by_source = values.get('loss_by_source', ())
    losses = {f'loss/{name}': float(loss) for name, loss in zip(sources, by_source, strict=False)}
    is_fault = not math.isfinite(found.get('log_partition', 0.0))
    return found | {name: loss for name, loss in losses.items() if is_fault or not math.isnan(loss)}
