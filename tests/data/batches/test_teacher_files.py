"""The files of a prepared teacher: rows come back exactly, whatever their order, and damage is refused."""

import dataclasses

import numpy as np
import pytest

from pretrax.data.batches.source import HostBatch
from pretrax.data.batches.teacher_files import Description, HostTopK, TeacherFiles, create, digests
from pretrax.errors import UserError

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


@pytest.mark.parametrize(
    ('break_it', 'said'),
    [
        (lambda path: (path / 'teacher.json').unlink(), r'has no teacher.json\nwrite it first: pretrax distill'),
        (lambda path: (path / 'teacher.json').write_text('{"format": 1'), 'damaged: .*\nremove'),
        (lambda path: (path / 'teacher.json').write_text('{"format": 9}'), 'format 9, and this version'),
        (lambda path: (path / 'part-00000' / 'rows.npy').unlink(), r'part-00000: damaged: .*rows.npy.*\nremove'),
        (lambda path: (path / 'part-00000').rename(path / 'gone'), r'part-00000: damaged'),
        (
            lambda path: (path / 'part-00001' / 'ids.npy').write_bytes((path / 'part-00001/ids.npy').read_bytes()[:-8]),
            r'part-00001: damaged: .*\nremove',
        ),
        (lambda path: np.save(path / 'part-00001' / 'log_tail.npy', np.zeros((2, 3))), 'have other shapes'),
    ],
)
def test_missing_and_damaged_files_are_refused(directory, break_it, said):
    break_it(directory)
    with pytest.raises(UserError, match=said) as refused:
        TeacherFiles(directory)
    assert len(str(refused.value).splitlines()) <= 10
