"""States in memory: what is kept there, and which of them, or of the checkpoints, a run continues from."""

import json
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoint.test_restoring import cut, delete, empty, flip
from checkpoint.test_store import DESCRIPTION, recipe, saved, state_on
from pretrax.checkpoint import Memory, pieces_in, restore_newest, states_of
from pretrax.checkpoint.manifest import manifest_content, read_manifest
from pretrax.train.state import abstract_state
from small import mesh_of


@pytest.fixture(scope='module')
def state():
    return state_on(mesh_of(2, 2, 2))


def described(step, **more):
    return DESCRIPTION | {'productive_seconds': float(step), **more}


def kept(directory, state, *steps, every=1, finite=True, report=print):
    """Keeps the state as that of these steps, and returns what kept it."""
    directory.mkdir(exist_ok=True)
    memory = Memory(directory, every, report)
    memory.begin(0, state, {})
    for step in steps:
        memory.save(step, state, described(step), jnp.array(finite))
    memory.wait()
    return memory


def resumed(memory, checkpoints, mesh=(2, 2, 2), reader=0):
    """Step, state and reports of a run that continues."""
    said = []
    with jax.set_mesh(mesh_of(*mesh)):
        like = abstract_state(recipe())
        restored = restore_newest(checkpoints, like, said.append, memory=states_of(pieces_in(memory), reader))
    return (*(restored or (0, None, {})), said)


def assert_same(back, state):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), back, state)


@pytest.mark.parametrize('mesh', [(2, 2, 2), (1, 1, 1), (1, 4, 1)])
def test_the_newest_state_is_restored_bit_exactly_on_any_mesh(mesh, state, tmp_path):
    kept(tmp_path / 'memory', state, 3, 4, 5)
    saved(tmp_path / 'checkpoints', state, steps=(2,))
    step, back, description, said = resumed(tmp_path / 'memory', tmp_path / 'checkpoints', mesh)
    assert (step, description['where'], said) == (5, 'memory of this machine', [])
    assert_same(back, state)


def test_a_newer_checkpoint_is_taken(state, tmp_path):
    kept(tmp_path / 'memory', state, 3)
    saved(tmp_path / 'checkpoints', state, steps=(4,))
    step, _, description, _ = resumed(tmp_path / 'memory', tmp_path / 'checkpoints')
    assert (step, 'where' in description) == (4, False)


def files_of(memory, step):
    return sorted(path for path in (memory / '0' / str(step)).rglob('*') if path.is_file())


@pytest.mark.parametrize('harm', [flip, cut, empty, delete])
def test_damage_falls_through_to_the_state_before_and_then_to_the_disk(harm, state, tmp_path):
    memory, checkpoints = tmp_path / 'memory', tmp_path / 'checkpoints'
    kept(memory, state, 4, 5)
    saved(checkpoints, state, steps=(2,))
    assert [piece.step for piece in pieces_in(memory)] == [4, 5]
    for name in {path.name: path for path in files_of(memory, 5)}.values():
        shutil.copytree(memory, tmp_path / 'harmed')
        harm(tmp_path / 'harmed' / name.relative_to(memory))
        step, back, _, said = resumed(tmp_path / 'harmed', checkpoints)
        assert step == 4, name
        assert_same(back, state)
        assert said == [] if name.name == 'manifest.json' else 'step 5 in memory' in said[0]
        harm(next(path for path in files_of(tmp_path / 'harmed', 4) if path.name != 'manifest.json'))
        assert resumed(tmp_path / 'harmed', checkpoints)[0] == 2
        shutil.rmtree(tmp_path / 'harmed')


def test_a_torn_piece_is_none(state, tmp_path):
    memory = tmp_path / 'memory'
    kept(memory, state, 4)
    shutil.copytree(memory / '0' / '4', memory / '0' / '5.partial')
    assert [piece.step for piece in pieces_in(memory)] == [4]


