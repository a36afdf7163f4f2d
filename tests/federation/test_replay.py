"""A replay has the members and the newest rounds that were recorded, and says which contribution differs."""

import os
import shutil
import subprocess
import sys

import pytest

from hand_made_federations import NAMES, contribution, write_federation
from pretrax.cli import main
from pretrax.config.schema import Federation
from pretrax.federation import replay as federation_replay
from pretrax.federation.course import Course
from pretrax.federation.objects import contribution_path, island_path, read_contribution
from pretrax.federation.registry import Membership, read_table
from pretrax.federation.replay import ReplayedRounds, rounds_of
from pretrax.federation.rounds import Rounds, Waiting
from pretrax.storage.shared_path import SharedPath
from runs import write_yaml

ALL = Course(contributes=[1, 2, 3])


@pytest.fixture
def recorded(tmp_path):
    return write_federation(tmp_path / 'recorded')


@pytest.fixture
def again(recorded, tmp_path):
    """The place of a replay, before an island has trained."""
    place = SharedPath(tmp_path / 'again')
    federation_replay._copied(recorded, place)
    return place


def rounds(place, name, course=ALL):
    membership = Membership(place, name, NAMES[name], 3, is_founder=name == 'a', lease=None)
    return rounds_of(membership, Federation(), pytest.fail, course)


def repeat(recorded, number, name, **changes):
    """What an island contributes again, in another attempt and at another time."""
    found, _ = read_contribution(recorded, number, name)
    return found.model_copy(update={'attempt': 'other', 'time': 3e9, 'seconds': 77.0, **changes})


def test_a_round_is_closed_with_its_recorded_members_however_fast_others_are(recorded, again):
    a, c = rounds(again, 'a'), rounds(again, 'c')
    assert (type(a), type(rounds(recorded, 'a', None))) == (ReplayedRounds, Rounds)
    for number, name in ((1, 'a'), (1, 'c'), (1, 'b')):
        assert isinstance(a.poll(1), Waiting)
        assert rounds(again, name).contribute(repeat(recorded, number, name))
    closing = a.poll(1)
    assert closing.in_order() == ['a', 'b', 'c']
    assert set(a.members(closing)) == {'a', 'b', 'c'}
    c.contribute(repeat(recorded, 2, 'c'))  # it was late
    assert a.poll(2).missing == ('a', 'b')
    for name in 'ab':
        rounds(again, name).contribute(repeat(recorded, 2, name))
    closing = c.poll(2)
    assert (closing.in_order(), closing.left_out) == (['a', 'b'], ['c'])
    assert not closing.lists(repeat(recorded, 2, 'c'))
    assert a.poll(4).missing == ()  # it was never closed


def test_an_island_enters_the_rounds_that_it_entered_and_contributes_to_no_other(recorded, again):
    c = rounds(again, 'c', Course(contributes=[3], entered=[0, 1], enters=True))
    assert c.newest(0) == 0
    with pytest.raises(OSError, match='round 1 is not replayed yet'):
        c.newest(0)
    with pytest.raises(OSError, match='a contribution to round 1 is not replayed yet'):
        c.contribute(repeat(recorded, 1, 'c'))
    for name in 'abc':
        rounds(again, name).contribute(repeat(recorded, 1, name))
    assert not c.contribute(repeat(recorded, 1, 'c', tokens=7))  # that of an earlier process counts
    assert c.newest(0) == 1
    with pytest.raises(OSError, match='what follows is not replayed yet'):
        c.newest(0)
    assert [rounds(again, 'c', Course(enters=x)).is_left_out(1) for x in (True, False)] == [True, False]


def write_index(place, digest):
    """Writes the index of what island b learned for round 2. `digest`: of one of its weights."""
    path = place / 'rounds/2/b/5f/0/index.json'
    path.write_bytes(f'{{"objects": [{{"embed/0.0": "1", "layers.q/0": "{digest}"}}]}}'.encode())


