"""Tables of text: for a terminal, in Markdown, and as CSV. The first row has the headings."""

import csv
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

type Rows = Sequence[Sequence[str]]


def text_table(rows: Rows, left: Collection[int] = ()) -> list[str]:
    """Lines with aligned columns; those in `left` begin at the left edge, others end at the right edge."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            f'{cell:<{width}}' if column in left else f'{cell:>{width}}'
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append('  '.join(cells).rstrip())
    return lines


def markdown_table(rows: Rows) -> list[str]:
    """The lines of a table in Markdown."""
    head, *body = rows
    lines = [head, ['---'] * len(head), *body]
    return ['| ' + ' | '.join(markdown_text(cell) for cell in row) + ' |' for row in lines]


def markdown_text(text: str) -> str:
    """Text as one cell or line of Markdown that has no markup of its own."""
    for mark in '\\`*[]|':
        text = text.replace(mark, f'\\{mark}')
    return text.replace('&', '&amp;').replace('<', '&lt;').replace('\n', ' ')


def csv_table(rows: Iterable[Iterable[Any]], end: str = '\n') -> str:
    """The rows as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator=end).writerows(rows)
    return text.getvalue()


def csv_records(records: Sequence[Mapping[str, Any]]) -> str:
    """Records with the same keys as CSV, whose first row has the keys."""
    return csv_table([list(records[0]) if records else [], *(list(record.values()) for record in records)])
