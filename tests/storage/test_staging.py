"""Directories of a bucket that are written and read on a disk."""

import pytest

from pretrax.errors import UserError
from pretrax.huggingface.tensor_files import new_directory
from pretrax.storage import locate
from pretrax.storage.staging import read_directory, written_directory

FILES = {'checkpoints/0/manifest.json': b'{}', 'checkpoints/0/state/a/0.0': b'\0' * 1000, 'z/config.yaml': b'x: 1'}


def write(directory):
    for name, content in FILES.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


def test_a_directory_is_uploaded_with_its_manifest_last(bucket):
    place = locate(f'{bucket.url}/run')
    with written_directory(place) as local:
        write(local)
        assert bucket.keys() == []
    keys = bucket.keys()
    assert {key.removeprefix('run/'): bucket.content(key) for key in keys} == FILES
    written = [path for method, path in bucket.requests if method in ('PUT', 'POST')]
    assert '.unfinished' in written[0]
    assert 'manifest.json' in written[-1]
    with read_directory(place) as copy:
        assert {name: (copy / name).read_bytes() for name in FILES} == FILES
    assert not copy.exists()


def test_a_failed_upload_leaves_nothing(bucket):
    bucket.fault(match='manifest.json', method='PUT' if bucket.scheme == 's3' else 'POST', status=403)
    with pytest.raises(PermissionError), written_directory(locate(f'{bucket.url}/run')) as local:
        write(local)
    assert bucket.keys() == []


def test_a_failed_block_uploads_nothing(bucket):
    with pytest.raises(ValueError, match='broken'), written_directory(locate(f'{bucket.url}/run')) as local:
        write(local)
        raise ValueError('broken')
    assert bucket.keys() == []


def test_a_directory_of_the_disk_is_itself(tmp_path):
    with written_directory(tmp_path / 'a') as local, read_directory(tmp_path / 'b') as copy:
        assert (local, copy) == (tmp_path / 'a', tmp_path / 'b')


def test_a_new_directory_may_not_have_objects(bucket):
    bucket.put('out/x', b'1')
    with pytest.raises(UserError, match='exists and is not empty'), new_directory(locate(f'{bucket.url}/out')):
        pass
    with new_directory(locate(f'{bucket.url}/new')) as partial:
        (partial / 'y').write_bytes(b'2')
    assert bucket.keys() == ['new/y', 'out/x']
