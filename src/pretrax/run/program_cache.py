"""Compiled programs kept on the disk, so that a run that starts again, or another like it, skips the compiler.

This is JAX's persistent compilation cache, switched on and looked after. A key is made of the program, the versions, the
flags, the compiler's options and the devices; what JAX keeps is the executable, so that what is computed is the same to
the last bit. Of several processes the first one writes; of CPUs each writes its own. `JAX_COMPILATION_CACHE_DIR` puts the
cache elsewhere, where nothing is removed; `JAX_ENABLE_COMPILATION_CACHE=false` switches it off.
"""

import os
import pathlib
import re
import stat
import warnings
from collections.abc import Callable
from typing import Any, TextIO

import jax

from pretrax.jax_compat import cache_programs_in_every_cpu_process
from pretrax.machine.cache import own_directory

Say = Callable[[str], None]

LARGEST = 10 << 30  # bytes of programs that stay
SHORTEST = 0.5  # seconds; what compiles faster is not kept
_SWITCH = 'JAX_ENABLE_COMPILATION_CACHE=false switches it off'
_HIT = '/jax/compilation_cache/cache_hits'
_FAILURE = re.compile(r"Error (reading|writing) persistent compilation cache entry for '([^']*)': (.*)", re.DOTALL)


def keep_programs(say: Say) -> None:
    """Switches the cache on, unless the user has chosen otherwise. Whatever fails about it is said, and costs the
    compiler's time alone."""
    if not jax.config.jax_enable_compilation_cache:
        return
    own: pathlib.Path | None = None
    if jax.config.jax_compilation_cache_dir is None:
        own, why = _own_directory()
        if own is None:
            say(f'compiled programs are not kept: {why}; {_SWITCH}')
            return
        jax.config.update('jax_compilation_cache_dir', str(own))
        if 'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS' not in os.environ:
            jax.config.update('jax_persistent_cache_min_compile_time_secs', SHORTEST)
    elif jax.config.jax_compilation_cache_dir == str(_place()):
        own = _place()  # switched on before, in this process
    if own is not None and _is_first():
        remove_oldest(own, LARGEST)
    cache_programs_in_every_cpu_process()
    before = warnings.showwarning
    warnings.showwarning = _Failures(before.before if isinstance(before, _Failures) else before, own, say)


def compile_or_take(lowered: Any) -> tuple[Any, str]:
    """A step compiled, or the one that an earlier run has left; and which it was, in words."""
    hits: list[str] = []

    def listen(event: str, **_: Any) -> None:
        if event == _HIT:
            hits.append(event)

    jax.monitoring.register_event_listener(listen)
    try:
        step = lowered.compile()
    finally:
        jax.monitoring.unregister_event_listener(listen)
    kept = f'took the compiled step from {jax.config.jax_compilation_cache_dir}'
    return step, kept if hits else 'compiled the step'


def remove_oldest(directory: pathlib.Path, most: int) -> None:
    """Removes what was used longest ago, until what is left has at most so many bytes."""
    found = []
    for path in directory.rglob('*'):
        try:
            told = path.lstat()
        except OSError:  # another run has removed it
            continue
        if stat.S_ISREG(told.st_mode):
            found.append((max(told.st_atime, told.st_mtime), told.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= most:
            break
        _remove(path)
        total -= size


def _place() -> pathlib.Path:
    return own_directory() / 'xla'


def _own_directory() -> tuple[pathlib.Path | None, str]:
    """The user's, made if there is none; or None and the reason. To load a program is to run it, so that nobody else may
    have written it."""
    path = _place()
    if not path.is_absolute():
        return None, 'this user has no home directory'
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        told = path.stat()
    except OSError as error:
        return None, f'{path}: {error.strerror}'
    if told.st_uid != os.getuid() or told.st_mode & 0o022:
        return None, f'others may write in {path}'
    if not os.access(path, os.W_OK | os.X_OK):
        return None, f'{path} cannot be written'
    return path, ''


def _is_first() -> bool:
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def _remove(path: pathlib.Path) -> None:
    try:
        path.unlink()
    except OSError:  # gone already, or not ours to remove: then it stays, and JAX goes on without it
        return


class _Failures:
    """Takes the place of `warnings.showwarning`: JAX warns of what it cannot read or write, and compiles. Here that is one
    line, once. What was cut short, by a full disk or a kill, goes, as JAX would leave it there for ever."""

    def __init__(self, before: Callable[..., None], own: pathlib.Path | None, say: Say):
        self.before, self._own, self._say, self._said = before, own, say, False

    def __call__(
        self,
        message: Any,
        category: Any,
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        found = _FAILURE.match(str(message))
        if found is None:
            self.before(message, category, filename, lineno, file, line)
            return
        what, program, why = found.groups()
        if self._own is not None:
            for entry in self._own.glob(f'{program}-*'):
                _remove(entry)
        if not self._said:
            self._said = True
            first = why.strip().partition('\n')[0][:200]
            self._say(
                f'WARNING: compiled programs: {what} {jax.config.jax_compilation_cache_dir} failed: {first}; {_SWITCH}'
            )
