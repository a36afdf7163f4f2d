"""A watched run: follows its files and turns new lines into events for the clients.

run      state, progress, last values, attempts and warnings of the run
curves   points of its curves, each from an index on
samples  its newest samples

A client may apply an event twice, or one that is older than what it has, if the newer events follow.
"""

import collections
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from pretrax.federation.registry import is_federation
from pretrax.observe.attempts import FILE as ATTEMPTS
from pretrax.observe.attempts import Attempt, attempts_of, is_event
from pretrax.observe.step_lines import SAMPLES as SAMPLES_FILE
from pretrax.storage import AnyPath, BucketPath
from pretrax.system.line_files import read_lines
from pretrax.view.federation.read import Federation
from pretrax.view.federation.tables import open_text
from pretrax.view.live.curves import MOST_KEYS, TIME, Curves
from pretrax.view.live.follow import FederationTail, open_tail
from pretrax.view.record.columns import Columns, parse_columns
from pretrax.view.record.run_record import is_sample
from pretrax.view.record.settings import parse_settings, value_of
from pretrax.view.record.state import state_of
from pretrax.view.record.verdict import KEYS, Losses, verdict_of

WAITING, REMOVED = 'waiting', 'removed'  # besides the states of observe/attempts.py
_OF_ATTEMPTS = ('start', 'ended', 'first_step', 'last_step', 'outcome', 'why', 'processes')
SAMPLES, ATTEMPTS_SHOWN, MOST_EVENTS = 50, 50, 10_000  # the newest ones
STALLED = 10  # times the usual time between two lines
LEAST_SILENCE = 60.0  # seconds without a line before a run is stalled

type Kind = Literal['run', 'curves', 'samples']


class Event(NamedTuple):
    """An event for the clients."""

    kind: Kind
    data: dict[str, Any]


