"""Memory of a process on CPUs: huge pages, which the process keeps after freeing them.

Each step allocates its arrays again, and Linux provides new memory in pages of 4 kB, each filled with zeros. glibc can
use pages of 2 MB and keep freed memory for later allocations, but only if it is configured before the program starts.
So a verb that runs a model restarts itself once at its beginning (measurements: benchmarks/lab-notes.md). If
GLIBC_TUNABLES sets one of these options already, none is changed. A debugger would lose a process that restarts, so
that a debugged one does not.
"""

import ctypes
import os
import pathlib
import signal
import sys

from pretrax.system.accelerators import has_accelerator

_HUGE = 'glibc.malloc.hugetlb=1'
_KEPT = (
    # Larger arrays get a mapping of their own, which is unmapped with them. In the kept memory, their places would not
    # fit again: posix_memalign asks for more than an array leaves behind.
    f'glibc.malloc.mmap_threshold={2**29}',
    f'glibc.malloc.trim_threshold={2**40}',  # freed memory is not returned to the system
    'glibc.malloc.arena_max=1',  # memory that one thread frees is available to all
)
_ENABLED = pathlib.Path('/sys/kernel/mm/transparent_hugepage/enabled')


def ask_for_kept_memory() -> None:
    """Restarts this process with such memory, if that is possible and not configured already."""
    if sys.gettrace() is not None or 'debugpy' in sys.modules:
        return
    variables = with_kept_memory(dict(os.environ))
    if variables is not None and sys.orig_argv:
        sys.stdout.flush()
        sys.stderr.flush()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until `pretrax.cli.main` can handle it
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], variables)


def with_kept_memory(variables: dict[str, str]) -> dict[str, str] | None:
    """Environment variables with the options; None if they are set already, useless or impossible."""
    given = variables.get('GLIBC_TUNABLES', '')
    wanted = (_HUGE, *_KEPT)
    if any(tunable.partition('=')[0] in given for tunable in wanted):
        return None
    if not _has_glibc() or (has_accelerator() and variables.get('JAX_PLATFORMS') != 'cpu'):
        return None
    return variables | {'GLIBC_TUNABLES': ':'.join(filter(None, [given, *wanted]))}


def described() -> str:
    """The memory of this process, for the start-up report."""
    given = os.environ.get('GLIBC_TUNABLES', '')
    enabled = _ENABLED.read_text() if _ENABLED.exists() else ''
    huge = '[always]' in enabled or ('[madvise]' in enabled and _HUGE in given)
    kept = all(tunable in given for tunable in _KEPT)
    return f'{"huge pages" if huge else "small pages"}, {"kept" if kept else "returned"} when freed'


def return_free_memory() -> None:
    """Returns to the system what this process has freed: glibc keeps it otherwise."""
    if _has_glibc():
        ctypes.CDLL(None).malloc_trim(0)


def _has_glibc() -> bool:
    try:
        return 'glibc' in (os.confstr('CS_GNU_LIBC_VERSION') or '')
    except (AttributeError, ValueError):  # another system or C library
        return False
