"""Reads tables with one document per row: .csv and .tsv with a header line, and the needed columns of .parquet."""

import contextlib
import csv
import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pretrax.data.corpus import content
from pretrax.data.corpus.content import read_content, split_lines
from pretrax.data.corpus.files import TextFile
from pretrax.data.corpus.parts import Row, refuse_changed
from pretrax.data.corpus.storage import opened, refusal
from pretrax.errors import UserError, install_extra

if TYPE_CHECKING:
    import pyarrow.parquet

_ROWS_AT_ONCE = 256
_BOM = '\ufeff'


@dataclass(frozen=True)
class Delimited:
    """A .csv or .tsv file, quoted as in RFC 4180, with a header line. The origin of a row is its first line."""

    file: TextFile

    def rows(self, start: int = 0) -> Iterator[Row]:
        refuse_changed(self.file)
        yield from itertools.islice(self._rows(), start, None)
        refuse_changed(self.file, afterwards=True)

    def count(self) -> int:
        return sum(1 for _ in self._rows())

    def exact(self, origin: str) -> str:
        return origin

    def _rows(self) -> Iterator[Row]:
        path = self.file.path
        csv.field_size_limit(content.LONGEST_LINE)
        # The reader cannot continue after an exception of its input, so bytes that are not UTF-8 pass through it.
        decoded = (line.decode('utf-8', 'surrogateescape') + '\n' for line in split_lines(read_content(path), path))
        reader = csv.reader(decoded, delimiter='\t' if self.file.kind == 'tsv' else ',', strict=True)
        header: list[str] | None = None
        while True:
            origin = f'{path}:{reader.line_num + 1}'
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if 'unexpected end of data' in str(error) or 'field limit' in str(error):
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
class RowGroups:
    """The row groups start to stop - 1 of a .parquet file. The origin of a row is its number in the file, from 1."""

    file: TextFile
    fields: tuple[str, ...]
    start: int = 0
    stop: int | None = None

    def rows(self, start: int = 0) -> Iterator[Row]:
        refuse_changed(self.file)
        with _parquet(self.file) as parquet:
            n_rows = [parquet.metadata.row_group(group).num_rows for group in range(parquet.num_row_groups)]
            group, row = self.start, sum(n_rows[: self.start])
            while group < len(n_rows) and start >= n_rows[group]:
                start -= n_rows[group]
                row += n_rows[group]
                group += 1
            batches = parquet.iter_batches(
                _ROWS_AT_ONCE, range(group, len(n_rows))[: self._n_groups(group)], columns=self._columns(parquet)
            )
            for batch in batches:
                yield from _records(batch.slice(min(start, len(batch))), row + start, self.file)
                row += len(batch)
                start = max(0, start - len(batch))
        refuse_changed(self.file, afterwards=True)

    def count(self) -> int:
        with _parquet(self.file) as parquet:
            groups = range(parquet.num_row_groups)[self.start : self.stop]
            return sum(parquet.metadata.row_group(group).num_rows for group in groups)

    def exact(self, origin: str) -> str:
        return origin

    def cut(self, positions: Sequence[int]) -> list['RowGroups | None']:
        """Parts of the whole file, cut at the row groups nearest to these byte positions; None for an empty part."""
        with _parquet(self.file) as parquet:
            sizes = [parquet.metadata.row_group(group).total_byte_size for group in range(parquet.num_row_groups)]
        ends = list(itertools.accumulate(sizes))
        total = max(1, ends[-1] if ends else 1)
        bounds = [0, *(min(1 + bisect_left(ends, at * total / self.file.size), len(sizes)) for at in positions)]
        parts = [replace(self, start=start, stop=stop) for start, stop in itertools.pairwise([*bounds, len(sizes)])]
        return [part if not number or part.start != part.stop else None for number, part in enumerate(parts)]

    def _n_groups(self, group: int) -> int | None:
        return None if self.stop is None else max(0, self.stop - group)

    def _columns(self, parquet: 'pyarrow.parquet.ParquetFile') -> list[str] | None:
        names = parquet.schema_arrow.names
        columns = [name if name in names else name.partition('.')[0] for name in self.fields]
        return columns if columns and set(columns) <= set(names) else None  # all, for the error about a missing field


@contextlib.contextmanager
def _parquet(file: TextFile) -> Iterator['pyarrow.parquet.ParquetFile']:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f'{file.path}: reading .parquet needs pyarrow\n  {install_extra("datasets")}') from None
    if file.is_compressed:
        raise UserError(
            f'{file.path}: a .parquet file cannot be read through {file.path.suffix}\n'
            '  decompress it; .parquet has its own compression'
        )
    with opened(file.path) as stream:
        try:
            with pyarrow.parquet.ParquetFile(stream) as parquet:
                yield parquet
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


def _header(values: list[str], origin: str) -> list[str]:
    names = [values[0].removeprefix(_BOM), *values[1:]] if values else []
    twice = {name for name in names if names.count(name) > 1}
    if not names or twice:
        what = f'the header names {sorted(twice)[0]!r} twice' if twice else 'no header'
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
