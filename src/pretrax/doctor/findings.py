"""The context that a check gets, and the findings that it returns."""

import dataclasses
import socket
from pathlib import Path
from typing import Any, Literal

from pretrax.config import RunConfig


@dataclasses.dataclass(frozen=True)
class Context:
    """A process, its machine, and the run that is to be trained."""

    config: RunConfig | None  # config of the run; None: only the machine is checked
    index: int = 0  # index of the process
    processes: int = 1  # how many there are
    seconds: float = 120.0  # for each check
    root: Path = Path('/')  # directory with `proc`, `sys` and `dev`, for tests

    @property
    def host(self) -> str:
        """The name of the machine."""
        return socket.gethostname()

    def read(self, path: str) -> str:
        """The text of a file of the system, such as 'proc/meminfo'; '' if it cannot be read."""
        try:
            return (self.root / path).read_text(errors='replace').strip()
        except OSError:
            return ''


Status = Literal['ok', 'warning', 'failure']


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of a check on one node."""

    check: str  # the name of the check, which begins a line of the table
    result: str  # what was found, in a few words
    status: Status = 'ok'  # a failure would break training; a warning would slow it down, or break it later
    fix: str = ''  # what to do about it, in one line; required unless `status` is 'ok'
    same: str | None = None  # a text that must be equal on all nodes; None: nothing is compared
    differs: Status = 'failure'  # the status if it is not equal
    # With `same`, what the table shows for nodes without this finding; None: they are not compared
    absent: str | None = None
    # Findings of a group that are 'ok' share a line of the table with this name; '': the finding has its own line
    group: str = ''
    amount: float | None = None  # a number, higher is better; the table shows the lowest one
    compare: bool = False  # names nodes whose `amount` is far below that of the others (`comparison.outliers`)

    def to_json(self) -> dict[str, Any]:
        """The attributes, for `from_json`."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> 'Finding':
        """The finding that `to_json` described. Ignores what another version of pretrax may have added."""
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{key: value for key, value in values.items() if key in known})


def failure(check: str, result: str, fix: str) -> Finding:
    """A finding that would break training."""
    return Finding(check, result, 'failure', fix)


def warning(check: str, result: str, fix: str) -> Finding:
    """A finding that would slow training down, or break it later."""
    return Finding(check, result, 'warning', fix)
