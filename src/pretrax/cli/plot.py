"""Draw metrics of one or more runs."""

import shutil
from typing import Literal

from pretrax.option import argument, option


def plot(
    runs: tuple[str, ...] = argument('Directories of runs.', metavar='RUN...'),
    out: str | None = option('A .png, .svg, .pdf, .html or .csv file. [default: the terminal]', '-o', metavar='FILE'),
    key: tuple[str, ...] = option(
        'A key of metrics.jsonl; may be repeated. [default: loss and val_loss]', '-k', default=()
    ),
    x: Literal['step', 'tokens', 'time'] = option('The x axis.', default='step'),
    smooth: float = option('Half-life of an exponential moving average; 0: none.', default=0, min=0, metavar='STEPS'),
    log_x: bool = option('A logarithmic x axis.', default=False),
    log_y: bool = option('Logarithmic y axes.', default=False),
) -> None:
    from pretrax.cli._output import suffix_of, write_output
    from pretrax.view.charts.curves import DRAWN, chart, curve, default_keys, load_runs, table
    from pretrax.view.charts.page import chart_page
    from pretrax.view.charts.picture import SUFFIXES, chart_picture
    from pretrax.view.charts.text import chart_text

    suffix = suffix_of(out, (*SUFFIXES, '.html', '.csv'))
    loaded = load_runs(runs, {*(key or DRAWN), x})
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