class WatchedRun:
    """A run on a disk or in a bucket, which need not exist yet. Its methods may be called from several threads.

    Args:
        name: under which it is shown.

    Attributes:
        id: unique among the watched runs.
        state: 'waiting' (nothing was written), 'removed', or one of `observe.attempts.State`.
    """

    def __init__(self, path: AnyPath, name: str):
        self.path, self.name, self.id = path, name, str(path)
        self.state, self.more = WAITING, False
        self.heard: float | None = None  # when the newest line was written, or else read, in seconds since 1970
        self.curves = Curves()
        self._lock = threading.Lock()
        self._open_metrics()
        self._new_curves: Curves | None = None  # of a file that replaced another one, until it is read to its end
        self._replaced = False
        self._attempts = _Records(path / ATTEMPTS, is_event, MOST_EVENTS)
        self._samples = _Records(path / SAMPLES_FILE, is_sample, SAMPLES)
        self._steps: int | None = None
        self._why = self._problem = ''
        slow = isinstance(path, BucketPath)
        self._config_timer, self._state_timer = _Timer(60 if slow else 5), _Timer(15 if slow else 2)
        self._sent: dict[str, Any] = {}

    def poll(self) -> list[Event]:
        """Reads the new lines. An error of the disk or the bucket is reported in the event `run`."""
        with self._lock:
            has_samples = False
            try:
                is_new = self._read_metrics() | self._attempts.read()
                has_samples = self._samples.read()
                if self._config_timer.is_due(is_new and self._steps is None):
                    self._read_config()
                if self._state_timer.is_due(is_new):
                    self._read_state()
                self._problem = ''
            except OSError as error:
                self._problem = f'{error.filename or self.path}: {error.strerror}'
            except Exception as error:  # caused by the contents of the files; the other runs are still watched
                self._problem = f'{type(error).__name__}: {str(error)[:200]}'
                self._open_metrics()
                self._new_curves = Curves()
            events = [Event('samples', self._sample_data())] if has_samples else []
            curves: dict[str, Any] = {'id': self.id, 'keys': self.curves.changes()}
            if self._replaced:
                curves['only'], self._replaced = list(self.curves.by_key), False
            if curves['keys'] or 'only' in curves:
                events.append(Event('curves', curves))
            info = self._unlocked_info()
            if info != self._sent:
                self._sent = info
                events.append(Event('run', info))
            return events

    def snapshot(self) -> list[Event]:
        """The events that give a client everything."""
        with self._lock:
            curves = {'id': self.id, 'keys': self.curves.whole(), 'only': list(self.curves.by_key)}
            return [Event('run', self._unlocked_info()), Event('curves', curves), Event('samples', self._sample_data())]

    def info(self) -> dict[str, Any]:
        """The data of the event `run`."""
        with self._lock:
            return self._unlocked_info()

    def _open_metrics(self) -> None:
        file = self.path / 'metrics.jsonl'
        is_run = not is_federation(self.path) or file.exists()
        self._metrics = open_tail(file) if is_run else FederationTail(self.path)

    @property
    def _federation(self) -> Federation | None:
        return self._metrics.federation if isinstance(self._metrics, FederationTail) else None

    def _read_metrics(self) -> bool:
        self.more = False  # if this read fails, the next one waits
        appended = self._metrics.read()
        if appended.replaced:
            self._new_curves = Curves()
        self.more = appended.more
        reading = self.curves if self._new_curves is None else self._new_curves
        if appended.lines:
            reading.extend(parse_columns(appended.lines))
            self.heard = (reading.by_key[TIME].last if TIME in reading.by_key else 0.0) or time.time()
        if self._new_curves is not None and not self.more:
            self._new_curves.replaces(self.curves)
            self.curves, self._new_curves, self._replaced = self._new_curves, None, True
        return bool(appended.lines) or appended.replaced

    def _sample_data(self) -> dict[str, Any]:
        samples = [
            {'step': one['step'], 'prompt': one['prompt'], 'text': one['text'].removeprefix(one['prompt'])}
            for one in self._samples.records
        ]  # `text` of the file begins with the prompt
        return {'id': self.id, 'samples': samples}

    def _read_config(self) -> None:
        try:
            file = self._federation.config if self._federation is not None else 'config.yaml'
            settings, _ = parse_settings((self.path / file).read_text(encoding='utf-8'))
        except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError):
            return
        steps = value_of(settings, 'steps')
        self._steps = steps if type(steps) is int and abs(steps) < 2**62 else None

    def _read_state(self) -> None:
        if self._federation is not None:
            self.state, trains = self._federation.state
            self._why = ', '.join(filter(None, [trains, open_text(self._federation)]))
            return
        attempts, step = attempts_of(self._attempts.records), self.curves.last_step
        if isinstance(self.path, Path) and not self.path.is_dir():
            self.state = REMOVED if self.heard is not None or self.state == REMOVED else WAITING
            return
        written = np.array([] if step is None else [step]), np.array([] if self.heard is None else [self.heard])
        state, self._why = state_of(self.path, attempts, Columns({}, *written), self._steps)
        self.state = WAITING if state == 'lost' and step is None and not attempts else state

    def _unlocked_info(self) -> dict[str, Any]:
        curves, attempts = self.curves, attempts_of(self._attempts.records)
        interval = _interval(curves)
        silence = 0.0 if self.heard is None else time.time() - self.heard
        is_stalled = self.state == 'running' and silence > max(LEAST_SILENCE, STALLED * (interval or 0.0))
        numbers = {key: curve.last for key, curve in curves.by_key.items() if key != TIME}
        last = {key: number if math.isfinite(number) else str(number) for key, number in numbers.items()}
        return {
            'id': self.id,
            'name': self.name,
            'state': self.state,
            'why': self._why,
            'stalled': is_stalled,
            'step': curves.last_step,
            'steps': self._steps,
            'lines': curves.lines,
            'reading': self.more,
            'heard': self.heard,
            'interval': interval,
            'ends': self._end(attempts),
            'last': last,
            'attempts': [{key: getattr(one, key) for key in _OF_ATTEMPTS} for one in attempts[-ATTEMPTS_SHOWN:]],
            'restarts': max(0, len(attempts) - 1),
            'warnings': self._warnings(is_stalled),
        }

    def _end(self, attempts: list[Attempt]) -> float | None:
        """When the run ends if it continues as in the newest lines of this attempt, in seconds since 1970."""
        times, step = self.curves.by_key.get(TIME), self.curves.last_step
        if self.state != 'running' or self._steps is None or times is None or step is None:
            return None
        began = attempts[-1].began if attempts else None
        steps, clock = times.points.steps[-100:], times.points.highs[-100:]
        steps, clock = (steps, clock) if began is None else (steps[clock >= began], clock[clock >= began])
        if len(steps) < 2 or steps[-1] <= steps[0]:
            return None
        with np.errstate(over='ignore', invalid='ignore'):
            return _known(
                clock[-1] + float(self._steps - int(steps[-1])) * (clock[-1] - clock[0]) / (steps[-1] - steps[0])
            )

    def _warnings(self, is_stalled: bool) -> list[str]:
        curves, found = self.curves, []
        if self._problem:
            found.append(f'cannot be read: {self._problem}')
        if self._federation is not None:
            found += self._federation.problems
        if is_stalled:
            found.append('stalled: no new line for much longer than usual')
        losses = {}
        for key in curves.by_key.keys() & {*KEYS}:
            points = curves.by_key[key].points
            is_finite = np.isfinite(points.means)  # the others have lines of their own
            losses[key] = Losses(points.steps[is_finite], points.means[is_finite])
        if text := verdict_of(losses):
            found.append(text)
        for key, curve in curves.by_key.items():
            if curve.nonfinite:
                step, text = curve.nonfinite[-1]
                count = f' ({curve.nonfinite_count:,} times)' if curve.nonfinite_count > 1 else ''
                found.append(f'{key} was {text} at step {step:,}{count}')
        for key, what in (('skipped_steps', 'skipped'), ('steps_without_targets', 'without targets')):
            count = curves.by_key.get(key)
            if count is not None and count.last > 0:
                found.append(f'{count.last:,.0f} steps {what}')
        back = [event for event in self._attempts.records if event['event'] == 'rolled back']
        if back:
            found.append(f'rolled back {len(back)} times, last to step {back[-1].get("step")}')
        if curves.skipped:
            found.append(f'{curves.skipped:,} lines of metrics.jsonl are not lines of metrics')
        if len(curves.by_key) >= MOST_KEYS:
            found.append(f'only the first {MOST_KEYS} keys are shown')
        return found


