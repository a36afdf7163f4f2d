"""The files of a prepared teacher: rows come back exactly, whatever their order, and damage is refused."""

import dataclasses

import numpy as np
import pytest

from pretrax.data.batches.source import HostBatch
from pretrax.distill.files import Description, HostTopK, TeacherFiles, create, digests
from pretrax.errors import UnavailableError, UserError
from pretrax.storage import locate

LENGTH, K = 6, 3
DESCRIPTION = Description('weights', 'runs/teacher', 2.0, K, 1000, LENGTH, 'data', None)


def batch_of(*seeds):
    """A batch with a row for each seed."""
    rows = [np.random.default_rng(seed).integers(0, 1000, LENGTH) for seed in seeds]
    tokens = np.array(rows, np.int32)
    ones = np.ones_like(tokens)
    return HostBatch(tokens, tokens, ones, np.arange(LENGTH, dtype=np.int32) * ones, ones.astype(np.float32))


def top_of(*seeds):
    drawn = [np.random.default_rng(seed + 100) for seed in seeds]
    ids = np.array([draw.integers(0, 1000, (LENGTH, K)) for draw in drawn], np.int32)
    log_probs = np.array([-draw.random((LENGTH, K)) for draw in drawn], np.float32)
    return HostTopK(ids, log_probs, log_probs[..., 0] - 1)


@pytest.fixture
def directory(tmp_path):
    files = create(tmp_path / 'teacher', DESCRIPTION)
    for seeds in ((5, 1, 4), (2, 3)):
        files.write(digests(batch_of(*seeds)), top_of(*seeds))
    return tmp_path / 'teacher'


def test_rows_come_back_in_any_order_and_only_those_that_are_there(directory):
    files = create(directory, dataclasses.replace(DESCRIPTION, place='moved'))
    assert len(files) == 5
    for found, expected in zip(files.read(batch_of(3, 5, 3, 1)), top_of(3, 5, 3, 1), strict=True):
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype
    assert files.has(batch_of(1, 6, 2)).tolist() == [True, False, True]
    other_segments = batch_of(1)._replace(segments=np.full((1, LENGTH), 2, np.int32))
    assert not files.has(other_segments).any()
    with pytest.raises(UserError, match=r'has 2 of 3 rows of a batch.*\nrun `pretrax distill prepare`'):
        files.read(batch_of(1, 6, 2))


def test_what_another_teacher_or_killed_process_left_is_not_mixed_in(directory):
    (directory / '.part-00002.partial-host-1').mkdir()
    assert len(TeacherFiles(directory)) == 5
    for name, value in {'teacher': 'other', 'temperature': 1.0, 'tokens': 'other', 'top_k': 4}.items():
        with pytest.raises(UserError, match=f'was prepared with another {name}: '):
            create(directory, dataclasses.replace(DESCRIPTION, **{name: value}))
    with pytest.raises(UserError, match='it has other files'):
        create(directory.parent, DESCRIPTION)


def cut(path):
    path.write_bytes(path.read_bytes()[:-8])


def flip(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ('break_it', 'said'),
    [
        (lambda path: (path / 'teacher.json').unlink(), r'has no teacher.json\nwrite it first: pretrax distill'),
        (lambda path: (path / 'teacher.json').write_text('{"format": 2'), 'damaged: .*\nrestore it from a copy'),
        (lambda path: (path / 'teacher.json').write_text('{"format": 9}'), 'format 9, but this version'),
        (lambda path: (path / 'part-00000' / 'rows.npy').unlink(), r'part-00000 is damaged: rows.npy is missing'),
        (lambda path: (path / 'part-00000' / 'manifest.json').unlink(),
        r'part-00000 is damaged: manifest.json is missing'),
        (lambda path: (path / 'part-00000' / 'manifest.json').write_text('{}'),
        r'part-00000 is damaged: manifest.json is'),
        (lambda path: (path / 'part-00000').rename(path / 'gone'), r'part-00000 is damaged: manifest.json is missing'),
        (lambda path: cut(path / 'part-00001' / 'ids.npy'), r'part-00001 is damaged: ids.npy has 192 of 200 bytes'),
        (lambda path: flip(path / 'part-00001' / 'log_probs.npy'),
        r'part-00001 is damaged: log_probs.npy has another digest'),
    ],
)  # fmt: skip
def test_missing_and_damaged_files_are_refused(directory, break_it, said):
    break_it(directory)
    with pytest.raises(UserError, match=said) as refused:
        TeacherFiles(directory)
    lines = str(refused.value).splitlines()
    assert len(lines) <= 10
    assert 'pretrax distill prepare' in lines[-1] or 'format 9' in lines[0]


