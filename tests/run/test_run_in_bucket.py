"""A run whose directory is in a bucket, on a real server:
it trains as on a disk, and survives what happens to buckets.
"""

import re
from pathlib import Path

import pytest

from pretrax import config_from_values, pretrain
from pretrax.checkpoint import steps_in
from pretrax.errors import UnavailableError, UserError
from pretrax.observe.attempts import read_attempts
from pretrax.observe.metrics import read_metrics
from pretrax.run.directory import local_directory
from pretrax.run.dry_run import dry_run
from pretrax.storage import BucketPath
from pretrax.view.report import write_report
from runs import At, Quiet, StoppedAt, lines_of, without_clock


@pytest.fixture
def remote(s3, small, tmp_path, monkeypatch):
    """The configuration of a run in a bucket, on a machine that has nothing yet."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'machine'))
    monkeypatch.chdir(tmp_path)
    return small | {'run_dir': f'{s3.url}/runs/a', 'checkpoint': {'every': 2, 'keep': 9}}


def losses(run_dir):
    return [without_clock(line) for line in read_metrics(BucketPath(run_dir) / 'metrics.jsonl', pytest.fail)]


def test_a_run_resumes_on_a_machine_that_has_nothing_as_if_it_had_never_stopped(small, remote, tmp_path, monkeypatch):
    pretrain(config_from_values(small), progress=Quiet())
    stopped = pretrain(config_from_values(remote), progress=StoppedAt(3))
    assert stopped.stopped == 'signal'
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'another-machine'))
    result = pretrain(config_from_values(remote), progress=Quiet())
    assert int(result.state.step) == 6
    assert losses(remote['run_dir']) == [without_clock(line) for line in lines_of(small)]
    run = BucketPath(remote['run_dir'])
    assert steps_in(run / 'checkpoints') == [2, 4, 6]
    assert {'config.yaml', 'startup.txt', 'lock', 'metrics.jsonl', 'attempts.jsonl'} <= {p.name for p in run.iterdir()}
    events = read_attempts(local_directory(run))
    assert [(event['event'], event['step']) for event in events] == [
        ('began', 0), ('stepped', 1), ('stopped', 4), ('began', 4), ('stepped', 5), ('finished', 6),
    ]  # fmt: skip
    assert not [path for path in tmp_path.iterdir() if path.name.startswith('s3')]


@pytest.mark.slow
@pytest.mark.parametrize('name', ['Läufe 語', '50% #1', 'a[1]*', 'what?'])
def test_a_run_in_a_bucket_has_the_name_that_was_written(name, s3, small, remote):
    run_dir = f'{s3.url}/runs/{name}'
    pretrain(config_from_values(small), progress=Quiet())
    pretrain(config_from_values(remote | {'run_dir': run_dir}), progress=StoppedAt(3))
    pretrain(config_from_values(remote | {'run_dir': run_dir}), progress=Quiet())
    assert losses(run_dir) == [without_clock(line) for line in lines_of(small)]
    assert {key.split('/')[1] for key in s3.keys('runs/')} == {name}


def test_the_report_is_written_in_the_bucket(remote):
    pretrain(config_from_values(remote | {'log': {'every': 1}}), progress=Quiet())
    run = BucketPath(remote['run_dir'])
    text = (run / 'report.html').read_text()
    assert '<span class="state" data-state="finished">' in text
    rows = text.partition('id="checkpoints"')[2].partition('<tbody>')[2].partition('</tbody>')[0]
    assert [re.findall('<td[^>]*>([^<]*)', row)[0] for row in rows.split('<tr>')[1:]] == ['2', '4', '6']
    assert text.count(remote['run_dir']) > 1
    write_report(remote['run_dir'])
    assert (run / 'report.html').read_text() != ''


@pytest.mark.parametrize('status', [503, pytest.param(401, marks=pytest.mark.slow)])
def test_a_bucket_that_fails_for_a_while_does_not_stop_training(status, s3, remote, monkeypatch):
    """Also one that refuses credentials that have expired, until they are renewed."""

    class Failing(Quiet):
        def update(self, metrics):
            if metrics['step'] == 2:
                self.fault = s3.fault(times=float('inf'), status=status)
            if metrics['step'] == 5:
                s3.faults.clear()

    progress = Failing()
    monkeypatch.setenv('PRETRAX_STORAGE_RETRY_SECONDS', '0')
    result = pretrain(config_from_values(remote), progress=progress)
    assert int(result.state.step) == 6
    assert [line for line in progress.said if line.startswith('WARNING: no checkpoint could be written to s3://')]
    assert [line['step'] for line in losses(remote['run_dir'])] == [1, 2, 3, 4, 5, 6]
    assert steps_in(BucketPath(remote['run_dir']) / 'checkpoints')[-1] == 6


def test_a_checkpoint_is_valid_only_once_the_metrics_before_it_are_in_the_bucket(s3, remote):
    """Otherwise a machine that has nothing would resume with a gap in the metrics."""
    s3.fault(method='PUT', match='metrics.jsonl', times=float('inf'), status=403)
    progress = At(6, s3.faults.clear)
    pretrain(config_from_values(remote), progress=progress)
    run = BucketPath(remote['run_dir'])
    assert [line for line in progress.said if 'no checkpoint could be written' in line]
    assert 2 not in steps_in(run / 'checkpoints')
    assert 6 in steps_in(run / 'checkpoints')
    assert [line['step'] for line in losses(remote['run_dir'])] == [1, 2, 3, 4, 5, 6]


def test_a_run_that_is_taken_over_stops_and_writes_no_more(s3, remote, monkeypatch):
    values = remote | {
        'steps': 100_000, 'schedule': {'name': 'constant'}, 'faults': {'lease_seconds': 0.4},
        'checkpoint': {'every': 50_000},
    }  # fmt: skip
    taken = At(3, lambda: s3.put('runs/a/lock', b'{"holder": "process 1 on another-machine", "since": "now"}'))
    with pytest.raises(UserError, match=r'taken over this run: .* is held by process 1 on another-machine since now'):
        pretrain(config_from_values(values), progress=taken)
    assert 'another-machine' in s3.content('runs/a/lock').decode()
    assert s3.keys('runs/a/checkpoints/') == ['runs/a/checkpoints/index.json']


def test_a_dry_run_writes_nothing_in_the_bucket_and_notices_one_that_cannot_be_written(s3, remote):
    said = []
    dry_run(config_from_values(remote), report=said.append)
    assert said[-1].startswith('dry run: no problem found; the run would start at step 0')
    assert s3.keys() == []
    s3.put('runs/a/lock', b'{"holder": "process 1 on another-machine", "since": "now"}')
    dry_run(config_from_values(remote), report=said.append)
    assert [line for line in said if 'held by process 1 on another-machine' in line]
    s3.fault(method='PUT', times=99, status=403)
    with pytest.raises(UserError, match=r'run_dir: s3://.* cannot be used: Access denied'):
        dry_run(config_from_values(remote), report=said.append)


def test_a_run_that_is_copied_to_a_bucket_or_to_a_disk_goes_on(s3, small, remote, tmp_path):
    """File by file, as `gsutil cp -r` and `aws s3 sync` do."""
    small |= {'checkpoint': remote['checkpoint']}
    pretrain(config_from_values(small), progress=Quiet())
    straight = [without_clock(line) for line in lines_of(small)]

    pretrain(config_from_values(small | {'run_dir': str(tmp_path / 'a')}), progress=StoppedAt(3))
    for path in (tmp_path / 'a').rglob('*'):
        if path.is_file():
            s3.put(f'runs/a/{path.relative_to(tmp_path / "a").as_posix()}', path.read_bytes())
    pretrain(config_from_values(remote | {'faults': {'lease_seconds': 0.4}}), progress=Quiet())
    assert losses(remote['run_dir']) == straight
    assert 'runs/a/metrics.jsonl' not in s3.keys('runs/a/')
    assert steps_in(BucketPath(remote['run_dir']) / 'checkpoints') == [2, 4, 6]

    pretrain(config_from_values(remote | {'run_dir': f'{s3.url}/runs/b'}), progress=StoppedAt(3))
    for key in s3.keys('runs/b/'):
        path = tmp_path / key.removeprefix('runs/')
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(s3.content(key))
    copied = small | {'run_dir': str(tmp_path / 'b')}
    assert steps_in(tmp_path / 'b' / 'checkpoints') == [2, 4]
    assert [line['step'] for line in read_metrics(tmp_path / 'b' / 'metrics.jsonl', pytest.fail)] == [1, 2, 3, 4]
    pretrain(config_from_values(copied), progress=Quiet())
    assert [without_clock(line) for line in lines_of(copied)] == straight
    assert steps_in(tmp_path / 'b' / 'checkpoints') == [2, 4, 6]


@pytest.mark.slow
def test_credentials_that_are_never_renewed_end_the_run_which_continues_with_new_ones(s3, small, remote, monkeypatch):
    pretrain(config_from_values(small), progress=Quiet())
    monkeypatch.setenv('PRETRAX_STORAGE_RETRY_SECONDS', '0')
    expire = At(3, lambda: s3.fault(times=float('inf'), status=401))
    with pytest.raises(UnavailableError, match='the state of step 6 is not saved\nrun the same command again'):
        pretrain(config_from_values(remote), progress=expire)
    assert [line for line in expire.said if line.startswith('WARNING: no checkpoint could be written to s3://')]
    assert [line for line in expire.said if '401' in line], expire.said
    s3.faults.clear()
    assert 6 not in steps_in(BucketPath(remote['run_dir']) / 'checkpoints')
    pretrain(config_from_values(remote), progress=Quiet())
    assert losses(remote['run_dir']) == [without_clock(line) for line in lines_of(small)]


@pytest.mark.slow
def test_a_run_moves_from_a_bucket_to_a_disk_and_from_a_disk_to_a_bucket(s3, small, remote, tmp_path):
    """Its objects and files are copied by a tool that knows nothing of runs."""
    reference = small | {'run_dir': str(tmp_path / 'reference')}
    pretrain(config_from_values(reference), progress=Quiet())
    expected = [without_clock(line) for line in lines_of(reference)]

    pretrain(config_from_values(remote), progress=StoppedAt(3))
    for key in s3.keys('runs/a/'):
        file = tmp_path / 'moved' / key.removeprefix('runs/a/')
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(s3.content(key))
    moved = remote | {'run_dir': str(tmp_path / 'moved')}
    pretrain(config_from_values(moved), progress=Quiet())
    assert [without_clock(line) for line in lines_of(moved)] == expected
    assert [event['step'] for event in read_attempts(tmp_path / 'moved') if event['event'] == 'began'] == [0, 4]

    pretrain(config_from_values(small), progress=StoppedAt(3))
    for file in Path(small['run_dir']).rglob('*'):
        if file.is_file():
            s3.put(f'runs/b/{file.relative_to(small["run_dir"])}', file.read_bytes())
    back = remote | {'run_dir': f'{s3.url}/runs/b'}
    pretrain(config_from_values(back), progress=Quiet())
    assert losses(back['run_dir']) == expected
    events = read_attempts(local_directory(BucketPath(back['run_dir'])))
    assert [event['step'] for event in events if event['event'] == 'began'] == [0, 4]
