"""Verbs that run a model ask for huge pages that they keep, by starting themselves again, once,
and leave alone what was decided.
"""

import os
import subprocess
import sys

import pytest

from pretrax import cli
from pretrax.system import process_memory
from pretrax.system.process_memory import with_kept_memory

ASKED = (
    'glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=536870912:glibc.malloc.trim_threshold=1099511627776:'
    'glibc.malloc.arena_max=1'
)


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A Linux with glibc, and without accelerators unless the file given back exists."""
    monkeypatch.setattr(process_memory, 'has_accelerator', (tmp_path / 'accelerator').exists)
    monkeypatch.setattr(process_memory, '_has_glibc', lambda: True)
    return tmp_path / 'accelerator'


def test_other_tunables_stay_and_given_ones_are_respected(system):
    assert with_kept_memory({}) == {'GLIBC_TUNABLES': ASKED}
    given = {'A': 'b', 'GLIBC_TUNABLES': 'glibc.malloc.check=1'}
    assert with_kept_memory(given) == {'A': 'b', 'GLIBC_TUNABLES': f'glibc.malloc.check=1:{ASKED}'}
    for decided in ASKED.split(':'):
        assert with_kept_memory({'GLIBC_TUNABLES': decided}) is None


def test_a_machine_with_accelerators_keeps_its_memory_settings(system, monkeypatch):
    system.touch()
    assert with_kept_memory({}) is None
    assert with_kept_memory({'JAX_PLATFORMS': 'cpu'}) == {'JAX_PLATFORMS': 'cpu', 'GLIBC_TUNABLES': ASKED}
    system.unlink()
    monkeypatch.setattr(process_memory, '_has_glibc', lambda: False)
    assert with_kept_memory({}) is None


@pytest.mark.parametrize('given', ['', 'glibc.malloc.hugetlb=0'])
def test_the_program_starts_again_once_with_its_arguments(given):
    program = (
        'import os, sys\nfrom pretrax.system import process_memory\nprocess_memory.has_accelerator = lambda: False\n'
        'process_memory._has_glibc = lambda: True\n'
        'print("started", flush=True)\nprocess_memory.ask_for_kept_memory()\n'
        'print(sys.argv[1:], os.environ["GLIBC_TUNABLES"])'
    )
    done = subprocess.run(
        [sys.executable, '-c', program, 'train', 'a b=c'], env={**os.environ, 'GLIBC_TUNABLES': given},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[:-1] == ['started'] * (1 if given else 2)
    assert lines[-1] == f"['train', 'a b=c'] {given or ASKED}"


@pytest.mark.parametrize(
    ('verb', 'asks'), [('train', True), ('generate', True), ('serve', True), ('eval', True), ('report', False)]
)
def test_verbs_that_run_a_model_ask(verb, asks, monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(cli, 'ask_for_kept_memory', lambda: asked.append(verb))
    monkeypatch.setattr(sys, 'argv', ['pretrax', verb, '--help'])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 0
    assert asked == [verb] * asks


@pytest.mark.parametrize(
    ('kernel', 'tunables', 'told'),
    [
        ('always [madvise] never', ASKED, 'huge pages, kept when freed'),
        ('always [madvise] never', 'glibc.malloc.hugetlb=1', 'huge pages, returned when freed'),
        ('always madvise [never]', ASKED, 'small pages, kept when freed'),
        ('[always] madvise never', '', 'huge pages, returned when freed'),
        (None, '', 'small pages, returned when freed'),
    ],
)
def test_the_report_describes_the_memory(kernel, tunables, told, tmp_path, monkeypatch):
    monkeypatch.setattr(process_memory, '_ENABLED', tmp_path / 'enabled')
    monkeypatch.setenv('GLIBC_TUNABLES', tunables)
    if kernel:
        (tmp_path / 'enabled').write_text(kernel)
    assert process_memory.described() == told