class _Timer:
    """Says when it is time to do something again."""

    def __init__(self, seconds: float):
        self._seconds, self._next = seconds, 0.0

    def is_due(self, now: bool) -> bool:
        """Whether the seconds have passed since this was last true, or it has to be done now."""
        if not now and time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + self._seconds
        return True


class _Records:
    """The newest records of a file of JSON lines."""

    def __init__(self, path: AnyPath, is_record: Callable[[dict[str, Any]], bool], most: int):
        self._tail, self._is_record = open_tail(path), is_record
        self.records: collections.deque[dict[str, Any]] = collections.deque(maxlen=most)

    def read(self) -> bool:
        """Reads what is new. Returns whether anything is. Raises OSError."""
        is_new, more = False, True
        while more:
            appended = self._tail.read()
            if appended.replaced:
                self.records.clear()
            lines = read_lines(appended.lines.splitlines(), self._is_record)
            self.records.extend(line.record for line in lines if line.record is not None)
            is_new, more = is_new or bool(appended.lines) or appended.replaced, appended.more
        return is_new


def _interval(curves: Curves) -> float | None:
    """The usual time between two of the newest lines, in seconds."""
    times = curves.by_key.get(TIME)
    if times is None or times.count < 3:
        return None
    with np.errstate(over='ignore', invalid='ignore'):
        return _known(max(0.0, float(np.median(np.diff(times.points.highs[-50:]))) / times.per_point))


def _known(value: float) -> float | None:
    """A number that JSON has."""
    return value if math.isfinite(value) else None
