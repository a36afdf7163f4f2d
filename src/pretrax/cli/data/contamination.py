"""Look up the text of tasks in the tokens of training.

Texts are compared by words, without case and punctuation. A document of a task is contaminated if 13 words of it in a
row (--words) are in one training document.
"""

import dataclasses
from pathlib import Path

from pretrax.cli.data._token_files import TokenFileOptions
from pretrax.errors import UserError
from pretrax.option import argument, option
from pretrax.storage import locate

_SHOWN = 3  # documents of each task


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    path: str = argument('Token files, or a run whose tokens are in its directory.', metavar='PATH')
    tasks: str | None = option('Tasks of `pretrax eval`. [default: all, without --file]', metavar='A,B')
    file: tuple[str, ...] = option(
        'A text, rows such as JSON lines, or a directory; may be repeated.', default=(), metavar='FILE'
    )
    words: int = option('Words in an n-gram.', default=13, min=2, metavar='N')
    limit: int = option('Documents of each kind, as in `pretrax eval`.', default=50, min=1)
    seed: int = option('Seed of the choice of documents, as in `pretrax eval`.', default=0)
    split: str = option('Split of the token files.', default='train', metavar='NAME')
    workers: int | None = option('Processes. [default: one per core]', min=1)
    json: str | None = option('Also write all documents to a file.', metavar='FILE')
    token_files: TokenFileOptions


def contamination(options: Options) -> None:
    from pretrax.cli._output import write_output
    from pretrax.cli.data._lookup import look_up
    from pretrax.evaluate.contamination import Ngrams, as_json, as_text, overlaps, texts_of_files, texts_of_task
    from pretrax.evaluate.results import TASKS
    from pretrax.evaluate.task import Settings, choose

    names = [] if options.file else list(TASKS)
    if options.tasks is not None:
        names = [name.strip() for name in options.tasks.split(',')]
    settings = Settings(limit=options.limit, seed=options.seed)
    documents = {task.name: texts_of_task(task, settings) for task in choose(names, TASKS)}
    documents |= {place: texts_of_files(place) for place in options.file}
    place, split = tokens_of(options.path), options.split
    files = options.token_files.open(place)
    if files.tokenizer is None:
        raise UserError(f'{place} does not name its tokenizer\n  give it: --tokenizer FILE')
    if split not in files.splits:
        raise UserError(f'{place} has no split {split!r}\n  splits: {", ".join(files.splits)}')
    ngrams = Ngrams(documents, options.words)
    store = files.splits[split]
    arguments = options.token_files.arguments()
    places = look_up(ngrams, files.path, arguments, split, store.n_tokens, options.workers)
    found = overlaps(ngrams, places)
    print(as_text(found, _SHOWN))
    if options.json is not None:
        write_output(options.json, as_json(found, options.words, place) + '\n')


def tokens_of(path: str) -> str:
    """The token files of a run, or the path itself."""
    prepared = sorted(directory.glob('data/tokens-*')) if isinstance(directory := locate(path), Path) else []
    if len(prepared) > 1:
        raise UserError(
            f'{path} has several token files\n  give one of them: {", ".join(str(place) for place in prepared)}'
        )
    return str(prepared[0]) if prepared else path