def test_a_damaged_part_is_removed_when_the_directory_is_written_again(directory):
    """The other part stays, and becomes the first one."""
    flip(directory / 'part-00000' / 'ids.npy')
    said = []
    files = create(directory, DESCRIPTION, said.append)
    assert [line.partition(': ')[2][:31] for line in said] == [f'{directory}/part-00000 is damaged'[:31]]
    assert files.has(batch_of(5, 1, 4, 2, 3)).tolist() == [False, False, False, True, True]
    files.write(digests(batch_of(5, 1, 4)), top_of(5, 1, 4))
    for found, expected in zip(TeacherFiles(directory).read(batch_of(3, 5)), top_of(3, 5), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_part_that_cannot_be_read_is_kept(directory):
    """As when a disk or its permissions fail: only what differs from its manifest is removed."""
    file = directory / 'part-00000' / 'ids.npy'
    whole = file.read_bytes()
    file.unlink()
    file.mkdir()
    for opened in (TeacherFiles, lambda path: create(path, DESCRIPTION)):
        with pytest.raises(UserError, match=r'Is a directory .*ids.npy'):
            opened(directory)
    file.rmdir()
    file.write_bytes(whole)
    assert len(TeacherFiles(directory)) == len(create(directory, DESCRIPTION)) == 5


def test_a_directory_in_a_bucket(bucket, tmp_path, monkeypatch):
    """Another machine reads what one has written.
    A part whose upload was cut is none, and one that is damaged is removed.
    """
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'one'))
    place = locate(f'{bucket.url}/teacher')
    files = create(place, DESCRIPTION)
    files.write(digests(batch_of(5, 1)), top_of(5, 1))
    bucket.fault(match='part-00001-.*/manifest.json', method='PUT' if bucket.scheme == 's3' else 'POST', status=403)
    with pytest.raises(UserError, match=r'part-00001: .*\n.*run the same command again: it continues'):
        files.write(digests(batch_of(2)), top_of(2))
    assert len(TeacherFiles(place)) == len(create(place, DESCRIPTION)) == 2
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'other'))
    files = create(place, DESCRIPTION)
    files.write(digests(batch_of(2)), top_of(2))
    for found, expected in zip(TeacherFiles(place, 1).read(batch_of(2, 5)), top_of(2, 5), strict=True):
        np.testing.assert_array_equal(found, expected)
    [key] = [key for key in bucket.keys('teacher/part-00000') if key.endswith('ids.npy')]
    bucket.put(key, bucket.content(key)[:-1])
    with pytest.raises(UserError, match=r'teacher/part-00000 is damaged: ids.npy has'):
        TeacherFiles(place, 2)
    said = []
    assert create(place, DESCRIPTION, said.append).has(batch_of(5, 2)).tolist() == [False, True]
    assert 'part-00000 is damaged' in said[0]
    assert TeacherFiles(place, 3).has(batch_of(5, 2)).tolist() == [False, True]
    assert len({key.split('/')[1] for key in bucket.keys('teacher/part')}) == 1


def test_a_bucket_of_an_earlier_version_and_a_lost_manifest(directory, s3, tmp_path, monkeypatch):
    """An earlier version had no index: what was uploaded with its manifest was a part."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'one'))
    place = locate(f'{s3.url}/teacher')
    for path in directory.rglob('*'):
        if path.is_file():
            s3.put(f'teacher/{path.relative_to(directory)}', path.read_bytes())
    s3.put('teacher/part-00002/ids.npy', b'cut')
    assert len(TeacherFiles(place)) == len(create(place, DESCRIPTION)) == 5
    assert not s3.keys('teacher/part-00002')
    s3.delete('teacher/part-00000/manifest.json')
    with pytest.raises(UserError, match=r'part-00000 is damaged: manifest.json is missing'):
        TeacherFiles(place, 1)
    assert len(create(place, DESCRIPTION, lambda text: None)) == 2


def test_a_bucket_that_does_not_answer_is_said_to_be_out_of_reach(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    place = locate(f'{bucket.url}/teacher')
    create(place, DESCRIPTION)
    with bucket.down(), pytest.raises(UnavailableError, match='run the same command again'):
        TeacherFiles(place)
