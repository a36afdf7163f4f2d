"""Two writers of one result in a bucket: whoever succeeds, every byte of the result is what a lone writer makes."""

import itertools
import json
import os
import tempfile

import numpy as np
import pytest

from checkpoint.test_keep import Memory
from distill.test_files import DESCRIPTION, batch_of, top_of
from interleaved import interleavings
from pretrax.data.tokens.flat_tokens import TokenizerIdentity, splits
from pretrax.data.tokens.flat_tokens_check import verify
from pretrax.data.tokens.flat_tokens_writer import create as create_tokens
from pretrax.distill.files import TeacherFiles, digests
from pretrax.distill.files import create as create_teacher
from pretrax.errors import UserError
from pretrax.storage import BucketPath
from pretrax.storage.index import Guard
from pretrax.storage.lease import held_for
from pretrax.storage.staging import written_directory
from pretrax.weights.prompt_file import _InBucket
from token_arrays import encode_documents

IDENTITY = TokenizerIdentity(sha256=None, vocab_size=9, end_of_text=None)
DOCUMENTS = {'first': [[1, 2, 3], [4]], 'second': [[5, 6]]}
# An export of each writer: some files have equal names, some equal contents, and some the other writer lacks.
FILES = {
    'first': {'config.json': b'{}', 'model-1.safetensors': b'1', 'a.json': b'first', 'manifest.json': b'm1'},
    'second': {'config.json': b'{}', 'model-1.safetensors': b'2', 'z.json': b'second', 'manifest.json': b'm2'},
}


@pytest.fixture
def machines():
    """Yields a new directory each time, in memory where the system has that: as many machines as a test needs."""
    with tempfile.TemporaryDirectory(dir='/dev/shm' if os.access('/dev/shm', os.W_OK) else None) as directory:
        yield (f'{directory}/{number}' for number in itertools.count())


@pytest.fixture
def memory(monkeypatch):
    memory = Memory()
    monkeypatch.setattr('pretrax.storage.bucket_path.open_bucket', lambda scheme, name: memory)
    return memory


def succeeds(write, *arguments):
    try:
        write(*arguments)
    except (UserError, FileExistsError):
        return False
    return True


def write_tokens(place, writer):
    with create_tokens(place, IDENTITY, None, {'writer': writer}) as made:
        made.append('train', *encode_documents(DOCUMENTS[writer]), n_bytes=None, predicted_bytes=None)


def files_in(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob('*') if path.is_file()
    }


@pytest.mark.slow
@pytest.mark.parametrize('kills', [False, True], ids=['stopped', 'killed'])
def test_tokens_are_those_of_one_writer_and_nothing_else_is_left(bucket, tmp_path, kills):
    """The expected bytes are those of the same tokens on a disk."""
    alone = {}
    for writer in DOCUMENTS:
        write_tokens(tmp_path / writer, writer)
        alone[writer] = files_in(tmp_path / writer)
    place = BucketPath(f'{bucket.url}/tokens')

    def first(request):
        bucket.reset()
        bucket.request = request
        return succeeds(write_tokens, place, 'first')

    def seen():
        """The files of the result, found without the product; None: there is none."""
        keys = bucket.keys('tokens/')
        if 'tokens/index.json' not in keys:
            return None
        prefix = f'tokens/{json.loads(bucket.content("tokens/index.json"))["entries"]["result"]}/'
        return {key.removeprefix(prefix): bucket.content(key) for key in keys if key.startswith(prefix)}

    outcomes = set()
    for stop, did_first, did_second, found, at_end in interleavings(
        bucket, first, lambda: succeeds(write_tokens, place, 'second'), seen, kills
    ):
        outcomes.add((did_first, did_second))
        assert found == at_end == alone['second' if did_second else 'first'], stop
        assert did_first + did_second == 1 or (kills and not did_first), stop
        verify(place)
        if did_second or not kills:
            assert len(bucket.keys()) == len(at_end) + 1, f'{stop}: leftovers'
    assert stop > 20
    assert {did_second for _, did_second in outcomes} == {True, False}


def write_export(place, writer):
    with written_directory(place) as local:
        local.mkdir()
        for name, content in FILES[writer].items():
            (local / name).write_bytes(content)


def test_an_exported_directory_has_the_files_of_one_writer(memory):
    """A writer that was stopped makes the other one give up, unless it has not begun or has ended."""
    place = BucketPath('s3://bucket/export')

    def first(request):
        memory.objects.clear()
        memory.request = request
        return succeeds(write_export, place, 'first')

    def seen():
        return {key.removeprefix('export/'): content for key, content in memory.objects.items()}

    outcomes = set()
    for stop, did_first, did_second, found, at_end in interleavings(
        memory, first, lambda: succeeds(write_export, place, 'second'), seen
    ):
        outcomes.add((did_first, did_second))
        assert did_first + did_second == 1, stop
        assert at_end == FILES['first' if did_first else 'second'], stop
        if did_second:
            assert found == at_end, stop
    assert len(outcomes) == 2
    assert stop > 6


