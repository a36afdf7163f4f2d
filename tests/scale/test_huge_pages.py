"""`pretrax train` asks for huge pages by starting itself again, once, and leaves alone what was decided before."""

import os
import subprocess
import sys

import pytest

from pretrax.scale import huge_pages
from pretrax.scale.huge_pages import with_huge_pages


@pytest.fixture
def system(tmp_path, monkeypatch):
    """A Linux with glibc whose kernel gives huge pages to those who ask."""
    enabled = tmp_path / 'enabled'
    enabled.write_text('always [madvise] never\n')
    monkeypatch.setattr(huge_pages, '_ENABLED', enabled)
    monkeypatch.setattr(huge_pages, '_has_glibc', lambda: True)
    return enabled


def test_other_tunables_stay_and_what_was_decided_is_left_alone(system):
    assert with_huge_pages({}) == {'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=1'}
    given = {'A': 'b', 'GLIBC_TUNABLES': 'glibc.malloc.check=1'}
    assert with_huge_pages(given) == {'A': 'b', 'GLIBC_TUNABLES': 'glibc.malloc.check=1:glibc.malloc.hugetlb=1'}
    assert with_huge_pages({'GLIBC_TUNABLES': 'glibc.malloc.hugetlb=0'}) is None
    for never_or_always in ('always madvise [never]\n', '[always] madvise never\n'):
        system.write_text(never_or_always)
        assert with_huge_pages({}) is None
    system.unlink()
    assert with_huge_pages({}) is None


@pytest.mark.parametrize('given', ['', 'glibc.malloc.hugetlb=0'])
def test_the_program_starts_again_once_with_its_arguments(given, system):
    program = (
        'import os, pathlib, sys\nfrom pretrax.scale import huge_pages\n'
        f'huge_pages._ENABLED = pathlib.Path({str(system)!r})\nhuge_pages._has_glibc = lambda: True\n'
        'print("started", flush=True)\nhuge_pages.ask_for_huge_pages()\n'
        'print(sys.argv[1:], os.environ["GLIBC_TUNABLES"], huge_pages.pages())'
    )
    done = subprocess.run(
        [sys.executable, '-c', program, 'train', 'a b=c'], env={**os.environ, 'GLIBC_TUNABLES': given},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[:-1] == ['started'] * (1 if given else 2)
    told = 'huge (GLIBC_TUNABLES has glibc.malloc.hugetlb=1)' if not given else 'small (large arrays are slower;'
    assert lines[-1].startswith(f"['train', 'a b=c'] {given or 'glibc.malloc.hugetlb=1'} {told}")
