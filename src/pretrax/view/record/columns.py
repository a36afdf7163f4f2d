"""The lines of a `metrics.jsonl` as one column of numbers per key."""

import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pydantic_core

from pretrax.observe.metrics import is_metrics, restored


class Column(NamedTuple):
    """The numbers of one key, in the order of the file. Three arrays of the same length."""

    steps: np.ndarray  # int64
    # Float64. NaN and infinity are values. A line whose value is null, or that lacks the key, is left out.
    values: np.ndarray
    lines: np.ndarray  # int64, index of each number's line among the lines of metrics, from 0


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


def parse_columns(content: bytes) -> Columns:
    """The columns of the content of a `metrics.jsonl`. Lines that are not lines of metrics are skipped and counted."""
    records, skipped = _records(content)
    lines_of_keys: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for number, record in enumerate(records):
        record = records[number] = restored(record)
        lines_of_keys[tuple(record)].append(number)
    parts: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
    for keys, numbers in sorted(lines_of_keys.items(), key=lambda item: item[1][0]):
        lines = np.array(numbers, np.int64)
        columns = zip(*(records[number].values() for number in numbers), strict=True)
        for key, values in zip(keys, columns, strict=True):
            numeric, where = _numbers(values)
            if len(numeric):
                parts.setdefault(key, []).append((lines if where is None else lines[where], numeric))
    steps = _whole(parts.pop('step', []), len(records), np.int64)
    times = _whole(parts.pop('time', []), len(records), np.float64)
    return Columns({key: _joined(found, steps) for key, found in parts.items()}, steps, times, skipped)


def _records(content: bytes) -> tuple[list[dict[str, Any]], int]:
    """The lines of metrics, and the number of others."""
    *lines, torn = content.split(b'\n')
    lines = [line for line in lines if line.strip()]
    try:
        found = pydantic_core.from_json(b'[' + b','.join(lines) + b']', cache_strings='keys')
    except ValueError:
        found = [_parsed(line) for line in lines]
    last = [record] if _is_metrics(record := _parsed(torn)) else []
    records = [record for record in itertools.chain(found, last) if _is_metrics(record)]
    return records, len(found) + len(last) - len(records)


def _parsed(line: bytes) -> Any:
    try:
        return pydantic_core.from_json(line)
    except ValueError:
        return None


def _is_metrics(record: Any) -> bool:
    return type(record) is dict and is_metrics(record) and abs(record['step']) < 2**62


def _numbers(values: tuple[Any, ...]) -> tuple[np.ndarray, list[int] | None]:
    """The numbers among these values, and their indices; None if all are numbers."""
    if set(map(type, values)) <= {float, int}:
        return _array(values), None
    where = [index for index, value in enumerate(values) if type(value) in (float, int)]
    return _array([values[index] for index in where]), where


def _array(values: Sequence[float]) -> np.ndarray:
    try:
        return np.array(values, np.float64)
    except OverflowError:  # an integer beyond the range of float64
        return np.array([float(str(value)) for value in values], np.float64)


def _whole(parts: list[tuple[np.ndarray, np.ndarray]], count: int, dtype: Any) -> np.ndarray:
    """One value for each line. Steps are in every line; times may be missing."""
    values = np.full(count, np.nan if dtype == np.float64 else 0, dtype)
    for lines, found in parts:
        values[lines] = found
    return values


def _joined(parts: list[tuple[np.ndarray, np.ndarray]], steps: np.ndarray) -> Column:
    lines, values = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
    if len(parts) > 1:
        order = np.argsort(lines, kind='stable')
        lines, values = lines[order], values[order]
    return Column(steps[lines], values, lines)
