"""List runs with their state, progress and losses."""

import dataclasses
import json
import math
from typing import Literal

from pretrax.errors import UserError
from pretrax.option import argument, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    directories: tuple[str, ...] = argument(
        'Directories of runs, on disks or in buckets. [default: runs]', default=(), metavar='[DIRECTORY]...'
    )
    sort: Literal['name', 'state', 'step', 'progress', 'loss', 'val_loss', 'tokens_per_second', 'age'] = option(
        'Order: the best or newest first.', '-s', default='name'
    )
    reverse: bool = option('Reverse the order.', '-r', default=False)
    state: tuple[str, ...] = option('Only runs in this state; may be repeated.', default=(), metavar='STATE')
    match: str = option("Only runs of such a name: 'base-*'.", default='*', metavar='PATTERN')
    first: int = option('The first N of them; 0: all.', '-n', default=0, min=0, metavar='N')
    as_json: bool = option('Print JSON.', '--json', default=False)
    out: str | None = option('A .csv or .json file.', '-o', metavar='FILE')


def runs(options: Options) -> None:
    from pretrax.cli._output import suffix_of, write_output
    from pretrax.view.run_list import STATES, list_runs, runs_text, select
    from pretrax.view.tables import csv_records

    out = options.out
    suffix = suffix_of(out, ('.csv', '.json'))
    for name in options.state:
        if name not in STATES:
            raise UserError(f'--state {name}: expected one of {", ".join(STATES)}')
    found = select(list_runs(options.directories or ['runs']), options.state, options.match, options.sort)
    found = (found[::-1] if options.reverse else found)[: options.first or None]
    records = [
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in record.items()}
        for record in map(dataclasses.asdict, found)
    ]
    if out is not None:
        write_output(out, csv_records(records) if suffix == '.csv' else json.dumps(records, indent=1) + '\n')
        print(f'wrote {out}')
    elif options.as_json:
        print(json.dumps(records, indent=1))
    elif not found:
        print('no such runs')
    else:
        print('\n'.join(runs_text(found)))
        if any(run.is_partial for run in found):
            print('* of the last 8 MiB of its metrics')
