"""Where a run in a bucket writes on the disk."""

import socket
from pathlib import Path

from pretrax.storage import BucketPath
from pretrax.storage.locate import working_directory


def test_a_run_on_a_disk_writes_in_its_directory():
    assert working_directory(Path('runs/a'), 3) == Path('runs/a')


def test_each_run_process_and_machine_has_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    runs = [BucketPath('s3://bucket/a'), BucketPath('gs://bucket/a'), BucketPath('s3://bucket/b/a')]
    places = [working_directory(run, index) for run in runs for index in (0, 1)]
    assert places == [working_directory(run, index) for run in runs for index in (0, 1)]
    monkeypatch.setattr(socket, 'gethostname', lambda: 'another')
    places += [working_directory(run) for run in runs]
    assert len(set(places)) == 9
    assert {place.parent for place in places} == {tmp_path / 'pretrax' / 'runs'}
