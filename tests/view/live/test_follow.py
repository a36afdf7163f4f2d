"""Files that are followed while they are written, torn, replaced, removed and made again."""

import json
import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrax.observe.metrics import MetricsLog
from pretrax.storage import parts
from pretrax.storage.bucket_path import BucketPath
from pretrax.view.live import follow as follow
from pretrax.view.live.follow import open_tail


class Reader:
    """What somebody who follows a file knows of it."""

    def __init__(self, path):
        self.tail, self.lines, self.exists, self.replaced = open_tail(path), b'', False, 0

    def read(self):
        more = True
        while more:
            appended = self.tail.read()
            self.replaced += appended.replaced
            self.lines = appended.lines if appended.replaced else self.lines + appended.lines
            more, self.exists = appended.more, appended.exists
        return self.lines


def complete(content):
    return content[: content.rfind(b'\n') + 1]


def test_only_what_was_appended_is_read(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    path.write_bytes(b'one\ntwo\n')
    tail = open_tail(path)
    assert tail.read().lines == b'one\ntwo\n'
    assert tail.read().lines == b''
    with path.open('ab') as file:
        file.write(b'thr')
        file.flush()
        assert tail.read().lines == b''
        file.write(b'ee\nfour')
    appended = tail.read()
    assert (appended.lines, appended.replaced, appended.more) == (b'three\n', False, False)


def test_a_file_that_comes_goes_and_comes_again(tmp_path):
    path = tmp_path / 'run' / 'metrics.jsonl'
    reader = Reader(path)
    assert (reader.read(), reader.exists) == (b'', False)
    path.parent.mkdir()
    path.write_bytes(b'a\nb\n')
    assert (reader.read(), reader.exists, reader.replaced) == (b'a\nb\n', True, 0)
    path.unlink()
    assert (reader.read(), reader.exists, reader.replaced) == (b'', False, 1)
    path.write_bytes(b'c\n')
    assert (reader.read(), reader.exists) == (b'c\n', True)


def test_a_file_that_is_rewritten_in_place_with_more_than_before_is_another_one(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n')
    reader = Reader(path)
    reader.read()
    inode = path.stat().st_ino
    with path.open('r+b') as file:
        file.write(b'{"step": 1}\n{"step": 5}\n{"step": 6}\n')
    assert path.stat().st_ino == inode
    assert reader.read() == path.read_bytes()
    assert reader.replaced == 1


def test_a_directory_in_place_of_the_file_is_an_error_that_passes(tmp_path):
    path = tmp_path / 'metrics.jsonl'
    path.mkdir()
    tail = open_tail(path)
    with pytest.raises(OSError, match='Not a file'):
        tail.read()
    path.rmdir()
    path.write_bytes(b'a\n')
    assert tail.read().lines == b'a\n'


def test_a_line_without_end_does_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(follow, 'CHUNK', 1000)
    monkeypatch.setattr(follow, '_LONGEST', 5000)
    path = tmp_path / 'metrics.jsonl'
    path.write_bytes(b'{' * 50_000 + b'\n{"step": 1}\n')
    reader = Reader(path)
    lines = reader.read().splitlines()
    assert lines[-1] == b'{"step": 1}'
    assert len(lines[0]) < 7000


STEPS = st.one_of(
    st.tuples(st.just('append'), st.integers(1, 5)),
    st.tuples(st.just('tear'), st.integers(1, 30)),
    st.tuples(st.just('resume'), st.integers(0, 20)),
    st.tuples(st.just('remove'), st.just(0)),
    st.tuples(st.just('read'), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(STEPS, max_size=25), chunk=st.sampled_from([7, 64, 4096]))
def test_whatever_a_run_does_its_complete_lines_are_known(tmp_path_factory, steps, chunk):
    directory = tmp_path_factory.mktemp('run')
    path, number, chance = directory / 'metrics.jsonl', 0, random.Random(0)
    path.touch()
    reader = Reader(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(follow, 'CHUNK', chunk)
        for what, amount in [*steps, ('read', 0)]:
            if what == 'append' or (what == 'tear' and path.exists()):
                with path.open('ab') as file:
                    for _ in range(amount if what == 'append' else 1):
                        number += 1
                        line = json.dumps({'step': number, 'loss': chance.random()}).encode() + b'\n'
                        file.write(line if what == 'append' else line[: min(amount, len(line) - 1)])
            elif what == 'resume':
                with MetricsLog(path, resumed_step=amount, say=lambda _: None):
                    number = min(number, amount)
            elif what == 'remove':
                path.unlink(missing_ok=True)
                number = 0
            else:
                known = reader.read()
                content = path.read_bytes() if path.exists() else b''
                assert known == complete(content)
                assert reader.exists == path.exists()


def upload(server, content, before, size):
    """As `Mirror` uploads a file: surplus parts are removed first, then each part is written that has changed."""
    pieces = [content[start : start + size] for start in range(0, len(content), size)]
    for number in range(len(pieces), before):
        server.delete(f'run/metrics.jsonl/{number:06}')
    for number, piece in enumerate(pieces):
        server.put(f'run/metrics.jsonl/{number:06}', piece)
    return len(pieces)


@pytest.mark.slow
def test_the_parts_of_a_file_in_a_bucket_are_followed(s3, monkeypatch):
    size, content, count = 64, b'', 0
    for module in (follow, parts):
        monkeypatch.setattr(module, 'PART', size)
    reader = Reader(BucketPath(f'{s3.url}/run/metrics.jsonl'))
    assert (reader.read(), reader.exists) == (b'', False)
    for step in range(40):
        content += json.dumps({'step': step, 'loss': os.urandom(6).hex()}).encode() + b'\n'
        count = upload(s3, content, count, size)
        if step % 3 == 0:
            assert reader.read() == content
    assert (reader.read(), reader.replaced) == (content, 0)
    s3.requests.clear()
    reader.read()
    assert len(s3.requests) <= 2  # nothing new costs this much
    for keep in (15, 14, 3):  # a run resumes from an earlier step
        content = b''.join(content.splitlines(keepends=True)[:keep])
        count = upload(s3, content, count, size)
        assert reader.read() == content
        content += b'{"step": 1000}\n' * 3
        count = upload(s3, content, count, size)
        assert reader.read() == content
    assert reader.replaced == 3


@pytest.mark.slow
def test_one_object_in_a_bucket_is_read_too(s3):
    s3.put('copied/metrics.jsonl', b'a\nb')
    reader = Reader(BucketPath(f'{s3.url}/copied/metrics.jsonl'))
    assert reader.read() == b'a\n'
    s3.put('copied/metrics.jsonl', b'a\nbc\n')
    assert reader.read() == b'a\nbc\n'
    with s3.down(), pytest.raises(OSError, match='does not answer'):
        reader.read()
    assert reader.read() == b'a\nbc\n'
    s3.delete('copied/metrics.jsonl')
    reader.read()
    assert not reader.exists
