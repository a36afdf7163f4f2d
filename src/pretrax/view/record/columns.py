"""The lines of a `metrics.jsonl` as one column of numbers per key.

The file is read in pieces, and a curve of more than `MOST` numbers may be thinned while it is read: a file of a million
lines needs little memory.
"""

import dataclasses
import io
import re
from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pydantic_core

from pretrax.errors import Report
from pretrax.federation.registry import is_federation
from pretrax.observe.metrics import is_metrics, open_metrics, restored
from pretrax.storage import AnyPath
from pretrax.system.line_files import Line, not_a_record, parse_lines, read_pieces
from pretrax.view.federation.lines import as_file, metric_lines
from pretrax.view.federation.read import read_federation

_IN_NUMBERS = b'0123456789.+-E'
_SEPARATED = bytes.maketrans(b'}\n', b' ,')
_DROPPED = bytes({*range(256)} - {*_IN_NUMBERS, *b', }\n'})
_SHAPE = re.compile(rb'\{"[A-Za-z_/]+": (, "[A-Za-z_/]+": )*\}')  # of a line, without the characters of numbers
MOST = 1 << 17  # numbers of a curve; more are thinned to at most a quarter of them


class Column(NamedTuple):
    """The numbers of one key, in the order of the file. Three arrays of the same length."""

    steps: np.ndarray  # int64
    # Float64. NaN and infinity are values. A line whose value is null, or that lacks the key, is left out.
    values: np.ndarray
    lines: np.ndarray  # int64, index of each number's line among the lines of metrics, from 0

    def thinned(self) -> 'Column':
        """The column, or of one with more than `MOST` numbers those at `extremes`."""
        kept = extremes(self.values, self.lines)
        return self if kept is None else Column(*(array[kept] for array in self))


@dataclasses.dataclass(frozen=True)
class Columns(Mapping[str, Column]):
    """{key: column}, in the order of the keys' first appearance, without 'step' and 'time'."""

    by_key: dict[str, Column]
    steps: np.ndarray  # steps of each line, int64
    times: np.ndarray  # times of each line, seconds since 1970, float64; NaN for a line that has none
    skipped: int = 0  # number of lines that are not lines of metrics, without an incomplete last line

    def __getitem__(self, key: str) -> Column:
        return self.by_key[key]

    def __iter__(self):
        return iter(self.by_key)

    def __len__(self) -> int:
        return len(self.by_key)

    @property
    def known_times(self) -> np.ndarray:
        """The times of the lines that have one."""
        return self.times[~np.isnan(self.times)]

    def last(self, key: str) -> float | None:
        """The newest number of a key; None if there is none."""
        column = self.by_key.get(key)
        return None if column is None else float(column.values[-1])


def read_metrics_columns(path: AnyPath, report: Report, keys: Collection[str] | None = None) -> Columns:
    """All numbers of a `metrics.jsonl`, or of its parts in a bucket; of these keys or of all.

    A federation that is in the directory of the file, which does not exist, has the lines of its rounds.

    Args:
        report: receives a warning for each line that is not one of metrics.

    Raises:
        UserError: the file does not exist.
    """
    is_file = path.exists() or not is_federation(path.parent)
    with open_metrics(path) if is_file else io.BytesIO(as_file(metric_lines(read_federation(path.parent)))) as file:
        return read_columns(file, keys=keys, skip=lambda line: report(not_a_record(path, line, 'a line of metrics')))


def parse_columns(content: bytes) -> Columns:
    """The columns of the content of a `metrics.jsonl`."""
    return read_columns(io.BytesIO(content))


def read_columns(
    *files: BinaryIO,
    keys: Collection[str] | None = None,
    exact: Collection[str] | None = None,
    skip: Callable[[Line], object] = lambda line: None,
) -> Columns:
    """The columns of the lines of files, one after another.

    Args:
        keys: the keys to read; None: all keys.
        exact: keys whose numbers are all kept; of another with more than `MOST` numbers, those at `extremes` are kept.
            None: all numbers of all keys are kept.
        skip: receives each line that is not a line of metrics, except an incomplete last one.
    """
    columns: dict[str, _Growing] = defaultdict(_Growing)
    wanted = None if keys is None else {'step', 'time', *keys}
    count = skipped = 0
    for first, n_lines, content in (piece for file in files for piece in read_pieces(file)):
        tables, others = _read_alike(content, n_lines, wanted)
        texts = content.removesuffix(b'\n').split(b'\n') if others else []
        records = dict(zip(others, parse_lines(b''.join(texts[place] + b'\n' for place in others)), strict=False))
        foreign = [place for place, record in records.items() if not _is_ours(record)]
        for place in foreign:
            del records[place]
            if texts[place].strip() and (place < len(texts) - 1 or content.endswith(b'\n')):
                skipped += 1
                skip(Line(first + place, texts[place], None))
        for places, numbers in sorted([*tables, *_numbers_of(records, wanted)], key=lambda table: table[0][0]):
            lines = count + places - np.searchsorted(foreign, places)
            for key, values in numbers.items():
                columns[key].add(lines, values, exact is None or key in {'step', 'time', *exact})
        count += n_lines - len(foreign)
    steps = columns.pop('step', _Growing()).whole(count, 0).astype(np.int64)
    times = columns.pop('time', _Growing()).whole(count, np.nan)
    found: dict[str, Column] = {}
    for key in list(columns):
        found[key] = columns.pop(key).joined(steps, found.values())
    return Columns(found, steps, times, skipped)


