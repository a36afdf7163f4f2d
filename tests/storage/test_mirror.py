"""A directory that is copied to a bucket while it is written, on real servers."""

import contextlib
import itertools
import json
import os

import pytest

from checkpoint.test_keep import Memory
from interleaved import interleavings
from pretrax.observe.metrics import MetricsLog, read_metrics
from pretrax.storage import BucketPath, mirror
from pretrax.storage.lease import LostError
from pretrax.storage.mirror import Mirror
from pretrax.storage.parts import PART, open_joined
from pretrax.view.live.follow import open_tail

EVENTS = [(5, 'started'), (7.5, 'began'), (9, 'ended')]


@pytest.fixture
def remote(bucket):
    return BucketPath(f'{bucket.url}/runs/a')


@pytest.fixture
def mirrored(tmp_path, remote):
    """A mirror of `tmp_path / machine`."""

    def make(machine='here', lease=None, report=print):
        local = tmp_path / machine
        local.mkdir(exist_ok=True)
        return Mirror(local, remote, lease, report)

    return make


def test_empty_files_wait_for_their_content(tmp_path, mirrored, bucket):
    one = mirrored()
    (tmp_path / 'here' / 'startup.txt').write_text('')
    one.upload()
    assert bucket.keys() == []
    (tmp_path / 'here' / 'startup.txt').write_text('1')
    one.upload()
    assert bucket.keys() == ['runs/a/startup.txt']


class lease:  # noqa: N801
    """A lease, which may be lost."""

    def __init__(self, token, previous='', lost=False):
        self.token, self.previous, self.lost = token, previous, lost

    def confirm(self):
        if self.lost:
            raise LostError('lost')


def content(path):
    with open_joined(path) as file:
        return file.read()


def test_files_are_uploaded_with_their_names_and_locks_data_and_unfinished_ones_are_not(tmp_path, mirrored, bucket):
    upload = [
        'config.yaml',
        'tb/events.1',
        'wandb-run-id',
        'profile/a/b.gz',
        'data/tokens-1/tokenizer.json',
        'data/stream-0a.json',
    ]
    stay = [
        'lock',
        '.config.yaml.partial-a-1',
        'data/tokens-1/train.bin',
        'data/survey.json',
        'tb/.x',
        'checkpoints/5/a',
    ]
    for name in upload + stay:
        path = tmp_path / 'here' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    mirrored().upload()
    assert bucket.keys() == sorted(f'runs/a/{name}' for name in upload)
    assert bucket.content('runs/a/tb/events.1') == b'tb/events.1'


def test_a_growing_log_is_uploaded_in_parts_and_only_the_last_is_written_again(tmp_path, mirrored, remote, bucket):
    one = mirrored()
    log = tmp_path / 'here' / 'metrics.jsonl'
    whole = b''
    written = []
    for size in (100, PART, 2 * PART + 5, 10):
        with log.open('ab') as file:
            file.write(os.urandom(size))
        bucket.requests.clear()
        one.upload()
        whole = log.read_bytes()
        assert content(remote / 'metrics.jsonl') == whole
        written.append(sum(method in ('PUT', 'POST') for method, _ in bucket.requests))
    assert written == [1 + 2, 2 + 1, 3 + 1, 1 + 1], 'parts, and the index, which is claimed first'
    assert max(len(bucket.content(key)) for key in sorted(bucket.keys())) == PART
    assert len(bucket.keys()) == 5, 'no part of before is left'
    bucket.requests.clear()
    one.upload()
    assert bucket.requests == []


def test_a_log_that_was_cut_loses_its_last_parts_first(tmp_path, mirrored, remote, bucket):
    """A kill between two requests must not leave later lines behind earlier ones."""
    one = mirrored()
    log = tmp_path / 'here' / 'metrics.jsonl'
    log.write_bytes(os.urandom(3 * PART))
    one.upload()
    kept = log.read_bytes()[: PART + 7]
    log.unlink()
    log.write_bytes(kept)
    bucket.requests.clear()
    one.upload()
    assert content(remote / 'metrics.jsonl') == kept
    written = [path for method, path in bucket.requests if method in ('PUT', 'POST')]
    assert ['000001' in path for path in written] == [True, False], 'the first part is there already'
    assert 'index.json' in written[-1]
    assert {path[path.index('00000') : path.index('00000') + 6] for method,
    path in bucket.requests if method == 'DELETE'} == {
        '000001', '000002'
    }  # fmt: skip


def test_a_process_that_knows_nothing_of_earlier_uploads_removes_surplus_parts_too(tmp_path, mirrored, remote):
    log = tmp_path / 'here' / 'metrics.jsonl'
    mirrored()
    log.write_bytes(os.urandom(3 * PART))
    mirrored().upload()
    log.write_bytes(b'short\n')
    mirrored().upload()
    assert content(remote / 'metrics.jsonl') == b'short\n'


