"""Memory of arrays on CPUs: huge pages, which the process keeps.

Arrays of a step are made anew each time, and the kernel hands out fresh memory a page of 4 kB at a time, each filled with
zeros. glibc asks for pages of 2 MB, and keeps what was freed for what comes next, when it is told to before a program
starts, and not later. So `pretrax train` starts itself again, once, at its very beginning; docs/lab-notes.md has what it
brings. Where GLIBC_TUNABLES says something about one of these already, all are left alone.
"""

import os
import pathlib
import sys

from pretrax.machine.accelerators import has_accelerator

_HUGE = 'glibc.malloc.hugetlb=1'
_KEPT = (
    'glibc.malloc.mmap_max=0',  # no mapping of its own for a large array, which would end with it
    f'glibc.malloc.trim_threshold={2**40}',  # nothing free is given back
    'glibc.malloc.arena_max=1',  # what one thread frees, every other takes
)
_ENABLED = pathlib.Path('/sys/kernel/mm/transparent_hugepage/enabled')


def ask_for_kept_memory() -> None:
    """Replaces the process by the same one with such memory, where that is possible and was not decided before."""
    variables = with_kept_memory(dict(os.environ))
    if variables is not None and sys.orig_argv:
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], variables)


def with_kept_memory(variables: dict[str, str]) -> dict[str, str] | None:
    """Variables of a process that asks for it; None where it is decided, of no use, or not possible."""
    given = variables.get('GLIBC_TUNABLES', '')
    wanted = (_HUGE, *_KEPT)
    if any(tunable.partition('=')[0] in given for tunable in wanted):
        return None
    if not _has_glibc() or (has_accelerator() and variables.get('JAX_PLATFORMS') != 'cpu'):
        return None
    return variables | {'GLIBC_TUNABLES': ':'.join(filter(None, [given, *wanted]))}


def described() -> str:
    """What the memory of this process is, for the start-up report."""
    given = os.environ.get('GLIBC_TUNABLES', '')
    enabled = _ENABLED.read_text() if _ENABLED.exists() else ''
    huge = '[always]' in enabled or ('[madvise]' in enabled and _HUGE in given)
    kept = all(tunable in given for tunable in _KEPT)
    return f'{"huge pages" if huge else "small pages"}, {"kept" if kept else "given back"} when free'


def _has_glibc() -> bool:
    try:
        return 'glibc' in (os.confstr('CS_GNU_LIBC_VERSION') or '')
    except (AttributeError, ValueError):  # no such system, or another C library
        return False
