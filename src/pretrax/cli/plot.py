"""Draw a metric of one or more runs."""

import pathlib
import shutil
from typing import Annotated

import typer

from pretrax.errors import UserError


def plot(
    runs: Annotated[list[str], typer.Argument(metavar='RUN...', help='Directories of runs.')],
    out: Annotated[
        str | None, typer.Option('--out', '-o', metavar='FILE', help='An .svg or .html file. [default: the terminal]')
    ] = None,
    key: Annotated[str, typer.Option('--key', '-k', help='A key of metrics.jsonl.')] = 'loss',
) -> None:
    from pretrax.observe import plot as chart

    suffix = pathlib.Path(out).suffix.lower() if out else None
    if suffix not in (None, '.svg', '.html'):
        raise UserError(
            f'cannot draw {out}: expected a name that ends in .svg or .html\n'
            'for another format, open the .svg in a browser or a drawing program; other tools can read metrics.jsonl'
        )
    series = chart.load_series(runs, key)
    if out is None:
        print(chart.text(series, key, width=min(shutil.get_terminal_size().columns, 120)))
        return
    image = chart.svg(series, key)
    if suffix == '.html':
        image = f'<!doctype html>\n<meta charset="utf-8">\n<title>{len(series)} runs</title>\n{image}'
    path = pathlib.Path(out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(image, encoding='utf-8')
    except OSError as error:
        raise UserError(f'cannot write {out}: {error.strerror}') from error
    print(f'wrote {out}')
