"""Compare runs: what differs, and which is better.

Runs that differ only in their seed form an arm. The first arm is the baseline.
"""

import math

import typer

from pretrax.errors import UserError
from pretrax.option import argument, option


def compare(
    runs: tuple[str, ...] = argument('Directories of runs, two or more.', metavar='RUN...'),
    out: str | None = option('A .md, .html, .csv or .json file. [default: the terminal]', '-o', metavar='FILE'),
    key: str | None = option('A key of metrics.jsonl. [default: val_loss if all runs have it, else loss]', '-k'),
    seed_noise: float | None = option(
        'Standard deviation of the final loss between seeds, if you know it.', metavar='SD'
    ),
    confidence: float = option('Confidence level of all intervals together.', default=0.95, min=0.5, max=0.9999),
    window: float = option(
        'The last part of a run, over which training losses are averaged.', default=0.1, min=0.001, max=0.5
    ),
    separate: bool = option('Every run is an arm of its own.', default=False),
) -> None:
    from pretrax.cli._output import suffix_of, write_output
    from pretrax.view.compare import text as compare_text
    from pretrax.view.compare.comparison import Options
    from pretrax.view.compare.comparison import compare as compared
    from pretrax.view.compare.text import compare_page
    from pretrax.view.record.run_record import read_run

    formats = {
        '.md': compare_text.as_markdown,
        '.html': compare_page,
        '.csv': compare_text.as_csv,
        '.json': compare_text.as_json,
    }
    suffix = suffix_of(out, formats)
    if not (math.isfinite(confidence) and math.isfinite(window)):
        raise UserError('--confidence and --window must be numbers')
    if seed_noise is not None and not 0 < seed_noise < math.inf:
        raise UserError(f'--seed-noise {seed_noise:g}: expected a number above 0')
    records = [read_run(run, exact=[key] if key else ()) for run in runs]
    for warning in (text for record in records for text in record.warnings):
        typer.echo(f'WARNING: {warning}', err=True)
    result = compared(records, Options(key, window, confidence, seed_noise, separate))
    if out is None:
        print(compare_text.as_text(result))
        return
    write_output(out, formats[suffix](result))
    print(f'wrote {out}')
