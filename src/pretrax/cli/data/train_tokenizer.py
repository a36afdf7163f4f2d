"""Train a tokenizer on text."""

from pretrax.cli._output import write_new
from pretrax.errors import UserError
from pretrax.option import REQUIRED, argument, option
from pretrax.storage import locate


def train_tokenizer(
    source: str = argument('A YAML file, or a value of data.text: files or stdlib.', metavar='CONFIG|TEXT'),
    out: str = option('A new tokenizer.json.', '-o', default=REQUIRED, metavar='FILE'),
    overrides: tuple[str, ...] = argument('Changes to the configuration.', default=(), metavar='KEY=VALUE'),
    vocab_size: int | None = option('Vocabulary size. [default: data.vocab_size]', min=257, metavar='N'),
    model: str = option('bpe or unigram.', default='bpe', metavar='MODEL'),
) -> None:
    import pydantic

    from pretrax.config import load
    from pretrax.data.options import TextOptions, options_of_text
    from pretrax.data.text import find_corpus
    from pretrax.data.tokenize.prepare import Work, train_on_corpus
    from pretrax.data.tokenizers.tokenizer_training import MODELS

    if model not in MODELS:
        raise UserError(f'--model {model}: no such model\n  expected {" or ".join(MODELS)}')
    path = locate(out)
    if path.exists():
        raise UserError(f'--out {out}: this file already exists\n  remove it, or write to another file')
    if source.endswith(('.yaml', '.yml')):
        section = load(source, overrides).data
        options = options_of_text(section.name, section.options)
    elif overrides:
        raise UserError(
            f'{" ".join(overrides)}: changes a configuration, but {source} is not one\n  expected a .yaml file'
        )
    else:
        try:
            options = TextOptions.model_validate({'text': source})
        except pydantic.ValidationError as error:
            raise UserError(f'{source!r}: {error.errors()[0]["msg"]}') from None
    work = Work(options.engine, options.workers) if isinstance(options, TextOptions) else Work()
    corpus = find_corpus(options, print)
    tokenizer = train_on_corpus(corpus, print, vocab_size or options.vocab_size or 4096, MODELS[model], work)
    write_new(path, tokenizer.content)
    print(f'next: data.tokenizer={out} in a configuration, or after pretrax train CONFIG')
