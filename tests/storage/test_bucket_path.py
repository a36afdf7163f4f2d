"""Objects on real S3 and Cloud Storage servers: what is written is read, errors are OSErrors, faults are survived."""

import os
import subprocess
import sys
import threading
import time

import pytest

from pretrax.errors import UserError
from pretrax.storage import BucketPath
from pretrax.storage.connection import BucketError
from side_by_side import free_port


@pytest.fixture
def root(bucket):
    return BucketPath(bucket.url) / 'runs/a'


def test_an_object_is_read_as_it_was_written(bucket, root):
    content = bytes(range(256)) * 1000
    (root / 'some file').write_bytes(content)
    assert bucket.content('runs/a/some file') == content
    assert (root / 'some file').read_bytes() == content
    assert (root / 'some file').read_range(10, 300) == content[10:300]
    with (root / 'some file').open('rb') as stream:
        assert stream.read() == content


def test_text_keeps_its_characters(root):
    (root / 'ü.txt').write_text('naïve\n')
    assert (root / 'ü.txt').read_text() == 'naïve\n'
    with (root / 'ü.txt').open() as lines:
        assert list(lines) == ['naïve\n']


def test_a_directory_is_a_prefix_with_objects(bucket, root):
    for key in ('runs/a/x', 'runs/a/sub/y', 'runs/a/sub/z', 'runs/ab', 'runs/a0', 'runs/a'):
        bucket.put(key, b'1')
    assert root.files() == ['sub/y', 'sub/z', 'x']
    assert [path.name for path in root.iterdir()] == ['sub', 'x']
    assert root.is_dir()
    assert root.is_file()
    assert (root / 'x').is_file()
    assert not (root / 'x').is_dir()
    assert not (root / 'su').exists()
    root.remove_tree()
    assert bucket.keys() == ['runs/a', 'runs/a0', 'runs/ab']


def test_a_missing_object_raises_what_a_missing_file_raises(root):
    with pytest.raises(FileNotFoundError) as info:
        (root / 'none').read_bytes()
    assert info.value.filename == str(root / 'none')
    with pytest.raises(FileNotFoundError):
        (root / 'none').unlink()
    (root / 'none').unlink(missing_ok=True)


def test_a_missing_bucket_is_named(bucket):
    with pytest.raises(FileNotFoundError) as info:
        (BucketPath(f'{bucket.scheme}://no-such-bucket') / 'x').write_bytes(b'1')
    assert 'no-such-bucket' in str(info.value)


def test_one_of_many_writers_creates_an_object(root):
    path, created = root / 'lease', []
    missing = path.read_version()
    assert missing.content is None

    def create(number):
        if path.write_version(b'%d' % number, missing.version):
            created.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(created) == 1
    assert path.read_bytes() == b'%d' % created[0]


def test_a_write_that_expects_another_version_changes_nothing(root):
    path = root / 'lease'
    first = path.write_version(b'1', path.read_version().version)
    second = path.write_version(b'2', first)
    assert second != first
    assert path.write_version(b'3', first) is None
    assert path.write_version(None, first) is None
    assert path.read_version() == (b'2', second)
    assert path.write_version(None, second) is not None
    assert not path.is_file()


@pytest.mark.parametrize(
    'status', [pytest.param(429, marks=pytest.mark.slow), pytest.param(500, marks=pytest.mark.slow), 503]
)
def test_a_service_that_fails_for_a_moment_is_asked_again(bucket, root, status):
    fault = bucket.fault(status=status, times=2)
    (root / 'x').write_bytes(b'1')
    assert fault.times == 0
    bucket.fault(status=status, times=2)
    assert (root / 'x').read_bytes() == b'1'
    bucket.fault(status=status, times=2)
    assert root.files() == ['x']


def test_a_connection_that_breaks_is_made_again(bucket, root):
    content = bytes(1 << 20)
    bucket.fault(cut_after=0, times=2)
    (root / 'x').write_bytes(content)
    bucket.fault(method='GET', cut_after=1000, times=2)
    assert (root / 'x').read_bytes() == content


def test_a_lost_answer_writes_the_object_once(bucket, root):
    bucket.fault(method='PUT' if bucket.scheme == 's3' else 'POST', lose_answer=True)
    (root / 'x').write_bytes(b'1')
    assert (root / 'x').read_bytes() == b'1'


def test_a_service_that_stays_away_is_a_temporary_error(bucket, root):
    with bucket.down(), pytest.raises(BucketError) as info:
        (root / 'x').write_bytes(b'1')
    assert info.value.is_temporary
    assert info.value.filename == str(root / 'x')
    (root / 'x').write_bytes(b'1')


def test_an_endpoint_where_nothing_listens_is_reported_soon(s3, monkeypatch):
    monkeypatch.setenv('AWS_ENDPOINT_URL', f'http://127.0.0.1:{free_port()}')
    monkeypatch.setenv('PRETRAX_STORAGE_RETRY_SECONDS', '600')
    started = time.monotonic()
    with pytest.raises(BucketError, match='does not answer'):
        BucketPath('s3://another-bucket/x').read_bytes()
    assert time.monotonic() - started < 300


def test_denied_access_is_not_repeated(bucket, root):
    fault = bucket.fault(status=403, times=9)
    with pytest.raises(PermissionError, match='Access denied'):
        (root / 'x').read_bytes()
    assert fault.times == 8


@pytest.mark.parametrize('url', ['gs://', 's3:///key', 'ftp://bucket/key'])
def test_a_url_without_a_bucket_is_refused(url):
    with pytest.raises(UserError, match=r'expected gs://BUCKET/PATH'):
        BucketPath(url)


def test_a_path_has_the_parts_of_pathlib():
    path = BucketPath('s3://bucket//runs/./a/') / 'metrics.jsonl'
    assert str(path) == 's3://bucket/runs/a/metrics.jsonl'
    assert (path.name, path.stem, path.suffix) == ('metrics.jsonl', 'metrics', '.jsonl')
    assert path.parent == BucketPath('s3://bucket/runs/a')
    assert path.with_name('x') == BucketPath('s3://bucket/runs/a/x')
    with pytest.raises(UserError, match=r'has no'):
        path / '../other'


def test_a_server_that_falls_silent_is_asked_again(s3):
    fault = s3.fault(match='/x', delay=60)
    program = "from pretrax.storage import BucketPath; BucketPath('s3://pretrax-test/x').write_bytes(b'1')"
    environment = {**os.environ, 'TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS': '2'}
    subprocess.run([sys.executable, '-c', program], env=environment, check=True, timeout=300)
    assert fault.times == 0
    assert s3.content('x') == b'1'
