"""What has happened to an island happens again in a replay, and islands learn the same bits."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from federation.test_island import Outage, Stopped, out_of_reach, values_of
from hand_made_federations import NAMES, closing, contribution
from pretrax import config_from_values, pretrain
from pretrax.federation.course import courses_of
from pretrax.federation.objects import Event, State, Table
from pretrax.federation.replay import replay
from pretrax.storage.shared_path import SharedPath, locate_shared
from runs import Quiet, write_yaml

TESTS = Path(__file__).parents[1]


def one(number, step, events=(), attempt='5f'):
    """A contribution of an island to a round, and its events as (kind, round, step, own, waited)."""
    names = ('kind', 'round', 'step', 'own', 'waited')
    found = [Event(batch=10 * each[2], **dict(zip(names, each, strict=False))) for each in events]
    return contribution(number, 'a', 100, 1.0, 1.0, step=step, events=found)


def courses(*contributions, others=(), **terms):
    """(start, batch, enters, contributes, entered, late) of each course. `others`: rounds without the island."""
    terms = {'federation.every': 4, 'steps': 100} | terms
    table = Table(founder='a', terms=terms | {'federation.islands': 3}, islands={'a': 0})
    own = {each.round: each for each in contributions}
    closings = {n: closing(n, [each], ['b' if n in others else 'a'], shares=NAMES) for n, each in own.items()}
    found = courses_of(table, own, closings)
    return [(x.start, x.batch, x.enters, x.contributes, x.entered, x.late) for x in found]


def test_an_island_to_which_nothing_has_happened_has_one_course():
    assert courses(one(1, 4), one(2, 8)) == [(0, None, False, [1, 2], [0], {})]


@pytest.mark.parametrize(
    ('contributions', 'terms', 'expected'),
    [
        # It joined late; it took round 2 ten steps late.
        ([one(2, 8, [('entered', 1, 4, 0)]), one(3, 22, [('took', 2, 18, 18)])], {},
         [(0, None, True, [2, 3], [1], {2: 18})]),
        # It lost its state, or the state before it had one.
        ([one(1, 4), one(3, 12, [('entered', 2, 8, 0)])], {},
         [(0, None, False, [1], [0], {}), (0, None, True, [3], [2], {})]),
        # It was left out of round 2 in time, and of round 3 after an outage of five steps.
        ([one(1, 4), one(2, 8), one(3, 12, [('entered', 2, 8, 8, 2)]), one(4, 24, [('entered', 3, 20, 17, 3)])],
         {'others': (2, 3)}, [(0, None, False, [1, 2, 3, 4], [0, 2, 3], {3: 17})]),
        # It came back from step 9, with round 2 taken, and was left out of round 3.
        ([one(2, 8), one(4, 16, [('entered', 3, 12, 9)])], {},
         [(0, None, False, [2], [0], {}), (9, None, True, [4], [3], {})]),
        # It rolled back to step 6, and what it contributed to round 2 before counts.
        ([one(1, 4), one(2, 8), one(3, 12, [('rolled back', 2, 6, 6), ('entered', 2, 8, 8, 2)])], {},
         [(0, None, False, [1, 2], [0], {}), (6, 60, False, [3], [2], {})]),
        # The same, before its first checkpoint.
        ([one(1, 4), one(2, 8, [('rolled back', 0, 0, 0), ('entered', 1, 4, 0)])], {},
         [(0, None, False, [1], [0], {}), (0, 0, True, [2], [1], {})]),
        # It rolled back while it waited for round 1, which it took at step 12: it also waited before.
        ([one(1, 4), one(2, 16, [('rolled back', 1, 6, 6), ('took', 1, 12, 12)])], {},
         [(0, None, False, [1], [0], {1: 12}), (6, 60, False, [2], [], {1: 12})]),
        # With a delay of two steps, step 10 is the usual one. Round 2 is taken late only at step 11.
        ([one(1, 4), one(2, 8), one(3, 12, [('entered', 2, 10, 10, 2)])],
         {'others': (2,), 'federation.delay': 2}, [(0, None, False, [1, 2, 3], [0, 2], {})]),
        ([one(1, 4), one(2, 8), one(3, 12, [('entered', 2, 11, 11, 2)])],
         {'others': (2,), 'federation.delay': 2}, [(0, None, False, [1, 2, 3], [0, 2], {2: 11})]),
        # A process took round 1 in time and died; the next one took it late, and its round 2 came too late.
        ([one(1, 4), one(2, 8), one(4, 18, [('took', 1, 10, 10), ('entered', 3, 14, 14, 2)])], {},
         [(0, None, False, [1, 2], [0], {1: 10}), (0, None, False, [4], [0, 3], {1: 10})]),
        # It went on with other devices, and then came back from before that.
        ([one(1, 4), one(2, 8, [('changed', 2, 6, 6)]), one(4, 16, [('entered', 3, 12, 5)])], {},
         [(0, None, False, [1], [0], {}), (6, None, False, [2], [], {}), (5, None, True, [4], [3], {})]),
        # Round 2 has what it has learned, but was damaged: after an outage it entered round 3.
        ([one(1, 4), one(2, 8), one(4, 18, [('entered', 3, 14, 14, 2)])], {},
         [(0, None, False, [1, 2, 4], [0, 3], {2: 14})]),
        # Two of three events were said before.
        ([one(1, 4), one(2, 9, [('took', 1, 5, 5)]), one(4, 17, [('took', 1, 5, 5), ('entered', 3, 13, 9, 2)])],
         {'others': (2,)}, [(0, None, False, [1, 2, 4], [0, 3], {1: 5})]),
    ],
)  # fmt: skip
def test_events_between_contributions_make_courses(contributions, terms, expected):
    assert courses(*contributions, **terms) == expected


def test_a_course_has_the_devices_of_the_contribution_that_tells_of_it():
    table = Table(founder='a', terms={'federation.every': 4, 'federation.islands': 3}, islands={'a': 0})
    own = {2: one(2, 8), 3: None, 5: one(5, 20, [('entered', 4, 16, 10)])}
    found = courses_of(table, own, {})
    assert [(course.of, course.contributes) for course in found] == [(2, [2, 3]), (5, [5])]


def test_a_round_that_could_not_be_read_is_dropped():
    table = Table(founder='a', terms={'federation.every': 4, 'federation.islands': 3}, islands={'a': 0})
    own = {1: one(1, 4), 3: one(3, 12, [('entered', 2, 8, 4, 1)])}
    [found] = courses_of(table, own, {1: closing(1, [own[1]], 'a')})
    assert (found.entered, found.dropped, found.late) == ([0, 2], [1], {})


@pytest.fixture
def island(tmp_path, monkeypatch):
    """island(name, progress, **changes) trains an island of a federation until its end, or until `progress` stops."""
    monkeypatch.setenv('PYTHONPATH', str(TESTS))

    def values(name, islands=2, **changes):
        plugins = [str(TESTS / 'federation' / 'replayed_plugin.py')]
        return values_of(tmp_path, name, islands) | {'steps': 24, 'plugins': plugins} | changes

    def train(name='a', progress=None, **changes):
        pretrain(config_from_values(values(name, **changes)), progress=progress or Quiet())
        return values(name)

    train.values = values
    return train


def events(tmp_path, number, name='a'):
    path = tmp_path / 'bucket' / 'rounds' / str(number) / f'{name}.json'
    return [(one['kind'], one['round'], one['step'], one['own']) for one in json.loads(path.read_text())['events']]


def remove_checkpoints(values, after):
    for path in (Path(values['run_dir']) / 'checkpoints').iterdir():
        if path.name.isdecimal() and int(path.name) > after:
            shutil.rmtree(path)


def check(tmp_path, rounds):
    said = []
    assert replay(SharedPath(tmp_path / 'bucket'), tmp_path / 'out', said.append) == []
    assert [text.split(':')[0] for text in said[1:]] == [f'round {n}' for n in range(1, rounds + 1)]


@pytest.mark.slow
def test_a_round_that_was_taken_late_is_taken_at_the_same_step(tmp_path, island, monkeypatch):
    monkeypatch.setattr('pretrax.federation.exchange._PATIENCE', 0.1)
    bucket = tmp_path / 'bucket'
    island(islands=1, steps=60, progress=out_of_reach(bucket, 6, 20))
    [(kind, number, step, own)] = events(tmp_path, 3)
    assert (kind, number, step) == ('took', 2, own)
    assert step > 8
    rounds = len([path for path in (bucket / 'rounds').iterdir() if (path / 'closed.json').exists()])
    check(tmp_path, rounds)


def test_a_rollback_is_repeated(tmp_path, island):
    island(islands=1, steps=20, data={'name': 'bad-of-replays'}, faults={'rollback_after': 2})
    assert events(tmp_path, 3) == [('rolled back', 2, 6, 6), ('entered', 2, 8, 8)]
    check(tmp_path, 5)


@pytest.mark.slow
def test_islands_that_join_late_and_are_left_out_learn_the_same(tmp_path, island):
    island('a', Stopped(5))
    island('b')
    island('a')
    assert events(tmp_path, 2, 'b') == [('entered', 1, 4, 0)]
    check(tmp_path, 6)


def test_an_island_that_has_lost_its_state_comes_in_again(tmp_path, island):
    values = island('a', Stopped(9))
    shutil.rmtree(values['run_dir'])
    island('a')
    assert events(tmp_path, 3) == [('entered', 2, 8, 0)]
    check(tmp_path, 6)


@pytest.mark.slow
def test_an_island_that_goes_on_from_an_older_checkpoint_does_so_again(tmp_path, island):
    """It comes back from step 6, to find that its round was closed without it, and from step 12, after another one."""
    island('b', Stopped(5))
    values = island('a', Stopped(6))
    island('b', Stopped(9))
    island('a', Stopped(17))
    assert events(tmp_path, 3) == [('entered', 1, 4, 0), ('entered', 2, 8, 7)]
    remove_checkpoints(values, 12)
    shutil.rmtree(tmp_path / 'bucket' / 'rounds' / '4')  # as if it had ended before it wrote what it had learned
    island('b', Stopped(18))
    island('a')
    assert events(tmp_path, 5) == [('entered', 4, 16, 12)]
    check(tmp_path, 6)


PROCESS = (
    'import json, sys; from pretrax import *; from federation.test_island import Stopped; '
    'pretrain(config_from_values(json.loads(sys.argv[1])), allow_changes=True, progress=Stopped(int(sys.argv[2])))'
)


@pytest.mark.slow
def test_an_island_that_was_left_out_and_has_forgotten_it_is_left_out_again(tmp_path, island):
    """Others close the round while it trains. It dies after it has contributed, and comes back from before."""

    def others():
        path = tmp_path / 'bucket' / 'islands' / 'a' / 'state.json'
        path.write_bytes(State(round=3, state='stopped').content())  # nobody waits for it
        subprocess.run([sys.executable, '-c', PROCESS, json.dumps(island.values('b')), '13'], check=True)

    island('b', Stopped(5))
    values = island('a', Outage({10: others, 13: lambda: signal.raise_signal(signal.SIGINT)}))
    remove_checkpoints(values, 9)
    island('a', Stopped(17))
    assert [events(tmp_path, number) for number in (2, 3, 4)] == [[('entered', 1, 4, 0)], [], [('entered', 3, 12, 9)]]
    island('b')
    island('a')
    check(tmp_path, 6)


@pytest.mark.slow
def test_an_island_that_goes_on_with_other_devices_changes_them_again(tmp_path, island):
    """Eight devices, then two."""
    values = island('a', Stopped(5), islands=1)
    values |= {'mesh': {'d': 2}, 'federation': values['federation'] | {'islands': 1}}
    environment = os.environ | {'XLA_FLAGS': '', 'JAX_NUM_CPU_DEVICES': '2'}
    subprocess.run([sys.executable, '-c', PROCESS, json.dumps(values), '99'], env=environment, check=True)
    assert events(tmp_path, 2) == [('changed', 2, 6, 6)]
    check(tmp_path, 6)


@pytest.mark.slow
def test_an_island_of_several_processes_is_trained_again_in_as_many(tmp_path, island):
    values = island.values('a', islands=1) | {'mesh': {'d': 2}}
    launch = [sys.executable, '-m', 'pretrax', 'launch', 'local', '-n', '2', write_yaml(values, tmp_path / 'a.yaml')]
    flags = re.sub(r'--xla_force_host_platform_device_count=\d+', '', os.environ['XLA_FLAGS'])
    subprocess.run(launch, env=os.environ | {'XLA_FLAGS': flags}, check=True)
    assert [events(tmp_path, n) for n in range(1, 7)] == [[]] * 6
    check(tmp_path, 6)


@pytest.mark.slow
def test_a_federation_in_a_bucket_is_repeated_in_a_directory(tmp_path, island, bucket):
    """With a delay, fragments and an encoding that keeps a residual, after a stop while a round is pending."""
    section = {'bucket': f'{bucket.url}/fed', 'islands': 1, 'every': 8, 'fragments': 2, 'delay': 2, 'encoding': 'int8'}
    island('a', Stopped(9), federation=section)
    island('a', federation=section)
    said = []
    assert replay(locate_shared(f'{bucket.url}/fed'), tmp_path / 'out', said.append) == []
    assert [text.split(':')[0] for text in said[1:]] == [f'round {number}' for number in range(1, 8)]