def test_another_machine_continues_the_logs_and_this_one_does_not_fetch_its_own(tmp_path, mirrored, remote):
    first = mirrored('first')
    first.fetch(lease('1'))
    log = MetricsLog(tmp_path / 'first' / 'metrics.jsonl')
    log.write({'step': 1, 'loss': 1.0})
    (tmp_path / 'first' / 'wandb-run-id').write_text('abc')
    (tmp_path / 'first' / 'stacks').mkdir()
    (tmp_path / 'first' / 'stacks' / 'process-0.txt').write_text('first')
    first.upload()
    log.write({'step': 2, 'loss': 0.5})  # not uploaded
    log.close()

    same = mirrored('first')
    same.fetch(lease('2', '1'))
    assert [line['step'] for line in read_metrics(tmp_path / 'first' / 'metrics.jsonl')] == [1, 2]
    same.upload()

    second = mirrored('second')
    started, began, ended = (f'{{"time": {time}, "event": "{event}"}}\n' for time, event in EVENTS)
    (tmp_path / 'second' / 'attempts.jsonl').write_text(started + ended)  # by a launcher on this machine
    (remote / 'attempts.jsonl' / '000000').write_bytes(began.encode())  # by an earlier version
    second.fetch(lease('3', '2'))
    assert (tmp_path / 'second' / 'wandb-run-id').read_text() == 'abc'
    assert (tmp_path / 'second' / 'attempts.jsonl').read_text() == started + began + ended
    second.upload(names='attempts.jsonl')
    assert content(remote / 'attempts.jsonl') == (started + began + ended).encode()
    with MetricsLog(tmp_path / 'second' / 'metrics.jsonl', resumed_step=1, say=lambda _: None) as log:
        log.write({'step': 2, 'loss': 7.0})
    (tmp_path / 'second' / 'stacks').mkdir()
    (tmp_path / 'second' / 'stacks' / 'process-0.txt').write_text('second')
    second.upload()
    assert [line['loss'] for line in read_metrics(remote / 'metrics.jsonl')] == [1.0, 7.0]
    assert sorted([content(remote / 'stacks' / 'process-0.txt')]) in ([b'firstsecond'], [b'secondfirst'])

    back = mirrored('first')
    back.fetch(lease('4', '3'))
    assert [line['loss'] for line in read_metrics(tmp_path / 'first' / 'metrics.jsonl')] == [1.0, 7.0]


def test_the_thread_uploads_and_a_failure_is_reported_once_and_tried_again(tmp_path, mirrored, bucket, monkeypatch):
    monkeypatch.setenv('PRETRAX_STORAGE_RETRY_SECONDS', '0')
    monkeypatch.setattr(mirror, 'EVERY', 0.05)
    said = []
    one = mirrored(report=said.append)

    def wait_for(done):
        for _ in range(2000):
            if done():
                return
            one._wake.wait(0.01)
        pytest.fail(str(said))

    with one.running():
        (tmp_path / 'here' / 'config.yaml').write_text('1')
        wait_for(lambda: bucket.keys() == ['runs/a/config.yaml'])
        with bucket.down():
            (tmp_path / 'here' / 'config.yaml').write_text('22')
            wait_for(lambda: said)
            before = len(bucket.requests)
            wait_for(lambda: len(bucket.requests) > before + 8)
            assert len(said) == 1
        wait_for(lambda: bucket.content('runs/a/config.yaml') == b'22' and len(said) == 2)
    assert 'cannot be written' in said[0]
    assert said[1].endswith('is written again')


def test_nothing_is_written_once_another_process_has_taken_over(tmp_path, mirrored, bucket):
    one = mirrored(lease=lease('1', lost=True))
    for name in ('config.yaml', 'metrics.jsonl'):
        (tmp_path / 'here' / name).write_text('x')
        with pytest.raises(LostError):
            one.upload()
        (tmp_path / 'here' / name).unlink()
    assert all('index' in key for key in bucket.keys(''))


def test_files_and_parts_are_found(bucket, remote, tmp_path):
    assert not (remote / 'metrics.jsonl').exists()
    bucket.put('runs/a/metrics.jsonl/000000', b'1')
    bucket.put('runs/a/one.txt', b'2')
    assert (remote / 'metrics.jsonl').exists()
    assert content(remote / 'one.txt') == b'2'
    with pytest.raises(FileNotFoundError):
        content(remote / 'none')
    assert json.loads(content(remote / 'metrics.jsonl')) == 1


