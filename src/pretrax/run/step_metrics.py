"""The metrics of training steps: read one step late, written to the log, shown in the terminal."""

import contextlib
import math
import os
import pathlib
import statistics
import time
from collections.abc import Iterator
from concurrent import futures
from concurrent.futures import Future
from typing import Any

import jax

from pretrax.checkpoint.agreement import gather
from pretrax.config import shown_samples
from pretrax.errors import Report
from pretrax.infer.sample import sample
from pretrax.model.loss import Batch
from pretrax.observe.device_memory import memory_in_use
from pretrax.observe.goodput import goodput
from pretrax.observe.progress import Progress
from pretrax.run.clock import Clock, is_done
from pretrax.run.compiled_step import CompiledStep, record_program
from pretrax.run.logged_program import NoiseScale, layer_statistics
from pretrax.run.out_of_memory import explaining_full_memory
from pretrax.run.processes import is_first_process
from pretrax.run.replay import Replay
from pretrax.run.result import OnStep
from pretrax.run.run_log import RunLog, ending
from pretrax.run.seen_batch import show_batch
from pretrax.run.setup import Run
from pretrax.run.start import Start
from pretrax.run.validation import bits_per_byte
from pretrax.run.watch import Requests
from pretrax.system.process_hosts import described, expected_hosts
from pretrax.train.skipping import without_empty_means
from pretrax.train.step import TrainState, Weights

_LOOK = 0.001  # seconds between two looks at the device while a batch is late
_EXCESSES = 3  # lines in a row: the time of one short step is too uncertain to doubt the peak


