"""Limits of the system: each check, with the files of a system that would break training."""

import os
import subprocess
import sys

import pytest

from pretrax.doctor import machine
from pretrax.doctor.findings import Context

NOTHING_FREE = 'MemTotal: 1000000 kB\nSwapTotal: 8000000 kB\nSwapFree: {} kB\n'


def write(root, **files):
    for name, text in files.items():
        path = root / name.replace('__', '/')
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Context(None, root=root)


def status(found):
    return [finding.status for finding in found]


def limited(check: str, *resources: str, processes: int = 1) -> str:
    """The statuses of a check in a process with such limits."""
    lines = [
        f'resource.setrlimit(resource.RLIMIT_{name}, ({value.partition(":")[0]}, {value.partition(":")[2] or value}))'
        for name, _, value in (r.partition('=') for r in resources)
    ]
    program = '\n'.join([
        'import resource', 'from pretrax.doctor import machine', 'from pretrax.doctor.findings import Context', *lines,
        f'print(*[f"{{f.status}}: {{f.result}}: {{f.fix}}" for f in machine.{check}(Context(None, '
        f'processes={processes}))])',
    ])  # fmt: skip
    return subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True).stdout


def test_too_few_open_files_for_the_number_of_processes():
    assert limited('open_files', 'NOFILE=64').startswith('failure: hard limit 64')
    assert limited('open_files', 'NOFILE=1024', processes=8).startswith('ok')
    assert limited('open_files', 'NOFILE=1024', processes=256).startswith(
        'failure: hard limit 1024; training needs about 4608'
    )
    assert limited('open_files', 'NOFILE=64:8192', processes=256).startswith('ok: hard limit 8192')


def test_too_few_threads(tmp_path):
    assert limited('threads', 'NPROC=200').startswith('failure: limit 200')
    directory = tmp_path / 'sys/fs/cgroup'
    directory.mkdir(parents=True)
    for text, expected in ('64', 'failure'), ('max', 'ok'):
        (directory / 'pids.max').write_text(f'{text}\n')
        assert status(machine.threads(Context(None, root=tmp_path))) == [expected]


def test_locked_memory_counts_only_with_rdma(tmp_path):
    program = limited('locked_memory', 'MEMLOCK=65536')
    assert program.strip() == ''  # no such card in this machine
    (tmp_path / 'sys/class/infiniband/mlx5_0').mkdir(parents=True)
    found = list(machine.locked_memory(Context(None, root=tmp_path)))
    soft = machine.resource.getrlimit(machine.resource.RLIMIT_MEMLOCK)[0]
    assert status(found) == (['ok'] if soft == machine.resource.RLIM_INFINITY else ['failure'])
    assert 'mlx5_0' in found[0].result


def test_core_files_of_unlimited_size(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.resource, 'getrlimit', lambda which: (machine.resource.RLIM_INFINITY,) * 2)
    context = write(tmp_path, proc__sys__kernel__core_pattern='core.%p')
    assert status(machine.core_files(context)) == ['warning']
    write(tmp_path, proc__sys__kernel__core_pattern='|/usr/lib/systemd/systemd-coredump %P')
    assert status(machine.core_files(context)) == []


def test_memory_of_the_cgroup(tmp_path):
    context, directory = Context(None, root=tmp_path), tmp_path / 'sys/fs/cgroup'
    directory.mkdir(parents=True)
    (directory / 'memory.max').write_text(str(2**31))
    (directory / 'memory.current').write_text(str(2**31 - 2**28))
    found = next(iter(machine.memory(context)))
    assert (found.status, found.result) == ('failure', '268 MB free (cgroup limit 2.15 GB)')
    (directory / 'memory.current').write_text('0')
    assert status(machine.memory(context)) == ['ok']
    (directory / 'memory.max').write_text('max')
    assert 'cgroup' not in next(iter(machine.memory(context))).result


def test_swap_in_use(tmp_path):
    context = write(tmp_path, proc__meminfo=NOTHING_FREE.format(100))
    assert status(machine.swap(context)) == ['warning']
    write(tmp_path, proc__meminfo=NOTHING_FREE.format(8000000))
    assert status(machine.swap(context)) == []


@pytest.fixture
def shm(tmp_path):
    """A root whose /dev/shm has 64 MB, as Docker gives, mostly in use."""
    place = tmp_path / 'dev/shm'
    place.mkdir(parents=True)
    mounted = subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=64m', 'tmpfs', place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f'cannot mount: {mounted.stderr.strip()}')
    yield tmp_path
    subprocess.run(['umount', place], check=True)


def test_a_small_shared_memory(shm):
    (shm / 'dev/shm/used').write_bytes(bytes(2**20))
    assert status(machine.shared_memory(Context(None, root=shm))) == ['warning']
    for number in range(2):
        (shm / f'dev/nvidia{number}').touch()
    found = next(iter(machine.shared_memory(Context(None, root=shm))))
    assert found.status == 'failure'
    assert '--shm-size' in found.fix
    assert status(machine.shared_memory(Context(None))) == ['ok'] or os.statvfs('/dev/shm').f_bavail < 2**14


@pytest.mark.parametrize(
    ('chosen', 'tpu', 'expected'),
    [('never', False, 'warning'), ('madvise', False, 'ok'), ('madvise', True, 'warning'), ('always', True, 'ok')],
)
def test_huge_pages(tmp_path, chosen, tpu, expected):
    words = ' '.join(f'[{word}]' if word == chosen else word for word in ('always', 'madvise', 'never'))
    context = write(tmp_path, sys__kernel__mm__transparent_hugepage__enabled=words, dev__null='')
    if tpu:
        (tmp_path / 'dev/accel0').touch()
    assert status(machine.huge_pages(context)) == [expected]