def test_a_log_is_read_as_it_was_when_it_was_opened_and_a_few_parts_at_once(bucket, remote):
    parts = [os.urandom(PART) for _ in range(40)] + [b'old']
    for number, part in enumerate(parts):
        bucket.put(f'runs/a/metrics.jsonl/{number:06}', part)
    bucket.requests.clear()
    with open_joined(remote / 'metrics.jsonl') as file:
        bucket.put('runs/a/metrics.jsonl/000040', b'replaced')
        start = file.read(PART // 2)
        assert sum(method == 'GET' for method, _ in bucket.requests) < 20
        assert start + file.read() == b''.join(parts)


def test_after_a_removed_lock_a_machine_takes_the_lines_of_its_successor(tmp_path, mirrored, remote):
    """The lease of its successor counted from 1 again; the lines of 30 steps were erased."""
    mine, other = tmp_path / 'mine', tmp_path / 'other'
    first = mirrored('mine')
    first.fetch(lease('1'))
    (mine / 'metrics.jsonl').write_text('1\n')
    first.upload()
    successor = mirrored('other')
    successor.fetch(lease('2'))  # the lock was removed
    (other / 'metrics.jsonl').write_text('1\n2\n')
    successor.upload()
    mirrored('mine').fetch(lease('3', '2'))
    assert (mine / 'metrics.jsonl').read_text() == '1\n2\n'


def test_a_mirror_that_was_stopped_at_any_request_changes_nothing_for_its_successor(tmp_path, monkeypatch):
    """Every request of the first, on a bucket in memory; it cuts its log, grows it, and writes a file."""
    monkeypatch.setattr(mirror, 'PART', 4)
    memory = Memory()
    monkeypatch.setattr('pretrax.storage.bucket_path.open_bucket', lambda scheme, name: memory)
    remote = BucketPath('s3://bucket/run')

    def visible():
        logs = [content(remote / name) for name in ('metrics.jsonl', 'samples.jsonl')]
        return [*logs, (remote / 'config.yaml').read_bytes()]

    def train(one, local, contents):
        for metrics, others in contents:
            (local / 'metrics.jsonl').write_text(metrics)
            for name in ('samples.jsonl', 'config.yaml'):
                (local / name).write_text(others)
            one.upload()

    def seen_by_the_second(stop):
        """What is there when the second has uploaded, and at the end; [] if the first has fewer requests."""
        memory.objects.clear()
        first, second = tmp_path / f'{stop}-a', tmp_path / f'{stop}-b'
        first.mkdir()
        second.mkdir()
        held, count, seen = lease('1'), itertools.count(), []
        one = Mirror(first, remote, held, print)
        train(one, first, [('11112222333', 'aaaa')])

        def request():
            if next(count) == stop:
                memory.request = lambda: None
                held.lost = True
                two = Mirror(second, remote, lease('2'), print)
                two.fetch(lease('2'))
                train(two, second, [('11112bbb', 'bb'), ('11112bbbb', 'bbbbb')])
                seen.append(visible())

        memory.request = request
        with contextlib.suppress(LostError):
            train(one, first, [('1111222233334444', 'aaaaa'), ('1111x', 'aa'), ('1111xxxxx', 'aaaaaaa')])
        memory.request = lambda: None
        return [*seen, visible()] if seen else []

    for stop in range(10_000):
        seen = seen_by_the_second(stop)
        if not seen:
            break
        assert seen[0] == seen[1] == [b'11112bbbb', b'bbbbb', b'bbbbb'], stop
    assert stop > 20


def test_a_log_that_was_copied_from_a_disk_survives_a_kill_at_any_request(tmp_path, monkeypatch):
    """The next machine has every line once, and removes the copied object."""
    memory = Memory()
    monkeypatch.setattr('pretrax.storage.bucket_path.open_bucket', lambda scheme, name: memory)
    remote, machines = BucketPath('s3://bucket/run'), itertools.count()

    def train(line):
        local = tmp_path / str(next(machines))
        local.mkdir()
        one = Mirror(local, remote, lease('1'), print)
        one.fetch(lease('1'))
        with (local / 'metrics.jsonl').open('a') as log:
            log.write(line)
        one.upload()
        return True

    def first(request):
        memory.objects = {'run/metrics.jsonl': b'copied\n'}
        memory.request = request
        return train('first\n')

    for stop, _, _, found, _ in interleavings(
        memory, first, lambda: train('second\n'), lambda: content(remote / 'metrics.jsonl'), kills=True
    ):
        assert found in (b'copied\nsecond\n', b'copied\nfirst\nsecond\n'), stop
        assert 'run/metrics.jsonl' not in memory.objects, stop
    assert stop > 5


def test_a_log_that_grows_is_followed_through_its_parts(tmp_path, monkeypatch):
    """Each upload replaces the last part by another object; a cut log is reported as replaced."""
    monkeypatch.setattr(mirror, 'PART', 4)
    monkeypatch.setattr('pretrax.view.live.follow.PART', 4)
    memory = Memory()
    monkeypatch.setattr('pretrax.storage.bucket_path.open_bucket', lambda scheme, name: memory)
    one = Mirror(tmp_path, BucketPath('s3://bucket/run'), None, print)
    tail, lines = open_tail(BucketPath('s3://bucket/run/metrics.jsonl')), b''
    for text in ('1\n', '1\n22\n', '1\n22\n333\n4', '1\n22\n333\n44\n5\n'):
        (tmp_path / 'metrics.jsonl').write_text(text)
        one.upload()
        while True:
            read = tail.read()
            assert not read.replaced
            lines += read.lines
            if not read.lines and not read.more:
                break
    assert lines == b'1\n22\n333\n44\n5\n'
    (tmp_path / 'metrics.jsonl').write_text('1\n6\n')
    one.upload()
    assert tail.read().replaced
