"""Opens token files of other tools as `TokenStore`s, without conversion."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pretrax.data.corpus.files import nearest
from pretrax.data.tokens.foreign_layout import GPT2_END_OF_TEXT, MEGATRON_MAGIC, IdType, Layout, megatron, nanogpt, pbin
from pretrax.data.tokens.foreign_survey import Survey, survey_file
from pretrax.data.tokens.token_store import TokenStore
from pretrax.errors import UserError
from pretrax.storage import AnyPath

GPT2_VOCABULARY = 50257
FORMATS = 'a flat-tokens directory, nanoGPT .bin, Modalities .pbin, Megatron .bin/.idx, or seqax flat-tokens (zarr 2)'


class ForeignTokens(TokenStore):
    """A file of another tool. `format` is the name of the format."""

    def __init__(self, layout: Layout, found: Survey, vocab_size: int):
        self.name, self.format = str(layout.path), layout.format
        self.n_tokens, self.n_documents = layout.n_tokens, len(found.starts) - 1
        self.vocab_size, self.largest_token, self.end_of_text = vocab_size, found.largest, found.end_of_text
        self.fingerprint = found.sha256
        self._layout, self._starts = layout, found.starts

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        read = self._layout.read(ranges)
        return [self._encoded(values, start, stop) for values, (start, stop) in zip(read, ranges, strict=True)]

    def _encoded(self, values: np.ndarray, start: int, stop: int) -> np.ndarray:
        if self._layout.start_bits:
            values = values >> 1
        if len(values) and not (int(values.min()) >= 0 and int(values.max()) <= self.largest_token):
            raise UserError(
                f'{self.name}: tokens {start:,} to {stop:,} have an id above {self.largest_token:,}, the largest '
                'before\n'
                '  the file was changed after it was opened; restore it and start again'
            )
        first, last = np.searchsorted(self._starts, np.array([start, stop], np.uint64))
        encoded = values.astype(np.uint32) << np.uint32(1)
        encoded[(self._starts[first:last] - np.uint64(start)).astype(np.int64)] |= np.uint32(1)
        return encoded

    def read_starts(self, start: int, stop: int) -> np.ndarray:
        return np.array(self._starts[start:stop])


def find_layouts(path: Path, end_of_text: int | None = None, dtype: IdType | None = None) -> dict[str, Layout]:
    """The splits of a path: 'train', and 'validation' if there is one.

    Args:
        end_of_text: the id that ends documents in a nanoGPT .bin. Other formats store document boundaries.
        dtype: the type of the ids of a nanoGPT .bin; None: uint16. Other formats store it.

    Raises:
        UserError: not a known token file, or its header or size is wrong, or an argument does not apply to the format.
    """
    if path.is_dir():
        return _in_directory(path, end_of_text, dtype)
    prefix = path.with_suffix('') if path.suffix in ('.bin', '.idx') else path
    idx = prefix.with_name(prefix.name + '.idx')
    if path.suffix == '.pbin' and path.is_file():
        layout = pbin(path)
    elif path.suffix == '.idx' or _begins(idx, MEGATRON_MAGIC):
        layout = megatron(prefix)
    elif not path.exists():
        raise UserError(f'{path}: no such file or directory\n  {nearest(path)}')
    elif path.suffix == '.bin':
        held_out = path.with_name('val.bin')
        pair = {'validation': held_out} if path.name == 'train.bin' and held_out.is_file() else {}
        return {split: nanogpt(file, end_of_text, dtype) for split, file in ({'train': path} | pair).items()}
    else:
        raise UserError(
            f'{path}: not a token file that pretrax can read\n  expected {FORMATS}\n'
            '  for text, use data.text instead of data.tokens'
        )
    _refuse_options(layout, end_of_text, dtype)
    return {'train': layout}


def _in_directory(path: Path, end_of_text: int | None, dtype: IdType | None) -> dict[str, Layout]:
    if (path / 'train.bin').is_file():
        return find_layouts(path / 'train.bin', end_of_text, dtype)
    splits = {'train': path / 'train', 'validation': path / 'validation'}
    if (path / 'encoded_tokens' / '.zarray').is_file():
        splits = {'train': path}
    found = {name: split for name, split in splits.items() if (split / 'encoded_tokens' / '.zarray').is_file()}
    if 'train' not in found:
        inside = [str(file.parent) for at in ('*', 'data/*') for file in sorted(path.glob(f'{at}/zarr.json'))]
        hint = f'did you mean {inside[0]}?' if inside else nearest(path)
        raise UserError(f'{path}: not a token file that pretrax can read\n  expected {FORMATS}\n  {hint}')
    from pretrax.data.tokens.foreign_zarr import seqax

    layouts = {name: seqax(split) for name, split in found.items()}
    _refuse_options(layouts['train'], end_of_text, dtype)
    return layouts


def _begins(path: Path, magic: bytes) -> bool:
    if not path.is_file():
        return False
    with path.open('rb') as stream:
        return stream.read(len(magic)) == magic


def _refuse_options(layout: Layout, end_of_text: int | None, dtype: IdType | None) -> None:
    if end_of_text is not None:
        raise UserError(
            f'{layout.path}: {layout.format} stores document boundaries\n  remove end_of_text={end_of_text}'
        )
    if dtype is not None:
        raise UserError(f'{layout.path}: {layout.format} stores the type of its ids\n  remove dtype={dtype}')


def open_layouts(
    layouts: dict[str, Layout], directory: AnyPath | None, say: Callable[[str], None], vocab_size: int | None = None
) -> dict[str, ForeignTokens]:
    """Opens splits for reading, with one vocabulary.

    Args:
        directory: caches the survey of each file; None: no cache.
        vocab_size: None: from the files if they have it, otherwise the largest id plus 1.

    Raises:
        UserError: an id is outside the vocabulary, or a file is damaged.
    """
    surveys = {split: survey_file(layout, directory, say) for split, layout in layouts.items()}
    largest = max(survey.largest for survey in surveys.values())
    if vocab_size is None:
        implied = max(_implied_vocabulary(layout, surveys[split]) for split, layout in layouts.items())
        vocab_size = max(implied, largest + 1)
        reason = (
            'from the file' if implied else 'the largest id plus 1; to change it, set data.vocab_size or data.tokenizer'
        )
        say(f'vocabulary: {vocab_size:,} tokens, {reason}')
    for split, layout in layouts.items():
        survey = surveys[split]
        for note in survey.notes:
            say(f'tokens: {layout.path}: {note}')
        if survey.largest >= vocab_size:
            raise UserError(
                f'{layout.path}: token {survey.largest:,} does not exist in a vocabulary of {vocab_size:,}\n'
                '  the tokens are from another tokenizer, or the file is damaged or has ids of another width'
            )
        ends = 'without end-of-text token' if survey.end_of_text is None else f'ended by token {survey.end_of_text}'
        say(
            f'tokens: {split} {layout.n_tokens:,} tokens, {len(survey.starts) - 1:,} documents ({ends}), '
            f'read from {layout.path} ({layout.format})'
        )
    return {split: ForeignTokens(layout, surveys[split], vocab_size) for split, layout in layouts.items()}


def _implied_vocabulary(layout: Layout, found: Survey) -> int:
    """The vocabulary size that the format implies, or 0. Documents that end with GPT-2's end-of-text imply GPT-2's."""
    if layout.vocab_size is not None:
        if found.largest >= layout.vocab_size:
            raise UserError(
                f'{layout.path}: max_token_id is {layout.vocab_size - 1:,}, but token {found.largest:,} occurs\n'
                '  the file is damaged'
            )
        return layout.vocab_size
    return GPT2_VOCABULARY if layout.assumed and found.end_of_text == GPT2_END_OF_TEXT else 0
