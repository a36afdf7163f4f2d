"""Notices of a run: its end, a rollback, a stall, and that it recovered; and of a launcher, if the run was killed."""

import pathlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pretrax.errors import DONE, TRY_AGAIN, Report
from pretrax.observe.attempts import read_attempts
from pretrax.observe.notify import Notice, Notifier

if TYPE_CHECKING:
    from pretrax.config import RunConfig
    from pretrax.run.setup import Run

_ENDS = ('finished', 'stopped', 'failed')  # what a training writes when it ends, and notifies of by itself


class _Notices:
    """Sends notices about a run to the webhook or the command of `log.notify`."""

    def __init__(self, run: 'Run | RunConfig', report: Report):
        section = run.log.notify
        self._run = run
        self._notifier = Notifier(section.url, section.command, section.events, report)

    def _send(self, event: str, step: int, why: str) -> None:
        run = self._run
        self._notifier.send(Notice(event, run.name, str(run.run_dir), step, run.steps, why))

    def close(self) -> None:
        """Waits a limited time until the notices are sent."""
        self._notifier.close()


class LaunchNotices(_Notices):
    """Notices that the launcher sends for a training that could not, for example because it was killed."""

    def attempt_ended(self, directory: pathlib.Path, code: int, step: int, why: str, starts_again: bool) -> None:
        """Sends 'failed', unless the training has notified of its end. Returns at once."""
        events = [event['event'] for event in read_attempts(directory)]
        began = max((number for number, event in enumerate(events) if event == 'started'), default=0)
        if code != DONE and not any(event in _ENDS for event in events[began:]):
            then = 'starting again from the newest checkpoint' if starts_again else 'giving up'
            self._send('failed', step, f'{why}; {then}')


class RunNotices(_Notices):
    """Sends notices about a run, in process 0. Nothing happens unless `log.notify` has a webhook or a command.

    Args:
        directory: on this machine, where the run writes its attempts.
        step: the newest step that is done.
    """

    def __init__(self, run: 'Run | RunConfig', directory: pathlib.Path, step: Callable[[], int], report: Report):
        super().__init__(run, report)
        self._step = step
        # Steps that the run has to pass before it has recovered; None: it is not in trouble.
        self._recovers_after = step() if _died(directory) else None
        self._trouble = 'the process before this one was killed or failed'
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        if run.log.notify.url is not None or run.log.notify.command is not None:
            self._thread = threading.Thread(target=self._watch, name='notices', daemon=True)
            self._thread.start()

    def diverged(self, back_to: int) -> None:
        """The run returns to an earlier step, since too many steps in a row were skipped."""
        self._recovers_after = max(self._step(), self._recovers_after or 0)
        self._trouble = 'the run had diverged'
        self._send('diverged', self._step(), f'too many steps were skipped; the run returns to step {back_to}')

    def corrupted(self, why: str) -> None:
        """A device has computed something wrong."""
        self._send('corrupted', self._step(), why)

    def ended(self, event: str, why: str) -> None:
        """The run has ended in this process. Waits a limited time until the notices are sent."""
        self._stop()
        self._send(event, self._step(), why)
        self._notifier.close()

    def close(self) -> None:
        """Ends the thread."""
        self._stop()
        super().close()

    def _stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _watch(self) -> None:
        """Looks for a stall, and for steps after a trouble."""
        seconds = self._run.log.notify.stalled_seconds
        first = newest = self._step()
        moved, stalled = time.monotonic(), False
        while not self._over.wait(min(1.0, seconds / 4)):
            step, now = self._step(), time.monotonic()
            if step != newest:
                newest, moved = step, now
                if stalled:
                    stalled, self._recovers_after, self._trouble = False, step - 1, 'the run had stalled'
                self._look_for_recovery(step)
            elif newest != first and not stalled and now - moved > seconds:  # the first step is compiled
                stalled = True
                self._send('stalled', step, f'no step for {now - moved:.0f} s')
        self._look_for_recovery(self._step())

    def _look_for_recovery(self, step: int) -> None:
        if self._recovers_after is not None and step > self._recovers_after:
            self._recovers_after = None
            self._send('recovered', step, self._trouble)


def _died(directory: pathlib.Path) -> bool:
    """Whether the newest process that trained the run failed or was killed."""
    events = [
        event
        for event in read_attempts(directory)
        if event['event'] in ('began', *_ENDS)
        or (event['event'] == 'ended' and event.get('code') not in (DONE, TRY_AGAIN))
    ]
    return bool(events) and events[-1]['event'] in ('began', 'failed', 'ended')
