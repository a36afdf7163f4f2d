"""Tables of text: for a terminal, in Markdown, and as CSV. The first row has the headings.

A table for a terminal is as wide as it, or as COLUMNS says. It first drops columns that matter less, and names
them below the table; then it wraps long cells. A pipe has no width: scripts get every column, and a line for each row.
"""

import csv
import io
import shutil
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import rich.console
import rich.table
import rich.text

from pretrax.errors import printable

type Rows = Sequence[Sequence[str]]
_GAP = 2  # spaces between columns
_NARROWEST, _ENOUGH = 8, 24  # a column of text in a narrow terminal, and while other columns are dropped


def terminal_width() -> int | None:
    """Columns of the terminal, or of COLUMNS; None: the output is not a terminal."""
    return shutil.get_terminal_size((0, 0)).columns or None


def text_table(
    rows: Rows, left: Collection[int] = (), drop: Sequence[str] = (), more: str = '', width: int | None = None
) -> list[str]:
    """The lines of a table for a terminal.

    Args:
        left: the columns of text, which begin at the left edge and may be wrapped; numbers end at the right edge.
        drop: the headings of columns that a narrow terminal leaves out, the least important first.
        more: what shows the columns that are left out, such as '--json'.
        width: of the terminal (default: `terminal_width`).
    """
    width = width or terminal_width()
    if width is None:  # of many rows, in no time
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        cells = (
            [f'{c:<{n}}' if i in left else f'{c:>{n}}' for i, (c, n) in enumerate(zip(row, widths, strict=True))]
            for row in rows
        )
        return ['  '.join(row).rstrip() for row in cells]
    table, dropped = fitted_table(rows, left, drop, width)
    console = rich.console.Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as found:
        console.print(table, crop=False)
    lines = [line.rstrip() for line in found.get().splitlines()]
    if not dropped:
        return lines
    how = ' or '.join(['a wider terminal', *([more] if more else [])])
    return [*lines, *textwrap.wrap(f'not shown: {", ".join(dropped)} (see {how})', width)]


def fitted_table(
    rows: Sequence[Sequence[str | rich.text.Text]], left: Collection[int], drop: Sequence[str], width: int
) -> tuple[rich.table.Table, list[str]]:
    """A table of at most this width, and the headings of the columns that it leaves out; see `text_table`."""
    cells = [
        [cell if isinstance(cell, rich.text.Text) else rich.text.Text(printable(cell)) for cell in row] for row in rows
    ]
    # Numbers are never broken; their headings and text are.
    widths = [[cell.cell_len for cell in column] for column in zip(*cells, strict=True)]
    least = [min(max(n), _NARROWEST) if i in left else max(n[1:], default=0) for i, n in enumerate(widths)]
    wanted = [max(least[i], min(max(n) if i in left else n[0], _ENOUGH)) for i, n in enumerate(widths)]
    headings, kept, dropped = [str(heading) for heading in rows[0]], list(range(len(widths))), list[str]()
    for heading in drop:
        if sum(wanted[i] + _GAP for i in kept) - _GAP <= width:
            break
        if heading in headings:
            kept.remove(headings.index(heading))
            dropped.append(heading)
    needs = {i: max(widths[i]) - least[i] for i in kept}
    spare = max(0, width + _GAP - sum(least[i] + _GAP for i in kept))
    for number, i in enumerate(sorted(kept, key=needs.__getitem__)):  # those that need little get all of it
        needs[i] = min(needs[i], spare // (len(kept) - number))
        spare -= needs[i]
    table = rich.table.Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style='')
    for i in kept:
        justify = 'left' if i in left else 'right'
        table.add_column(cells[0][i], justify=justify, overflow='fold', width=max(1, least[i] + needs[i]))
    for row in cells[1:]:
        table.add_row(*(row[i] for i in kept))
    return table, dropped


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
