"""Print counts, lengths, checksums and first documents of token files."""

import dataclasses
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from pretrax.cli.data._token_files import TokenFileOptions, TokenPath
from pretrax.errors import UserError
from pretrax.option import option
from pretrax.storage import locate_local

if TYPE_CHECKING:
    from pretrax.data.tokens.flat_tokens import FlatTokens
    from pretrax.data.tokens.token_summary import Lengths

_SHOWN = 60  # tokens per document


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    path: TokenPath
    plot: str | None = option('Draw the lengths of documents.', metavar='FILE.svg')
    documents: int = option('Print the first N documents of each split.', default=3, min=0, metavar='N')
    files: TokenFileOptions


def inspect(options: Options) -> None:
    from pretrax.data.tokens.flat_tokens import FlatTokens
    from pretrax.data.tokens.token_summary import Lengths, first_documents, lengths
    from pretrax.view.charts.picture import need_pictures
    from pretrax.view.charts.text import bars_text

    path, plot = options.path, options.plot
    if plot is not None:
        if Path(plot).suffix != '.svg':
            raise UserError(f'--plot {plot}: expected a name that ends in .svg')
        need_pictures('.svg')
    files = options.files.open(path)
    identity = files.identity
    known = 'unknown' if files.tokenizer is None else f'sha256 {files.tokenizer.sha256[:16]}..'
    ends = 'none' if identity.end_of_text is None else f'token {identity.end_of_text}'
    begins = ' '.join(f'token {token}' for token in identity.begin_of_text) or 'none'
    print(f'tokenizer: {known}, {identity.vocab_size:,} tokens, beginning of text: {begins}, end of text: {ends}')
    width = min(shutil.get_terminal_size().columns, 100)
    drawn: dict[str, Lengths] = {}
    for split, store in files.splits.items():
        print(f'\n{split}')
        if isinstance(store, FlatTokens):
            _print_manifest(store)
        found = drawn[split] = lengths(store)
        print(
            f'  tokens per document: {found.shortest:,} to {found.longest:,}, mean {found.mean:,.1f}, '
            f'median {found.median:,}{" or more" if found.median >= 1 << 16 else ""}'
        )
        print('\n'.join(f'  {line}' for line in bars_text(*_bars(found), width - 2)))
        for number, ids in enumerate(first_documents(store, options.documents, _SHOWN)):
            text = str(ids) if files.tokenizer is None else repr(files.tokenizer.decode(ids))
            print(f'  document {number}: {text}{" .." if len(ids) == _SHOWN else ""}')
    if plot is not None:
        _draw(locate_local(plot), drawn, path)


def _print_manifest(store: 'FlatTokens') -> None:
    counts, manifest = store.manifest.counts, store.manifest
    if counts.bytes is not None:
        print(f'  text: {counts.bytes:,} bytes, {counts.bytes / counts.tokens:.2f} per token')
    print(f'  targets: {counts.targets:,}{" (a loss mask excludes some)" if store.has_mask else ""}')
    for name, value in manifest.source.items():
        if not isinstance(value, dict | list):
            print(f'  source: {name} {value}')
    for made_of in manifest.source.get('inputs', []):
        print(f'  made of: {made_of["path"]}, {made_of["documents"]:,} documents, {made_of["tokens"]:,} tokens')
    for name, digest in manifest.sha256.items():
        print(f'  sha256: {name} {digest[:16]}.. (compared by `pretrax data verify`)')


def _bars(found: 'Lengths') -> tuple[list[str], list[int]]:
    labels = [f'{least:,}' if least == most else f'{least:,}-{most:,}' for least, most, _ in found.buckets]
    return labels, [count for _, _, count in found.buckets]


def _draw(file: Path, drawn: dict[str, 'Lengths'], name: str) -> None:
    from pretrax.cli._output import write_output
    from pretrax.view.charts.picture import bars_picture

    series = {split: _bars(found) for split, found in drawn.items()}
    write_output(str(file), bars_picture(series, f'Documents of {name}', 'number of documents by tokens per document'))
    print(f'\nwrote {file}')
