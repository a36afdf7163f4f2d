"""Tokens in real buckets: read like those on a disk, kept on this machine within a bound, and faults are survived."""

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from data_options import data_options
from pretrax.data.batches import block_cache, windows
from pretrax.data.batches.source import DataRequest
from pretrax.data.batches.token_source import open_stores
from pretrax.data.tokenizers.tokenizer_training import train_tokenizer
from pretrax.data.tokens import block_files, flat_tokens, flat_tokens_writer, token_array
from pretrax.data.tokens.block_files import BlockFiles
from pretrax.data.tokens.flat_tokens import TokenizerIdentity, open_split
from pretrax.data.tokens.flat_tokens_check import verify
from pretrax.data.tokens.flat_tokens_writer import create
from pretrax.errors import UnavailableError, UserError
from pretrax.storage import BucketPath, connection
from token_arrays import encode_documents


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))


@pytest.fixture
def small_files(monkeypatch):
    """Several shards of few values."""
    monkeypatch.setattr(flat_tokens_writer, '_CHUNK', 1 << 8)
    for name in flat_tokens.SHARD_LENGTH:
        monkeypatch.setitem(flat_tokens.SHARD_LENGTH, name, 1 << 14)


@pytest.fixture
def directory(tmp_path, small_files) -> Path:
    tokenizer = train_tokenizer(['a b c'], 300)
    identity = TokenizerIdentity(sha256=tokenizer.sha256, vocab_size=tokenizer.vocab_size, end_of_text=0)
    with create(tmp_path / 'tokens', identity, tokenizer.content, {}) as writer:
        for split in ('train', 'validation'):
            ids = [[n % 200 + 1] * (n % 90) + [0] for n in range(2000)]
            writer.append(split, *encode_documents(ids), n_bytes=None, predicted_bytes=None)
    return tmp_path / 'tokens'


def upload(directory: Path, server) -> BucketPath:
    for file in directory.rglob('*'):
        if file.is_file():
            server.put(f'a/tokens/{file.relative_to(directory)}', file.read_bytes())
    return BucketPath(f'{server.url}/a/tokens')


