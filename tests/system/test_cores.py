"""What the operating system reports of the processor and the memory."""

import os
import pathlib
import subprocess
import sys

import pytest

from pretrax.system import cores

CPUINFO = """processor\t: 0
model name\t: AMD EPYC 9R14
flags\t\t: fpu avx2 avx512_bf16

processor\t: 1
model name\t: another
flags\t\t: fpu
"""


@pytest.mark.skipif(not hasattr(os, 'sched_setaffinity'), reason='Linux restricts a process to some cores')
def test_a_process_restricted_to_one_core_counts_one():
    program = (
        'import os; os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])\n'
        'from pretrax.system.cores import usable_cores; import sys; print(usable_cores(), "jax" in sys.modules)'
    )
    assert subprocess.check_output([sys.executable, '-c', program], text=True).split() == ['1', 'False']


def test_name_and_flags_are_those_of_the_first_processor(monkeypatch):
    monkeypatch.setattr(cores, '_lines', lambda path: CPUINFO.splitlines())
    assert cores.cpu_name() == 'AMD EPYC 9R14'
    assert cores.cpu_flags() == {'fpu', 'avx2', 'avx512_bf16'}


def test_available_memory_is_what_linux_reports_and_half_elsewhere(monkeypatch):
    monkeypatch.setattr(cores, '_lines', lambda path: ['MemTotal: 9 kB', 'MemAvailable: 5 kB'])
    assert cores.available_memory() == 5 * 1024
    monkeypatch.setattr(cores, '_lines', lambda path: [])
    assert cores.available_memory() == cores.total_memory() // 2


# Files of a container with a quota of 1.5 cores and 2 GB, as docker and Kubernetes mount them; the second is of a
# process deeper in the tree, as under systemd and Slurm, whose own cgroup has no limit.
CGROUPS = {
    'version 2': {
        'proc/self/cgroup': '0::/\n', 'sys/fs/cgroup/cpu.max': '150000 100000\n',
        'sys/fs/cgroup/memory.max': '2000000000\n', 'sys/fs/cgroup/memory.current': '900000000\n',
        'sys/fs/cgroup/memory.stat': 'anon 1\ninactive_file 400000000\n',
    },
    'version 2, above': {
        'proc/self/cgroup': '0::/job_7/step_0\n', 'sys/fs/cgroup/job_7/cpu.max': '150000 100000\n',
        'sys/fs/cgroup/job_7/memory.max': '2000000000\n', 'sys/fs/cgroup/job_7/memory.current': '500000000\n',
        'sys/fs/cgroup/job_7/step_0/cpu.max': 'max 100000\n', 'sys/fs/cgroup/job_7/step_0/memory.max': 'max\n',
    },
    'version 1': {
        'proc/self/cgroup': '4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n',
        'sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us': '150000\n',
        'sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us': '100000\n',
        'sys/fs/cgroup/memory/memory.limit_in_bytes': '2000000000\n',
        'sys/fs/cgroup/memory/memory.usage_in_bytes': '900000000\n',
        'sys/fs/cgroup/memory/memory.stat': 'total_inactive_file 400000000\n',
    },
    'no limit': {
        'proc/self/cgroup': '4:memory:/\n3:cpu,cpuacct:/\n', 'sys/fs/cgroup/cpu/cpu.cfs_quota_us': '-1\n',
        'sys/fs/cgroup/cpu/cpu.cfs_period_us': '100000\n',
        'sys/fs/cgroup/memory/memory.limit_in_bytes': '9223372036854771712\n',
        'sys/fs/cgroup/memory/memory.usage_in_bytes': '900000000\n',
    },
    'no cgroups': {},
}  # fmt: skip


@pytest.mark.parametrize('kind', CGROUPS)
def test_the_quota_and_the_limit_of_a_container_count(kind, tmp_path, monkeypatch):
    for name, content in CGROUPS[kind].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    is_limited = kind.startswith('version')
    assert cores.cgroup_cores(tmp_path) == (1.5 if is_limited else None)
    assert cores.cgroup_memory(tmp_path) == ((2_000_000_000, 500_000_000) if is_limited else None)
    monkeypatch.setattr(cores, '_ROOT', tmp_path)
    monkeypatch.setattr(os, 'sched_getaffinity', lambda pid: set(range(8)), raising=False)
    monkeypatch.setattr(os, 'sysconf', {'SC_PAGE_SIZE': 4096, 'SC_PHYS_PAGES': 2**24}.get)
    monkeypatch.setattr(cores, '_lines', lambda path: ['MemAvailable: 60000000 kB'])
    assert cores.usable_cores() == (1 if is_limited else 8)
    assert cores.total_memory() == (2_000_000_000 if is_limited else 2**36)
    assert cores.available_memory() == (1_500_000_000 if is_limited else 60_000_000 * 1024)


@pytest.mark.parametrize(
    ('controller', 'limits'),
    [
        ('cpu', {'cpu.cfs_period_us': '100000', 'cpu.cfs_quota_us': '100000'}),
        ('memory', {'memory.limit_in_bytes': str(3 << 30)}),
    ],
)
def test_a_real_cgroup_counts(controller, limits):
    """Version 1, as root. A process is moved into a group of its own, then looks at its cores and its memory."""
    group = pathlib.Path('/sys/fs/cgroup') / controller / f'pretrax-test-{os.getpid()}'
    try:
        group.mkdir()
        for name, value in limits.items():
            (group / name).write_text(value)
    except OSError as error:
        pytest.skip(f'no cgroup of version 1 can be made here: {error}')
    try:
        program = (
            f'import os; open({str(group / "cgroup.procs")!r}, "w").write(str(os.getpid())); '
            'from pretrax.system.cores import available_memory, total_memory, usable_cores; '
            'print(usable_cores(), total_memory(), available_memory())'
        )
        done = subprocess.run([sys.executable, '-c', program], check=True, capture_output=True, text=True)
        cores, memory, available = map(int, done.stdout.split())
    finally:
        group.rmdir()
    if controller == 'cpu':
        assert cores == 1
    else:
        assert memory == 3 << 30
        assert 2 << 30 < available <= 3 << 30
