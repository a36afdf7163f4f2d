"""How pretrax talks to its user: reported lines, errors that the user can fix, and exit codes."""

import contextlib
import errno
import pathlib
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO

Report = Callable[[str], None]  # shows the user a line of text

DONE = 0  # done, or stopped as asked
MISTAKE = 2  # a UserError: the same command would fail again
TRY_AGAIN = 75  # start the same command again to continue
CONFIGURATION = 78  # what other programs use instead of 2 (EX_CONFIG in sysexits.h)

MOST_LINES = 10

_FIXES = {
    errno.ENOSPC: 'make room',
    errno.EDQUOT: 'make room',
    errno.EFBIG: 'raise the limit of the shell (ulimit -f)',
    errno.EROFS: 'mount the file system so that it can be written',
    errno.EACCES: 'change its permissions',
    errno.EPERM: 'change its permissions',
    errno.EIO: 'look at the disk or the file server (dmesg)',
    errno.ESTALE: 'mount the file system again',
    errno.ENOTCONN: 'mount the file system again',
    errno.ETIMEDOUT: 'look at the file server',
}
# Errors of the system that a disk, a path or the permissions of a user cause, and no mistake of the program.
OF_THE_SYSTEM = frozenset({*_FIXES, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EEXIST})


class UserError(ValueError):
    """A mistake in a file, a configuration, a flag or a request; the message says what was given and what to change."""

    exit_code = MISTAKE

    def short_text(self) -> str:
        """The message as it is printed: at most ten lines."""
        lines = str(self).splitlines() or ['unknown mistake']
        if len(lines) > MOST_LINES:
            lines = [*lines[: MOST_LINES - 1], f'({len(lines) - MOST_LINES + 1} more lines)']
        return printable('\n'.join(lines))

    def _render_traceback_(self) -> list[str]:
        """What IPython and notebooks show: the message, without the lines of pretrax that raised it."""
        return [f'{type(self).__name__}: {self.short_text()}']


@contextlib.contextmanager
def system_errors(problem: str, fix: str = '') -> Iterator[None]:
    """Makes an error of the system, or a text that is not UTF-8, a UserError.

    It has the problem, such as 'FILE cannot be read', the reason, and `fix`.
    """
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else 'it is not text in UTF-8'
        raise UserError(f'{problem}: {reason}{fix}') from error


class UnavailableError(UserError):
    """A service that a run needs did not answer for a long time; the same command may succeed later."""

    exit_code = TRY_AGAIN


def disk_fix(error: OSError) -> str:
    """Advice for an error of `OF_THE_SYSTEM`: 'make room, or use another directory'."""
    fix = _FIXES.get(error.errno or 0)
    return f'{fix}, or use another directory' if fix else 'use another path'


_CONTROLS = (*range(32), *range(127, 160))
_DIRECTIONS = (0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A))  # of text, and line separators
_REPLACED = dict.fromkeys([*_CONTROLS, *_DIRECTIONS, *range(0xD800, 0xE000)], '\ufffd')
del _REPLACED[ord('\n')], _REPLACED[ord('\t')]


def printable(text: str) -> str:
    """The text without what would control a terminal: names in files and text of models may come from anybody."""
    return text.translate(_REPLACED)


def warn(text: str) -> None:
    """Prints a line to standard error."""
    print(printable(text), file=sys.stderr, flush=True)


def first_line(error: BaseException) -> str:
    """The first line of an error's message; '' if it has none."""
    return next(iter(str(error).strip().splitlines()), '')


class PrintableStream:
    """A text stream that shows control characters as U+FFFD. `unfiltered` is the stream behind it."""

    def __init__(self, stream: TextIO):
        self.unfiltered = stream

    def write(self, text: str) -> int:
        encoding = self.unfiltered.encoding or 'utf-8'
        self.unfiltered.write(printable(text).encode(encoding, 'replace').decode(encoding))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unfiltered, name)


def unfiltered_output() -> TextIO:
    """Standard output, for what moves the cursor and filters its text itself."""
    return getattr(sys.stdout, 'unfiltered', sys.stdout)


def install_extra(extra: str) -> str:
    """The advice to install an optional extra. In a clone, it keeps those that are installed."""
    if (pathlib.Path(__file__).parents[2] / 'pyproject.toml').is_file():
        return f"in the repository: uv sync --inexact --extra {extra} --no-dev   (or: pip install -e '.[{extra}]')"
    return f"pip install 'pretrax[{extra}]'   (or: uv pip install 'pretrax[{extra}]')"
