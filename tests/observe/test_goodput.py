"""The division of a run's time by cause, against histories whose every second is known."""

import itertools
import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pretrax.observe.attempts import is_event, note, read_attempts, touch
from pretrax.observe.goodput import CAUSES, divide, goodput, read_pauses

WORK = {
    'evaluate': 'evaluation', 'sample': 'evaluation', 'save': 'checkpoint', 'remember': 'checkpoint', 'data': 'data',
    'compile': 'compile', 'replay': 'replay', 'trace': 'idle', 'federate': 'federation',
}  # fmt: skip
KILLED_IN = ('startup', 'preparation', 'compile', 'steps', 'steps', 'steps')


class History:
    """Lives of a run that are drawn at random, what they write, and the true seconds by cause.

    Attributes:
        events, pauses: as in the files.
        truth: seconds by cause.
    """

    def __init__(self, seed):
        self.draw, self.now = random.Random(seed), 1.7e9
        self.events, self.pauses, self.truth = [], [], dict.fromkeys(CAUSES, 0.0)
        self.saved = 0.0  # kept seconds of the newest checkpoint
        self.alive = self.now
        self.has_launcher = self.draw.random() < 0.7

    def spend(self, cause, most=10.0, least=1.0):
        seconds = self.draw.uniform(least, most)
        self.now += seconds
        self.truth[cause] += seconds
        return seconds

    def write(self, event, **what):
        self.events.append({'time': self.now, 'event': event, 'alive': self.alive, **what})
        self.alive = self.now

    def lose(self):
        """What was trained since the checkpoint is trained again."""
        lost = self.truth['kept'] - self.saved
        self.truth['kept'] = self.saved
        self.truth['lost'] += lost
        return lost

    def train(self, is_killed):
        """Steps and what is between them; the process may be killed in a step."""
        for action in self.draw.choices(
            ['steps', 'pause', 'save', 'roll back'], [6, 4, 2, 1], k=self.draw.randint(1, 12)
        ):
            self.spend('kept')
            self.alive = self.now
            if action == 'pause':
                work = self.draw.choice(list(WORK))
                self.pause(work, WORK[work])
            elif action == 'save':
                self.saved = self.truth['kept']
                self.pause('save', 'checkpoint')
            elif action == 'roll back':
                self.pause('restore', 'restore')
                self.write('rolled back', step=1, from_step=2, lost=self.lose())
        if is_killed:
            self.spend('kept')
            self.alive = self.now

    def pause(self, work, cause):
        self.pauses.append({'time': self.now, 'step': 1, 'work': work, 'seconds': self.spend(cause)})
        self.alive = self.now

    def live(self, is_last=False):
        """One attempt, from its start to its end or a kill; the last one is not killed."""
        killed_in = self.draw.choice(KILLED_IN) if not is_last and self.draw.random() < 0.7 else None
        if self.has_launcher:
            self.write('started', attempt=1, processes=[1])
            self.spend('startup')
            if killed_in == 'startup':
                return self.killed(began=False)
        age = self.spend('startup', 3.0)
        restore = self.spend('restore', 3.0)
        age += restore + self.spend('startup', 3.0)
        self.lose()
        self.write('began', step=1, age=age, restore=restore, kept=self.saved)
        compiled = self.spend('compile')
        if killed_in in ('preparation', 'compile'):
            return self.killed(began=True, stepped=False)
        self.spend('kept')
        self.write('stepped', step=2, compile=compiled)
        self.train(killed_in is not None)
        if killed_in:
            return self.killed(began=True)
        self.spend('kept')
        self.alive, self.saved = self.now, self.truth['kept']
        event = self.draw.choice(['finished', 'stopped', 'failed'])
        if event == 'failed':
            self.spend('detection')
        self.write(event, step=3, why='')
        if self.has_launcher:
            self.spend('detection' if event == 'failed' else 'idle', 2.0)
            self.write('ended', why='', code=int(event == 'failed'), step=3, noticed=self.now)
            self.spend('scheduling' if event == 'failed' else 'idle', 100.0)
        elif not is_last:
            self.spend('idle', 100.0)
        return None

    def killed(self, began, stepped=True):
        """The process is gone. A launcher notices it, or somebody starts it again."""
        if not self.has_launcher:
            self.spend('scheduling', 100.0)
            if not stepped:  # nothing tells how long it compiled
                self.truth['scheduling'] += self.truth['compile'] - self.compiled_before
                self.truth['compile'] = self.compiled_before
            return
        noticed = self.now
        if began and stepped:
            noticed += self.spend('detection')
        seconds = self.spend('detection' if began else 'startup', 0.2, 0.1)
        self.write('ended', why='killed', code=-9, step=1, noticed=self.now - seconds)
        self.spend('scheduling', 50.0)

    @property
    def compiled_before(self):
        """Seconds of compilation of the attempts whose first step was done."""
        return sum(event['compile'] for event in self.events if event['event'] == 'stepped') + sum(
            pause['seconds'] for pause in self.pauses if pause['work'] == 'compile'
        )


