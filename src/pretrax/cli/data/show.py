"""Print the tokens of a step of a run: exactly what the step saw, with the boundaries of documents.

`pretrax data show runs/quickstart --step 120` prints the first rows of the batch of step 120. A warning about a skipped
step gives the number of its batch: `pretrax data show runs/quickstart --batch 119`. Control characters are shown as
U+FFFD.
"""

from pretrax.cli._arguments import Plugins
from pretrax.errors import UserError
from pretrax.option import argument, option


def show(
    run: str = argument('The directory of a run, such as runs/NAME.', metavar='RUN'),
    step: int | None = option('The batch of this step.', metavar='N'),
    batch: int | None = option('The batch with this number, from 0.', min=0, metavar='N'),
    rows: int = option('Print the first K rows.', default=4, min=1, metavar='K'),
    ids: bool = option('Print the ids of the tokens too.', default=False),
    plugin: Plugins = (),
) -> None:
    from pretrax.cli._arguments import load_plugins
    from pretrax.run.seen_batch import row_text, seen_batch

    if (step is None) == (batch is None):
        raise UserError('give --step N or --batch N, one of them')
    load_plugins(plugin)
    seen = seen_batch(run, step, batch, print)
    of_step = '' if step is None else f' of step {step:,}'
    host, sources = seen.rows(rows), seen.source_of_rows(rows)
    length = host.tokens.shape[1]
    print(f'batch {seen.index:,}{of_step}: {seen.n_rows:,} rows of {length:,} tokens; the first {len(sources):,}:')
    for row, source in enumerate(sources):
        print(f'\nrow {row}' + (f', from {source}' if source else ''))
        for line in row_text(host, row, seen.source.tokenizer, ids):
            print(line)