def test_an_export_that_was_killed_is_never_mixed_with_another_and_looks_unfinished(memory):
    place = BucketPath('s3://bucket/export')

    def first(request):
        memory.objects.clear()
        memory.request = request
        return succeeds(write_export, place, 'first')

    for stop, _, did_second, found, _ in interleavings(
        memory, first, lambda: succeeds(write_export, place, 'second'), lambda: dict(memory.objects), kills=True
    ):
        files = {key.removeprefix('export/'): content for key, content in found.items()}
        is_marked = files.pop('.unfinished', None) is not None
        if did_second:
            assert files == FILES['second'], stop
        else:
            assert files.items() <= FILES['first'].items(), stop
            assert is_marked or files == FILES['first'], stop
            memory.objects.clear()  # as the message says
            write_export(place, 'second')
            assert len(memory.objects) == len(FILES['second'])


def test_an_export_that_goes_on_after_its_directory_was_removed_changes_no_file_of_another(memory):
    """A user removed what the first had written, which was not killed, but stopped."""
    place = BucketPath('s3://bucket/export')

    def first(request):
        memory.objects.clear()
        memory.request = request
        return succeeds(write_export, place, 'first')

    def second():
        memory.objects.clear()
        write_export(place, 'second')
        return True

    for stop, _, _, found, at_end in interleavings(memory, first, second, lambda: dict(memory.objects)):
        assert len(found) == len(FILES['second'])
        assert found.items() <= at_end.items(), stop


def test_answers_that_come_second_replace_nothing_and_are_not_lost(memory):
    memory.objects['answers.jsonl'] = b'of another process'
    answers = _InBucket(BucketPath('s3://bucket/answers.jsonl'))
    answers.append({'text': 'mine'})
    with pytest.raises(UserError, match=r'nothing is lost: the answers are in s3://bucket/answers.jsonl\.') as refused:
        answers.finish()
    assert memory.objects.pop('answers.jsonl') == b'of another process'
    assert memory.objects == {str(refused.value).split('s3://bucket/')[-1]: b'{"text": "mine"}\n'}


def test_the_results_of_a_directory_with_a_lease_are_refused_to_the_second_writer(memory):
    """As `bench` writes them. The first is stopped until its lease has expired, and another process has taken over."""
    out = BucketPath('s3://bucket/sweep')
    with held_for(out, 60, pytest.fail) as confirm:
        first = Guard(confirm)
        first.write(out / 'results.jsonl', b'1')
        lock = json.loads(memory.objects['sweep/lock'])
        memory.objects['sweep/lock'] = json.dumps(lock | {'token': 'another', 'holder': 'process 2'}).encode()
        memory.objects['sweep/results.jsonl'] = b'1 and 2'
        with pytest.raises(UserError, match=r'held by process 2 since .*\nuse another directory, or wait for it'):
            first.write(out / 'results.jsonl', b'1 and mine')
    assert memory.objects['sweep/results.jsonl'] == b'1 and 2'


class TakenOverError(UserError):
    """The lease belongs to another process."""


@pytest.mark.slow
@pytest.mark.parametrize('kills', [False, True], ids=['stopped', 'killed'])
def test_rows_of_a_teacher_are_those_that_the_holder_of_the_lease_has_written(memory, machines, monkeypatch, kills):
    """The second continues with what the first has finished. A part of the first is damaged, so that it repairs too."""
    place, holder = BucketPath('s3://bucket/teacher'), ['first']
    monkeypatch.setattr('os.fsync', lambda descriptor: None)

    def write(writer, *parts):
        monkeypatch.setenv('XDG_CACHE_HOME', next(machines))

        def confirm():
            memory.request()
            if holder[0] != writer:
                raise TakenOverError('')

        files = create_teacher(place, DESCRIPTION, lambda text: None, confirm)
        for seeds in parts:
            if not files.has(batch_of(*seeds)).all():
                files.write(digests(batch_of(*seeds)), top_of(*seeds))

    def first(request):
        memory.objects.clear()
        holder[0] = 'first'
        write('first', (8,), (9,))
        [damaged] = [key for key in memory.objects if key.startswith('teacher/part-00000') and key.endswith('ids.npy')]
        memory.objects[damaged] = memory.objects[damaged][:-1]
        memory.request = request
        return succeeds(write, 'first', (1, 2), (3,))

    def second():
        holder[0] = 'second'
        write('second', (1, 2), (4,))
        return True

    def seen():
        monkeypatch.setenv('XDG_CACHE_HOME', next(machines))
        files = TeacherFiles(place)
        for expected, found in zip(top_of(9, 2, 4), files.read(batch_of(9, 2, 4)), strict=True):
            np.testing.assert_array_equal(found, expected)
        return files.rows.tolist()

    for stop, did_first, _, found, at_end in interleavings(memory, first, second, seen, kills):
        assert found == at_end, stop
        assert not did_first, stop
        write('second', (5,))
        entries = json.loads(memory.objects['teacher/index.json'])['entries']
        parts = {key.split('/')[1] for key in memory.objects if 'part-' in key}
        assert parts == {path for path in entries.values() if path}, f'{stop}: leftovers'
    assert stop > 20


def test_tokens_that_are_being_written_are_said_to_be_incomplete(s3):
    place = BucketPath(f'{s3.url}/tokens')
    with create_tokens(place, IDENTITY, None, {}) as made:
        made.append('train', *encode_documents(DOCUMENTS['first']), n_bytes=None, predicted_bytes=None)
        with pytest.raises(UserError, match='its tokens are not complete'):
            splits(place)
    assert splits(place) == ['train']
