"""Disks that are full, and buckets that refuse."""

import shutil
import subprocess
import time

import pytest

from pretrax import config_from_values
from pretrax.doctor import disk
from pretrax.doctor.findings import Context
from runs import BIGRAM

VALUES = {
    'name': 'a', 'model': BIGRAM, 'data': {'name': 'synthetic', 'vocab_size': 96}, 'steps': 4,
    'batch': {'tokens': 64, 'sequence_length': 16}, 'optimizer': {'learning_rate': 1e-2},
}  # fmt: skip


def context(run_dir) -> Context:
    return Context(config_from_values(VALUES | {'run_dir': str(run_dir)}))


def one(found):
    [finding] = found
    return finding


@pytest.fixture
def small(tmp_path):
    """A file system of 4 MiB."""
    directory = tmp_path / 'disk'
    directory.mkdir()
    mounted = subprocess.run(
        ['mount', '-t', 'tmpfs', '-o', 'size=4m', 'tmpfs', directory], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f'cannot mount: {mounted.stderr.strip()}')
    yield directory
    subprocess.run(['umount', directory], check=True)


def test_a_full_disk(small):
    there = context(small / 'runs' / 'a')
    assert one(disk.run_directory(there)).status == 'ok'
    (small / 'all').write_bytes(bytes(shutil.disk_usage(small).free))
    found = one(disk.run_directory(there))
    assert found.status == 'failure'
    assert 'No space left on device' in found.result
    assert not (small / 'runs').exists()


def test_a_disk_with_room_for_no_checkpoint_or_too_few(small):
    there = context(small / 'run')
    assert one(disk.checkpoints(there, 100_000, '')).status == 'ok'
    few = one(disk.checkpoints(there, 1_100_000, ''))
    assert (few.status, few.fix) == ('warning', 'make room, or keep fewer: checkpoint.keep=2')
    assert one(disk.checkpoints(there, 5_000_000, '')).status == 'failure'


def test_a_cache_without_room(small, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(small / 'cache'))
    found = one(disk.cache(context(small)))
    assert (found.status, found.fix) == ('warning', 'make room, or export XDG_CACHE_HOME=PATH')


def test_a_bucket_that_works_and_is_left_as_it_was(bucket):
    found = one(disk.bucket(context(f'{bucket.url}/runs/a')))
    assert found.status == 'ok'
    assert 'ms per request' in found.result
    assert bucket.keys() == []


def test_a_bucket_that_does_not_answer(s3):
    with s3.down():
        found = one(disk.bucket(context(f'{s3.url}/runs/a')))
    assert found.status == 'failure'
    assert 'credentials' in found.fix


def test_a_bucket_that_may_not_be_written(s3):
    s3.fault(method='PUT', status=403, times=float('inf'))
    assert one(disk.bucket(context(f'{s3.url}/runs/a'))).status == 'failure'


def test_a_bucket_that_does_not_exist(s3):
    assert one(disk.bucket(context('s3://no-such-bucket/runs/a'))).status == 'failure'


def test_a_bucket_far_away(s3, monkeypatch):
    monkeypatch.setattr(disk, '_SLOW', 0.3)
    s3.fault(delay=0.5, times=3)
    began = time.monotonic()
    found = one(disk.bucket(context(f'{s3.url}/runs/a')))
    assert time.monotonic() - began > 1.4
    assert found.status == 'warning'
    assert 'region' in found.fix
