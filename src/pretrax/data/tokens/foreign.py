"""Token files of other tools, to train from as they are: which tool wrote a path, and a `TokenStore` over it."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from pretrax.data.corpus.files import nearest
from pretrax.data.tokens.foreign_layout import GPT2_END_OF_TEXT, MEGATRON_MAGIC, Layout, megatron, nanogpt, pbin
from pretrax.data.tokens.foreign_survey import Survey, survey
from pretrax.errors import UserError

GPT2_VOCABULARY = 50257
FORMATS = 'a flat-tokens directory, nanoGPT .bin, Modalities .pbin, Megatron .bin/.idx, or seqax flat-tokens (zarr 2)'


class ForeignTokens:
    """A `TokenStore` over a file of another tool. `format` names the tool."""

    bytes_per_target = None
    has_mask = False

    def __init__(self, layout: Layout, found: Survey, vocab_size: int):
        self.name, self.format = str(layout.path), layout.format
        self.n_tokens, self.n_documents = layout.n_tokens, len(found.starts) - 1
        self.vocab_size, self.end_of_text = vocab_size, found.end_of_text
        self.fingerprint = found.sha256
        self._layout, self._starts = layout, found.starts

    def read(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """The values `2 * id + starts_a_document` in each [start, stop), uint32, all read at once."""
        read = self._layout.read(ranges)
        return [self._encoded(values, start, stop) for values, (start, stop) in zip(read, ranges, strict=True)]

    def _encoded(self, values: np.ndarray, start: int, stop: int) -> np.ndarray:
        if self._layout.start_bits:
            values = values >> 1
        if len(values) and not (int(values.min()) >= 0 and int(values.max()) < self.vocab_size):
            raise UserError(
                f'{self.name}: an id in tokens {start:,} to {stop:,} is none of the {self.vocab_size:,} there were when '
                'the file was opened\n  something has written to it: restore it, and start again'
            )
        first, last = np.searchsorted(self._starts, np.array([start, stop], np.uint64))
        encoded = values.astype(np.uint32) << np.uint32(1)
        encoded[(self._starts[first:last] - np.uint64(start)).astype(np.int64)] |= np.uint32(1)
        return encoded

    def read_starts(self, start: int, stop: int) -> np.ndarray:
        """Where documents start to stop - 1 begin in the stream of tokens, uint64; after the last comes the end."""
        return np.array(self._starts[start:stop])

    def read_mask(self, ranges: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """All True: none of these formats has a loss mask."""
        return [np.ones(stop - start, bool) for start, stop in ranges]


def find_layouts(path: Path, end_of_text: int | None = None) -> dict[str, Layout]:
    """The splits that a path names: 'train', and 'validation' where it has one. Raises UserError for what is no token
    file of another tool, and for what is damaged as far as the header and the size tell.

    Args:
        end_of_text: the id that ends a document of a nanoGPT .bin, which does not say; the others do, and it is refused.
    """
    if path.is_dir():
        return _in_directory(path, end_of_text)
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
        return {split: nanogpt(file, end_of_text) for split, file in ({'train': path} | pair).items()}
    else:
        raise UserError(
            f'{path}: none of the token files that pretrax reads\n  expected {FORMATS}\n'
            '  text goes into data.text instead of data.tokens'
        )
    _refuse_end_of_text(end_of_text, layout)
    return {'train': layout}


def _in_directory(path: Path, end_of_text: int | None) -> dict[str, Layout]:
    if (path / 'train.bin').is_file():
        return find_layouts(path / 'train.bin', end_of_text)
    splits = {'train': path / 'train', 'validation': path / 'validation'}
    if (path / 'encoded_tokens' / '.zarray').is_file():
        splits = {'train': path}
    found = {name: split for name, split in splits.items() if (split / 'encoded_tokens' / '.zarray').is_file()}
    if 'train' not in found:
        inside = [str(file.parent) for at in ('*', 'data/*') for file in sorted(path.glob(f'{at}/zarr.json'))]
        hint = f'did you mean {inside[0]}?' if inside else nearest(path)
        raise UserError(f'{path}: none of the token files that pretrax reads\n  expected {FORMATS}\n  {hint}')
    from pretrax.data.tokens.foreign_zarr import seqax

    layouts = {name: seqax(split) for name, split in found.items()}
    _refuse_end_of_text(end_of_text, layouts['train'])
    return layouts


def _begins(path: Path, magic: bytes) -> bool:
    if not path.is_file():
        return False
    with path.open('rb') as stream:
        return stream.read(len(magic)) == magic


def _refuse_end_of_text(end_of_text: int | None, layout: Layout) -> None:
    if end_of_text is not None:
        raise UserError(
            f'{layout.path}: {layout.format} says itself where documents end\n'
            f'  end_of_text={end_of_text} would change nothing: leave it out'
        )


def open_layouts(
    layouts: dict[str, Layout], directory: Path | None, say: Callable[[str], None], vocab_size: int | None = None
) -> dict[str, ForeignTokens]:
    """Open splits for reading, with one vocabulary; each file is read once, and what that finds is kept in `directory`
    (None keeps nothing).

    Args:
        vocab_size: None takes what the files say, or the largest id and one.

    Raises UserError for an id outside of the vocabulary, and for what is damaged.
    """
    found = {split: survey(layout, directory, say) for split, layout in layouts.items()}
    largest = max(of.largest for of in found.values())
    if vocab_size is None:
        said = max(_said_vocabulary(layout, found[split]) for split, layout in layouts.items())
        vocab_size = max(said, largest + 1)
        reason = (
            'as the format says' if said else 'the largest id and one; data.vocab_size or data.tokenizer can say more'
        )
        say(f'vocabulary: {vocab_size:,} tokens, {reason}')
    for split, layout in layouts.items():
        of = found[split]
        for note in of.notes:
            say(f'tokens: {layout.path}: {note}')
        if of.largest >= vocab_size:
            raise UserError(
                f'{layout.path}: token {of.largest:,} does not exist in a vocabulary of {vocab_size:,}\n'
                '  these tokens are of another tokenizer, or the file is damaged or holds ids of another width'
            )
        ends = 'no token ends them' if of.end_of_text is None else f'token {of.end_of_text} ends them'
        say(
            f'tokens: {split} {layout.n_tokens:,} tokens, {len(of.starts) - 1:,} documents ({ends}), '
            f'read as they are from {layout.path} ({layout.format})'
        )
    return {split: ForeignTokens(layout, found[split], vocab_size) for split, layout in layouts.items()}


def _said_vocabulary(layout: Layout, found: Survey) -> int:
    """What the format says of the vocabulary, 0 for nothing. A file with documents that end like GPT-2's is GPT-2's."""
    if layout.vocab_size is not None:
        if found.largest >= layout.vocab_size:
            raise UserError(
                f'{layout.path}: max_token_id is {layout.vocab_size - 1:,}, and token {found.largest:,} occurs\n  it is damaged'
            )
        return layout.vocab_size
    return GPT2_VOCABULARY if layout.assumed and found.end_of_text == GPT2_END_OF_TEXT else 0