@given(st.integers(0, 10**9), st.integers(1, 8))
def test_every_second_of_a_history_has_its_cause(seed, lives):
    history = History(seed)
    first = history.now
    for left in reversed(range(lives)):
        history.live(is_last=not left)
    expected = history.truth
    seconds = divide(history.events, history.pauses).at(history.now)
    assert sum(seconds.values()) == pytest.approx(history.now - first)
    assert seconds == pytest.approx(expected, abs=1e-4)
    assert goodput(seconds) == pytest.approx(expected['kept'] / (history.now - first))


times = st.one_of(st.floats(0, 2e9), st.floats(allow_nan=True, allow_infinity=True), st.none(), st.just('soon'))
events = st.fixed_dictionaries(
    {
        'time': st.floats(0, 2e9),
        'event': st.sampled_from(
            ['allocated', 'started', 'began', 'stepped', 'ended', 'failed', 'finished', 'rolled back', 'x']
        ),
    },
    optional=dict.fromkeys(['alive', 'noticed', 'age', 'restore', 'kept', 'compile', 'lost'], times)
    | {'code': st.sampled_from([0, 1, 2, 75, -9, None])},
)
pauses = st.fixed_dictionaries(
    {
        'time': st.floats(0, 2e9),
        'step': st.just(1),
        'work': st.sampled_from([*WORK, 'restore', 'finish', 'x']),
        'seconds': st.floats(-1e9, 1e9),
    }
)


@given(st.lists(events, min_size=1), st.lists(pauses), st.floats(0, 2e9))
@example([{'time': 1.0, 'event': 'began'}, {'time': 1.0, 'event': 'ended', 'noticed': 0.0}], [], 0.0)
def test_whatever_the_files_say_the_causes_are_all_of_the_time(history, breaks, now):
    """Also if the clock was set back, times are foreign, or pauses are longer than the run."""
    assert all(map(is_event, history))
    seconds = divide(history, breaks).at(now)
    assert list(seconds) == list(CAUSES)
    assert all(0 <= n < math.inf for n in seconds.values())
    marks = [event['time'] for event in history] + [now]
    total = sum(max(0.0, later - earlier) for earlier, later in itertools.pairwise(marks))
    age = history[0].get('age')
    if isinstance(age, float) and 0 < abs(age) < 2**62:
        total += max(0.0, age)
    assert sum(seconds.values()) == pytest.approx(total)
    assert 0 <= goodput(seconds) <= 1


def test_a_run_of_an_earlier_version_has_no_lost_steps_and_all_of_its_time():
    history = [
        {'time': 100.0, 'event': 'began', 'step': 0},
        {'time': 130.0, 'event': 'stepped', 'step': 1},
        {'time': 500.0, 'event': 'began', 'step': 5},
        {'time': 520.0, 'event': 'stepped', 'step': 6},
    ]
    seconds = divide(history, [{'time': 200.0, 'step': 4, 'work': 'save', 'seconds': 10.0}]).at(600.0)
    assert {cause: n for cause, n in seconds.items() if n} == {
        'kept': 150.0, 'compile': 50.0, 'checkpoint': 10.0, 'scheduling': 290.0,
    }  # fmt: skip


def test_an_event_says_when_the_training_was_last_alive(tmp_path):
    note(tmp_path, 'stepped', step=1)
    touch(tmp_path)
    touched = (tmp_path / 'attempts.jsonl').stat().st_mtime
    note(tmp_path, 'ended', code=-9)
    assert [event.get('alive') for event in read_attempts(tmp_path)] == [None, pytest.approx(touched, abs=1e-3)]
    touch(tmp_path / 'nowhere')


def test_foreign_lines_of_pauses_are_skipped(tmp_path):
    assert read_pauses(tmp_path) == []
    (tmp_path / 'pauses.jsonl').write_text(
        '[1]\n{"time": 1, "step": 1, "work": "save", "seconds": NaN}\n'
        '{"time": 1, "step": 1, "work": "save", "seconds": 2}\n{"time": 3'
    )
    assert [pause['seconds'] for pause in read_pauses(tmp_path)] == [2]
