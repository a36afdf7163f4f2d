"""Disks that are full, read-only, gone or not ours while a run trains: real mounts, real permissions.

Training goes on, every attempt to save is told, and no directory ever looks like a checkpoint that is none.
"""

import concurrent.futures
import fcntl
import os
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from pretrax import config_from_values, pretrain
from pretrax.checkpoint import Checkpoints, steps_in, verify
from pretrax.errors import UserError
from pretrax.observe.metrics import read_metrics
from pretrax.run import saving
from runs import BIGRAM, Quiet

# TensorStore complains of its own writes that failed, besides raising what failed first.
pytestmark = pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')

VALUES = {
    'name': 'disk', 'model': BIGRAM, 'data': {'name': 'synthetic', 'vocab_size': 96}, 'steps': 40,
    'batch': {'tokens': 64, 'sequence_length': 16}, 'optimizer': {'learning_rate': 1e-2},
    'schedule': {'name': 'constant'}, 'mesh': {'r': 1, 'd': 4, 't': 2}, 'precision': {'compute': 'f32'},
    'log': {'every': 1}, 'eval': {'every': 0}, 'checkpoint': {'every': 10, 'keep': 9},
}  # fmt: skip


@pytest.fixture(scope='module')
def losses(tmp_path_factory):
    """Of each step, where nothing goes wrong."""
    directory = tmp_path_factory.mktemp('well')
    pretrain(config_from_values(VALUES | {'run_dir': str(directory)}), progress=Quiet())
    return [line['loss'] for line in read_metrics(directory / 'metrics.jsonl')]


class Watched(Checkpoints):
    """Those of the run that is trained now."""

    newest: Checkpoints

    def __init__(self, *arguments):
        super().__init__(*arguments)
        Watched.newest = self


@pytest.fixture(autouse=True)
def watched(monkeypatch):
    monkeypatch.setattr(saving, 'Checkpoints', Watched)


@pytest.fixture
def disk(tmp_path):
    """A file system of its own, of 4 MiB."""
    place = tmp_path / 'disk'
    place.mkdir()
    mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=4m', 'tmpfs', place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f'a file system can be mounted by root alone: {mounted.stderr.strip()}')
    yield place
    subprocess.run(['umount', '-l', place], check=True)


class During(Quiet):
    """Does something at some steps, {step: what}, when nothing is being saved."""

    def __init__(self, events):
        super().__init__()
        self.events = events

    def update(self, metrics):
        if event := self.events.get(metrics['step']):
            concurrent.futures.wait(filter(None, [Watched.newest._writing]))
            event()

    def refused(self):
        return [line for line in self.said if line.startswith('WARNING: no checkpoint could be written')]


def fill(disk):
    """Up to the last byte."""
    with (disk / 'filler').open('wb', buffering=0) as filler, pytest.raises(OSError, match='No space left'):
        while True:
            filler.write(bytes(1 << 12))


def trained(run, events, expected, last=40):
    """Trains; all checkpoints are whole, all losses those of a run that nothing happened to."""
    progress = During(events)
    result = pretrain(config_from_values(VALUES | {'run_dir': str(run)}), progress=progress)
    assert int(result.state.step) == last
    for step in steps_in(run / 'checkpoints'):
        verify(run / 'checkpoints', step)
    lines = read_metrics(run / 'metrics.jsonl')
    assert [line['loss'] for line in lines] == [expected[line['step'] - 1] for line in lines]
    return progress, [line['step'] for line in lines]


def test_a_disk_that_is_full_for_a_while(disk, losses):
    run = disk / 'run'
    events = {13: lambda: fill(disk), 35: (disk / 'filler').unlink}
    progress, steps = trained(run, events, losses)
    assert steps_in(run / 'checkpoints') == [10, 40]
    assert len(progress.refused()) == 2  # of steps 20 and 30
    assert all('/checkpoints: No space left on device. Training' in line for line in progress.refused())
    assert sum('bytes of metrics wait in memory' in line for line in progress.said) >= 4
    assert steps == list(range(1, 41))  # what waited is there
    assert {entry.suffix for entry in (run / 'checkpoints').iterdir()} == {''}


def test_a_disk_that_is_full_from_the_start_is_reported(disk):
    fill(disk)
    with pytest.raises(UserError, match=r'run_dir: .* cannot be used: No space left on device'):
        pretrain(config_from_values(VALUES | {'run_dir': str(disk / 'run')}), progress=Quiet())


def test_a_disk_that_stays_full_is_an_error_and_the_same_command_resumes(disk, losses):
    run = disk / 'run'
    progress = During({13: lambda: fill(disk)})
    with pytest.raises(
        UserError, match=r'the state of step 40 is not saved: /.*/run/checkpoints: No space left on device\nmake room'
    ):
        pretrain(config_from_values(VALUES | {'run_dir': str(run)}), progress=progress)
    assert len(progress.refused()) == 3
    assert steps_in(run / 'checkpoints') == [10]
    (disk / 'filler').unlink()
    _, steps = trained(run, {}, losses)
    assert steps == list(range(1, 41))