def run_replay(recorded, tmp_path, capsys, monkeypatch, trained):
    """The exit code and the output of the command, with islands that contribute these at once."""

    class Quick:
        def __init__(self, *_, **__):
            for one in trained:
                path = contribution_path(SharedPath(tmp_path / 'out' / 'bucket'), one.round, one.name)
                path.create(one.content())
            write_index(SharedPath(tmp_path / 'out' / 'bucket'), '3')

        def poll(self):
            return None

        def end(self, seconds):
            pass

    monkeypatch.setattr(federation_replay, 'Child', Quick)
    with pytest.raises(SystemExit) as end:
        main(['federation', 'replay', str(recorded), '--out', str(tmp_path / 'out')])
    out, err = capsys.readouterr()
    return end.value.code or 0, out + err


@pytest.mark.parametrize(
    ('changes', 'code', 'said'),
    [
        ({}, 0, 'every contribution is the recorded one'),
        ({'tokens': 99}, 1, 'round 2: island b has another tokens: 100 is recorded, 99 now'),
        ({'anchor': '1' * 32}, 1, 'round 2: island b has another anchor: the weights after round 1 differ'),
        ({'pieces': 'other'}, 1, 'round 2: island b has another difference of layers.q'),
    ],
)
def test_the_first_contribution_that_differs_is_named(recorded, tmp_path, capsys, monkeypatch, changes, code, said):
    for name in NAMES:
        (island_path(recorded, name) / 'config.yaml').write_text('mesh: {d: 2}\n')
    if changes.get('pieces'):
        write_index(recorded, '2')
        piece = contribution(2, 'b', 1, 1.0, 1.0).pieces['0'][0]
        changes = {'pieces': {'0': [piece.model_copy(update={'xxh3': '3' * 32})]}}
    places = [*((n, name) for n in (1, 2, 3) for name in 'abc'), (4, 'a')]  # round 4 is open
    again = [repeat(recorded, *place, **(changes if place == (2, 'b') else {})) for place in places]
    found, text = run_replay(recorded, tmp_path, capsys, monkeypatch, again)
    assert (found, text.splitlines()[-1]) == (code, said)


def test_what_cannot_be_replayed_is_said(recorded, tmp_path, capsys, monkeypatch):
    code, text = run_replay(recorded, tmp_path, capsys, monkeypatch, [])
    assert (code, 'islands/a/config.yaml is missing' in text) == (2, True)
    code, text = run_replay(recorded, tmp_path, capsys, monkeypatch, [])
    assert (code, 'it is not empty' in text) == (2, True)
    shutil.rmtree(recorded / 'rounds')
    shutil.rmtree(tmp_path / 'out')
    code, text = run_replay(recorded, tmp_path, capsys, monkeypatch, [])
    assert (code, 'no round is closed yet' in text) == (2, True)


@pytest.mark.slow
def test_islands_that_are_trained_again_learn_the_same_bits(tmp_path):
    """Two islands with other meshes."""
    values = {
        'model': {'family': 'llama', 'n_layers': 1, 'd_model': 16, 'attention': {'n_heads': 2}}, 'steps': 9,
        'data': {'name': 'synthetic', 'vocab_size': 64}, 'batch': {'tokens': 64, 'sequence_length': 16},
        'precision': {'compute': 'f32'}, 'log': {'report': False}, 'eval': {'every': 0},
        'optimizer': {'learning_rate': 0.01},
        'federation': {'bucket': str(tmp_path / 'bucket'), 'islands': 2, 'every': 3, 'encoding': 'int8', 'keep': 1},
    }  # fmt: skip
    trainings = []
    for name, devices in (('a', 2), ('b', 1)):
        own = {'name': name, 'run_dir': str(tmp_path / 'runs' / name), 'mesh': {'d': devices}}
        config = write_yaml(values | own, tmp_path / f'{name}.yaml')
        command = [sys.executable, '-m', 'pretrax', 'train', config]
        trainings.append(subprocess.Popen(command, env=os.environ | {'JAX_NUM_CPU_DEVICES': str(devices)}))
    assert [training.wait() for training in trainings] == [0, 0]
    assert not list((tmp_path / 'bucket' / 'rounds' / '1').glob('*/*'))  # a replay needs no old numbers
    said = list[str]()
    both = ', '.join(read_table(SharedPath(tmp_path / 'bucket')).islands)
    assert federation_replay.replay(SharedPath(tmp_path / 'bucket'), tmp_path / 'out', said.append) == []
    assert [text.rpartition(' ')[0] for text in said[1:]] == [f'round {n}: {both} learned the' for n in (1, 2, 3)]
