"""Reads tables with one document per row: .csv and .tsv with a header line, and the needed columns of .parquet."""

import collections
import contextlib
import csv
import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pretrax.data.corpus.content import read_content, split_lines
from pretrax.data.corpus.files import TextFile
from pretrax.data.corpus.parts import Part, Row, in_memory, refuse_changed
from pretrax.data.corpus.storage import opened, refusal
from pretrax.errors import UserError
from pretrax.system.software import need_extra

if TYPE_CHECKING:
    import pyarrow.parquet

LONGEST_ROW = 64 << 20  # bytes of a row of .csv, which the reader holds with 4 bytes per character
_ROWS_AT_ONCE, _BYTES_AT_ONCE = 256, 64 << 20
_BOM = '\ufeff'


@dataclass(frozen=True)
class Delimited(Part):
    """A .csv or .tsv file, quoted as in RFC 4180, with a header line. The origin of a row is its first line."""

    file: TextFile

    @in_memory
    def rows(self, start: int = 0) -> Iterator[Row]:
        refuse_changed(self.file)
        yield from itertools.islice(self._rows(), start, None)
        refuse_changed(self.file, afterwards=True)

    def count(self) -> int:
        return sum(1 for _ in self._rows())

    def _rows(self) -> Iterator[Row]:
        path = self.file.path
        csv.field_size_limit(LONGEST_ROW)
        n_bytes = 0  # of the row so far

        def decoded() -> Iterator[str]:
            nonlocal n_bytes
            for line in split_lines(read_content(path), path, LONGEST_ROW):
                n_bytes += len(line)
                if n_bytes > LONGEST_ROW:
                    raise _too_long(f'{path}:{first_line}')
                # The reader cannot continue after an exception of its input, so bytes that are not UTF-8 pass through
                # it.
                yield line.decode('utf-8', 'surrogateescape') + '\n'

        reader = csv.reader(decoded(), delimiter='\t' if self.file.kind == 'tsv' else ',', strict=True)
        header: list[str] | None = None
        while True:
            first_line, n_bytes = reader.line_num + 1, 0
            origin = f'{path}:{first_line}'
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if 'field limit' in str(error):
                    raise _too_long(origin) from None
                if 'unexpected end of data' in str(error):
                    raise UserError(f'{origin}: a quote in this row is never closed') from None
                if header is None:
                    raise UserError(f'{origin}: {error}') from None
                yield Row(origin, UserError(f'{origin}: {error}'))
                continue
            if header is None:
                header = _header(values, origin)
            elif not values:
                yield Row(origin, '')
            else:
                yield Row(origin, _record(header, values, origin))


