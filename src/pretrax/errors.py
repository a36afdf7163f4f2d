"""How pretrax talks to its user: reported lines, errors that the user can fix, and exit codes."""

from collections.abc import Callable

Report = Callable[[str], None]  # shows the user a line of text

DONE = 0  # done, or stopped as asked
MISTAKE = 2  # a UserError: the same command would fail again
TRY_AGAIN = 75  # start the same command again to continue
CONFIGURATION = 78  # what other programs use instead of 2 (EX_CONFIG in sysexits.h)

MOST_LINES = 10


class UserError(ValueError):
    """A mistake in a file, a configuration, a flag or a request; the message says what was given and what to change."""

    def short_text(self) -> str:
        """The message as it is printed: at most ten lines."""
        lines = str(self).splitlines() or ['unknown mistake']
        if len(lines) > MOST_LINES:
            lines = [*lines[: MOST_LINES - 1], f'({len(lines) - MOST_LINES + 1} more lines)']
        return '\n'.join(lines)


def install_extra(extra: str) -> str:
    """The advice to install an optional extra: it keeps those that are installed, and needs no package index."""
    return f"in the repository: uv sync --inexact --extra {extra}   (or: pip install -e '.[{extra}]')"