class StepMetrics:
    """Reads the metrics of each step, and logs some of them.

    Args:
        log: what the run writes; None in all processes but the first.

    Attributes:
        on_step: is called after each step with its number and its metrics, while the device computes the next step.
        skipped_in_a_row: the number of steps skipped in a row, up to the newest step that was read or restored.
        tokens: tokens of all steps up to that one.
        without_targets: the number of steps up to that one that had nothing to learn.
    """

    def __init__(
        self,
        run: Run,
        start: Start,
        clock: Clock,
        log: RunLog | None,
        progress: Progress,
        report: Report,
    ):
        self.clock = clock
        self.on_step: OnStep | None = None
        self.skipped_in_a_row = int(start.state.skipped_in_a_row)
        self.tokens, self.without_targets = _tokens_of(run, start), start.description.get('steps_without_targets', 0)
        self._run, self._log, self._progress, self._report = run, log, progress, report
        self._pending: tuple[int, dict[str, jax.Array]] | None = None
        self._loss: Any = math.nan  # of the newest step that was read
        self._statistics = layer_statistics(run, clock, report)
        self._noise = NoiseScale(run, start.description, clock, report)
        self._replay = Replay(run, clock, report, log.notices.corrupted if log is not None else lambda why: None)
        self._straggler = Straggler(report)
        self._program: Any = None  # the compiled step
        self._batches_ahead = 0  # the number of a step's batch minus the number of steps before it
        self._is_after_rollback = False
        self._has_grown = False  # whether the batches have grown since the newest step
        self._excesses = 0  # lines in a row with more than the peak of the devices

    @contextlib.contextmanager
    def waiting(self, batch: Future[Any]) -> Iterator[None]:
        """While the loop waits for a batch. The clock counts it from when the device has nothing to do."""
        while self._pending is not None and not is_done(self._pending[1]):
            if futures.wait([batch], _LOOK).done:
                break
        else:
            if self._pending is not None:
                self.clock.ended(self._pending[0])
        with self.clock.waiting_for_data():
            yield

    def before(self, number: int, index: int, state: TrainState, batch: Batch) -> None:
        """Call it before each step, with the number of its batch: starts the programs that are due."""
        self._batches_ahead = index - (number - 1)
        if self._pending is not None and is_done(self._pending[1]):  # the device waits for this step
            self.clock.ended(self._pending[0])
        if self._has_grown:  # a lap has steps with batches of one size
            self.clock.lap()
            self._has_grown = False
        if self._replay.is_due(number):
            self.read()
            self._replay.check(number, state, batch)
        self._statistics.compute(number, index, state, batch)
        self._noise.compute(number, index, state, batch)
        self._straggler.begin_step()

    def after(self, number: int, metrics: dict[str, jax.Array]) -> None:
        """Call it after each step was dispatched: reads the step before, while the device computes this one."""
        self.read(newest=(number, metrics))
        self._pending = number, metrics

    def wait(self) -> None:
        """Waits for the pending step to end, without logging it."""
        if self._pending is not None:
            with explaining_full_memory(self._run, 'training', self._program):
                jax.block_until_ready(self._pending[1])
            self.clock.ended(self._pending[0])

    def read(self, newest: tuple[int, dict[str, jax.Array]] | None = None) -> None:
        """Waits for the pending step to end, and logs its metrics if it is one of every `log.every` steps.

        Args:
            newest: the step that was dispatched after it, and its metrics.
        """
        if self._pending is None:
            return
        (number, metrics), self._pending = self._pending, None
        skipped = self.skipped_in_a_row
        with explaining_full_memory(self._run, 'training', self._program):
            self.skipped_in_a_row = int(metrics['skipped_in_a_row'])  # waits for the step to end
        self.clock.ended(newest[0] if newest and is_done(newest[1]) else number)
        self._straggler.end_step(number)
        self.tokens, self._loss = self.tokens + self._run.size.tokens, metrics['loss']
        is_empty = bool(metrics['steps_without_targets'])
        self.without_targets += is_empty
        if self._log is not None:
            self._log.step = number
        self.clock.stepped(number, self._report)
        run = self._run
        tokens = f'to see its tokens: {show_batch(run.run_dir, number - 1 + self._batches_ahead)}'
        if is_empty and self.without_targets == 1:
            self._report(
                f'WARNING: step {number} had nothing to learn and changed nothing: no token of its batch is a target; '
                f'{tokens}'
            )
        if self.skipped_in_a_row and not skipped:
            self._report(
                f'WARNING: step {number} was skipped: its gradient is not finite, or its loss is a spike; {tokens}'
            )
        every = run.log.every
        is_logged = (every and number % every == 0) or number in (1, run.steps) or self._is_after_rollback
        self._is_after_rollback = False
        if is_logged or self.on_step is not None:
            values = self._measured(number, jax.device_get(metrics))
            if is_logged:
                self._log_step(number, values)
            if self.on_step is not None:
                self.on_step(number, values)
        statistics = self._statistics.read(number)
        if statistics and self._log is not None and not is_empty:
            self._log.write_statistics(number, statistics)
        noise = self._noise.read(number)
        if 'noise_scale' in noise:
            self.write({'step': number, **noise})
        elif noise:  # there is nothing to show yet
            self.note({'step': number, **noise})

    def write(self, metrics: dict[str, float]) -> None:
        """Writes and shows metrics of a step or an evaluation."""
        if self._log is not None:
            self._log.write(metrics)
            self._progress.update(metrics)

    def note(self, metrics: dict[str, Any]) -> None:
        """Writes metrics that the terminal does not show."""
        if self._log is not None:
            self._log.write(metrics)

    def compiled(self, step: CompiledStep) -> None:
        """Reports how the next steps were compiled, and writes their program if that is wanted."""
        if step.run is not self._run:
            self._statistics = layer_statistics(step.run, self.clock, self._report)
            self._noise = NoiseScale(step.run, self._noise.description(), self.clock, self._report)
            self._replay.prepare(step.run)
        self._has_grown = self._program is not None
        self._run, self._program = step.run, step.call
        self._report(str(step))
        if self._log is not None:
            self._log.environment.compiled(step)
            record_program(self._run, step, self._report)

    def counts(self) -> dict[str, Any]:
        """Tokens and seconds of all steps so far, and the loss of the newest one."""
        return {'tokens': self.tokens, 'seconds': self.clock.productive_seconds(), 'loss': float(self._loss)}

    def description(self) -> dict[str, Any]:
        """The part of a checkpoint's description that `rewind` and a resumed run need."""
        return {
            'tokens': self.tokens,
            'skipped_in_a_row': self.skipped_in_a_row,
            'steps_without_targets': self.without_targets,
            **self.clock.description(),
            **self._noise.description(),
        }

    def sample(self, number: int, weights: Weights) -> None:
        """Shows and writes text that the model writes after a step, one for each prompt."""
        model, tokenizer = self._run.recipe.model, self._run.source.tokenizer
        self.show(number, sample(model, weights, tokenizer, self._run.sample))

    def show(self, number: int, texts: list[str]) -> None:
        """Shows and writes samples of a step, one for each prompt."""
        samples = shown_samples(self._run.shown_prompts, self._run.sample.prompts, texts)
        for _, text in samples:
            self._report(f'sample at step {number}: {text}')
        if self._log is not None:
            self._log.sample(number, *zip(*samples, strict=True))

    def flush(self) -> None:
        """Makes the trackers keep the metrics so far. Call it when a checkpoint is saved."""
        self.clock.saved()
        if self._log is not None:
            self._log.flush()

    def rewind(self, start: Start) -> None:
        """Forgets the steps after a checkpoint, to which the run returns."""
        self._pending, self.skipped_in_a_row = None, 0
        self.tokens = _tokens_of(self._run, start)
        self.without_targets = start.description.get('steps_without_targets', 0)
        self.clock.rolled_back(start.step, start.description)
        self._is_after_rollback = True  # its line has the number of the batch
        self._statistics.forget()
        self._noise.rewind(start.description)
        if self._log is not None:
            self._log.rewind(start.step)

    def _measured(self, number: int, metrics: dict[str, Any]) -> dict[str, Any]:
        """The metrics of one step, without those that several steps have in common, such as the speed."""
        values = without_empty_means({name: float(value) for name, value in metrics.items()})
        per_token = self._run.source.bytes_per_token
        nll = values.get('nll' if 'nll' in metrics else 'loss')
        return {
            'step': number,
            'tokens': self.tokens,
            'batch': number - 1 + self._batches_ahead,
            **values,
            'skipped_steps': int(values['skipped_steps']) - self.without_targets,
            'steps_without_targets': self.without_targets,
            **self._replay.metrics(),
            **({'bits_per_byte': bits_per_byte(nll, per_token)} if per_token and nll is not None else {}),
        }

    def _log_step(self, number: int, values: dict[str, Any]) -> None:
        tokens_per_second = self.clock.lap() * self._run.size.tokens
        mfu = self._run.mfu
        self._excesses = self._excesses + 1 if mfu.is_exceeded(tokens_per_second) else 0
        if self._excesses == _EXCESSES:
            self._report(f'WARNING: {mfu.explain_excess(tokens_per_second)}')
        utilization = {'mfu': None, **mfu(tokens_per_second)}  # the column is always there
        if not math.isfinite(values.get('loss', 0.0)):
            skipped = values['skipped_steps']
            self._report(f'step {number}: the loss is {values["loss"]}; {skipped} steps skipped so far')
        seconds = self.clock.seconds()
        self.write(
            {
                **values,
                'goodput': goodput(seconds),
                **{f'seconds/{cause}': round(n, 3) for cause, n in seconds.items() if n},
                'tokens_per_second': tokens_per_second,
                **utilization,
                **memory_in_use(),
            }
        )


