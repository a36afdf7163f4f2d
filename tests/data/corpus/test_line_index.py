"""The line index of a .jsonl file leads to the right lines, and a wrong index is refused."""

import gzip
import json
import os
import signal
import subprocess
import sys

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from pretrax.cli import main
from pretrax.data.corpus.corpus import Corpus, shards
from pretrax.data.corpus.line_index import _HEADER, find_index, index_path, write_index
from pretrax.data.corpus.listing import find_files
from pretrax.data.corpus.selection import RowCounts
from pretrax.errors import UserError

COMPRESS = {'': bytes, '.gz': gzip.compress, '.zst': zstandard.ZstdCompressor().compress}


def run(*arguments):
    with pytest.raises(SystemExit) as left:
        main(list(arguments))
    assert left.value.code == 0


def one(path):
    (file,) = find_files(str(path))
    return file


def write(path, texts, frames=1):
    """Writes the texts as lines in about `frames` frames."""
    raw = b''.join(json.dumps({'text': text}).encode() + b'\n' for text in texts)
    step = -(-len(raw) // frames) or 1
    chunks = [raw[start : start + step] for start in range(0, len(raw), step)]
    path.write_bytes(b''.join(map(COMPRESS[path.suffix if path.suffix != '.jsonl' else ''], chunks)))
    return path


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=['Cs']), min_size=1, max_size=30), max_size=20),
    suffix=st.sampled_from(sorted(COMPRESS)),
    frames=st.integers(1, 12),
    n=st.integers(1, 12),
    start=st.integers(0, 25),
)
def test_reading_starts_at_any_document_and_shards_are_complete(tmp_path_factory, texts, suffix, frames, n, start):
    path = write(tmp_path_factory.mktemp('index') / f'a.jsonl{suffix}', texts or ['x'], frames)
    corpus = Corpus([one(path)])
    plain = list(corpus.documents())
    unindexed = list(corpus.documents(start=start))
    index = write_index(one(path))
    assert len(index.starts) == len(plain)
    content = {'': bytes, '.gz': gzip.decompress}.get(suffix, lambda raw: b''.join(_zstd(raw)))(path.read_bytes())
    assert [content[at : at + 7] for at in index.starts.tolist()] == [b'{"text"'] * len(plain)
    assert [d for shard in shards(corpus, n) for d in shard.documents()] == plain, 'with the same line numbers'
    assert list(corpus.documents(start=start)) == plain[start:] == unindexed
    for shard in shards(corpus, n):
        assert list(shard.documents(start=2)) == list(shard.documents())[2:]


def _zstd(raw):
    while raw:
        frame = zstandard.ZstdDecompressor().decompressobj()
        yield frame.decompress(raw)
        raw = frame.unused_data


@pytest.mark.parametrize(('suffix', 'expected'), [('', 4), ('.gz', 4), ('.zst', 4)])
def test_a_file_of_several_frames_is_shared_and_read_from_the_nearest_frame(tmp_path, suffix, expected, monkeypatch):
    path = write(tmp_path / f'a.jsonl{suffix}', [f'{n} ' + os.urandom(200).hex() for n in range(1000)], frames=50)
    assert len(shards(Corpus([one(path)]), 4)) == (4 if not suffix else 1)
    write_index(one(path))
    corpus = Corpus([one(path)])
    assert len(shards(corpus, 4)) == expected
    sizes = [len(list(shard.documents())) for shard in shards(corpus, 4)]
    assert sum(sizes) == 1000
    assert min(sizes) > 200
    with path.open('r+b') as stream:  # the bytes before are not read
        stream.write(bytes(1000))
    stat = corpus.files[0].state.stamp.split()[1]
    os.utime(path, ns=(int(stat), int(stat)))
    assert [d.text.split()[0] for d in corpus.documents(start=990)] == [str(n) for n in range(990, 1000)]


