"""Print where the time of traced steps went.

By scope of the model, operation or source line: time, FLOP/s, bytes/s, fraction of the roofline, exposed communication
and gaps, with what to try. To trace steps, train with log.profile=3 or log.profile_on_slow=3.0.
"""

from typing import Literal

from pretrax.option import argument, option


def trace(
    run: str = argument('Directory of a run, or a trace.', metavar='RUN'),
    by: Literal['scope', 'operation', 'source'] = option('What the rows of the table are grouped by.', default='scope'),
    step: int | None = option('Only this step. [default: all steps of the newest trace]', metavar='N'),
    out: str | None = option('A .csv, .json or .html file. [default: the terminal]', '-o', metavar='FILE'),
) -> None:
    from pretrax.cli._output import suffix_of, write_output
    from pretrax.storage import locate
    from pretrax.view.trace.run_trace import open_newest
    from pretrax.view.trace.table import as_csv, as_html, as_json, text

    suffix = suffix_of(out, ('.csv', '.json', '.html'))
    steps = open_newest(locate(run), step)
    if out is None:
        print(text(steps, by))
        return
    if suffix == '.html':
        content = as_html(steps, by, f'Trace of {run}')
    else:
        content = as_csv(steps, by) if suffix == '.csv' else as_json(steps, by)
    write_output(out, content)
    print(f'wrote {out}')
