"""The program cache: compiled programs on disk, so that a restarted run, or another run like it, skips the compiler.

This is JAX's persistent compilation cache, switched on and kept small. A key is made of the program, the versions, the
flags, the compiler's options and the devices. JAX stores executables, so results are the same to the last bit. The
first process writes. CPU programs of several devices are not kept: loaded, they would hang. `JAX_COMPILATION_CACHE_DIR`
moves the cache to a directory in which nothing is removed. `JAX_ENABLE_COMPILATION_CACHE=false` switches it off.
"""

import os
import pathlib
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import jax

from pretrax.errors import Report
from pretrax.run.processes import is_first_process
from pretrax.system.cache import oldest_first, own_directory, remove
from pretrax.system.trusted import why_untrusted

LARGEST = 10 << 30  # bytes of programs that are kept
SHORTEST = 0.5  # seconds; programs that compile faster are not kept
_SWITCH = 'JAX_ENABLE_COMPILATION_CACHE=false switches it off'
_HIT = '/jax/compilation_cache/cache_hits'
_FAILURE = re.compile(r"Error (reading|writing) persistent compilation cache entry for '([^']*)': (.*)", re.DOTALL)


def keep_programs(report: Report) -> None:
    """Switches the cache on, unless the user has chosen otherwise. Failures are reported, and cost only time."""
    if not jax.config.jax_enable_compilation_cache:
        return
    own: pathlib.Path | None = None
    if jax.config.jax_compilation_cache_dir is None:
        own, why = _own_directory()
        if own is None:
            report(f'WARNING: compiled programs are not kept: {why}; {_SWITCH}')
            return
        jax.config.update('jax_compilation_cache_dir', str(own))
        if 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS' not in os.environ:
            jax.config.update('jax_persistent_cache_min_compile_time_secs', SHORTEST)
    elif jax.config.jax_compilation_cache_dir == str(_place()):
        own = _place()  # switched on before, in this process
    if own is not None and is_first_process():
        remove_oldest(own, LARGEST)
    before = warnings.showwarning
    warnings.showwarning = _Failures(before.before if isinstance(before, _Failures) else before, own, report)


def compile_or_load(
    lowered: Any, with_places: bool = False, options: Mapping[str, Any] | None = None
) -> tuple[Any, str | None]:
    """The compiled program, and the directory of the cache if it was loaded from there.

    Args:
        with_places: the scopes and source lines in the program must be those of this code; a program in the cache may
            have those of an older version, whose operations are the same.
    """
    hits: list[str] = []
    places = jax.config.jax_compilation_cache_include_metadata_in_key

    def listen(event: str, **_: Any) -> None:
        if event == _HIT:
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    jax.config.update('jax_compilation_cache_include_metadata_in_key', places or with_places)
    try:
        compiled = lowered.compile(compiler_options=dict(options or {}))
    finally:
        jax.config.update('jax_compilation_cache_include_metadata_in_key', places)
        jax.monitoring.unregister_event_listener(listen)
    return compiled, jax.config.jax_compilation_cache_dir if hits else None


def remove_oldest(directory: pathlib.Path, most: int) -> None:
    """Removes the least recently used files, until the rest has at most `most` bytes."""
    files = oldest_first(directory)
    total = sum(size for _, size in files)
    for path, size in files:
        if total <= most:
            break
        remove(path)
        total -= size


def _place() -> pathlib.Path:
    return own_directory() / 'xla'


def _own_directory() -> tuple[pathlib.Path | None, str]:
    """The user's cache, created if it does not exist; or None and the reason.

    Loading a program runs it, so nobody else may write there.
    """
    path = _place()
    if not path.is_absolute():
        return None, 'this user has no home directory'
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
        why = why_untrusted(path)
    except OSError as error:
        return None, f'{path}: {error.strerror}'
    if why:
        return None, why
    if not os.access(path, os.W_OK | os.X_OK):
        return None, f'{path} cannot be written'
    return path, ''


class _Failures:
    """Replaces `warnings.showwarning`: reports the first program that JAX cannot read or write, in one line.

    JAX compiles in that case. It would keep an entry that a full disk or a kill has truncated; this removes it.
    """

    def __init__(self, before: Callable[..., None], own: pathlib.Path | None, report: Report):
        self.before, self._own, self._report, self._reported = before, own, report, False

    def __call__(
        self,
        message: Any,
        category: Any,
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        failure = _FAILURE.match(str(message))
        if failure is None:
            self.before(message, category, filename, lineno, file, line)
            return
        what, program, why = failure.groups()
        if self._own is not None:
            for entry in self._own.glob(f'{program}-*'):
                remove(entry)
        if not self._reported:
            self._reported = True
            first, directory = why.strip().partition('\n')[0][:200], jax.config.jax_compilation_cache_dir
            self._report(f'WARNING: compiled programs: {what} {directory} failed: {first}; {_SWITCH}')
