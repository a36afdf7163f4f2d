"""The record of a run: `metrics.jsonl`, one JSON object a line, and the trackers that get the same numbers.

The file is the truth and the trackers are copies: it is written first, it is flushed line by line, and a tracker that
fails is switched off while training and the file go on. Every line is standard JSON, in which NaN and infinity do not
exist: such a value is written as null and named in `nonfinite`, from which `read_metrics` restores it:

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
    """Appends to `metrics.jsonl` and passes every line on to the trackers. One process of a run owns it.

    Args:
        path: the file; made if there is none, with its directories.
        trackers: see `observe.trackers.open_trackers`.
        resumed_step: the step that training continues from. Lines of later steps belong to work that was lost with
            the process and will be done again; they are removed, as is a line that a kill has cut short.
        say: told about every line removed and every tracker lost.
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
        self._unwritten = b''  # of a disk that was full
        self._file = path.open('ab', buffering=0)  # a line is with the operating system when `write` returns

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Append one line. `metrics` has 'step' (int); values are numbers (Python, NumPy, JAX scalars), text or None.

        A value that is still being computed on a device is waited for: pass numbers of a step that is over.
        """
        record = {key: value.item() if hasattr(value, 'item') else value for key, value in metrics.items()}
        if type(record.get('step')) is not int:
            raise TypeError(f'a line of metrics needs an integer step, not {record.get("step")!r}')
        self._append(json.dumps(_standard(record), allow_nan=False).encode() + b'\n')
        numbers = {key: value for key, value in record.items() if isinstance(value, int | float) and key != 'step'}
        for tracker in tuple(self._trackers):
            self._try(tracker, 'stopped working', lambda tracker=tracker: tracker.log(record['step'], numbers))

    def close(self) -> None:
        """Finish the trackers (they may still have something to send) and the file. Safe to call twice."""
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
        """Remove the lines of later steps, which will be trained again."""
        self._file.close()
        _rewind(self._path, step, self._say)
        self._file = self._path.open('ab', buffering=0)

    def _append(self, line: bytes) -> None:
        """A full disk or a directory that is gone does not end the training: lines wait in memory."""
        self._unwritten += line
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                self._say(
                    f'WARNING: {self._path} was removed while training; it is made again, with the lines from now on'
                )
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file.close()
                self._file = self._path.open('ab', buffering=0)
            while self._unwritten:  # a full disk may take a part before it refuses
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            self._say(
                f'WARNING: cannot write {self._path}: {error.strerror}. Training goes on; '
                f'{len(self._unwritten):,} bytes of metrics wait in memory'
            )

    def _try(self, tracker: Tracker, what: str, call: Callable[[], None]) -> None:
        # The one broad `except` of this package: a tracker is other people's code that talks to a network, it may
        # raise anything, and days of training are worth more than its curves. Once, so that it cannot slow each step.
        try:
            call()
        except Exception as error:
            self._trackers.remove(tracker)
            reason = str(error).strip().split('\n')[0]
            self._say(
                f'WARNING: {tracker.name} {what} ({type(error).__name__}: {reason}). '
                f'It gets no more numbers in this run; metrics.jsonl has all of them.'
            )


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All lines of a `metrics.jsonl`, values that are not finite restored.

    A last line without its end is left out: a running training is just writing it, or was killed at it. Raises
    UserError for a file that is not there or has another broken line.
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
    """Keep the whole lines up to `last_step`. A new file replaces the old one at once: a kill here loses nothing."""
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
        say(f'{path.name}: removed {_lines(torn)} cut short when the run was stopped')
    if later:
        say(f'{path.name}: removed {_lines(later)} after step {last_step}; those steps are trained again')


def _lines(count: int) -> str:
    return '1 line' if count == 1 else f'{count} lines'


def _parse(path: pathlib.Path) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Each line as it stands and as a record; None for one that is not the JSON object of a step."""
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
    """Names of the numbers in these records, in the order in which they first appear, without 'step'."""
    found: dict[str, None] = {}
    for record in records:
        found.update((key, None) for key, value in record.items() if isinstance(value, int | float) and key != 'step')
    return list(found)
