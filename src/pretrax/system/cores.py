"""Processor and memory that this process may use: those of the machine, or of its container. Imports no JAX."""

import os
import pathlib
import platform
from collections.abc import Iterator

_ROOT = pathlib.Path('/')


def usable_cores() -> int:
    """Cores that this process may use: `taskset` or a container's CPU quota may leave fewer than there are."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return max(min(cores, int(cgroup_cores(_ROOT) or cores)), 1)


def cpu_name() -> str:
    """Model name of the processor."""
    return _cpuinfo().get('model name') or platform.processor() or platform.machine()


def cpu_flags() -> set[str]:
    """Instruction sets of the processor, such as `avx2`; empty if the operating system does not report them."""
    return set(_cpuinfo().get('flags', '').split())


def total_memory() -> int:
    """Bytes of the memory of the machine or of the container."""
    limit, machine = cgroup_memory(_ROOT), os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
    return min(machine, limit[0]) if limit else machine


def available_memory() -> int:
    """Bytes of memory that are free for programs; half of all memory if the operating system does not report it."""
    limit = cgroup_memory(_ROOT)
    left = [max(limit[0] - limit[1], 0)] if limit else []
    for line in _lines('/proc/meminfo'):
        if line.startswith('MemAvailable'):
            return min([int(line.split()[1]) * 1024, *left])
    return min([total_memory() // 2, *left])


def cgroup_cores(root: pathlib.Path) -> float | None:
    """Cores of the CPU quota of this process's cgroup and of those above it, versions 2 and 1; None: no quota."""
    quotas = []
    for place in _cgroups(root, 'cpu'):
        words = [
            *_text(place / 'cpu.max').split(),
            _text(place / 'cpu.cfs_quota_us'),
            _text(place / 'cpu.cfs_period_us'),
        ]
        quota, period, *_ = [word for word in words if word] + ['', '']
        if quota.isdecimal() and period.isdecimal() and int(period):  # else `max`, or -1
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def cgroup_memory(root: pathlib.Path) -> tuple[int, int] | None:
    """Bytes that this process's cgroup may use and uses, without cached files that can be dropped; None: no limit.

    The cgroup with the least memory left counts, among those above it too. Versions 2 and 1.
    """
    found = []
    for place in _cgroups(root, 'memory'):
        limit = _text(place / 'memory.max') or _text(place / 'memory.limit_in_bytes')
        used = _text(place / 'memory.current') or _text(place / 'memory.usage_in_bytes')
        if limit.isdecimal() and used.isdecimal() and int(limit) < os.sysconf('SC_PAGE_SIZE') * 2**40:
            fields = dict(line.split(maxsplit=1) for line in _text(place / 'memory.stat').splitlines() if ' ' in line)
            cached = fields.get('total_inactive_file') or fields.get('inactive_file') or '0'
            found.append((int(limit), max(int(used) - int(cached), 0)))
    return min(found, key=lambda one: one[0] - one[1], default=None)


def _cgroups(root: pathlib.Path, controller: str) -> Iterator[pathlib.Path]:
    """The directories of this process's cgroup and of those above it, as far as a container shows them."""
    mount = root / 'sys/fs/cgroup'
    for line in _text(root / 'proc/self/cgroup').splitlines() or ['0::/']:
        _, names, path = line.split(':', 2)
        if names and controller not in names.split(','):
            continue
        top = next((top for top in (mount / names, mount / controller) if names and top.is_dir()), mount)
        inside = [part for part in path.split('/') if part and part != '..']
        yield from (top.joinpath(*inside[:n]) for n in range(len(inside), -1, -1))


def _text(path: pathlib.Path) -> str:
    try:
        return path.read_text(errors='replace').strip()
    except OSError:
        return ''


def _cpuinfo() -> dict[str, str]:
    """Fields of the first processor in `/proc/cpuinfo`; empty on other systems than Linux."""
    fields: dict[str, str] = {}
    for line in _lines('/proc/cpuinfo'):
        name, _, value = line.partition(':')
        fields.setdefault(name.strip(), value.strip())
    return fields


def _lines(path: str) -> list[str]:
    try:
        return pathlib.Path(path).read_text().splitlines()
    except OSError:  # not Linux
        return []
