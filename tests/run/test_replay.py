"""Silent corruption: flipped bits are seen, the right device is named, and a run without faults is left alone."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from benchmark_scripts import benchmark_script
from pretrax import config_from_values, pretrain
from pretrax.checkpoint import read_description
from pretrax.errors import UnavailableError
from pretrax.observe.attempts import note, quarantined, read_attempts
from pretrax.run import saving
from pretrax.run.replay import _minority
from pretrax.train.replay import arrays_of, do_replicas_differ
from run.test_restart_matrix import FEATURES, SPIKES
from runs import Quiet, lines_of, small_values, write_documents

bit_flips = benchmark_script('bit_flips')
SECOND = 4  # the second run of the program in the second replay: the first one has three, one with rotated data


@pytest.fixture(scope='module')
def flips():
    with bit_flips.Flips() as flips:
        yield flips


@pytest.fixture(scope='module')
def campaign(flips, tmp_path_factory):
    """Replays of a decoder over d=4 and t=2 that can be made to fail."""
    with bit_flips.Campaign(tmp_path_factory.mktemp('campaign'), d=4, t=2) as campaign:
        yield campaign


def test_flips_are_seen_unless_they_change_nothing_and_the_device_is_named(campaign, flips):
    """Flips that happen in all runs are seen if they are in the forward or backward pass of some rows of the batch:
    other devices compute these rows too, but the sums of the gradient are in another order there.
    """
    counts = bit_flips.flip_in_replays(campaign, flips, 100, np.random.default_rng(1))
    once = {name.removeprefix('once, '): count for name, count in counts.items() if name.startswith('once, ')}
    assert once['seen, that device named'] > once['injected'] / 2
    assert once['injected'] == once['seen, that device named'] + once['changes nothing']
    assert counts['always, seen, that device named'] > counts['always, injected'] / 2
    assert 'always, seen, others named' not in counts
    places = {name for name in counts if name.startswith('not seen, in ')}
    assert places <= {f'not seen, in {name}' for name in ('reduce_scatter', 'psum_invariant', 'convert_element_type')}


def test_a_flip_in_a_replica_of_the_state_is_seen_and_the_replica_is_named(campaign, flips):
    flips.rest()
    counts = bit_flips.flip_in_state(campaign, 20, np.random.default_rng(2))
    assert (counts['injected'], counts['that device named']) == (20, 20)
    device = campaign.run.mesh.devices.flat[3]
    flipped = bit_flips.flipped_replica(campaign.state.usual_loss, device, np.random.default_rng(3))
    state = campaign.state._replace(usual_loss=flipped)
    assert not do_replicas_differ(*arrays_of(campaign.state))
    assert do_replicas_differ(*arrays_of(state))
    with pytest.raises(UnavailableError, match=r'step 7: device 3 of process 0 on .*: its replica .*: usual_loss'):
        campaign.replay.check(7, state, campaign.batch)


def test_two_replicas_that_differ_are_both_named():
    assert _minority([0, 4], {0: 1, 4: 2}) == [0, 4]
    assert _minority([0, 2, 4], {0: 1, 2: 5, 4: 1}) == [2]
    assert _minority([0, 1, 2, 3], {0: 1, 1: 1, 2: 2, 3: 2}) == [0, 1, 2, 3]


def test_without_faults_nothing_differs(campaign, flips):
    flips.rest()
    before = campaign.replay.differences
    bit_flips.replay_without_faults(campaign, 20)
    assert campaign.replay.differences == before


@pytest.fixture
def replayed(small, flips):
    """Trains with a replay before every second step, and returns what was said and the losses."""
    small['faults'] = {'replay': {'every': 2}}

    def train(name, **more):
        values = small | {'run_dir': f'{small["run_dir"]}-{name}'} | more
        progress = Quiet()
        try:
            pretrain(config_from_values(values), progress=progress)
        finally:
            flips.rest()
        return progress.said, lines_of(values), Path(values['run_dir'])

    flips.rest()
    return train


def aim(flips, runs, device=5):
    """A fault in the probability of a token."""
    place = next(i for i, place in enumerate(flips.places) if place.name.startswith('exp'))
    flips.aim(device, place, (), 3, 30, runs)


def test_a_step_that_differs_is_computed_again_and_the_run_goes_on_as_without_the_fault(replayed, flips):
    _, expected, _ = replayed('never', faults={})
    said, lines, _ = replayed('clean')
    assert [line['loss'] for line in lines] == [line['loss'] for line in expected]
    assert 'replays' not in expected[-1]
    assert [line['replays'] for line in lines] == [1, 2, 2, 3, 3, 4]
    assert lines[-1]['replay_differences'] == 0
    assert [line for line in said if 'digests per device' in line]
    aim(flips, {SECOND})  # the second run before step 2
    said, lines, directory = replayed('once')
    [warning] = [line for line in said if 'WARNING' in line]
    assert 'step 2: device 5 of process 0 on ' in warning
    assert 'psum_invariant over t in gradients/jvp(loss)/cross_entropy' in warning  # sends the sum of probabilities
    assert [line['loss'] for line in lines] == [line['loss'] for line in expected]
    assert (lines[-1]['replays'], lines[-1]['replay_differences']) == (5, 1)
    [event] = [event for event in read_attempts(directory) if event['event'] == 'corrupted']
    assert (event['step'], event['process']) == (2, 0)


def test_a_device_that_differs_again_is_quarantined_and_differences_count_over_restarts(replayed, flips):
    replayed('first')
    aim(flips, {SECOND, SECOND + 2})
    with pytest.raises(UnavailableError, match=r'step 2: device 5 of process 0 .*\n.*quarantined') as ended:
        replayed('twice')
    assert ended.value.exit_code == 75
    aim(flips, {SECOND})
    *_, directory = replayed('over-restarts', steps=3)
    aim(flips, {SECOND})
    with pytest.raises(UnavailableError, match='quarantined'):
        replayed('over-restarts', steps=12)
    assert quarantined(directory) is not None
    note(directory, 'started', processes=[1], attempt=2)
    assert quarantined(directory) is None


def test_a_device_that_errs_the_same_way_each_time_is_named_by_the_rotated_data(replayed, flips):
    replayed('first', mesh={'d': 4, 't': 2})
    aim(flips, None, device=5)
    with pytest.raises(UnavailableError, match=r'device 5 of process 0 .* different things from the same data'):
        replayed('always', mesh={'d': 4, 't': 2})


def test_a_program_that_is_not_deterministic_is_not_replayed(replayed, flips, monkeypatch):
    replayed('first')
    aim(flips, None)
    fault, calls = flips._fault.copy(), flips._calls
    calls.clear()

    def noisy(device):
        calls[int(device)] += 1
        return fault if calls[int(device)] % 2 else np.full_like(fault, bit_flips.NOWHERE)

    monkeypatch.setattr(flips, '_read', noisy)
    said, lines, directory = replayed('noisy')
    assert [line for line in said if 'not deterministic on this hardware' in line]
    assert len(lines) == 6
    assert not [event for event in read_attempts(directory) if event['event'] in ('corrupted', 'quarantined')]


def test_a_checkpoint_whose_replicas_differ_does_not_count_as_a_good_one(replayed, monkeypatch):
    monkeypatch.setattr(saving, 'do_replicas_differ', lambda *_: np.bool_(True))
    said, _, directory = replayed('unequal', steps=2)
    assert [line for line in said if 'replicas of the state of step 2 differ' in line]
    assert not read_description(directory / 'checkpoints', 2)['finite_state']


MORE = {
    'a pipeline': {'mesh': {'d': 2, 'p': 2}, 'model': {'n_layers': 2}},
    'dropout, experts and micro-batches': {
        'mesh': {'d': 2, 'e': 2, 't': 2}, 'batch': {'tokens': 256, 'sequence_length': 16, 'micro': 1},
        'model': {'dropout': 0.1, 'experts': {'n_experts': 4, 'experts_per_token': 2}},
    },
}  # fmt: skip


@pytest.mark.nightly
@pytest.mark.parametrize('feature', MORE | {name: more for name, more in FEATURES.items() if 'cache' not in str(more)})
def test_features_are_replayed_without_a_false_alarm(feature, tmp_path):
    write_documents(tmp_path)
    (tmp_path / 'spikes.py').write_text(SPIKES)
    more = json.loads(json.dumps((MORE | FEATURES)[feature]).replace('DIRECTORY', str(tmp_path)))
    values = small_values('none', tmp_path) | {'data': {'name': 'synthetic', 'vocab_size': 96}} | more
    if values['model'].get('name') != 'nnx':
        values['model'] = small_values('none', tmp_path)['model'] | values['model']
    values['optimizer'] = {'learning_rate': 1e-2} | more.get('optimizer', {})
    values['schedule'] = {'name': 'constant', 'warmup': 2}
    mesh = {axis: size for axis, size in values['mesh'].items() if axis != 'r'}
    values['mesh'] = mesh | {'r': 8 // math.prod(mesh.values())}
    values['faults'] = {'replay': {'every': 1}} | more.get('faults', {})
    progress = Quiet()
    pretrain(config_from_values(values), progress=progress)
    last = lines_of(values)[-1]
    events = read_attempts(Path(values['run_dir']))
    rollbacks = [event for event in events if event['event'] == 'rolled back']
    again = sum(event['from_step'] + 1 - event['step'] for event in rollbacks)  # one was begun and not read
    assert (last['replays'], last['replay_differences']) == (values['steps'] + again, 0)
    assert not [line for line in progress.said if 'rotated' in line and 'WARNING' in line]
