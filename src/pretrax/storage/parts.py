"""Files that are appended to, in a bucket: parts of one size below `NAME/`, the last one smaller.

A part is never written twice: a growing file gets another last part, and its index (storage/index.py) names the parts
in their order. Without an index, the object `NAME` and the objects below it, in the order of their names, are the file:
so logs of a machine are stored, which no other one writes, those of earlier versions, and those that were copied from a
disk.
"""

import io
import itertools
import shutil
from collections.abc import Buffer, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

from pretrax.storage.index import INDEX, read_entries
from pretrax.storage.locate import AnyPath
from pretrax.system.atomic import new_file
from pretrax.system.line_files import read_lines

PART = 512 * 1024  # bytes
_AT_ONCE = 8  # parts that are fetched together: a bucket answers slowly
_JOINED = '.joined'  # suffix of a file that is about to replace its parts


def open_joined(path: AnyPath) -> BinaryIO:
    """Opens a file, or the parts of one in a bucket, which are read when they are needed.

    Raises:
        FileNotFoundError: there is neither.
        OSError: it cannot be read. Reading raises it too.
    """
    if isinstance(path, Path) and not path.is_dir():
        return path.open('rb')
    parts = parts_of(path)
    if not parts:
        return io.BytesIO(path.read_bytes())
    return io.BufferedReader(_Parts(parts))


def read_records(path: AnyPath, is_record: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """The records of a file of JSON lines, or of its parts in a bucket; none if it does not exist. Raises OSError.

    Lines for which `is_record` is false are skipped.
    """
    try:
        with open_joined(path) as lines:
            return [line.record for line in read_lines(lines, is_record) if line.record is not None]
    except FileNotFoundError:
        return []


class _Parts(io.RawIOBase):
    """Parts one after another. A few are held at once, and the last one, which another may replace meanwhile."""

    def __init__(self, parts: Sequence[AnyPath]):
        self._contents = itertools.chain(_contents(parts[:-1]), [parts[-1].read_bytes()])
        self._rest = memoryview(b'')

    def readable(self) -> bool:
        return True

    def readinto(self, target: Buffer, /) -> int:
        view = memoryview(target)
        while not self._rest:
            content = next(self._contents, None)
            if content is None:
                return 0
            self._rest = memoryview(content)
        size = min(len(view), len(self._rest))
        view[:size], self._rest = self._rest[:size], self._rest[size:]
        return size


def _contents(parts: Sequence[AnyPath]) -> Iterator[bytes]:
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        for some in itertools.batched(parts, _AT_ONCE):
            yield from pool.map(lambda part: part.read_bytes(), some)


def parts_of(path: AnyPath) -> list[AnyPath]:
    """The parts of a file in a bucket, or of one that was copied from a bucket, in order; []: it is one object."""
    names = sorted(part.name for part in path.iterdir())
    if INDEX in names and (entries := read_entries(path)) is not None:
        return [path / name for _, name in sorted(entries.items()) if name is not None]
    is_copied = path.suffix != '.jsonl' and names and not isinstance(path, Path) and path.is_file()
    return [*([path] if is_copied else []), *(path / name for name in names if name != INDEX)]


def join_copied(directory: Path) -> None:
    """Makes files of the logs in a run directory that was copied from a bucket. Raises OSError.

    Tokens are prepared again if the bucket has only their tokenizer.
    """
    for tokenizer in directory.glob('data/*/tokenizer.json'):
        if [path.name for path in tokenizer.parent.iterdir()] == [tokenizer.name]:
            shutil.rmtree(tokenizer.parent)
    copied = [*directory.glob(f'*.jsonl/{INDEX}'), *directory.glob('*.jsonl/000000')]
    copied += [part for name in ('output', 'stacks') for part in directory.glob(f'{name}/*/*-000000')]
    unfinished = {path.with_suffix('') for path in directory.glob(f'**/*{_JOINED}')}
    for log in {part.parent for part in copied} | unfinished:
        joined = log.with_name(log.name + _JOINED)
        if log not in unfinished:
            with open_joined(log) as parts, new_file(joined) as whole:
                shutil.copyfileobj(parts, whole)
        shutil.rmtree(log, ignore_errors=True)
        joined.rename(log)