def test_tokens_in_a_bucket_equal_those_on_a_disk(directory, bucket):
    remote = upload(directory, bucket)
    near, far = open_split(directory, 'train'), open_split(remote, 'train')
    assert far.manifest == near.manifest
    ranges = [(0, 5), (40_000, 60_000), (near.n_tokens - 3, near.n_tokens)]
    for ours, theirs in zip(far.read(ranges), near.read(ranges), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert verify(remote) == verify(directory)


def test_damaged_objects_are_named(directory, s3):
    remote = upload(directory, s3)
    key = 'a/tokens/train/encoded_tokens/c/1'
    whole = s3.content(key)
    for content in (whole[:100] + bytes([whole[100] ^ 1]) + whole[101:], whole[:-9]):
        s3.put(key, content)
        with pytest.raises(UserError, match=f'{s3.url}/{key}: damaged token file: ') as caught:
            verify(remote)
        assert not isinstance(caught.value, UnavailableError)
    s3.delete(key)
    with pytest.raises(UserError, match=f'{s3.url}/{key}: damaged token file: missing'):
        verify(remote)


def test_a_missing_or_unfinished_directory_is_reported(directory, s3):
    with pytest.raises(UserError, match=f'{s3.url}/b: not a flat-tokens directory'):
        open_split(BucketPath(f'{s3.url}/b'), 'train')
    remote = upload(directory, s3)
    s3.delete('a/tokens/zarr.json')
    s3.put('a/tokens/written-0123456789abcdef/zarr.json', b'')
    with pytest.raises(UserError, match='its tokens are not complete'):
        open_split(remote, 'train')


def test_a_block_is_read_with_few_requests(directory, s3):
    split = open_split(upload(directory, s3), 'train')
    s3.requests.clear()
    split.read([(0, 1 << 14), (1 << 14, (1 << 14) + 9000)])
    assert len(s3.requests) <= 4, 'an index and a range of each shard'


@pytest.mark.parametrize('fault', [{'status': 500}, {'status': 503}, {'cut_after': 10}, {'cut_after': 0}])
def test_faults_while_reading_are_retried(directory, bucket, fault):
    split = open_split(upload(directory, bucket), 'train')
    bucket.fault(match='encoded_tokens', times=2, **fault)
    assert np.array_equal(
        split.read([(0, split.n_tokens)])[0], open_split(directory, 'train').read([(0, split.n_tokens)])[0]
    )


def test_a_bucket_that_comes_back_is_waited_for_and_one_that_stays_away_is_named(directory, s3, monkeypatch):
    monkeypatch.setenv('PRETRAX_STORAGE_RETRY_SECONDS', '0.3')
    split = open_split(upload(directory, s3), 'train')
    monkeypatch.setattr(token_array, '_PAUSE', 0.05)
    with s3.down():
        began = time.monotonic()
        with pytest.raises(UnavailableError, match=rf'{s3.url}/a/tokens/train.*cannot be read.*\n.*check the network'):
            split.read([(0, 9)])
        assert time.monotonic() - began > 3
    monkeypatch.setattr(token_array, 'PATIENCE', 1000)
    fault = s3.fault(times=float('inf'), cut_after=0)
    threading.Timer(3, s3.faults.remove, [fault]).start()
    assert len(split.read([(0, 9)])[0]) == 9


def test_what_was_read_is_kept_on_this_machine(directory, s3, said, monkeypatch):
    monkeypatch.setattr(block_files, '_SMALLEST', 1)
    remote = upload(directory, s3)
    spans = [(start, start + 1000) for start in range(0, 20_000, 1000)]
    expected = open_split(directory, 'train').read(spans)
    cache = BlockFiles(1 << 20, said.append)
    open_split(remote, 'train', cache).read(spans)
    again = open_split(remote, 'train', BlockFiles(1 << 20, said.append))
    s3.requests.clear()
    assert all(np.array_equal(a, b) for a, b in zip(again.read(spans), expected, strict=True))
    assert not s3.requests
    files = [file for file in cache.directory.rglob('*-*') if file.name == '3000-4000']
    for damage in (b'', b'1234', files[0].read_bytes()[:-1] + b'x'):
        files[0].write_bytes(damage)
        assert all(np.array_equal(a, b) for a, b in zip(again.read(spans), expected, strict=True))
    assert not said


def test_what_is_kept_is_bounded_and_the_oldest_goes_first(tmp_path, said, monkeypatch):
    monkeypatch.setattr(block_files, '_SMALLEST', 1)
    values = np.arange(1000, dtype=np.uint32)
    cache = BlockFiles(50_000, said.append, tmp_path / 'kept')
    for number in range(40):
        cache.write('0' * 64, (number * 1000, number * 1000 + 1000), values)
        os.utime(cache._path('0' * 64, (number * 1000, number * 1000 + 1000)), ns=(number, number))
        size = sum(file.stat().st_size for file in (tmp_path / 'kept').rglob('*-*'))
        assert size <= 50_000
    assert cache.read('0' * 64, (0, 1000), values.dtype) is None
    assert np.array_equal(cache.read('0' * 64, (39_000, 40_000), values.dtype), values)
    assert sum(file.stat().st_size for file in (tmp_path / 'kept').rglob('*-*')) > 30_000


def test_a_disk_that_cannot_keep_anything_costs_only_time(directory, s3, said, tmp_path, monkeypatch):
    monkeypatch.setattr(block_files, '_SMALLEST', 1)
    (tmp_path / 'file').write_text('')
    split = open_split(upload(directory, s3), 'train', BlockFiles(1 << 20, said.append, tmp_path / 'file' / 'kept'))
    for _ in range(2):
        assert len(split.read([(0, 1000)])[0]) == 1000
    assert len([line for line in said if 'nothing is kept' in line]) == 1


def test_batches_of_a_bucket_are_those_of_a_disk_and_are_read_ahead(directory, s3, said, tmp_path, monkeypatch):
    monkeypatch.setattr(block_cache, 'MEMORY', 1 << 18)
    monkeypatch.setattr(windows, 'BLOCK', 1 << 9)
    request = DataRequest(0, 32, tmp_path / 'data', said.append)
    near, far = (
        open_stores(open_split(place, 'train'), None, None, request) for place in (directory, upload(directory, s3))
    )
    for step in range(100):
        ours, theirs = (source.batch(step, slice(None), 16) for source in (far, near))
        assert all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))
        far._reader.join()  # a step takes longer than this
    half_a_window = far._order.window * far._order.block // 2
    later = far._order(99 * 16 + np.arange(16) + half_a_window)
    blocks = set((later // far._order.block).tolist())
    assert blocks <= set(far.train.cache._kept)
    assert not blocks <= set(near.train.cache._kept)


def test_other_schemes_are_refused_when_the_configuration_is_read():
    for tokens in ('s4://bucket/tokens', 'https://host/tokens', 's3:/bucket/tokens'):
        with pytest.raises(ValueError, match=r'is not supported here|two slashes'):
            data_options({'tokens': tokens})


def test_without_tensorstore_a_bucket_names_the_extra(monkeypatch):
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    connection.open_bucket.cache_clear()
    with pytest.raises(UserError, match=r's3://bucket needs the package tensorstore\n.*--extra cloud'):
        open_split(BucketPath('s3://bucket/tokens'), 'train')