@dataclass(frozen=True)
class RowGroups(Part):
    """The row groups start to stop - 1 of a .parquet file. The origin of a row is its number in the file, from 1."""

    file: TextFile
    fields: tuple[str, ...]
    start: int = 0
    stop: int | None = None

    @in_memory
    def rows(self, start: int = 0) -> Iterator[Row]:
        refuse_changed(self.file)
        with _parquet(self.file) as parquet:
            n_rows = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
            group, row = self.start, sum(n_rows[: self.start])
            while group < len(n_rows) and start >= n_rows[group]:
                start -= n_rows[group]
                row += n_rows[group]
                group += 1
            columns = self._columns(parquet)
            for number in range(len(n_rows))[group : self.stop]:
                at_once = min(
                    _ROWS_AT_ONCE, max(1, _BYTES_AT_ONCE // _largest_row(parquet, number, columns, self.file))
                )
                for batch in parquet.iter_batches(at_once, [number], columns=columns):
                    yield from _records(batch.slice(min(start, len(batch))), row + start, self.file)
                    row += len(batch)
                    start = max(0, start - len(batch))
        refuse_changed(self.file, afterwards=True)

    def count(self) -> int:
        with _parquet(self.file) as parquet:
            groups = range(parquet.num_row_groups)[self.start : self.stop]
            return sum(parquet.metadata.row_group(group).num_rows for group in groups)

    def cut(self, positions: Sequence[int]) -> list['RowGroups | None']:
        """Parts of the whole file, cut at the row groups nearest to these byte positions; None for an empty part."""
        with _parquet(self.file) as parquet:
            sizes = [parquet.metadata.row_group(group).total_byte_size for group in range(parquet.num_row_groups)]
        ends = list(itertools.accumulate(sizes))
        total = max(1, ends[-1] if ends else 1)
        bounds = [0, *(min(1 + bisect_left(ends, at * total / self.file.size), len(sizes)) for at in positions)]
        parts = [replace(self, start=start, stop=stop) for start, stop in itertools.pairwise([*bounds, len(sizes)])]
        return [part if not number or part.start != part.stop else None for number, part in enumerate(parts)]

    def _columns(self, parquet: 'pyarrow.parquet.ParquetFile') -> list[str] | None:
        names = parquet.schema_arrow.names
        columns = [name if name in names else name.partition('.')[0] for name in self.fields]
        return columns if columns and set(columns) <= set(names) else None  # all, for the error about a missing field


def _largest_row(
    parquet: 'pyarrow.parquet.ParquetFile', group: int, columns: Sequence[str] | None, file: TextFile
) -> int:
    """A bound on the bytes of most rows of a row group: their mean, and each value that a dictionary may repeat."""
    found = parquet.metadata.row_group(group)
    total = 0
    with opened(file.path) as stream:
        for chunk in map(found.column, range(found.num_columns)):
            if columns is not None and chunk.path_in_schema.partition('.')[0] not in {
                c.partition('.')[0] for c in columns
            }:
                continue
            total += chunk.total_uncompressed_size // max(1, found.num_rows)
            if (start := chunk.dictionary_page_offset) is not None:
                stream.seek(start)
                total += _uncompressed_size(stream.read(16))
    return max(1, total)


def _uncompressed_size(page_header: bytes) -> int:
    """The decompressed bytes of a page, the second field of its header (Thrift, compact protocol); 0: damaged."""
    at, sizes = 0, []
    while len(sizes) < 2 and page_header[at : at + 1] == b'\x15':  # the next field, i32
        value = shift = 0
        while True:
            at += 1
            byte = page_header[at] if at < len(page_header) else 0
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                break
        sizes.append(value >> 1)
        at += 1
    return sizes[1] if len(sizes) > 1 else 0


@contextlib.contextmanager
def _parquet(file: TextFile) -> Iterator['pyarrow.parquet.ParquetFile']:
    need_extra('datasets', f'{file.path}: reading .parquet', 'pyarrow')
    import pyarrow
    import pyarrow.parquet

    if file.is_compressed:
        raise UserError(
            f'{file.path}: a .parquet file cannot be read through {file.path.suffix}\n'
            '  decompress it; .parquet has its own compression'
        )
    with opened(file.path) as stream:
        try:
            with pyarrow.parquet.ParquetFile(stream) as parquet:
                yield parquet
        except MemoryError:
            raise
        except pyarrow.ArrowException as error:
            raise UserError(f'{file.path}: not readable as .parquet: {" ".join(str(error).split())[:300]}') from None
        except OSError as error:
            raise refusal(file.path, error) from error


def _records(batch: Any, row: int, file: TextFile) -> Iterator[Row]:
    try:
        records = batch.to_pylist()
    except UnicodeDecodeError:  # strings may have any bytes; find the bad rows
        for number in range(len(batch)):
            origin = f'{file.path}:{row + number + 1}'
            try:
                yield Row(origin, batch.slice(number, 1).to_pylist()[0])
            except UnicodeDecodeError as error:
                yield Row(origin, UserError(f'{origin}: not utf-8 at byte {error.start} ({error.reason})'))
        return
    for number, record in enumerate(records, row + 1):
        yield Row(f'{file.path}:{number}', record)


def _too_long(origin: str) -> UserError:
    return UserError(
        f'{origin}: a row of more than {LONGEST_ROW >> 20} MiB: a quote is never closed?\n'
        '  for documents as long as this, use .jsonl'
    )


def _header(values: list[str], origin: str) -> list[str]:
    names = [values[0].removeprefix(_BOM), *values[1:]] if values else []
    twice = sorted(name for name, n in collections.Counter(names).items() if n > 1)
    if not names or twice:
        what = f'the header names {twice[0]!r} twice' if twice else 'no header'
        raise UserError(f'{origin}: {what}\n  expected the field names in the first line')
    return names


def _record(header: list[str], values: list[str], origin: str) -> dict[str, Any] | UserError:
    if len(values) != len(header):
        return UserError(f'{origin}: {len(values)} fields\n  the header has {len(header)}: {", ".join(header)[:80]}')
    for name, value in zip(header, values, strict=True):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                return UserError(f'{origin}: field {name!r} is not utf-8')
    return dict(zip(header, values, strict=True))
