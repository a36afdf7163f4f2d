"""The end of a run in process 0: how it ended is written down, and those who want to know are called.

A failure of what is called here is a warning. It never changes how a run ends.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Literal

from pretrax.errors import Report, first_line
from pretrax.observe.attempts import note
from pretrax.run.run_log import RunLog
from pretrax.run.watch import Requests


@dataclasses.dataclass(frozen=True)
class Ending:
    """How a run ended in this process.

    Attributes:
        outcome: all steps are done; it was asked to stop; or an error ended it.
        why: the reason of a stop, or the error in one line; '' if all steps are done.
        step: the last step that is done.
    """

    outcome: Literal['finished', 'stopped', 'failed']
    why: str
    step: int


@contextlib.contextmanager
def ending(log: RunLog, requests: Requests, report: Report) -> Iterator[None]:
    """Calls `_AT_THE_END` when the block ends, also with an error."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        _end(log, Ending('stopped', 'interrupted', log.step), report)
        raise
    except BaseException as error:
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
    del report
    log.environment.ended()
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
