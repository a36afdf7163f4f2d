"""Import a Hugging Face checkpoint as a run.

The run can generate text, be exported, and be the init_from of another run.
"""

from pretrax.option import argument, option


def import_(
    source: str = argument('A directory, or org/name[@revision] on the hub.', metavar='HF_DIR_OR_ID'),
    out: str | None = option('Directory of the new run. [default: runs/NAME]', '-o', metavar='RUN'),
    begin_of_text: str | None = option(
        'What begins a text, as data.begin_of_text: the name of a token, true or false. [default: as tokenizer.json '
        'says]',
        metavar='TOKEN',
    ),
    allow_not_finite: bool = option('Import weights that are NaN or infinite, and only report them.', default=False),
) -> None:
    from pretrax.weights.imported import import_checkpoint

    choice = {'true': True, 'false': False}.get(begin_of_text or '', begin_of_text)
    run, count = import_checkpoint(source, out, choice, allow_not_finite)
    print(f'imported {count:,} parameters into {run}')
    print(f'try: pretrax generate {run}; init_from: {run} in a configuration; pretrax export {run} DIR')
