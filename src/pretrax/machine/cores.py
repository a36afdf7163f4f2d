"""Processor and memory of this machine, as its operating system reports them. Imports no JAX."""

import os
import pathlib
import platform


def usable_cores() -> int:
    """Cores that this process may use: a container or `taskset` may give it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def cpu_name() -> str:
    """Model name of the processor."""
    return _cpuinfo().get('model name') or platform.processor() or platform.machine()


def cpu_flags() -> set[str]:
    """Instruction sets of the processor, such as `avx2`; empty if the operating system does not report them."""
    return set(_cpuinfo().get('flags', '').split())


def total_memory() -> int:
    """Bytes of the machine's memory."""
    return os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')


def available_memory() -> int:
    """Bytes of memory that are free for programs; half of all memory if the operating system does not report it."""
    for line in _lines('/proc/meminfo'):
        if line.startswith('MemAvailable'):
            return int(line.split()[1]) * 1024
    return total_memory() // 2


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
