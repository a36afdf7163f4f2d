"""Damage to any file of a checkpoint is detected before a weight is used, and an earlier checkpoint is restored."""

import json
import os
import random
import shutil
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest
import xxhash

from bigram import Bigram
from checkpoint.test_store import DESCRIPTION, recipe, restored, saved, state_on
from preloaded import run
from pretrax.checkpoint import (
    Checkpoints,
    CheckpointWeights,
    DamagedError,
    SaveError,
    is_checkpoint,
    read_manifest,
    restore,
    restore_newest,
    state_files,
    steps_in,
    verify,
)
from pretrax.checkpoint.manifest import Manifest, _self_digest
from pretrax.errors import UserError
from pretrax.train.state import abstract_state
from small import LLAMA, mesh_of, transformer


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """Two checkpoints, of steps 2 and 4."""
    directory = tmp_path_factory.mktemp('whole')
    saved(directory, state_on(mesh_of()), steps=(2, 4))
    return directory


@pytest.fixture(scope='module')
def packed(tmp_path_factory):
    """Two checkpoints whose small files are in packs."""
    directory = tmp_path_factory.mktemp('packed')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_files, '_MANY', 1)
        patch.setattr(state_files, '_PACK', 50_000)
        saved(directory, state_on(mesh_of()), steps=(2, 4))
    assert len(list((directory / '4' / 'state').glob('packed.*'))) > 1
    return directory


@pytest.fixture
def directory(whole, tmp_path):
    shutil.copytree(whole, tmp_path / 'checkpoints')
    return tmp_path / 'checkpoints'


def kinds(directory):
    """A file of every kind: the manifest, Orbax's metadata, the metadata of an array, and the array."""
    files = [path.relative_to(directory / '4') for path in (directory / '4').rglob('*') if path.is_file()]
    return sorted({path.name: path for path in files}.values())


def flip(path):
    content = bytearray(path.read_bytes())
    bit = random.Random(str(path.name)).randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def empty(path):
    path.write_bytes(b'')


def delete(path):
    path.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason='needs root to become somebody else')
@pytest.mark.parametrize('which', [min, max])
def test_a_checkpoint_that_may_not_be_read_is_not_passed_over(which, whole):
    """Its manifest, or the largest of its files.
    An earlier one would be restored instead, and this one be removed later.
    """
    place = Path(tempfile.mkdtemp())
    directory = Path(shutil.copytree(whole, place / 'checkpoints'))
    place.chmod(0o755)
    directory.chmod(0o755)
    files = [path for path in (directory / '4').rglob('*') if path.is_file()]
    which(files, key=lambda path: (path.name != 'manifest.json', path.stat().st_size)).chmod(0)
    os.seteuid(65534)
    try:
        with jax.set_mesh(mesh_of()), pytest.raises(UserError, match=r'(?s)Permission denied.*may be whole') as caught:
            restore_newest(directory, abstract_state(recipe()), print)
        assert not isinstance(caught.value, DamagedError)
    finally:
        os.seteuid(0)
        shutil.rmtree(place)


@pytest.mark.parametrize('kind', ['whole', 'packed'])
@pytest.mark.parametrize('harm', [flip, cut, empty, delete])
def test_damage_to_any_kind_of_file_is_detected(harm, kind, request, tmp_path):
    whole = request.getfixturevalue(kind)
    directory = shutil.copytree(whole, tmp_path / 'checkpoints')
    files = kinds(directory)
    assert len(files) >= 5, files
    for name in files:
        harm(directory / '4' / name)
        with pytest.raises(UserError, match=r'the checkpoint .*4 '):
            verify(directory, 4)
        said = []
        with jax.set_mesh(mesh_of()):
            step, _, description = restore_newest(directory, abstract_state(recipe()), said.append, lambda _: None)
        assert (step, description) == (2, DESCRIPTION)
        assert len(said) == 1, said
        assert said[0].startswith(f'WARNING: the checkpoint {directory / "4"} ')
        shutil.copy(whole / '4' / name, directory / '4' / name)
    verify(directory, 4)


