"""Files with one JSON object per line that are appended to: `metrics.jsonl`, `attempts.jsonl`, `results.jsonl`.

A kill or a full disk leaves a line incomplete, and a person or another program may add lines of its own. Such a line
costs only itself: the next one starts on a new line, and readers skip what is not theirs.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import pydantic_core

_TOGETHER = 256  # lines that are parsed at once
_PIECE = 1 << 17  # bytes that are parsed at once; more would not stay in a cache of the processor


class Line(NamedTuple):
    """A line of a file, counted from 1. `record` is None if it is not a record of this file."""

    number: int
    text: bytes
    record: dict[str, Any] | None


def append_record(path: Path, record: dict[str, Any], sync: bool = False) -> None:
    """Appends a record, on the disk with `sync`. If the last line is incomplete, it is ended first. Raises OSError."""
    text = json.dumps(record).encode() + b'\n'
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        if size and os.pread(descriptor, 1, size - 1) != b'\n':
            text = b'\n' + text
        while text:  # a full disk may take a part before it refuses
            text = text[os.write(descriptor, text) :]
        if sync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_lines(lines: Iterable[bytes], is_record: Callable[[dict[str, Any]], bool]) -> Iterator[Line]:
    """The lines of an open file that are not blank. `is_record` tells which JSON objects belong there."""
    written = ((number, text) for number, text in enumerate(lines, 1) if text and not text.isspace())
    for together in itertools.batched(written, _TOGETHER):
        values = parse_lines(b''.join(text if text.endswith(b'\n') else text + b'\n' for _, text in together))
        for (number, text), record in zip(together, values, strict=True):
            yield Line(number, text, record if isinstance(record, dict) and is_record(record) else None)


def read_pieces(file: BinaryIO) -> Iterator[tuple[int, int, bytes]]:
    """Whole lines of a file, some hundreds at once: the number of the first, how many there are, and their text."""
    number = 1
    while content := file.read(_PIECE) + file.readline():
        n_lines = content.count(b'\n') + (not content.endswith(b'\n'))
        yield number, n_lines, content
        number += n_lines


def parse_lines(content: bytes) -> list[Any]:
    """The JSON value of each line; None for a line that is not JSON."""
    content = content.removesuffix(b'\n')
    with contextlib.suppress(ValueError):
        values = pydantic_core.from_json(b'[' + content.replace(b'\n', b',') + b']', cache_strings='keys')
        if len(values) == content.count(b'\n') + 1:
            return values
    return list(map(_parse, content.split(b'\n')))


def not_a_record(path: object, line: Line, what: str) -> str:
    """A warning for a line that was skipped. `what`: 'a line of metrics'."""
    shown = line.text[:60].decode(errors='replace').rstrip()
    return f'WARNING: {path}, line {line.number} is not {what}, and is skipped: {shown!r}'


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # not JSON, not text at all, or nested thousands of times
        return None