def test_the_command_rebuilds_the_index_of_a_changed_file(tmp_path, capsys):
    path = write(tmp_path / 'a.jsonl.gz', ['one', 'two'])
    run('data', 'index', str(path))
    said = capsys.readouterr().out
    assert f'{path}: 2 lines, 0.0 MB in one frame' in said
    assert f'{index_path(path)}: written' in said
    run('data', 'index', str(tmp_path / '*.gz'))
    assert 'up to date' in capsys.readouterr().out
    write(path, ['one', 'two', 'three'])
    with pytest.raises(UserError, match=r'has changed since it was indexed\n  rebuild it: pretrax data index .*\n.*rm'):
        shards(Corpus([one(path)]), 2)
    run('data', 'index', str(path))
    said = capsys.readouterr().out
    assert 'has changed' in said
    assert '3 lines' in said
    assert [file.path.name for file in find_files(str(tmp_path / '*'))] == ['a.jsonl.gz'], 'an index is not text'


def test_an_index_damaged_anywhere_is_refused(tmp_path):
    path = write(tmp_path / 'a.jsonl', map(str, range(50)))
    write_index(one(path))
    whole = index_path(path).read_bytes()
    for at in (0, 5, 20, _HEADER, _HEADER + 123, len(whole) - 1):
        index_path(path).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(UserError, match='pretrax data index'):
            find_index(one(path))
    for size in (0, 100, _HEADER, len(whole) - 8, len(whole) - 1):
        index_path(path).write_bytes(whole[:size])
        with pytest.raises(UserError, match='pretrax data index'):
            find_index(one(path))
    index_path(path).write_bytes(whole)
    assert find_index(one(path)) is not None


def test_files_that_cannot_be_indexed_are_refused(tmp_path):
    (tmp_path / 'a.csv').write_text('text\nx\n')
    with pytest.raises(UserError, match='csv files need no index'):
        write_index(one(tmp_path / 'a.csv'))
    path = write(tmp_path / 'a.jsonl.gz', map(str, range(500)))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match='truncated'):
        write_index(one(path))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ['a.csv', 'a.jsonl.gz']


def test_a_file_that_changes_during_indexing_is_refused(tmp_path):
    path = write(tmp_path / 'a.jsonl', ['one', 'two'])

    def grow(_):
        with path.open('a') as stream:
            stream.write('{"text": "three"}\n')

    with pytest.raises(UserError, match='changed while it was indexed'):
        write_index(one(path), grow)
    assert not index_path(path).exists()


# Indexes a file, and stops before the n-th progress report, fsync or rename.
STOP_BEFORE = """
import os, pathlib, signal, sys
from pretrax.data.corpus import line_index
from pretrax.data.corpus.listing import find_files
left = int(sys.argv[2])
def moment(*_, then=lambda *_: None):
    global left
    left -= 1
    if left == 0:
        print('here', flush=True)
        signal.pause()
    return then(*_)
fsync, rename = os.fsync, pathlib.Path.rename
os.fsync = lambda file: moment(file, then=fsync)
pathlib.Path.rename = lambda path, to: moment(path, to, then=rename)
line_index.write_index(find_files(sys.argv[1])[0], moment)
print('done', flush=True)
"""


def test_a_kill_at_any_moment_leaves_no_index(tmp_path):
    path = write(tmp_path / 'a.jsonl.gz', (str(n) * 20 for n in range(20_000)))
    moments = 0
    for moment in (1, 2, 4):
        command = [sys.executable, '-c', STOP_BEFORE, str(path), str(moment)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            if child.stdout.readline() == 'here\n':
                moments += 1
                assert find_index(one(path)) is None, 'no incomplete index'
                child.send_signal(signal.SIGKILL)
    assert moments == 3
    index = write_index(one(path))
    assert len(index.starts) == 20_000
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ['a.jsonl.gz', 'a.jsonl.gz.pretrax-index']


def test_two_processes_do_not_write_one_index(tmp_path):
    path = write(tmp_path / 'a.jsonl', ['one', 'two'])
    refused = []

    def meanwhile(_):
        with pytest.raises(UserError, match='another process is writing') as caught:
            write_index(one(path))
        refused.append(caught.value)

    write_index(one(path), meanwhile)
    assert refused
    assert len(find_index(one(path)).starts) == 2


def test_counts_cover_only_the_rows_that_were_read(tmp_path):
    path = write(tmp_path / 'a.jsonl', ['one', '', 'three', '', 'five'])
    write_index(one(path))
    counts = RowCounts()
    assert [d.text for d in Corpus([one(path)]).documents(counts, start=3)] == ['five']
    assert (counts.read, counts.kept, counts.left_out) == (2, 1, {'empty': 1})
