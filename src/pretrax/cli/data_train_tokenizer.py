"""`pretrax data train-tokenizer CONFIG|TEXT --out tokenizer.json`: a tokenizer of one's own text."""

from pathlib import Path

import pydantic

from pretrax.cli.data_tokenize import text_options
from pretrax.config import load
from pretrax.data.options import TextOptions
from pretrax.data.text import find_corpus
from pretrax.data.tokenize.prepare import Work, train_on_corpus
from pretrax.data.tokenizers.tokenizer_training import MODELS
from pretrax.errors import UserError
from pretrax.machine.atomic import write_file


def train_tokenizer(source: str, overrides: list[str], out: str, vocab_size: int | None, model: str) -> None:
    """Writes a tokenizer.json, whole or not at all."""
    if model not in MODELS:
        raise UserError(f'--model {model}: no such model\n  expected {" or ".join(MODELS)}')
    path = Path(out).expanduser()
    if path.exists():
        raise UserError(f'--out {out}: is there already\n  remove it, or write to another file')
    if source.endswith(('.yaml', '.yml')):
        options = text_options(load(source, overrides))
    elif overrides:
        raise UserError(
            f'{" ".join(overrides)}: changes a configuration, and {source} is none\n  expected a .yaml file'
        )
    else:
        try:
            options = TextOptions.model_validate({'text': source})
        except pydantic.ValidationError as error:
            raise UserError(f'{source!r}: {error.errors()[0]["msg"]}') from None
    work = Work(options.engine or 'local', options.workers)
    corpus = find_corpus(options, print)
    tokenizer = train_on_corpus(corpus, print, vocab_size or options.vocab_size or 4096, MODELS[model], work)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, tokenizer.content)
    except OSError as error:
        raise UserError(f'--out {out}: cannot write: {error.strerror}') from error
    print(f'wrote {out}\nnext: data.tokenizer={out} in a configuration, or after pretrax train CONFIG')