def test_a_directory_that_becomes_read_only(disk, tmp_path, losses):
    """Nothing is written there between two saves, so that the system lets it be mounted anew."""
    run = tmp_path / 'run'
    run.mkdir()
    (run / 'checkpoints').symlink_to(disk)

    def mount(how):
        subprocess.run(['mount', '-o', f'remount,{how}', disk], check=True)

    progress = During({13: lambda: mount('ro'), 35: lambda: mount('rw')})
    pretrain(config_from_values(VALUES | {'run_dir': str(run)}), progress=progress)
    assert steps_in(disk) == [10, 40]
    assert len(progress.refused()) == 2
    assert all('Read-only file system' in line for line in progress.refused())
    assert [line['loss'] for line in read_metrics(run / 'metrics.jsonl')] == losses


@pytest.fixture
def ext4(tmp_path):
    """A function that mounts a file system of its own with a journal, also again after it failed."""
    place, image = tmp_path / 'ext4', tmp_path / 'image'
    place.mkdir()
    image.write_bytes(b'')
    os.truncate(image, 32 << 20)
    is_made = shutil.which('mkfs.ext4') and not subprocess.run(['mkfs.ext4', '-q', image]).returncode

    def mount():
        subprocess.run(['umount', '-q', place])
        mounted = is_made and not subprocess.run(['mount', '-o', 'loop', image, place], capture_output=True).returncode
        if not mounted:
            pytest.skip('needs ext4 on a loop device, and root')
        return place

    yield mount
    subprocess.run(['umount', '-q', '-l', place])


def abort(place):
    """What ext4 does itself after an error of the disk: it becomes read-only, although files are open."""
    subprocess.run(['mount', '-o', 'remount,abort', place], check=True)


def shut_down(place):
    """What a disk does that was pulled out: every request is an error (EXT4_IOC_SHUTDOWN, without the journal)."""
    descriptor = os.open(place, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, 0x8004587D, struct.pack('I', 2))
    finally:
        os.close(descriptor)


@pytest.mark.slow
@pytest.mark.parametrize(
    ('fail', 'reason'), [(abort, 'Read-only file system'), (shut_down, 'Input/output error')], ids=['EROFS', 'EIO']
)
def test_a_disk_that_fails_while_files_are_open(ext4, losses, fail, reason):
    """The run ends with the reason; once the disk is back,
    the same command computes what a run without the failure does.
    """
    run = ext4() / 'run'
    progress = During({23: lambda: fail(run.parent)})
    with pytest.raises(UserError) as end:
        pretrain(config_from_values(VALUES | {'run_dir': str(run)}), progress=progress)
    first, fix = str(end.value).splitlines()
    assert first == f'the state of step 40 is not saved: {run}/checkpoints: {reason}'
    assert fix.startswith('make room, or make the disk writable again, and run the same command again')
    assert len(progress.refused()) == 2  # of steps 30 and 40
    assert (
        1 <= sum(line.startswith(f'WARNING: cannot write {run}/metrics.jsonl: {reason}') for line in progress.said) <= 6
    )
    with pytest.raises(UserError, match=f'run_dir: .* cannot be used: .* is not writable: {reason}') as start:
        pretrain(config_from_values(VALUES | {'run_dir': str(run)}), progress=Quiet())
    assert len(str(start.value).splitlines()) == 2
    ext4()
    resumed, steps = trained(run, {}, losses)
    assert any('resuming from step 20' in line for line in resumed.said)
    assert steps[-20:] == list(range(21, 41))


def test_a_directory_that_vanishes_is_created_again(tmp_path, losses):
    run = tmp_path / 'run'
    progress, steps = trained(run, {13: lambda: shutil.rmtree(run)}, losses)
    assert steps_in(run / 'checkpoints') == [20, 30, 40]
    assert any('metrics.jsonl was removed while training; it is created again' in line for line in progress.said)
    assert steps == list(range(14, 41))


def test_a_revoked_write_permission(tmp_path, losses):
    """Root may write anywhere, so this process is somebody else from step 13 to step 35."""
    if os.geteuid() != 0:
        pytest.skip('only root can become somebody else')
    run = tmp_path / 'run'
    try:
        progress, steps = trained(run, {13: lambda: os.seteuid(65534), 35: lambda: os.seteuid(0)}, losses)
    finally:
        os.seteuid(0)
    assert steps_in(run / 'checkpoints') == [10, 40]
    assert len(progress.refused()) == 2
    assert all('Permission denied' in line for line in progress.refused())
    assert steps == list(range(1, 41))


def test_an_unreadable_run_directory_is_reported(disk):
    run = disk / 'run'
    run.mkdir()
    subprocess.run(['mount', '-o', 'remount,ro', disk], check=True)
    with pytest.raises(UserError, match=r'run_dir: .* cannot be used: .* is not writable: Read-only file system'):
        pretrain(config_from_values(VALUES | {'run_dir': str(run)}), progress=Quiet())
    assert not Path(run / 'checkpoints').exists()