def extremes(values: np.ndarray, lines: np.ndarray, most: int = MOST) -> np.ndarray | None:
    """The indices of the lowest and the highest number of each group of lines, and of the first and the last number.

    A group has a power of two lines, so groups of thinned numbers are groups of all. NaN counts as the highest number.
    None: there are at most `most` numbers, and none is left out.
    """
    if len(values) <= most:
        return None
    width = 1
    while 8 * (lines[-1] // width + 1) > MOST:
        width *= 2
    starts = np.flatnonzero(np.diff(lines // width, prepend=-1))
    group = np.repeat(np.arange(len(starts)), np.diff(starts, append=len(values)))
    is_kept = np.zeros(len(values), bool)
    is_kept[[0, -1]] = True
    for each in (np.fmin.reduceat(values, starts), np.maximum.reduceat(values, starts)):
        is_it = (values == each[group]) | (np.isnan(values) & np.isnan(each[group]))
        where = np.flatnonzero(is_it)
        is_kept[where[np.flatnonzero(np.diff(group[where], prepend=-1))]] = True  # the first in each group
    return np.flatnonzero(is_kept)


class _Growing:
    """A column that is being read."""

    def __init__(self) -> None:
        self._lines: list[np.ndarray] = []  # shared by columns of the same lines
        self._values, self._is_exact = array('d'), True

    def add(self, lines: np.ndarray, values: array, is_exact: bool) -> None:
        self._lines.append(lines)
        self._values.extend(values)
        if len(self._values) > MOST and not is_exact:
            self._is_exact = False
            self._thin(MOST)

    def _thin(self, most: int) -> None:
        lines, values = self._merged()
        kept = extremes(values, lines, most)
        if kept is not None:
            lines, values = lines[kept], values[kept]
        self._lines, self._values = [lines], array('d', values.tobytes())

    def _merged(self) -> tuple[np.ndarray, np.ndarray]:
        lines, values = np.concatenate(self._lines), np.frombuffer(self._values)
        if (lines[1:] < lines[:-1]).any():
            order = np.argsort(lines, kind='stable')
            lines, values = lines[order], values[order]
        return lines, values

    def joined(self, steps: np.ndarray, others: Iterable[Column]) -> Column:
        """The column, of a file whose lines have these steps. It shares arrays with one of the same lines."""
        if not self._is_exact:
            self._thin(MOST // 4)
        lines, values = self._merged()
        alike = next((other for other in others if np.array_equal(other.lines, lines)), None)
        return Column(steps[lines], values, lines) if alike is None else alike._replace(values=values)

    def whole(self, count: int, missing: float) -> np.ndarray:
        """A value for each of `count` lines, float64."""
        found = np.full(count, missing, np.float64)
        if self._lines:
            found[np.concatenate(self._lines)] = self._values
        return found


def _is_ours(record: Any) -> bool:
    return type(record) is dict and is_metrics(record) and abs(record['step']) < 2**62


type _Table = tuple[np.ndarray, dict[str, array]]  # places of lines in a piece, and their numbers by key


def _read_alike(content: bytes, count: int, wanted: Collection[str] | None) -> tuple[list[_Table], list[int]]:
    """The numbers of the lines that are written as a training writes them, and the places of all other lines.

    Without the characters of numbers, lines of the same keys are the same text. So their keys are read once, and their
    numbers as one array of JSON, several times faster than the lines. Text is no number, and null is none.
    """
    text = content.removesuffix(b'\n')
    for sign in (b'-', b'+'):
        text = text.replace(b'e' + sign, b'E' + sign) if sign in text else text
    shapes = text.translate(None, _IN_NUMBERS)
    shape = shapes.partition(b'\n')[0]
    alike: dict[bytes, tuple[list[int] | range, bytes]] = {shape: (range(count), text)}
    if shapes + b'\n' != (shape + b'\n') * count:
        places, lines = defaultdict(list), text.split(b'\n')
        for place, shape in enumerate(shapes.split(b'\n')):
            places[shape].append(place)
        alike = {shape: (at, b'\n'.join(map(lines.__getitem__, at))) for shape, at in places.items()}
    tables, others = list[_Table](), list[int]()
    for shape, (at, lines) in alike.items():
        numbers = _read_numbers(shape, lines, wanted)
        if numbers is None:
            others += at
        else:
            tables.append((np.array(at), numbers))
    return tables, sorted(others)


def _read_numbers(shape: bytes, lines: bytes, wanted: Collection[str] | None) -> dict[str, array] | None:
    """{key: numbers} of lines of a shape; None if they are not lines of metrics with nothing but finite numbers."""
    keys = re.findall('"(.*?)"', shape.decode()) if _SHAPE.fullmatch(shape) else ()
    if 'step' not in keys or len({*keys, 'nonfinite'}) <= len(keys):
        return None
    try:  # a comma is between two numbers; a digit elsewhere makes two without one
        values = pydantic_core.from_json(b'[%b]' % lines.translate(_SEPARATED, _DROPPED))
        columns = {key: values[place :: len(keys)] for place, key in enumerate(keys)}
        if set(map(type, columns['step'])) != {int} or max(map(abs, columns['step'])) >= 2**62:
            return None
        return {key: array('d', columns[key]) for key in keys if wanted is None or key in wanted}
    except (ValueError, OverflowError):
        return None


def _numbers_of(records: Mapping[int, dict[str, Any]], wanted: Collection[str] | None) -> Iterator[_Table]:
    """The numbers of lines of metrics, by their place."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for place, record in records.items():
        for key, value in restored(record).items():
            if type(value) in (float, int) and (wanted is None or key in wanted):
                found[key][place] = value if type(value) is float else float(str(value))  # it may be beyond f64
    for key, numbers in found.items():
        yield np.array([*numbers]), {key: array('d', numbers.values())}
