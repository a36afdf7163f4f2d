"""Tables, a document a row: .csv and .tsv with a header line, and .parquet, of which only the asked columns are read."""

import contextlib
import csv
import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pretrax.data.corpus import blocks as content
from pretrax.data.corpus.blocks import blocks, lines
from pretrax.data.corpus.files import TextFile
from pretrax.data.corpus.parts import Row, refuse_changed
from pretrax.data.corpus.storage import opened, refusal
from pretrax.errors import UserError

if TYPE_CHECKING:
    import pyarrow.parquet

_ROWS_AT_ONCE = 256
_BOM = '\ufeff'


@dataclass(frozen=True)
class Delimited:
    """A .csv or .tsv file, quoted as RFC 4180 says; the first line names the fields. A place is a row's first line."""

    file: TextFile

    def rows(self, start: int = 0) -> Iterator[Row]:
        refuse_changed(self.file)
        yield from itertools.islice(self._rows(), start, None)
        refuse_changed(self.file, afterwards=True)

    def count(self) -> int:
        return sum(1 for _ in self._rows())

    def exact(self, place: str) -> str:
        return place

    def _rows(self) -> Iterator[Row]:
        path = self.file.path
        csv.field_size_limit(content.LONGEST_LINE)
        # The reader cannot go on after an error in what it reads from, so that bytes which are not UTF-8 pass through it.
        decoded = (line.decode('utf-8', 'surrogateescape') + '\n' for line in lines(blocks(path), path))
        reader = csv.reader(decoded, delimiter='\t' if self.file.kind == 'tsv' else ',', strict=True)
        header: list[str] | None = None
        while True:
            place = f'{path}:{reader.line_num + 1}'
            try:
                values = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if 'unexpected end of data' in str(error) or 'field limit' in str(error):
                    raise UserError(f'{place}: a quote opens in this row and does not close') from None
                if header is None:
                    raise UserError(f'{place}: {error}') from None
                yield Row(place, UserError(f'{place}: {error}'))
                continue
            if header is None:
                header = _header(values, place)
            elif not values:
                yield Row(place, '')
            else:
                yield Row(place, _record(header, values, place))


@dataclass(frozen=True)
class RowGroups:
    """The row groups start to stop - 1 of a .parquet file. A place is the number of a row in the file, from 1."""

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

    def exact(self, place: str) -> str:
        return place

    def cut(self, positions: Sequence[int]) -> list['RowGroups | None']:
        """Parts of the whole file, cut at the row groups nearest to these of its bytes."""
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
        return columns if set(columns) <= set(names) else None  # all of them, for what is said about a missing one


@contextlib.contextmanager
def _parquet(file: TextFile) -> Iterator['pyarrow.parquet.ParquetFile']:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{file.path}: reading .parquet takes pyarrow\n  pip install 'pretrax[datasets]'") from None
    if file.is_compressed:
        raise UserError(
            f'{file.path}: .parquet is compressed within\n  unpack it: {file.path.suffix} around it hides its rows'
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
    except UnicodeDecodeError:  # a column of strings may hold any bytes: which row is it?
        for number in range(len(batch)):
            place = f'{file.path}:{row + number + 1}'
            try:
                yield Row(place, batch.slice(number, 1).to_pylist()[0])
            except UnicodeDecodeError as error:
                yield Row(place, UserError(f'{place}: not utf-8 at byte {error.start} ({error.reason})'))
        return
    for number, record in enumerate(records, row + 1):
        yield Row(f'{file.path}:{number}', record)


def _header(values: list[str], place: str) -> list[str]:
    names = [values[0].removeprefix(_BOM), *values[1:]] if values else []
    twice = {name for name in names if names.count(name) > 1}
    if not names or twice:
        what = f'the header names {sorted(twice)[0]!r} twice' if twice else 'no header'
        raise UserError(f'{place}: {what}\n  expected the names of the fields in the first line')
    return names


def _record(header: list[str], values: list[str], place: str) -> dict[str, Any] | UserError:
    if len(values) != len(header):
        return UserError(f'{place}: {len(values)} fields\n  the header has {len(header)}: {", ".join(header)[:80]}')
    for name, value in zip(header, values, strict=True):
        if not value.isascii():
            try:
                value.encode()
            except UnicodeEncodeError:
                return UserError(f'{place}: field {name!r} is not utf-8')
    return dict(zip(header, values, strict=True))
