"""Separate programs that run before the logged steps, and whose results are read after them: layer statistics, and
the gradient noise scale (McCandlish et al. 2018, arXiv:1812.06162).
"""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pretrax.config.batch import rows_of
from pretrax.data.batches.sequences import sources_of_sequences
from pretrax.errors import Report, UserError
from pretrax.model.axes import ROWS
from pretrax.model.loss import Batch
from pretrax.run.clock import Clock
from pretrax.run.out_of_memory import explaining_full_memory
from pretrax.run.program_cache import compile_or_load
from pretrax.run.setup import Run
from pretrax.train.layer_statistics import make_layer_statistics
from pretrax.train.noise_scale import make_noise
from pretrax.train.step import TrainState


class LoggedProgram:
    """Runs a program before every N-th step, the first and the last. N is a key of `log:`; if it is 0, before none.

    Args:
        name: what the program computes, for messages, such as 'the layer statistics'.
        key: that key, such as `layers`.
        make: the jitted program of the run: state, batch and more arguments -> arrays.
        arguments: the number of a batch -> the arguments besides the state and the batch.
    """

    def __init__(
        self,
        run: Run,
        name: str,
        key: str,
        make: Callable[[], Any],
        arguments: Callable[[int], tuple[jax.Array, ...]],
        clock: Clock,
        report: Report,
    ):
        self._run, self._name, self._make, self._arguments = run, name, make, arguments
        self._every: int = getattr(run.log, key)
        self._clock, self._report = clock, report
        self._doing = f'computing {name} (log.{key})'  # when the memory of a device is full
        self._pending: dict[int, Any] = {}  # by step; a step is read after the next one has begun
        self._program: jax.stages.Compiled | None = None

    def compute(self, number: int, index: int, state: TrainState, batch: Batch) -> None:
        """Starts the program before a step, if it is due; `index` is the number of the batch."""
        if not self._every:
            return
        is_due = number % self._every == 0 or number in (1, self._run.steps)
        if not is_due and self._program is not None:
            return
        arguments = state, batch, *self._arguments(index)
        with explaining_full_memory(self._run, self._doing):
            if self._program is None:  # compiled at the first step, so that no later step is slow
                with self._clock.paused('compile', number):
                    self._program = self._compile(*arguments)
            if is_due:
                self._clock.interruptions += 1
                self._pending[number] = self._program(*arguments)

    def read(self, number: int) -> Any:
        """The result for a step that has ended; None: it was not due."""
        with explaining_full_memory(self._run, self._doing):
            return jax.device_get(self._pending.pop(number, None))

    def forget(self) -> None:
        """Forgets the steps that have not been read."""
        self._pending = {}

    def _compile(self, *arguments: Any) -> jax.stages.Compiled:
        began = time.perf_counter()
        compiled, cache = compile_or_load(self._make().lower(*arguments))
        how = f'loaded {self._name} from {cache}' if cache else f'compiled {self._name}'
        self._report(f'{how} in {time.perf_counter() - began:.1f} s')
        return compiled


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


_KEPT = 0.95  # decay of both sums per estimate: they cover about the last 20


class NoiseScale:
    """Estimates tr(Sigma) and |G|^2 every `log.noise_scale` steps, and divides their averages.

    Both estimates are noisy, so they are averaged separately; the average of quotients would be biased.

    Args:
        description: description of the checkpoint that training starts from, for `rewind`.

    Raises:
        UserError: a batch has one sequence.
    """

    def __init__(self, run: Run, description: dict[str, Any], clock: Clock, report: Report):
        if run.log.noise_scale and run.rows < 2:
            raise UserError(
                'log.noise_scale compares two halves of a batch, but a batch has one sequence\n'
                'use larger batch.tokens, or log.noise_scale=0'
            )
        self._length = run.size.sequence_length
        self._program = LoggedProgram(
            run=run,
            name='the noise scale',
            key='noise_scale',
            make=lambda: make_noise(run.recipe),
            arguments=lambda _: (),
            clock=clock,
            report=report,
        )
        self.rewind(description)

    def compute(self, number: int, index: int, state: TrainState, batch: Batch) -> None:
        """Starts the estimates of a step that is about to be taken, if they are due."""
        self._program.compute(number, index, state, batch)

    def read(self, number: int) -> dict[str, float]:
        """The metrics of a step that has ended; {}: none were due, or half of the batch has no target.

        `noise_scale` is missing if an estimate is not finite, and as long as the average of |G|^2 is not positive.
        """
        noise = self._program.read(number)
        if noise is None:
            return {}
        trace, square = map(float, noise)
        if math.isnan(trace):
            return {}
        found = {'noise_trace': trace, 'noise_square': square}
        if not (math.isfinite(trace) and math.isfinite(square)):
            return found
        self._trace, self._square = _KEPT * self._trace + trace, _KEPT * self._square + square
        if self._square > 0:
            found['noise_scale'] = self._length * self._trace / self._square
        return found

    def description(self) -> dict[str, Any]:
        """The part of a checkpoint's description that `rewind` needs."""
        return {'noise_sums': [self._trace, self._square]} if self._trace else {}

    def rewind(self, description: dict[str, Any]) -> None:
        """Returns to the averages of a checkpoint."""
        self._trace, self._square = description.get('noise_sums', (0.0, 0.0))
        self._program.forget()
