"""What the operating system reports of the processor and the memory."""

import os
import subprocess
import sys

import pytest

from pretrax.machine import cores

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
        'from pretrax.machine.cores import usable_cores; import sys; print(usable_cores(), "jax" in sys.modules)'
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
