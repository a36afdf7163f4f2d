"""The metrics of training steps: read one step late, written to the log, shown in the terminal."""

import contextlib
import math
from typing import Any

import jax

from pretrax.config import RunConfig
from pretrax.errors import Report
from pretrax.observe.metrics import MetricsLog
from pretrax.observe.progress import Progress
from pretrax.observe.trackers import open_trackers
from pretrax.run.clock import Clock
from pretrax.run.evaluate import bits_per_byte
from pretrax.run.processes import is_first_process
from pretrax.run.setup import Run


class StepMetrics:
    """Reads the metrics of each step, and logs some of them.

    Args:
        run: the run.
        clock: measures the speed of the steps.
        log: where metrics are written; None in all processes but the first.
        progress: where metrics are shown.
        report: receives warnings.

    Attributes:
        last: the newest metrics that were logged.
        skipped_in_a_row: the number of steps skipped in a row, up to the newest step that was read.
    """

    def __init__(
        self,
        run: Run,
        clock: Clock,
        log: MetricsLog | None,
        progress: Progress,
        report: Report,
    ):
        self.clock = clock
        self.last: dict[str, float] = {}
        self.skipped_in_a_row = 0
        self._run, self._log, self._progress, self._report = run, log, progress, report
        self._pending: tuple[int, dict[str, jax.Array]] | None = None

    def wait_for(self, number: int, metrics: dict[str, jax.Array]) -> None:
        """Keeps the metrics of a step that the device may still be computing, for the next `read`."""
        self._pending = number, metrics

    def read(self) -> None:
        """Waits for the pending step to end, and logs its metrics if `log.every` says so."""
        if self._pending is None:
            return
        (number, metrics), self._pending = self._pending, None
        self.skipped_in_a_row = int(metrics['skipped_in_a_row'])  # waits for the step to end
        self.clock.stepped(number, self._report)
        config = self._run.config
        if number % config.log.every == 0 or number in (1, config.steps):
            self._log_step(number, jax.device_get(metrics))

    def write(self, metrics: dict[str, float]) -> None:
        """Writes and shows metrics of a step or an evaluation."""
        if self._log is not None:
            self._log.write(metrics)
            self._progress.update(metrics)

    def rewind(self, step: int, description: dict[str, Any]) -> None:
        """Forgets the steps after `step`; `description` is that of its checkpoint."""
        self._pending, self.skipped_in_a_row = None, 0
        self.clock.rewind(description)
        if self._log is not None:
            self._log.rewind(step)

    def _log_step(self, number: int, metrics: dict[str, Any]) -> None:
        run = self._run
        values = {name: float(value) for name, value in metrics.items()}
        tokens_per_second = self.clock.lap(number) * run.config.batch.tokens
        per_token = run.source.bytes_per_token
        nll = values.get('nll', values['loss'])
        self.last = {
            'step': number,
            'tokens': number * run.config.batch.tokens,
            **values,
            'skipped_steps': int(values['skipped_steps']),
            'goodput': self.clock.goodput(),
            **({'bits_per_byte': bits_per_byte(nll, per_token)} if per_token else {}),
            'tokens_per_second': tokens_per_second,
            **run.mfu(tokens_per_second),
        }
        self.last.setdefault('mfu', None)  # type: ignore[arg-type]  # the column is always there
        if not math.isfinite(values['loss']):
            skipped = self.last['skipped_steps']
            self._report(f'step {number}: the loss is {values["loss"]}; {skipped} steps skipped so far')
        self.write(self.last)


def open_log(
    config: RunConfig, resumed_step: int, report: Report
) -> contextlib.AbstractContextManager[MetricsLog | None]:
    """The log of a run with its trackers; None in all processes but the first."""
    if not is_first_process():
        return contextlib.nullcontext()
    trackers = open_trackers(
        tensorboard=config.log.tensorboard,
        wandb=config.log.wandb,
        mlflow=config.log.mlflow,
        directory=config.run_dir,
        name=config.name,
        config=config.model_dump(mode='json'),
        resumed_step=resumed_step,
        say=report,
    )
    return MetricsLog(config.run_dir / 'metrics.jsonl', trackers, resumed_step=resumed_step, say=report)
