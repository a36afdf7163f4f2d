"""Metrics of a run: `metrics.jsonl`, one JSON object per line, and trackers that receive the same numbers.

The file is written first, line by line. Trackers are copies: a tracker that fails is dropped, and training continues.
Every line is standard JSON, which has no NaN and no infinity. Such a value is written as null and named in `nonfinite`,
from which `read_metrics` restores it:

    {"step": 120, "loss": null, "grad_norm": 3.2, "nonfinite": {"loss": "nan"}}

Keys and units: view/definitions.yaml.
"""

import contextlib
import math
import os
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from pretrax.errors import Report, UserError
from pretrax.observe.step_lines import StepLines
from pretrax.observe.trackers.base import Line as TrackerLine
from pretrax.observe.trackers.base import Shown, Tracker
from pretrax.observe.trackers.thread import FLUSH_SECONDS, TrackerThread
from pretrax.storage import AnyPath, locate
from pretrax.storage.parts import open_joined
from pretrax.system.line_files import append_record, not_a_record, parse_lines, read_lines, read_pieces

EVALUATIONS = 'evaluations.jsonl'
_NUMBERS = (int, float)
_OF_A_LINE = ('step', 'time')  # numbers that say when a line was written


class MetricsLog(contextlib.AbstractContextManager['MetricsLog']):
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
        say: Report = print,
    ):
        self._say = say
        path = pathlib.Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._lines = StepLines(path, resumed_step, say, is_metrics)
        self._trackers = [TrackerThread(each, _past(path, path.stat().st_size), resumed_step, say) for each in trackers]

    def write(self, metrics: Mapping[str, Any]) -> None:
        """Appends one line. `metrics` has 'step' (int); values are numbers (Python, NumPy, JAX scalars), text or None.

        Waits for values that a device still computes, so pass numbers of a finished step.
        """
        record = {key: value.item() if hasattr(value, 'item') else value for key, value in metrics.items()}
        if type(record.get('step')) is not int:
            raise TypeError(f'a line of metrics needs an integer step, not {record.get("step")!r}')
        self._lines.append(_standard(record))
        for tracker in self._trackers:
            tracker.log(_numbers(record))

    def show(self, step: int, key: str, content: Shown) -> None:
        """Sends a text, for example a sample, a table or a picture to the trackers. It is not written to the file."""
        for tracker in self._trackers:
            tracker.show(step, key, content)

    def file(self, path: pathlib.Path) -> None:
        """Uploads a file to the trackers that keep files."""
        for tracker in self._trackers:
            tracker.file(path)

    def flush(self) -> None:
        """Makes the trackers keep the lines so far, whatever happens to this process. Waits for them a short time."""
        deadline = time.monotonic() + FLUSH_SECONDS
        for tracker in self._trackers:
            tracker.begin_flush()
        for tracker in self._trackers:
            tracker.end_flush(deadline)

    def close(self, succeeded: bool = True) -> None:
        """Closes the trackers, which may still send data, and the file. May be called twice."""
        for tracker in self._trackers:
            tracker.close(succeeded)
        self._trackers.clear()
        self._lines.close()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(succeeded=kind is None)

    def rewind(self, step: int) -> None:
        """Removes the lines of later steps, which will be trained again."""
        self._lines.rewind(step)
        for tracker in self._trackers:
            tracker.rewind(step)


def append_evaluation(directory: pathlib.Path, step: int, values: Mapping[str, float]) -> None:
    """Appends what another process than the training has measured to `evaluations.jsonl`. Raises OSError.

    Its lines have no time, since they say nothing about the time of the run.
    """
    append_record(directory / EVALUATIONS, _standard({'step': step, **values}))


def read_metrics(path: str | AnyPath, report: Report = print) -> list[dict[str, Any]]:
    """All lines of a `metrics.jsonl`, with NaN and infinity restored. An incomplete last line is skipped.

    Args:
        path: the file, or its parts in a bucket.
        report: receives a warning for each other line that is not one of metrics, which is skipped too.

    Raises:
        UserError: the file does not exist.
    """
    path = locate(path) if isinstance(path, str) else path
    records = []
    with open_metrics(path) as file:
        for line in read_lines(file, is_metrics):
            if line.record is not None:
                records.append(restored(line.record))
            elif line.text.endswith(b'\n'):
                report(not_a_record(path, line, 'a line of metrics'))
    return records


@contextlib.contextmanager
def open_metrics(path: AnyPath) -> Iterator[BinaryIO]:
    """Opens a `metrics.jsonl`, or its parts in a bucket. Raises UserError if it does not exist."""
    try:
        with open_joined(path) as file:
            yield file
    except FileNotFoundError:
        raise UserError(f'no metrics at {path}: no such file') from None
    except IsADirectoryError:
        raise UserError(f'{path} is a directory, expected a file of metrics such as {path / "metrics.jsonl"}') from None


def _numbers(record: Mapping[str, Any]) -> TrackerLine:
    """What trackers receive of a line: numbers, not null and not text."""
    numbers = {key: value for key, value in record.items() if isinstance(value, _NUMBERS)}
    for key in _OF_A_LINE:
        numbers.pop(key, None)
    return TrackerLine(record['step'], numbers, record.get('time') or time.time())


def _past(path: pathlib.Path, size: int) -> Iterator[TrackerLine]:
    """The lines in the first bytes of a file, read when they are needed."""
    with path.open('rb') as file:
        for _, _, content in read_pieces(file):
            for record in parse_lines(content[:size]):
                if type(record) is dict and is_metrics(record):
                    yield _numbers(restored(record))
            size -= len(content)
            if size <= 0:  # what follows was written by this process
                return


def is_metrics(record: dict[str, Any]) -> bool:
    """Whether a JSON object is a line of metrics."""
    return type(record.get('step')) is int and ('nonfinite' not in record or _is_named(record['nonfinite']))


def _is_named(nonfinite: Any) -> bool:
    return type(nonfinite) is dict and all(value in ('nan', 'inf', '-inf') for value in nonfinite.values())


def _standard(record: Mapping[str, Any]) -> dict[str, Any]:
    broken = {key: str(value) for key, value in record.items() if isinstance(value, float) and not math.isfinite(value)}
    if not broken:
        return dict(record)
    return {key: None if key in broken else value for key, value in record.items()} | {'nonfinite': broken}


def restored(record: dict[str, Any]) -> dict[str, Any]:
    """A line of metrics with its NaN and infinities in place of null."""
    if 'nonfinite' not in record:
        return record
    values = {key: value for key, value in record.items() if key != 'nonfinite'}
    return values | {key: float(text) for key, text in record['nonfinite'].items() if key != 'step'}