def split(memory, step, line=None, both=False):
    """Gives every second file of a piece, or all with `both`, to another process, as if it had written them."""
    manifest = read_manifest(memory / '0', step)
    place = shutil.copytree(memory / '0' / str(step), memory / '1' / str(step))
    description = json.loads(json.dumps(manifest.description))
    for writer, odd in (0, 0), (1, 1):
        files = {name: file for i, (name, file) in enumerate(manifest.files.items()) if both or i % 2 == odd}
        description['piece']['writer'] = writer
        description['piece']['line'] = line if writer and line else manifest.description['piece']['line']
        place = memory / str(writer) / str(step)
        (place / 'manifest.json').write_bytes(manifest_content(step, description, manifest.arrays, files))
        for name in manifest.files.keys() - files.keys():
            (place / name).unlink()


def test_the_pieces_of_several_processes_make_one_state(state, tmp_path):
    kept(tmp_path / 'memory', state, 5)
    split(tmp_path / 'memory', 5)
    step, back, _, _ = resumed(tmp_path / 'memory', tmp_path / 'checkpoints', (1, 1, 1))
    assert step == 5
    assert_same(back, state)


def test_pieces_of_different_lines_are_never_mixed(state, tmp_path):
    kept(tmp_path / 'memory', state, 5)
    split(tmp_path / 'memory', 5, line='another')
    step, _, _, said = resumed(tmp_path / 'memory', tmp_path / 'checkpoints')
    assert step == 0
    assert len(said) == 2


def test_without_the_piece_of_process_0_the_metrics_may_lack_lines(state, tmp_path):
    kept(tmp_path / 'memory', state, 5)
    split(tmp_path / 'memory', 5, both=True)
    shutil.rmtree(tmp_path / 'memory' / '0')
    step, _, _, said = resumed(tmp_path / 'memory', tmp_path / 'checkpoints', reader=1)
    assert step == 0
    assert 'the piece of process 0 is missing' in said[0]


@pytest.mark.parametrize('reader', [0, 1])
def test_a_damaged_file_is_taken_from_another_process_that_held_it(reader, state, tmp_path):
    memory = tmp_path / 'memory'
    kept(memory, state, 5)
    split(memory, 5, both=True)
    harmed = [path for path in files_of(memory, 5) if path.name != 'manifest.json']
    for number, path in enumerate(harmed):  # each file is damaged in one of the pieces
        flip(memory / str(number % 2) / path.relative_to(memory / '0'))
    step, back, _, said = resumed(memory, tmp_path / 'checkpoints', reader=reader)
    assert (step, said) == (5, [])
    assert_same(back, state)


def test_a_state_that_is_not_finite_is_not_kept(state, tmp_path):
    memory = kept(tmp_path / 'memory', state, 4)
    memory.save(5, state, described(5), jnp.array(False))
    memory.close()
    assert [piece.step for piece in pieces_in(tmp_path / 'memory')] == [4]


def test_a_rollback_removes_later_states_and_begins_a_line(state, tmp_path):
    memory = kept(tmp_path / 'memory', state, 4, 5)
    before = pieces_in(tmp_path / 'memory')[0].line
    memory.roll_back_to(4)
    assert [piece.step for piece in pieces_in(tmp_path / 'memory')] == [4]
    memory.save(5, state, described(5), jnp.array(True))
    memory.close()
    assert [(piece.step, piece.line == before) for piece in pieces_in(tmp_path / 'memory')] == [(4, True), (5, False)]


def test_the_memory_holds_at_most_what_was_announced(state, tmp_path, monkeypatch):
    """Also after a restart, until the first state of the new attempt is whole."""
    directory, most = tmp_path / 'memory', 0
    size = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves(state)
        for shard in {str(s.index): s for s in leaf.addressable_shards}.values()
    )

    def measured(path, content):
        nonlocal most
        written(path, content)
        files = [
            file for file in directory.rglob('*') if file.is_file() and file.name not in ('.zarray', 'manifest.json')
        ]
        most = max(most, sum(file.stat().st_size for file in files))

    from pretrax.checkpoint import memory as module

    written = module.write_synced
    monkeypatch.setattr(module, 'write_synced', measured)
    kept(directory, state, *range(1, 6)).close()
    assert size < most <= 2 * size
    _, _, description, _ = resumed(directory, tmp_path / 'checkpoints')
    memory = Memory(directory, 1, print)
    text = memory.begin(5, state, description)
    assert f'2 x {size / 1e9:.3g} GB' in text
    assert [piece.step for piece in pieces_in(directory)] == [5]
    for step in (6, 7):
        memory.save(step, state, described(step), jnp.array(True))
    memory.close()
    assert most <= 2 * size
    assert [piece.step for piece in pieces_in(directory)] == [6, 7]


