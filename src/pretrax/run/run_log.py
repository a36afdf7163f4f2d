"""What process 0 writes about a run, besides checkpoints: metrics, samples, its environment, and how it ended.

A failure of what is called at the end is a warning. It never changes how a run ends.
"""

import contextlib
import dataclasses
import pathlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from pretrax.errors import Report, first_line
from pretrax.observe.attempts import note
from pretrax.observe.layer_statistics import LayerStatisticsLog
from pretrax.observe.metrics import MetricsLog
from pretrax.observe.notices import RunNotices
from pretrax.observe.step_lines import SampleLog
from pretrax.observe.trackers import open_trackers
from pretrax.observe.trackers.base import Table
from pretrax.run.environment import Environment
from pretrax.run.logged_program import curves
from pretrax.run.processes import may_be_a_lost_process
from pretrax.run.setup import Run
from pretrax.run.watch import Requests


class RunLog(contextlib.AbstractContextManager['RunLog']):
    """The files of a run that grow, and its trackers.

    Args:
        directory: on this machine, where the files are written.
        resumed_step: the step that training continues from; lines of later steps are removed.

    Attributes:
        run, directory: as given.
        step: the newest step that is done.
        metrics: `metrics.jsonl` and the trackers.
        samples: `samples.jsonl`.
        layers: `layer_statistics.jsonl`.
        environment: `environment.json`.
        notices: notifications.
    """

    def __init__(self, run: Run, directory: pathlib.Path, resumed_step: int, report: Report):
        self.run, self.directory, self.step = run, directory, resumed_step
        trackers = open_trackers(
            run.log.trackers(),
            directory=directory,
            name=run.name,
            config=run.written,
            resumed_step=resumed_step,
            say=report,
        )
        metrics = MetricsLog(directory / 'metrics.jsonl', trackers, resumed_step=resumed_step, say=report)
        with contextlib.ExitStack() as opened:  # closed if what comes later cannot be opened
            self.metrics = opened.enter_context(metrics)
            self.samples = opened.enter_context(contextlib.closing(SampleLog(directory, resumed_step, report)))
            self.layers = opened.enter_context(contextlib.closing(LayerStatisticsLog(directory, resumed_step, report)))
            self.environment = Environment(run, directory, report)
            self.notices = RunNotices(run, directory, lambda: self.step, report)
            opened.callback(self.notices.close)
            self._opened = opened.pop_all()

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Writes a line of metrics, with its time."""
        self.metrics.write({**metrics, 'time': round(time.time(), 3)})
        sources = [
            (key.removeprefix('val_loss/'), loss) for key, loss in metrics.items() if key.startswith('val_loss/')
        ]
        if sources:
            self.metrics.show(metrics['step'], 'validation', Table(('source', 'loss in nats per token'), sources))

    def flush(self) -> None:
        """Makes the trackers keep the metrics so far."""
        self.metrics.flush()

    def rewind(self, step: int) -> None:
        """Removes what was written about later steps."""
        self.notices.diverged(step)
        self.step = step
        self.metrics.rewind(step)
        self.samples.rewind(step)
        self.layers.rewind(step)

    def write_statistics(self, step: int, statistics: Mapping[str, np.ndarray]) -> None:
        """Writes the layer statistics of a step, and those of them that are curves as metrics."""
        self.layers.write(step, statistics)
        if found := curves(statistics, self.run.source.source_names):
            self.write({'step': step, **found})

    def sample(self, step: int, prompts: Sequence[str], texts: Sequence[str]) -> None:
        """Writes the samples of a step, one for each prompt."""
        self.samples.write(step, prompts, texts)
        self.metrics.show(step, 'samples', '\n\n'.join(texts))

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)  # `metrics` tells the trackers whether the run succeeded


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a run ended in this process."""

    outcome: Literal['finished', 'stopped', 'failed']  # all steps are done; it was asked to stop; or an error ended it
    why: str  # the reason of a stop, or the error in one line; '' if all steps are done
    step: int  # the last step that is done


@contextlib.contextmanager
def ending(log: RunLog, requests: Requests, report: Report) -> Iterator[None]:
    """Calls `_AT_THE_END` when the block ends, also with an error."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        _end(log, Ending('stopped', 'interrupted', log.step), report)
        raise
    except BaseException as error:
        if may_be_a_lost_process(error):  # the run has not failed: it goes on when its processes are started again
            raise
        _end(log, Ending('failed', f'{type(error).__name__}: {first_line(error)[:300]}', log.step), report)
        raise
    is_done = log.step >= log.run.steps
    _end(log, Ending('finished', '', log.step) if is_done else Ending('stopped', requests.why or '', log.step), report)


def _end(log: RunLog, how: Ending, report: Report) -> None:
    for what, call in _AT_THE_END.items():
        try:
            call(log, how, report)
        except Exception as error:  # an output, not the training
            report(f'WARNING: {what} failed ({type(error).__name__}: {first_line(error)[:200]})')


def _write_down(log: RunLog, how: Ending, report: Report) -> None:
    memory = log.environment.ended()
    if how.outcome != 'failed':
        report(memory)
    note(log.directory, how.outcome, step=how.step, why=how.why)


def _write_report(log: RunLog, how: Ending, report: Report) -> None:
    del how, report
    if log.run.log.report:
        from pretrax.view.report import FILE, write_report

        write_report(log.run.run_dir, log.directory / FILE, files=log.directory)


def _send_files(log: RunLog, how: Ending, report: Report) -> None:
    del how, report
    for name in ('config.yaml', 'report.html'):
        if (log.directory / name).exists():
            log.metrics.file(log.directory / name)


def _notify(log: RunLog, how: Ending, report: Report) -> None:
    del report
    log.notices.ended(how.outcome, how.why)


# What is called at the end, in this order.
_AT_THE_END: dict[str, Callable[[RunLog, Ending, Report], None]] = {
    'noting how the run ended': _write_down,
    'writing the report': _write_report,
    'sending the report to the trackers': _send_files,
    'notifying': _notify,
}
