"""Compare runs: what differs, and which is better.

Runs that differ only in their seed form an arm. The first arm is the baseline.
"""

import math
import pathlib
from typing import Annotated

import typer

from pretrax.errors import UserError


def compare(
    runs: Annotated[tuple[str, ...], typer.Argument(metavar='RUN...', help='Directories of runs, two or more.')],
    out: Annotated[
        str | None,
        typer.Option('--out', '-o', metavar='FILE', help='A .md, .html, .csv or .json file. [default: the terminal]'),
    ] = None,
    key: Annotated[
        str | None,
        typer.Option('--key', '-k', help='A key of metrics.jsonl. [default: val_loss if all runs have it, else loss]'),
    ] = None,
    seed_noise: Annotated[
        float | None,
        typer.Option(metavar='SD', help='Standard deviation of the final loss between seeds, if you know it.'),
    ] = None,
    confidence: Annotated[
        float, typer.Option(min=0.5, max=0.9999, help='Confidence level of all intervals together.')
    ] = 0.95,
    window: Annotated[
        float, typer.Option(min=0.001, max=0.5, help='The last part of a run, over which training losses are averaged.')
    ] = 0.1,
    separate: Annotated[bool, typer.Option('--separate', help='Every run is an arm of its own.')] = False,
) -> None:
    from pretrax.cli._output import write_output
    from pretrax.view.compare import text as compare_text
    from pretrax.view.compare.comparison import Options
    from pretrax.view.compare.comparison import compare as compared
    from pretrax.view.compare.page import compare_page
    from pretrax.view.record.run_record import read_run

    formats = {
        '.md': compare_text.as_markdown,
        '.html': compare_page,
        '.csv': compare_text.as_csv,
        '.json': compare_text.as_json,
    }
    suffix = pathlib.PurePath(out or '').suffix.lower()
    if out is not None and suffix not in formats:
        raise UserError(f'cannot write {out}: expected a name that ends in {", ".join(formats)}')
    if not (math.isfinite(confidence) and math.isfinite(window)):
        raise UserError('--confidence and --window must be numbers')
    if seed_noise is not None and not 0 < seed_noise < math.inf:
        raise UserError(f'--seed-noise {seed_noise:g}: expected a number above 0')
    records = [read_run(run) for run in runs]
    for warning in (text for record in records for text in record.warnings):
        typer.echo(f'WARNING: {warning}', err=True)
    result = compared(records, Options(key, window, confidence, seed_noise, separate))
    if out is None:
        print(compare_text.as_text(result))
        return
    write_output(out, formats[suffix](result))
    print(f'wrote {out}')
