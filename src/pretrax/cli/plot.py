"""Draw metrics of one or more runs."""

import pathlib
import shutil
from typing import Annotated, Literal

import typer

from pretrax.errors import UserError


def plot(
    runs: Annotated[tuple[str, ...], typer.Argument(metavar='RUN...', help='Directories of runs.')],
    out: Annotated[
        str | None,
        typer.Option(
            '--out', '-o', metavar='FILE', help='A .png, .svg, .pdf, .html or .csv file. [default: the terminal]'
        ),
    ] = None,
    key: Annotated[
        tuple[str, ...],
        typer.Option('--key', '-k', help='A key of metrics.jsonl; may be repeated. [default: loss and val_loss]'),
    ] = (),
    x: Annotated[Literal['step', 'tokens', 'time'], typer.Option('--x', help='The x axis.')] = 'step',
    smooth: Annotated[
        float, typer.Option(min=0, metavar='STEPS', help='Half-life of an exponential moving average; 0: none.')
    ] = 0,
    log_x: Annotated[bool, typer.Option('--log-x', help='A logarithmic x axis.')] = False,
    log_y: Annotated[bool, typer.Option('--log-y', help='Logarithmic y axes.')] = False,
) -> None:
    from pretrax.cli._output import write_output
    from pretrax.view.charts.curves import chart, curve, default_keys, load_runs, table
    from pretrax.view.charts.page import chart_page
    from pretrax.view.charts.picture import SUFFIXES, chart_picture
    from pretrax.view.charts.text import chart_text

    suffix = pathlib.PurePath(out or '').suffix.lower()
    if out is not None and suffix not in (*SUFFIXES, '.html', '.csv'):
        raise UserError(f'cannot draw {out}: expected a name that ends in {", ".join(SUFFIXES)}, .html or .csv')
    loaded = load_runs(runs)
    curves = [curve(run, name, x) for name in dict.fromkeys(key or default_keys(loaded)) for run in loaded]
    if out is None:
        drawn = chart(curves, x, smooth, log_x, log_y)
        print(chart_text(drawn, width=min(shutil.get_terminal_size().columns, 120)))
        return
    if suffix == '.csv':
        content = table(curves, x, smooth).encode()
    else:
        drawn = chart(curves, x, smooth, log_x, log_y)
        content = (
            chart_page(drawn, ', '.join(run.name for run in loaded)).encode()
            if suffix == '.html'
            else chart_picture(drawn, suffix)
        )
    write_output(out, content)
    print(f'wrote {out}')
