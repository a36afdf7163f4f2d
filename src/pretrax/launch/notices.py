"""Notifications that the launcher sends for a training that could not, for example because it was killed."""

import pathlib

from pretrax.config import RunConfig
from pretrax.errors import DONE, Report
from pretrax.launch.restarts import Outcome
from pretrax.observe.attempts import read_attempts
from pretrax.observe.notify import Notice, Notifier

_SAID = ('finished', 'stopped', 'failed')  # what a training writes when it ends, and notifies of by itself


class LaunchNotices:
    """Notifications of a launcher.

    Args:
        config: the run.
        directory: where its attempts are written.
        report: receives warnings.
    """

    def __init__(self, config: RunConfig, directory: pathlib.Path, report: Report):
        self._config, self._directory = config, directory
        section = config.log.notify
        self._notifier = Notifier(section.url, section.command, section.events, report)

    def attempt_ended(self, ended: Outcome, starts_again: bool) -> None:
        """Sends 'failed', unless the training has notified of its end. Returns at once."""
        events = [event['event'] for event in read_attempts(self._directory)]
        began = max((number for number, event in enumerate(events) if event == 'started'), default=0)
        if ended.code == DONE or any(event in _SAID for event in events[began:]):
            return
        config = self._config
        why = f'{ended.why}; {"starting again from the newest checkpoint" if starts_again else "giving up"}'
        self._notifier.send(Notice('failed', config.name, str(config.run_dir), ended.step, config.steps, why))

    def close(self) -> None:
        """Waits a limited time until the notices are sent."""
        self._notifier.close()
