"""What a tracker is, and what the trackers share."""

import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pretrax.errors import UserError, install_extra
from pretrax.system.atomic import write_file


class Line(NamedTuple):
    """The numbers of one line of metrics."""

    step: int
    numbers: Mapping[str, float]
    time: float  # at which it was written, in seconds since 1970


class Table(NamedTuple):
    columns: Sequence[str]
    rows: Sequence[Sequence[str | float]]


type Shown = str | Table | pathlib.Path  # a text, for example a sample; a table; a PNG file


class Tracker(Protocol):
    """A service or a file format that receives the metrics of a run.

    `TrackerThread` calls every method in one thread, so a method may wait for a network. If one raises an exception,
    the run continues without this tracker.
    """

    name: str
    where: str  # URL or command to view it

    def resume(self, step: int) -> Mapping[str, int]:
        """Prepares for the lines after `step`, before the first call of `log`.

        Removes what the tracker has of later steps, if it can. Returns the newest step of each metric that it has.
        """
        ...

    def rewind(self, step: int) -> bool:
        """Removes what the tracker has of later steps, since they are trained again. False: it cannot."""
        return False

    def log(self, lines: Sequence[Line]) -> None:
        """Logs numbers, oldest first."""
        ...

    def show(self, step: int, key: str, content: Shown) -> None:
        """Logs a text, a table or a picture."""
        ...

    def file(self, path: pathlib.Path) -> None:
        """Uploads a file, for example the report. Does nothing if the service keeps no files."""

    def flush(self) -> None:
        """Makes the numbers so far survive a kill of this process, if `log` does not. Called with each checkpoint."""

    def close(self, succeeded: bool) -> None:
        """Sends the remaining data. `succeeded`: the run did not end with an error."""


def needs(module: str, extra: str) -> Any:
    """The imported package of a tracker. Raises UserError if it is not installed."""
    try:
        return __import__(module)
    except ModuleNotFoundError as error:
        if error.name != module:  # it is installed, but one of its own dependencies is missing
            raise
        raise UserError(
            f'log.{extra} needs the package {module}, which is not installed\n'
            f'{install_extra(extra)}\n'
            f'or train without it: log.{extra}={"false" if extra == "tensorboard" else "null"}'
        ) from None


def remember(file: pathlib.Path, make: Callable[[], str]) -> str:
    """The text in the file, which is created if it does not exist."""
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, make().encode())
    return file.read_text().strip()


def flat(config: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
    """{'a': {'b': 1}} -> {'a.b': 1}"""
    found: dict[str, Any] = {}
    for key, value in config.items():
        found |= flat(value, f'{prefix}{key}.') if isinstance(value, Mapping) else {f'{prefix}{key}': value}
    return found


def markdown_code(text: str) -> str:
    """A text as a block of code in Markdown, which shows it as it is."""
    return '\n'.join(f'    {line}' for line in text.splitlines())


def markdown_table(table: Table) -> str:
    """A table in Markdown."""
    lines = [table.columns, ['---'] * len(table.columns), *table.rows]
    return '\n'.join(f'| {" | ".join(str(cell).replace("|", "&#124;") for cell in line)} |' for line in lines)