def test_every_flipped_bit_of_the_manifest_is_detected(directory):
    """But for white space: a flipped bit is either an error or the same JSON."""
    path = directory / '4' / 'manifest.json'
    original = path.read_bytes()
    before = read_manifest(directory, 4)
    numbers = random.Random(0)
    for _ in range(300):
        content = bytearray(original)
        bit = numbers.randrange(8 * len(content))
        content[bit // 8] ^= 1 << bit % 8
        path.write_bytes(content)
        try:
            after = read_manifest(directory, 4)
        except UserError:
            continue
        assert after == before
        assert json.loads(content) == json.loads(original)


def test_weights_read_in_pieces_are_verified(directory):
    """As an export and init_from read them: a flipped bit in an array is no other weight."""
    assert CheckpointWeights(directory, 4).shapes == {'table': (100, 104), 'bias': (104,)}
    flip(directory / '4' / 'state' / 'weights.bias' / '0')
    with pytest.raises(UserError, match=r'weights.bias/0 differs from what was written'):
        CheckpointWeights(directory, 4)


def test_packed_weights_are_read_in_pieces(packed, whole):
    pieces, others = CheckpointWeights(packed, 4), CheckpointWeights(whole, 4)
    assert pieces.shapes == others.shapes
    for path, shape in pieces.shapes.items():
        for row in range(0, shape[0], 7):
            np.testing.assert_array_equal(pieces.read(path, row, row + 1), others.read(path, row, row + 1))


@pytest.mark.parametrize('bracket', ['[', '{"a": '])
def test_a_deeply_nested_manifest_is_damage(bracket, directory):
    (directory / '4' / 'manifest.json').write_text(bracket * 100_000)
    with pytest.raises(DamagedError, match='has no readable description'):
        read_manifest(directory, 4)


@pytest.mark.parametrize('name', ['²', '٣', '03', '-1', '1' * 200])
def test_a_directory_that_is_not_named_like_a_step_is_no_checkpoint(name, directory):
    (directory / name).mkdir()
    assert steps_in(directory) == [2, 4]
    assert not is_checkpoint(directory / name)


def test_checkpoint_renamed_to_another_step_is_rejected(directory):
    (directory / '4').rename(directory / '6')
    with pytest.raises(UserError, match='its manifest is for step 4'):
        verify(directory, 6)


def test_extra_file_is_reported(directory):
    (directory / '4' / 'stray').write_text('')
    with pytest.raises(UserError, match='stray does not belong to it'):
        verify(directory, 4)


def test_training_does_not_restart_if_no_checkpoint_is_readable(directory):
    for step in (2, 4):
        flip(directory / str(step) / 'manifest.json')
    with pytest.raises(UserError, match=r'none of the 2 checkpoints in .* is readable'):
        restore_newest(directory, {}, lambda line: None, lambda description: None)
    assert restore_newest(directory / 'nothing', {}, print, print) is None


class Wider(Bigram):
    def init(self, key):
        return jax.tree.map(lambda w: jax.numpy.zeros([2 * n for n in w.shape]), super().init(key))


@pytest.mark.parametrize(
    ('model', 'reason'),
    [
        (Wider(), 'weights.table: 100 x 104 in the checkpoint, 200 x 208 in the model'),
        (transformer(LLAMA), 'weights.embed: missing in the checkpoint'),
    ],
)
def test_checkpoint_of_another_model_is_rejected(model, reason, whole):
    with pytest.raises(UserError, match='does not match the model or optimizer of the configuration') as refusal:
        restored(whole, 2, mesh_of(), model)
    assert reason in str(refusal.value)
    assert len(str(refusal.value).splitlines()) <= 10


def test_a_state_that_gained_an_average_is_refused_with_its_key(whole):
    like = {'step': jax.ShapeDtypeStruct((), 'int32'), 'ema': {'table': jax.ShapeDtypeStruct((100, 104), 'float32')}}
    with pytest.raises(UserError, match=r'ema.table: missing in the checkpoint(.|\n)*optimizer.ema_decay .* init_from'):
        restore(whole, 2, like)


# No file may grow beyond 10 kB, so that some arrays fail while others are still being written.
SICK = """
import pathlib, resource, signal, sys
import jax, numpy
from pretrax.checkpoint import Checkpoints, SaveError

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
state = {f'w{i}': jax.numpy.zeros((8, 1000 + 10000 * (i % 2))) for i in range(20)}
checkpoints = Checkpoints(pathlib.Path(sys.argv[1]), 3)
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
for step in range(3):
    try:
        checkpoints.save(step, state, {})
        checkpoints.wait()
    except SaveError as error:
        print(error)
checkpoints.close()
"""


def test_a_failed_save_is_reported_in_one_line(tmp_path):
    done = run(['python', '-c', SICK, str(tmp_path / 'checkpoints')], env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('no checkpoint could be written') == 3
    assert len(done.stdout.splitlines()) == 3
    assert done.stderr == ''


def test_failed_save_raises_save_error_and_leaves_nothing(tmp_path):
    """A file stands where the directory should be."""
    (tmp_path / 'checkpoints').write_text('')
    checkpoints = Checkpoints(tmp_path / 'checkpoints', 3)
    with pytest.raises(SaveError, match=r'no checkpoint could be written to .*checkpoints'):
        checkpoints.save(2, state_on(mesh_of(), steps=0), DESCRIPTION)
    checkpoints.close()
    assert steps_in(tmp_path / 'checkpoints') == []


def forge(directory, change, metadata=None):
    """Changes the manifest of step 4, or the metadata of an array, and writes digests that fit: anybody can."""
    place = directory / '4'
    content = json.loads((place / 'manifest.json').read_text())
    content.pop('manifest_xxh3')
    array = 'weights.table'
    if metadata is not None:
        path = place / 'state' / array / '.zarray'
        path.write_text(json.dumps(json.loads(path.read_text()) | metadata))
        digest = xxhash.xxh3_128_hexdigest(path.read_bytes())
        content['files'][f'state/{array}/.zarray'] = {'size': path.stat().st_size, 'xxh3': digest}
    change(content, content['arrays'][array])
    try:
        content['manifest_xxh3'] = _self_digest(Manifest.model_validate(content))
    except ValueError:
        content['manifest_xxh3'] = 'it cannot be known'
    (place / 'manifest.json').write_text(json.dumps(content))


@pytest.mark.parametrize(
    'change',
    [
        lambda content, array: array.update(shape=[-1, 3]),
        lambda content, array: array.update(shape=[2**63, 2]),
        lambda content, array: array.update(shape=[1.5]),
        lambda content, array: array.update(shape=[1] * 40),
        lambda content, array: array.update(shape='wide'),
        lambda content, array: array.update(shape=[2**30, 2**30]),
        lambda content, array: content.update(arrays=[]),
        lambda content, array: content['files'].update({'../../secret': {'size': 1, 'xxh3': '0'}}),
        lambda content, array: content['files'].update({'x': {'size': -1, 'xxh3': '0'}}),
        lambda content, array: content['files'].update({'x': {'size': 1, 'xxh3': '0', 'pack': '/etc/passwd'}}),
        lambda content, array: content.update(step=-4),
    ],
)
def test_a_forged_manifest_is_damage_before_anything_is_computed_from_it(directory, change):
    forge(directory, change)
    with pytest.raises(DamagedError, match=r'manifest\.json|is for step -4'):
        read_manifest(directory, 4)


@pytest.mark.parametrize(
    'metadata',
    [
        {'chunks': [0, 0]}, {'chunks': [1, 1]}, {'chunks': [2**62, 2**62]}, {'chunks': None}, {'shape': [2**40, 104]},
        {'shape': [104]},
        {'dtype': 'no dtype'}, {'dtype': '|O'}, {'dtype': None}, {'order': 'F'}, {'compressor': {'id': 'zstd'}},
        {'dimension_separator': '../'},
    ],
)  # fmt: skip
def test_forged_metadata_of_an_array_is_damage(directory, metadata):
    forge(directory, lambda content, array: None, metadata)
    with pytest.raises(DamagedError, match=r'zarray|bytes, not'):
        CheckpointWeights(directory, 4).read('table')
