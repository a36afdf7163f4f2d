"""Metrics of a run: `metrics.jsonl`, one JSON object per line, and trackers that receive the same numbers.

The file is written first, line by line. Trackers are copies: a tracker that fails is dropped, and training continues. Every
line is standard JSON, which has no NaN and no infinity. Such a value is written as null and named in `nonfinite`, from
which `read_metrics` restores it:

    {"step": 120, "loss": null, "grad_norm": 3.2, "nonfinite": {"loss": "nan"}}

Keys, units and examples: docs/metrics.md.
"""

import json
import math
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from pretrax.errors import UserError
from pretrax.machine.atomic import new_file
from pretrax.observe.trackers import Tracker


class MetricsLog:
    """Appends to `metrics.jsonl` and sends every line to the trackers. Only one process of a run may open it.

    Args:
        path: the file; created with its directories if it does not exist.
        trackers: see `observe.trackers.open_trackers`.
        resumed_step: the step that training continues from. Lines of later steps are removed, since those steps will be
            trained again, and so is an incomplete last line.
        say: receives a message for removed lines and for each tracker that fails.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        trackers: Sequence[Tracker] = (),
        *,
        resumed_step: int = 0,
        say: Callable[[str], None] = print,
    ):
        self._say = say
        self._trackers = list(trackers)
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists():
            _rewind(path, resumed_step, say)
        self._path = path
        self._unwritten = b''  # lines that did not fit on the disk
        self._file = path.open('ab', buffering=0)  # a line is with the operating system when `write` returns

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Appends one line. `metrics` has 'step' (int); values are numbers (Python, NumPy, JAX scalars), text or None.

        Waits for values that a device still computes, so pass numbers of a finished step.
        """
        record = {key: value.item() if hasattr(value, 'item') else value for key, value in metrics.items()}
        if type(record.get('step')) is not int:
            raise TypeError(f'a line of metrics needs an integer step, not {record.get("step")!r}')
        self._append(json.dumps(_standard(record), allow_nan=False).encode() + b'\n')
        numbers = {key: value for key, value in record.items() if isinstance(value, int | float) and key != 'step'}
        for tracker in tuple(self._trackers):
            self._try(tracker, 'stopped working', lambda tracker=tracker: tracker.log(record['step'], numbers))

    def close(self) -> None:
        """Closes the trackers, which may still send data, and the file. May be called twice."""
        for tracker in tuple(self._trackers):
            self._try(tracker, 'could not be finished', tracker.close)
        self._trackers.clear()
        lost, self._unwritten = len(self._unwritten), b''
        self._file.close()
        if lost:
            self._say(f'WARNING: {lost:,} bytes of metrics could not be written to {self._path}')

    def __enter__(self) -> 'MetricsLog':
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def rewind(self, step: int) -> None:
        """Removes the lines of later steps, which will be trained again."""
        self._file.close()
        _rewind(self._path, step, self._say)
        self._file = self._path.open('ab', buffering=0)

    def _append(self, line: bytes) -> None:
        """Appends a line. If the disk is full or the directory is gone, the line stays in memory and training continues."""
        self._unwritten += line
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                self._say(
                    f'WARNING: {self._path} was removed while training; it is created again, with the lines from now on'
                )
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file.close()
                self._file = self._path.open('ab', buffering=0)
            while self._unwritten:  # a full disk may take a part before it refuses
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            self._say(
                f'WARNING: cannot write {self._path}: {error.strerror}. Training continues; '
                f'{len(self._unwritten):,} bytes of metrics wait in memory'
            )

    def _try(self, tracker: Tracker, what: str, call: Callable[[], None]) -> None:
        # A tracker is foreign code that uses a network. It may raise anything, and must not end a training. It is dropped
        # after its first failure, so that it cannot slow down every step.
        try:
            call()
        except Exception as error:
            self._trackers.remove(tracker)
            reason = str(error).strip().split('\n')[0]
            self._say(
                f'WARNING: {tracker.name} {what} ({type(error).__name__}: {reason}). '
                f'It receives no more numbers of this run; metrics.jsonl has all of them.'
            )


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All lines of a `metrics.jsonl`, with NaN and infinity restored. An incomplete last line is skipped.

    Raises:
        UserError: the file does not exist, or another line is damaged.
    """
    path = pathlib.Path(path)
    try:
        records = list(_parse(path))
    except FileNotFoundError:
        raise UserError(f'no metrics at {path}: no such file') from None
    except IsADirectoryError:
        raise UserError(f'{path} is a directory, expected a file of metrics such as {path / "metrics.jsonl"}') from None
    for number, (line, record) in enumerate(records, start=1):
        if record is None and line.endswith(b'\n'):
            shown = line[:60].decode(errors='replace').rstrip()
            raise UserError(
                f'{path}, line {number} is not a line of metrics: {shown!r}\n'
                f'expected one JSON object with an integer "step"; remove the line to use the rest'
            )
    return [_restored(record) for _, record in records if record is not None]


def _rewind(path: pathlib.Path, last_step: int, say: Callable[[str], None]) -> None:
    """Keeps the complete lines up to `last_step`. A new file replaces the old one, so that a kill loses nothing."""
    later = torn = 0
    with new_file(path, sync=True) as kept:
        for line, record in _parse(path):
            if record is None:
                torn += 1
            elif record['step'] > last_step:
                later += 1
            else:
                kept.write(line.rstrip(b'\r\n') + b'\n')
    if torn:
        say(f'{path.name}: removed {_lines(torn)} left incomplete when the run was stopped')
    if later:
        say(f'{path.name}: removed {_lines(later)} after step {last_step}; those steps are trained again')


def _lines(count: int) -> str:
    return '1 line' if count == 1 else f'{count} lines'


def _parse(path: pathlib.Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Each line as bytes and as a record; the record is None if the line is not a JSON object with a step."""
    with open(path, 'rb') as lines:
        for line in lines:
            try:
                record = json.loads(line)
            except ValueError:  # not JSON, or not text at all
                record = None
            yield line, record if isinstance(record, dict) and type(record.get('step')) is int else None


def _standard(record: Mapping[str, Any]) -> dict[str, Any]:
    broken = {key: str(value) for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    if not broken:
        return dict(record)
    return {key: None if key in broken else value for key, value in record.items()} | {'nonfinite': broken}


def _restored(record: dict[str, Any]) -> dict[str, Any]:
    broken: dict[str, str] = record.pop('nonfinite', {})
    return record | {key: float(text) for key, text in broken.items()}


def keys(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of the numbers in these records, in the order of their first appearance, without 'step'."""
    found: dict[str, None] = {}
    for record in records:
        found.update((key, None) for key, value in record.items() if isinstance(value, int | float) and key != 'step')
    return list(found)
