"""Memory in huge pages on CPUs: arrays of a step are made anew each time, and the kernel hands them out a page at a time.

glibc asks for huge pages when it is told to before a program starts, and not later. So `pretrax train` starts itself
again, once, at its very beginning; docs/lab-notes.md has what it brings. Where GLIBC_TUNABLES says something about it
already (`glibc.malloc.hugetlb=0` keeps small pages), nothing is done.
"""

import os
import pathlib
import sys

_TUNABLE = 'glibc.malloc.hugetlb'
_ENABLED = pathlib.Path('/sys/kernel/mm/transparent_hugepage/enabled')


def ask_for_huge_pages() -> None:
    """Replaces the process by the same one with huge pages, where that is possible and was not decided before."""
    variables = with_huge_pages(dict(os.environ))
    if variables is not None and sys.orig_argv:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], variables)


def with_huge_pages(variables: dict[str, str]) -> dict[str, str] | None:
    """Variables of a process that asks for huge pages; None where these are decided, or asking is of no use."""
    given = variables.get('GLIBC_TUNABLES', '')
    if _TUNABLE in given or not (_has_glibc() and _ENABLED.exists() and '[madvise]' in _ENABLED.read_text()):
        return None
    return variables | {'GLIBC_TUNABLES': ':'.join(filter(None, [given, f'{_TUNABLE}=1']))}


def pages() -> str:
    """What the pages of this process are, for the start-up report."""
    if not _ENABLED.exists():
        return "the system's"
    if '[always]' in _ENABLED.read_text():
        return 'huge (the system gives them to all)'
    if f'{_TUNABLE}=1' in os.environ.get('GLIBC_TUNABLES', ''):
        return f'huge (GLIBC_TUNABLES has {_TUNABLE}=1)'
    return f'small (large arrays are slower; GLIBC_TUNABLES={_TUNABLE}=1 before the start asks for huge ones)'


def _has_glibc() -> bool:
    try:
        return 'glibc' in (os.confstr('CS_GNU_LIBC_VERSION') or '')
    except (AttributeError, ValueError):  # no such system, or another C library
        return False
