"""Where the time of a run went: all seconds since it first began, each with one cause.

The division follows from what the run wrote: the events of `attempts.jsonl` say which process did what when, and
`pauses.jsonl` lists the work between steps. No second counts twice, and none is left out.
"""

import collections
import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

from pretrax.observe.attempts import is_time
from pretrax.storage import AnyPath
from pretrax.storage.parts import read_records

PAUSES = 'pauses.jsonl'  # {"time", "step", "work", "seconds"} of each piece of work between steps
CAUSES = ('kept', 'lost', 'compile', 'data', 'checkpoint', 'restore', 'detection', 'scheduling', 'startup')
CAUSES += ('evaluation', 'federation', 'replay', 'idle')
# The cause of work in `pauses.jsonl`, if it is not the work itself.
_OF_WORK = {'save': 'checkpoint', 'remember': 'checkpoint', 'finish': 'checkpoint'}
_OF_WORK |= {'evaluate': 'evaluation', 'sample': 'evaluation', 'federate': 'federation'}
# The cause of the time after an event.
_NEXT = {'allocated': 'scheduling', 'started': 'startup', 'began': 'compile', 'failed': 'detection'}
_NEXT |= {'finished': 'idle', 'stopped': 'idle'}
_STARTS = ('allocated', 'started', 'began')
_FINAL = (0, 2, 78)  # exit codes after which a launcher starts nothing
_WRITTEN = 0.5  # seconds in which an event is written, which touches the file too


class Division:
    """The division of a run's time. It takes the records of a run in the order in which they were written.

    Attributes:
        seconds: seconds up to the newest event, by cause.
    """

    def __init__(self):
        self.seconds: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        self._time: float | None = None  # of the newest event
        self._doing = 'idle'
        self._pauses: dict[str, float] = {}  # seconds of pauses since the newest event, by cause
        self._heard = -math.inf  # the end of the newest of them

    def pause(self, work: str, seconds: float, ended: float = -math.inf) -> None:
        """Takes a pause, as in `pauses.jsonl`. `ended`: when it did; the process was alive then."""
        cause = _OF_WORK.get(work, work if work in CAUSES else 'idle')
        self._pauses[cause] = self._pauses.get(cause, 0.0) + seconds
        self._heard = max(self._heard, ended)

    def event(self, event: Mapping[str, Any]) -> None:
        """Takes a record of `attempts.jsonl`."""
        kind, now = event['event'], float(event['time'])
        if self._time is None:
            self._time = now - _seconds(event, 'age')
        if self._doing in ('compile', 'kept') and kind in (*_STARTS, 'ended', 'failed'):  # the attempt was lost
            self._until(min(now, max(self._time, self._newest_sign(event, self._time))))
            self._doing = 'scheduling' if kind in _STARTS else 'detection'
        elif self._doing == 'detection' and kind in _STARTS:  # no launcher noticed the failure
            self._doing = 'idle'
        if kind == 'began':
            restore = _seconds(event, 'restore')
            self._until(now, restore=restore, startup=_seconds(event, 'age') - restore)
            self._lose(self.seconds['kept'] - _seconds(event, 'kept', math.inf))
        elif kind == 'stepped':
            self._doing = 'kept'
            self._until(now, compile=_seconds(event, 'compile', math.inf))
        else:
            self._until(now)
        if kind == 'rolled back':
            self._lose(_seconds(event, 'lost'))
        elif kind == 'ended':
            self._doing = 'idle' if event.get('code') in _FINAL else 'scheduling'
        self._doing = _NEXT.get(kind, self._doing)

    def at(self, now: float) -> dict[str, float]:
        """Seconds up to a time, by cause."""
        later = copy.copy(self)
        later.seconds, later._pauses = {**self.seconds}, {**self._pauses}
        if self._time is not None:
            later._until(now)
        return later.seconds

    def _newest_sign(self, event: Mapping[str, Any], since: float) -> float:
        """When the training last gave a sign of life, before an event that says it is no longer alive."""
        if (touched := _seconds(event, 'alive')) > since + _WRITTEN or self._heard > since:
            return max(touched, self._heard)
        if event['event'] in _STARTS:
            return since if 'alive' in event else math.inf
        return _seconds(event, 'noticed', math.inf)

    def _until(self, now: float, **known: float) -> None:
        """Divides the time since the newest event: pauses, then other known seconds by cause; the rest has one cause.

        A clock that was set back may leave less time than is known.
        """
        assert self._time is not None
        left = max(0.0, now - self._time)
        for cause, seconds in (*self._pauses.items(), *known.items()):
            part = min(max(0.0, seconds), left)
            self.seconds[cause] += part
            left -= part
        self.seconds[self._doing] += left
        self._time, self._pauses, self._heard = now, {}, -math.inf

    def _lose(self, seconds: float) -> None:
        """Steps that took this time are trained again."""
        part = min(max(0.0, seconds), self.seconds['kept'])
        self.seconds['kept'] -= part
        self.seconds['lost'] += part


def divide(events: Iterable[Mapping[str, Any]], pauses: Iterable[Mapping[str, Any]]) -> Division:
    """The division after these events of `attempts.jsonl` and records of `pauses.jsonl`."""
    division, waiting = Division(), collections.deque(pauses)
    for event in (*events, None):
        while waiting and (event is None or waiting[0]['time'] < event['time']):
            pause = waiting.popleft()
            division.pause(pause['work'], pause['seconds'], pause['time'] + pause['seconds'])
        if event is not None:
            division.event(event)
    return division


def goodput(seconds: Mapping[str, float]) -> float:
    """The part of all time that was spent on steps that were kept, between 0 and 1."""
    return seconds['kept'] / max(sum(seconds.values()), 1e-9)


def read_pauses(directory: AnyPath) -> list[dict[str, Any]]:
    """The records of `pauses.jsonl`; none if it does not exist. Other lines are skipped."""
    return read_records(directory / PAUSES, _is_pause)


def _is_pause(record: dict[str, Any]) -> bool:
    are_finite = is_time(record.get('seconds')) and is_time(record.get('time'))
    return are_finite and type(record.get('step')) is int and isinstance(record.get('work'), str)


def _seconds(event: Mapping[str, Any], key: str, otherwise: float = 0.0) -> float:
    return event[key] if is_time(event.get(key)) else otherwise
