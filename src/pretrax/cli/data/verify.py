"""Check token files, and tokenize a sample of them again."""

import dataclasses
import itertools
from typing import TYPE_CHECKING

from pretrax.cli.data._token_files import TokenFileOptions, TokenPath
from pretrax.errors import UserError
from pretrax.option import option
from pretrax.storage import locate

if TYPE_CHECKING:
    from pretrax.data.tokens.token_files import TokenFiles

_SAMPLE = 200  # documents to tokenize again
_LONGEST = 1 << 16  # tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    path: TokenPath
    files: TokenFileOptions
    text: str | None = option('The text: check that its first documents are in the tokens.', metavar='TEXT')
    field: str = option('The field of a row that holds the text.', default='text', metavar='NAME')


def verify(options: Options) -> None:
    from pretrax.data.tokens import flat_tokens_check
    from pretrax.data.tokens.flat_tokens import FlatTokens
    from pretrax.data.tokens.token_files import is_flat_tokens
    from pretrax.data.tokens.token_summary import tokenized_differently

    path = options.path
    place, files = locate(path), options.files.open(path)
    if is_flat_tokens(place):
        flat_tokens_check.verify(place)
        print('every checksum is right, and counts, starts and ends of documents agree')
    else:
        print('every id is in the vocabulary, and the documents add up; this format has no checksums')
    for split, store in files.splits.items():
        if files.tokenizer is None:
            print(f'{split}: not tokenized again, since no tokenizer is known; --tokenizer names one')
            continue
        n, different = tokenized_differently(store, files.tokenizer, _SAMPLE, _LONGEST)
        if isinstance(store, FlatTokens) and 2 * len(different) > n:
            raise UserError(
                f'{path}: the tokenizer gives other tokens for the text of {len(different)} of {n} documents '
                f'of {split}\n'
                '  another tokenizer made these tokens'
            )
        same = f'{n - len(different)} of {n} documents give the same tokens when their text is tokenized again'
        print(f'{split}: {same}' + (f'; document {different[0]} does not' if different else ''))
    if options.text is not None:
        _verify_text(path, files, options.text, options.field)


def _verify_text(path: str, files: 'TokenFiles', text: str, field: str) -> None:
    """Checks that the first documents of the text are in the tokens."""
    from pretrax.data.corpus.corpus import Corpus
    from pretrax.data.corpus.listing import find_files
    from pretrax.data.corpus.selection import Selection
    from pretrax.data.corpus.stdlib import stdlib_files
    from pretrax.data.tokens.token_summary import missing_from

    if files.tokenizer is None:
        raise UserError(f'{path}: no tokenizer is known to tokenize {text} with\n  name it: --tokenizer')
    corpus = Corpus(stdlib_files() if text == 'stdlib' else find_files(text), Selection(field=field))
    sample = ((found.origin, found.text) for found in itertools.islice(corpus.documents(), _SAMPLE))
    n, missing = missing_from(files.splits.values(), files.tokenizer, sample)
    if len(missing) == n:
        raise UserError(
            f'{path}: it holds none of the first {n} documents of {text}, tokenized by its tokenizer\n'
            f'  the first is {missing[0]}; the tokens are of another text, or it was cut or changed before\n'
            if n
            else f'{text}: no document holds any text'
        )
    print(
        f'{text}: {n - len(missing)} of its first {n} documents are among the tokens'
        + (f'; {missing[0]} is not' if missing else '')
    )
