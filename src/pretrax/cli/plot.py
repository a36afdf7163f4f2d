"""`pretrax plot RUN...`: compare the curves of runs, in the terminal or as a file."""

import pathlib
import shutil

from pretrax.errors import UserError


def plot(runs: list[str], out: str | None = None, key: str = 'loss') -> None:
    """Draw one key of `metrics.jsonl` for each run: in the terminal, or to OUT (.svg, or .html that holds the SVG)."""
    from pretrax.observe import plot as chart

    suffix = pathlib.Path(out).suffix.lower() if out else None
    if suffix not in (None, '.svg', '.html'):
        raise UserError(
            f'cannot draw {out}: expected a name that ends in .svg or .html\n'
            'for another format open the .svg in a browser or a drawing program; for other tools read metrics.jsonl'
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