@pytest.fixture
def tmpfs(tmp_path):
    """mount(size) -> a directory in a file system in memory of this size."""
    places = []

    def mount(size):
        place = tmp_path / f'tmpfs-{len(places)}'
        place.mkdir()
        done = subprocess.run(
            ['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', place], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f'no file system can be mounted here: {done.stderr}')
        places.append(place)
        return place

    yield mount
    for place in places:
        subprocess.run(['umount', place], check=True)


def test_without_room_for_two_states_none_is_kept(state, tmpfs):
    memory = Memory(tmpfs('64k'), 1, print)
    text = memory.begin(0, state, {})
    assert text.startswith('none: 2 states need ')
    assert 'GB are free' in text
    assert not memory.is_due(1)


def test_a_memory_that_is_full_meanwhile_is_given_back_and_training_continues(state, tmpfs):
    directory, said = tmpfs('64M'), []
    memory = kept(directory, state, 1, report=said.append)
    (directory / 'other').write_bytes(bytes(shutil.disk_usage(directory).free))
    memory.save(2, state, described(2), jnp.array(True))
    memory.wait()
    assert len(said) == 1
    assert said[0].startswith('WARNING: states are not kept in memory any more: ')
    assert 'No space left' in said[0]
    assert [path for path in directory.rglob('*') if path.is_file()] == [directory / 'other']
    assert not memory.is_due(3)
    memory.close()


@pytest.mark.parametrize('every', [0, None])
def test_the_report_says_why_none_is_kept(every, state, tmp_path):
    memory = Memory(None if every is None else tmp_path, every, print)
    assert (
        memory.begin(0, state, {})
        == {
            0: 'none: checkpoint.memory.every is 0',
            None: 'none: no launcher keeps it; `pretrax launch` does',
        }[every]
    )


def test_it_is_kept_as_often_as_it_costs_one_percent(tmp_path):
    memory, said = Memory(tmp_path, None, print), []
    memory._every = 1
    costs = [
        ('', 0.05, 0.2, 0.1, ''),
        ('', 0.02, 0.2, 0.1, ''),
    ]  # the slowest process: 0.05 s, each time; a step takes 0.1 s
    while True:
        every, message = memory._decide(costs)
        if every == memory._every:
            break
        said.append(every)
        memory._every = every
        assert message.startswith('states are kept in memory every 64 steps: one takes 50 ms' if every == 64 else '')
    assert said == [4, 16, 64]
    assert 0.05 / (64 * 0.1) <= 0.01
    # cost and write: seconds
    for cost, write, same in (0.03, 0, 75), (0.07, 0, 75), (0.08, 0, 120), (0.02, 0, 30), (0.0, 0, 1), (0.0, 1.95, 30):
        memory._every = 75
        assert memory._decide([('', cost, write, 0.1, '')])[0] == same


def test_what_a_run_was_restored_from_stays_until_a_newer_state_is_whole(state, tmp_path):
    directory = tmp_path / 'memory'
    kept(directory, state, 5).close()
    split(directory, 5, both=True)
    _, _, description, _ = resumed(directory, tmp_path / 'checkpoints')
    memory = Memory(directory, 1, print)
    memory.begin(5, state, description)
    memory.save(6, state, described(6), jnp.array(False))
    memory.wait()
    assert [(piece.step, piece.writer) for piece in pieces_in(directory)] == [(5, 0), (5, 1)]
    memory.save(7, state, described(7), jnp.array(True))
    memory.close()
    assert [(piece.step, piece.writer) for piece in pieces_in(directory)] == [(7, 0)]


def test_a_launcher_that_has_ended_ends_the_keeping(state, tmp_path):
    said = []
    memory = kept(tmp_path / 'memory', state, 4, report=said.append)
    shutil.rmtree(tmp_path / 'memory')
    memory.save(5, state, described(5), jnp.array(True))
    memory.close()
    assert 'No such file or directory' in said[0]
    assert not (tmp_path / 'memory').exists()
