"""Runs that share a directory and train one model, against the algorithm written again."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from federation.diloco import diloco, first_weights, streaming
from pretrax import config_from_values, pretrain, register
from pretrax.checkpoint import CheckpointWeights, steps_in
from pretrax.errors import UnavailableError, UserError
from pretrax.federation import differences
from pretrax.federation.island import Island
from pretrax.federation.objects import State
from runs import BIGRAM, BadBatches, Quiet, StoppedAt, lines_of, without_clock
from side_by_side import coordinator_address, run_side_by_side
from small import VOCAB

VALUES = {
    'model': BIGRAM, 'data': {'name': 'synthetic', 'vocab_size': VOCAB}, 'steps': 12, 'schedule': {'name': 'constant'},
    'batch': {'tokens': 64, 'sequence_length': 16}, 'mesh': {'r': 2, 'd': 2, 't': 2},
    'optimizer': {'name': 'sgd', 'learning_rate': 0.5, 'weight_decay': 0.0, 'clip_norm': None},
    'precision': {'compute': 'f32'}, 'log': {'every': 1, 'report': False}, 'eval': {'every': 0},
    'checkpoint': {'every': 3, 'keep': 100},
}  # fmt: skip


class Stopped(StoppedAt):
    def update(self, metrics):
        if 'loss' in metrics:
            super().update(metrics)


def values_of(directory, name='a', islands=1, every=4, **section):
    federation = {'bucket': str(directory / 'bucket'), 'islands': islands, 'every': every, 'encoding': 'f32', **section}
    return VALUES | {'name': name, 'run_dir': str(directory / name), 'federation': federation}


def losses_of(values):
    return [line['loss'] for line in lines_of(values)]


def check_weights(state, theta):
    np.testing.assert_allclose(state.weights.table, theta['table'], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(state.weights.bias, theta['bias'], rtol=2e-5, atol=2e-6)


def test_one_island_is_a_run_with_the_outer_optimizer_in_it(tmp_path):
    values = values_of(tmp_path) | {'steps': 10}
    result = pretrain(config_from_values(values), progress=Quiet())
    theta, losses = diloco(tmp_path, 1, 10, 4)
    np.testing.assert_allclose(losses_of(values), losses[0], rtol=2e-6)
    check_weights(result.state, theta)


def test_an_island_reads_a_difference_once_to_check_and_to_average_it(tmp_path, monkeypatch):
    read = differences.add
    authors = []
    monkeypatch.setattr(differences, 'add', lambda *given: authors.append(given[3]) or read(*given))
    pretrain(config_from_values(values_of(tmp_path) | {'steps': 8}), progress=Quiet())
    assert authors == [f'the difference of island a for round {number}' for number in (1, 2)]


def test_fragments_are_averaged_in_turn_while_the_island_trains(tmp_path):
    values = values_of(tmp_path, fragments=2, delay=1, mixing=0.25) | {'steps': 11}
    result = pretrain(config_from_values(values), progress=Quiet())
    theta, losses = streaming(tmp_path, 1, 11, 4, [['table'], ['bias']], 1, 0.25)
    np.testing.assert_allclose(losses_of(values), losses[0], rtol=2e-6)
    check_weights(result.state, theta)


@pytest.mark.parametrize('section', [{}, {'fragments': 2, 'delay': 1}, {'encoding': 'int4'}])
def test_an_island_that_stops_anywhere_goes_on_as_if_it_had_not(tmp_path, section):
    whole, stopped = values_of(tmp_path / 'whole', **section), values_of(tmp_path / 'stopped', **section)
    pretrain(config_from_values(whole), progress=Quiet())
    for step in (3, 8):
        pretrain(config_from_values(stopped), progress=Stopped(step))
    pretrain(config_from_values(stopped), progress=Quiet())
    assert losses_of(stopped) == losses_of(whole)


def test_an_island_whose_checkpoint_is_older_than_the_anchors_goes_on_with_newer_weights(tmp_path):
    values = values_of(tmp_path, every=1, keep=1) | {'log': VALUES['log'] | {'every': 1}}
    pretrain(config_from_values(values), progress=Stopped(9))
    for path in (tmp_path / 'a' / 'checkpoints').iterdir():
        if path.name.isdecimal() and int(path.name) > 3:
            shutil.rmtree(path)
    progress = Quiet()
    result = pretrain(config_from_values(values), progress=progress)
    assert (int(result.state.step), int(result.state.batch)) == (12, 12)
    assert any('round 4 cannot be read' in text and 'is missing' in text for text in progress.said)
    assert any('weights of round 9' in text for text in progress.said)
    assert [learned(tmp_path, number)['a'][1] for number in range(1, 13)] == [64] * 12


@pytest.mark.slow
def test_a_bucket_has_few_numbers_after_many_rounds(tmp_path, s3, start):
    """A process that is killed leaves what it was just writing."""
    values = [
        values_of(tmp_path, name, 2, every=1, keep=5, wait_for=2, patience=20.0)
        | {'steps': 50, 'eval': {'every': 0}, 'checkpoint': {'every': 10}}
        for name in 'ab'
    ]
    for each in values:
        each['federation'] |= {'bucket': f'{s3.url}/federation'}
    first, second = start(values[0]), start(values[1])
    wait_for(lambda: (tmp_path / 'b' / 'metrics.jsonl').exists() and len(lines_of(values[1])) > 20)
    second.kill()
    second.wait()
    killed = json.loads(s3.content('federation/islands/b/lock'))['token']
    assert start(values[1]).wait() == first.wait() == 0
    keys = [key.split('/')[1:] for key in s3.keys('federation/')]
    closed = {int(key[1]) for key in keys if key[0] == 'rounds' and key[2] == 'closed.json'}
    assert closed == set(range(1, max(closed) + 1))
    assert max(closed) >= 50
    assert {int(key[1]) for key in keys if key[0] == 'rounds' and key[2] == 'a.json'} == closed
    last, at_kill = max(closed), {int(key[1]) for key in keys if key[3:4] == [killed]}
    numbers = {int(key[1]) for key in keys if key[0] == 'rounds' and len(key) > 3} - at_kill
    assert numbers <= set(range(last - last % 5 - 9, last + 1))
    assert len(at_kill) <= 1
    found = {int(key[1]) for key in keys if key[0] == 'anchors' and key[2] != killed}
    assert found <= {0, *range(last - last % 5 - 10, last + 1, 5)}
    assert not [path for method, path in s3.requests if method == 'GET' and 'list-type' in path]


def test_an_island_with_an_open_contribution_agrees_in_one_thread_after_the_other(tmp_path, monkeypatch):
    """Else those of several processes would wait for each other."""
    values = values_of(tmp_path, fragments=2, delay=1)
    pretrain(config_from_values(values), progress=Stopped(2))
    calls = []
    for name in ('_start', '_announce'):
        method = getattr(Island, name)
        monkeypatch.setattr(Island, name, lambda *a, name=name, method=method: calls.append(name) or method(*a))
    pretrain(config_from_values(values), progress=Quiet())
    assert calls[:3] == ['_announce', '_start', '_announce']


def test_an_island_does_not_wait_for_ever_for_a_founder_that_has_gone(tmp_path):
    founder = values_of(tmp_path, islands=2) | {'steps': 4}
    pretrain(config_from_values(founder), progress=Quiet())
    for name in ('anchors', 'rounds'):
        shutil.rmtree(tmp_path / 'bucket' / name)
    values = values_of(tmp_path, 'b', islands=2, patience=0.2) | {'steps': 4}
    pretrain(config_from_values(values), progress=Quiet())
    assert len(losses_of(values)) == 4
    assert json.loads((tmp_path / 'bucket' / 'anchors' / '0' / 'anchor.json').read_bytes())['by'] == 'b'


ISLAND = (
    'import json, sys, runs; from pretrax import *; '
    'pretrain(config_from_values(json.loads(sys.argv[1])), allow_changes=True)'  # of the mesh
)


@pytest.fixture
def start():
    """start(values) -> a process with one device that trains an island. All are ended at the end."""
    environment = os.environ | {'XLA_FLAGS': '', 'PYTHONPATH': str(Path(__file__).parents[1]), 'JAX_PLATFORMS': 'cpu'}
    processes = []

    def begin(values):
        values = values | {'mesh': {}}
        processes.append(subprocess.Popen([sys.executable, '-c', ISLAND, json.dumps(values)], env=environment))
        return processes[-1]

    yield begin
    for process in processes:
        process.kill()
        process.wait()


def learned(directory, number):
    """The members of a round, with the digests of what they have learned."""
    closing = json.loads((directory / 'bucket' / 'rounds' / str(number) / 'closed.json').read_text())
    return {name: (member['learned'], member['tokens']) for name, member in closing['members'].items()}


@pytest.mark.slow
def test_two_islands_train_one_model_and_kills_change_no_bit_of_it(tmp_path, start):
    theta, losses = diloco(tmp_path, 2, 12, 4)
    for place, kills in ((tmp_path / 'whole', 0), (tmp_path / 'killed', 4)):
        a, b = values_of(place, 'a', 2), values_of(place, 'b', 2)
        for name, values in (('a', a), ('b', b)):  # both are there before one of them contributes
            pretrain(config_from_values(values), progress=Stopped(1))
            state = place / 'bucket' / 'islands' / name / 'state.json'
            state.write_bytes(State(round=1, state='training').content())
        first = start(a)
        for kill in range(kills):
            second = start(b)
            wait_for(lambda kill=kill, b=b: len(lines_of(b)) > 2 + 2 * kill)
            second.kill()
            second.wait()
        assert start(b).wait() == first.wait() == 0
        np.testing.assert_allclose(losses_of(a), losses[0], rtol=2e-6)
        np.testing.assert_allclose(losses_of(b), losses[1], rtol=2e-6)
        for values in (a, b):
            weights = CheckpointWeights(Path(values['run_dir']) / 'checkpoints', 12)
            np.testing.assert_allclose(weights.read('table'), theta['table'], rtol=2e-5, atol=2e-6)
    for number in (1, 2, 3):
        assert learned(tmp_path / 'whole', number) == learned(tmp_path / 'killed', number)


def test_who_is_left_out_takes_the_newest_weights_and_a_new_island_joins(tmp_path):
    a, b = values_of(tmp_path, 'a', 2), values_of(tmp_path, 'b', 2)
    pretrain(config_from_values(a), progress=Stopped(5))
    joining, late = Quiet(), Quiet()
    new = pretrain(config_from_values(b), progress=joining)
    assert lines_of(b)[0]['step'] == 5  # it begins with the weights of round 1, which closed at step 4
    assert lines_of(b)[0]['batch'] == 4
    old = pretrain(config_from_values(a), progress=late)
    assert int(old.state.step) == 12
    np.testing.assert_array_equal(old.state.weights.table, new.state.weights.table)
    assert [list(learned(tmp_path, number)) for number in (1, 2, 3)] == [['a'], ['b'], ['b']]


def test_an_island_that_comes_after_the_end_has_the_final_weights(tmp_path):
    a, b, c = (values_of(tmp_path, name, 3) for name in 'abc')
    pretrain(config_from_values(b), progress=Stopped(2))
    final = pretrain(config_from_values(a), progress=Quiet()).state
    for values in (b, c):
        pretrain(config_from_values(values), progress=Quiet())
        weights = CheckpointWeights(Path(values['run_dir']) / 'checkpoints', 12)
        np.testing.assert_array_equal(weights.read('table'), final.weights.table)


def test_the_moving_average_of_an_island_that_joins_begins_at_the_newest_weights(tmp_path):
    schedule = {'name': 'piecewise', 'points': [[0, 1.0], [8, 0.0]]}  # no weight moves after round 2
    changes = {'optimizer': VALUES['optimizer'] | {'ema_decay': 0.999}, 'schedule': schedule}
    pretrain(config_from_values(values_of(tmp_path, 'a', 2) | changes), progress=Stopped(10))
    state = pretrain(config_from_values(values_of(tmp_path, 'b', 2) | changes), progress=Stopped(9)).state
    assert 8 < int(state.step) < 12
    np.testing.assert_array_equal(state.ema.table, state.weights.table)


def test_a_federation_begins_with_the_trained_weights_of_its_founder(tmp_path):
    trained = VALUES | {'name': 'trained', 'run_dir': str(tmp_path / 'trained'), 'steps': 4}
    state = pretrain(config_from_values(trained), progress=Quiet()).state
    frozen = {'schedule': {'name': 'piecewise', 'points': [[0, 0.0]]}}  # no step moves a weight
    a, b = values_of(tmp_path, 'a', 2) | frozen, values_of(tmp_path, 'b', 2) | frozen
    pretrain(config_from_values(a | {'init_from': trained['run_dir']}), progress=Stopped(1))
    joined = pretrain(config_from_values(b), progress=Stopped(1)).state
    np.testing.assert_array_equal(joined.weights.table, state.weights.table)


def test_an_island_does_not_go_on_in_another_bucket(tmp_path):
    values = values_of(tmp_path)
    pretrain(config_from_values(values), progress=Stopped(6))
    (tmp_path / 'bucket').rename(tmp_path / 'away')
    with pytest.raises(UserError, match='it has no round 1, which this run has taken'):
        pretrain(config_from_values(values), progress=Quiet())
    assert not (tmp_path / 'bucket' / 'rounds').exists()


def test_weights_that_never_move_are_not_sent(tmp_path):
    values = values_of(tmp_path) | {'optimizer': VALUES['optimizer'] | {'freeze': ['bias']}}
    state = pretrain(config_from_values(values), progress=Quiet()).state
    np.testing.assert_allclose(state.weights.bias, first_weights()['bias'], atol=1e-6)
    text = ''.join(path.read_text() for path in (tmp_path / 'bucket' / 'rounds').rglob('*.json'))
    assert 'table' in text
    assert 'bias' not in text


def test_a_section_without_a_bucket_changes_nothing(tmp_path):
    plain = VALUES | {'name': 'a', 'run_dir': str(tmp_path / 'plain')}
    other = values_of(tmp_path, 'a', 3, fragments=2, delay=1, encoding='int8')
    other['federation'] = other['federation'] | {'bucket': None}
    for values in (plain, other):
        pretrain(config_from_values(values), progress=Quiet())
    assert [without_clock(line) for line in lines_of(plain)] == [without_clock(line) for line in lines_of(other)]
    files = [
        {path.relative_to(root): path.read_bytes() for path in root.rglob('*') if path.is_file()}
        for root in (Path(values['run_dir']) / 'checkpoints' / '12' / 'state' for values in (plain, other))
    ]
    assert files[0] == files[1]


def test_a_bucket_out_of_reach_stops_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr('pretrax.federation.exchange._PATIENCE', 0.1)
    # These averages of one island change nothing: an island that drops nothing trains as it would without them.
    values, bucket = values_of(tmp_path, outer_rate=1.0, outer_momentum=0.0) | {'steps': 60}, tmp_path / 'bucket'
    progress = out_of_reach(bucket, 6, 20)
    result = pretrain(config_from_values(values), progress=progress)
    assert int(result.state.step) == 60
    assert any('round 2' in text and 'Training continues' in text for text in progress.said)
    assert any('is reached again' in text for text in progress.said)
    assert {'a'} == set(learned(tmp_path, 2))
    plain = VALUES | {'name': 'plain', 'run_dir': str(tmp_path / 'plain'), 'steps': 60}
    pretrain(config_from_values(plain), progress=Quiet())
    np.testing.assert_allclose(losses_of(values), losses_of(plain), rtol=1e-5)


@pytest.mark.slow
def test_an_island_that_is_ahead_waits_at_the_end_for_the_others(tmp_path, monkeypatch, start):
    monkeypatch.setattr('pretrax.federation.exchange._PATIENCE', 0.1)
    a, b = (values_of(tmp_path, name, 2, wait_for=2) | {'steps': 40} for name in 'ab')
    way = tmp_path / 'way'  # of a to the bucket
    a['federation'] |= {'bucket': str(way)}
    (tmp_path / 'bucket').mkdir()
    way.symlink_to('bucket')
    other = start(b)
    ahead = pretrain(config_from_values(a), progress=out_of_reach(way, 6, 18)).state
    assert other.wait() == 0
    last = json.loads((tmp_path / 'bucket' / 'rounds' / '10' / 'closed.json').read_text())
    assert {name: member['step'] for name, member in last['members'].items()} == {'a': 40, 'b': 40}
    weights = CheckpointWeights(Path(b['run_dir']) / 'checkpoints', 40)
    np.testing.assert_array_equal(weights.read('table'), ahead.weights.table)
    # It was ahead: in an earlier round, it had taken the last step, and the other one had not.
    before = json.loads((tmp_path / 'bucket' / 'rounds' / '8' / 'closed.json').read_text())
    assert before['members']['a']['step'] == 40 > before['members']['b']['step']


def test_the_weights_of_the_newest_round_are_evaluated(tmp_path):
    values = values_of(tmp_path) | {'steps': 10, 'eval': {'every': 2, 'batches': 1}}
    values['optimizer'] = values['optimizer'] | {'ema_decay': 0.9}
    pretrain(config_from_values(values), progress=Quiet())
    losses = {line['step']: line['val_loss'] for line in lines_of(values, 'val_loss')}
    assert losses[4] == losses[6] != losses[8] != losses[2]
    assert losses[8] != losses[10]


@register('data', 'bad-of-islands')
def bad(request):
    return BadBatches(request, VOCAB, 17)


def test_after_a_rollback_an_island_takes_the_round_that_it_has_contributed_to(tmp_path):
    values = values_of(tmp_path) | {'steps': 20, 'data': {'name': 'bad-of-islands'}, 'faults': {'rollback_after': 2}}
    progress = Quiet()
    result = pretrain(config_from_values(values), progress=progress)
    assert any('rolling back to step 6' in text for text in progress.said)
    assert (int(result.state.step), int(result.state.batch)) == (20, 24)
    third = json.loads((tmp_path / 'bucket' / 'rounds' / '3' / 'a.json').read_text())
    assert [event['kind'] for event in third['events']] == ['rolled back', 'entered']


class Outage(Quiet):
    def __init__(self, changes):
        super().__init__()
        self.changes = changes

    def update(self, metrics):
        if 'loss' in metrics and metrics['step'] in self.changes:
            self.changes.pop(metrics['step'])()


def out_of_reach(bucket, lost, found):
    """The progress of a run during which a directory, or a link to one, is no directory between two steps."""
    away = bucket.with_name('away')

    def move_away():
        bucket.rename(away)
        bucket.write_text('no directory')

    def bring_back():
        bucket.unlink()
        away.rename(bucket)

    return Outage({lost: move_away, found: bring_back})


def wait_for(what):
    end = time.monotonic() + 300
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_an_island_saves_at_once_while_it_waits_for_a_round(tmp_path):
    a, b = (values_of(tmp_path, name, 2) | {'steps': 8, 'checkpoint': {'every': 100}} for name in 'ab')
    for values in (a, b):
        pretrain(config_from_values(values), progress=Stopped(1))
    state = tmp_path / 'bucket/islands/b/state.json'
    state.write_bytes(State(round=1, state='training').content())
    saved = []

    def ask():
        wait_for((tmp_path / 'bucket/rounds/1/a.json').exists)
        os.kill(os.getpid(), signal.SIGUSR1)
        wait_for(lambda: 4 in steps_in(tmp_path / 'a' / 'checkpoints'))
        saved.append(sorted((tmp_path / 'bucket/rounds/1').glob('*.json')))
        state.write_bytes(State(round=1, state='stopped').content())

    thread = threading.Thread(target=ask)
    thread.start()
    pretrain(config_from_values(a), progress=Quiet())
    thread.join()
    assert saved == [[tmp_path / 'bucket/rounds/1/a.json']]  # the round was open
    losses = losses_of(a)
    shutil.rmtree(tmp_path / 'a/checkpoints/8')
    pretrain(config_from_values(a), progress=Quiet())
    assert losses_of(a) == losses


class StoppedOnce(Stopped):
    """Stopped at a step, once something is so."""

    def __init__(self, step, ready):
        super().__init__(step)
        self.ready = ready

    def update(self, metrics):
        if metrics.get('step') == self.step:
            wait_for(self.ready)
        super().update(metrics)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.fixture(scope='module')
def round_2_is_pending(tmp_path_factory):
    """Island a has stopped before it took round 2, in which it is; b took it, and wrote the weights of round 4."""
    directory = tmp_path_factory.mktemp('islands')
    a, b = (values_of(directory, name, 2, delay=3, keep=2, patience=0.2) | {'steps': 32} for name in 'ab')
    pretrain(config_from_values(a), progress=StoppedOnce(9, (directory / 'bucket/rounds/2/closed.json').exists))
    pretrain(config_from_values(b), progress=StoppedOnce(21, (directory / 'bucket/rounds/5/closed.json').exists))
    assert [list(learned(directory, number)) for number in range(1, 6)] == [['a'], ['a'], ['b'], ['b'], ['b']]
    return directory


@pytest.mark.parametrize(
    ('pattern', 'damage', 'problem'),
    [
        ('rounds/2/a/*/0/0', Path.unlink, '/0/0 is missing'),
        ('rounds/2/a/*/0/0', truncate, '/0/0: '),
        ('rounds/2/a/*/0/0', flip, '/0/0: it differs from what was written'),
        ('rounds/2/a/*/0/index.json', flip, '/0/index.json: it differs from what was written'),
        ('rounds/2/a.json', flip, 'rounds/2/a.json: '),
        ('rounds/2/a.json', Path.unlink, 'a.json: it is not the contribution of island a that closed.json lists'),
        ('rounds/2/closed.json', truncate, 'rounds/2/closed.json: '),
    ],
)
def test_an_island_takes_newer_weights_instead_of_a_round_that_is_damaged(
    pattern, damage, problem, round_2_is_pending, tmp_path
):
    shutil.copytree(round_2_is_pending, tmp_path, dirs_exist_ok=True)
    (path,) = (tmp_path / 'bucket').glob(pattern)
    damage(path)
    a, b = (values_of(tmp_path, name, 2, delay=3, keep=2, patience=0.2) | {'steps': 32} for name in 'ab')
    progress = Quiet()
    first = pretrain(config_from_values(a), progress=progress, allow_changes=True)
    (said,) = [text for text in progress.said if 'round 2 cannot be read (' in text]
    assert problem in said
    assert 'continues with the weights of round 5, and drops what it has learned since round 1' in said
    steps = [line['step'] for line in lines_of(a)]
    assert steps == [*range(1, steps[-13] + 1), *range(21, 33)]
    second = pretrain(config_from_values(b), progress=Quiet(), allow_changes=True)
    np.testing.assert_array_equal(first.state.weights.table, second.state.weights.table)


@pytest.mark.slow
def test_what_one_process_of_an_island_cannot_read_is_damaged_for_all(round_2_is_pending, tmp_path):
    """On its new mesh, it cannot learn for round 2 what it has contributed, so it catches up."""
    shutil.copytree(round_2_is_pending, tmp_path, dirs_exist_ok=True)
    for pattern in ('anchors/4/*/weights/0/0', 'rounds/5/b/*/0/0'):
        (path,) = (tmp_path / 'bucket').glob(pattern)
        flip(path)
    a = values_of(tmp_path, 'a', 2, delay=3, keep=2, patience=0.2) | {'steps': 32, 'mesh': {'r': 1, 'd': 2}}
    shared = os.environ | {
        'XLA_FLAGS': '', 'PYTHONPATH': str(Path(__file__).parents[1]), 'JAX_NUM_CPU_DEVICES': '1',
        'JAX_COORDINATOR_ADDRESS': coordinator_address(), 'JAX_NUM_PROCESSES': '2',
    }  # fmt: skip
    environments = [shared | {'JAX_PROCESS_ID': str(index)} for index in range(2)]
    both = run_side_by_side([['python', '-c', ISLAND, json.dumps(a)]] * 2, environments)
    assert 'round 2 was closed without this island: the island continues with the weights of round 4' in both[0].stdout
    for process in both:
        assert f'the difference of island b for round 5 cannot be used: {path}: it differs' in process.stderr
        assert 'the state is saved' in process.stderr
    assert lines_of(a)[-1]['step'] == 32


@pytest.mark.parametrize('is_restored', [True, False])
def test_an_island_trains_on_without_a_damaged_round_until_it_is_whole_or_closed_again(
    is_restored, tmp_path, monkeypatch
):
    monkeypatch.setattr('pretrax.federation.exchange._PATIENCE', 0.1)
    # This average of one island is what it has contributed.
    values = values_of(tmp_path, delay=3, patience=0.2, outer_rate=1.0, outer_momentum=0.0) | {'steps': 40}
    pretrain(config_from_values(values), progress=StoppedOnce(9, (tmp_path / 'bucket/rounds/2/closed.json').exists))
    (path,) = (tmp_path / 'bucket').glob('rounds/2/a/*/0/0')
    path.rename(tmp_path / 'away')
    progress = Quiet()
    with pytest.raises(UnavailableError, match=rf'{path} is missing\nthe state is saved; '):
        pretrain(config_from_values(values), progress=progress)
    (said,) = [text for text in progress.said if 'WARNING' in text]
    assert said.startswith(
        f'WARNING: federation: round 2: the difference of island a for round 2 cannot be used: {path}'
    )
    assert 'Training continues with the own weights' in said
    table = CheckpointWeights(tmp_path / 'a' / 'checkpoints', 40).read('table')
    closed = tmp_path / 'bucket/rounds/2/closed.json'
    if is_restored:
        (tmp_path / 'away').rename(path)
    else:
        closed.unlink()
    result = pretrain(config_from_values(values), progress=Quiet())
    assert len(losses_of(values)) == 40
    if is_restored:
        np.testing.assert_allclose(result.state.weights.table, table, rtol=1e-6, atol=1e-7)
    else:
        assert list(json.loads(closed.read_bytes())['rejected']) == ['a']


def test_an_island_comes_in_from_an_older_anchor_if_a_newer_one_is_damaged(tmp_path):
    pretrain(config_from_values(values_of(tmp_path, 'a', 2, keep=2)), progress=Stopped(10))
    losses = []
    for pattern in ('', 'anchors/2/*/weights/0/0', 'anchors/2/anchor.json', 'anchors/0/*/weights/0/0'):
        place = tmp_path / str(len(losses))
        shutil.copytree(tmp_path / 'bucket', place / 'bucket')
        for path in (place / 'bucket').glob(pattern) if pattern else ():
            flip(path)
        b = values_of(place, 'b', 2, keep=2)
        pretrain(config_from_values(b), progress=Quiet())
        losses.append(losses_of(b))
    assert losses[0] == losses[1] == losses[2] == losses[3]
    (anchor,) = (tmp_path / 'bucket').glob('anchors/0/*/weights/0/0')
    flip(anchor)
    shutil.rmtree(tmp_path / 'bucket/anchors/2')
    with pytest.raises(UnavailableError, match=f'no weights of the federation can be read: .*{anchor}'):
        pretrain(config_from_values(values_of(tmp_path, 'b', 2, keep=2)), progress=Quiet())


def test_an_island_that_was_left_out_of_a_damaged_round_trains_on(tmp_path):
    a, b = values_of(tmp_path, 'a', 2), values_of(tmp_path, 'b', 2)
    pretrain(config_from_values(a), progress=Stopped(5))
    pretrain(config_from_values(b), progress=Stopped(10))
    assert list(learned(tmp_path, 2)) == ['b']
    for path in (tmp_path / 'bucket').glob('rounds/2/b/*/0/0'):
        path.unlink()
    progress = Quiet()
    a = values_of(tmp_path, 'a', 2, patience=0.2)
    with pytest.raises(UnavailableError, match='the difference of island b for round 2 cannot be used'):
        pretrain(config_from_values(a), progress=progress, allow_changes=True)
    assert len(losses_of(a)) == 12
    assert 'the difference of island b for round 2 cannot be used' in '\n'.join(progress.said)