def _tokens_of(run: Run, start: Start) -> int:
    """Tokens of the steps before a start: as its checkpoint says, else as many as the configuration has for them."""
    return start.description.get('tokens', run.tokens_before(start.step))


@contextlib.contextmanager
def open_log(
    run: Run, directory: pathlib.Path, resumed_step: int, requests: Requests, report: Report
) -> Iterator[RunLog | None]:
    """The log of a run; None in all processes but the first. At the end the run's report is written."""
    if not is_first_process():
        yield None
        return
    with RunLog(run, directory, resumed_step, report) as log, ending(log, requests, report):
        yield log


EVERY = 20  # steps between two comparisons; each process sends one number


class Straggler:
    """Compares the time that processes spend between steps: fetching data, writing, being paused by their machine.

    A process that is fast waits inside of a step, for the others.
    """

    def __init__(self, report: Report):
        self._report = report
        self._named: int | None = None
        self._since = self._began = time.perf_counter()
        self._inside = 0.0
        self._steps = 0

    def begin_step(self) -> None:
        """Call it before a step."""
        self._began = time.perf_counter()

    def end_step(self, number: int) -> None:
        """Call it when the step with this number has ended, in all processes."""
        if jax.process_count() == 1:
            return
        now = time.perf_counter()
        self._inside, self._steps = self._inside + now - self._began, self._steps + 1
        self._began = now
        if number % EVERY:
            return
        per_step = (now - self._since) / self._steps
        own = per_step - self._inside / self._steps
        self._since, self._inside, self._steps = now, 0.0, 0
        if times := gather('time between steps', str(own)):
            self._compare([float(text) for text in times], per_step)

    def _compare(self, own: list[float], per_step: float) -> None:
        slow = slow_one(own, per_step)
        if slow is not None and slow != self._named:
            address = os.environ.get('JAX_COORDINATOR_ADDRESS', '')
            who = described([slow], dict(enumerate(expected_hosts(len(own), 0, address))))
            usual = statistics.median([seconds for index, seconds in enumerate(own) if index != slow])
            self._report(
                f'{who} is slow: between steps it takes {own[slow]:.2g} s, the others {usual:.2g} s, and they wait '
                'for it; '
                f'a step takes {per_step:.2g} s'
            )
        self._named = slow


def slow_one(own: list[float], per_step: float) -> int | None:
    """The process that takes a fifth of a step longer between steps than the others; None: they are alike.

    Args:
        own: seconds between steps, for each process.
        per_step: seconds of a step, with what is between steps.
    """
    slow = max(range(len(own)), key=own.__getitem__)
    usual = statistics.median([seconds for index, seconds in enumerate(own) if index != slow])
    return slow if own[slow] - usual > per_step / 5 else None
