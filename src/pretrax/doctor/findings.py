"""The context that a check gets, and the findings that it returns."""

import dataclasses
import socket
from pathlib import Path
from typing import Any, Literal

from pretrax.config import RunConfig


@dataclasses.dataclass(frozen=True)
class Context:
    """A process, its machine, and the run that is to be trained.

    Attributes:
        config: config of the run; None: only the machine is checked.
        index: index of the process.
        processes: how many there are.
        seconds: for each check.
        root: directory with `proc`, `sys` and `dev`, for tests.
    """

    config: RunConfig | None
    index: int = 0
    processes: int = 1
    seconds: float = 120.0
    root: Path = Path('/')

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
    """The result of a check on one node.

    Attributes:
        check: the name of the check, which begins a line of the table.
        result: what was found, in a few words.
        status: a failure would break training; a warning would slow it down, or break it later.
        fix: what to do about it, in one line; required unless `status` is 'ok'.
        same: a text that must be equal on all nodes; None: nothing is compared.
        differs: the status if it is not equal.
        absent: with `same`, what the table shows for nodes without this finding; None: they are not compared.
        amount: a number, higher is better; the table shows the lowest one.
        group: findings of a group that are 'ok' share a line of the table with this name; '': the finding has its own
            line.
        compare: names nodes whose `amount` is far below that of the others (`comparison.outliers`).
    """

    check: str
    result: str
    status: Status = 'ok'
    fix: str = ''
    same: str | None = None
    differs: Status = 'failure'
    absent: str | None = None
    group: str = ''
    amount: float | None = None
    compare: bool = False

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
