"""Where other tools put token ids and document boundaries: nanoGPT .bin, Modalities .pbin, Megatron .bin/.idx.

Opening one of these looks at its header and its size alone; docs/formats.md says what is read of each. Ids are read with
`pread`: a file that is cut while it is read is an error in words, where a memory map would kill the process.
"""

import os
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pretrax.data.tokens.foreign_pickle import read_pairs
from pretrax.errors import UserError

GPT2_END_OF_TEXT = 50256
PBIN_HEADER = 12
MEGATRON_MAGIC = b'MMIDIDX\x00\x00'
_MEGATRON_DTYPES = {1: 'u1', 2: 'i1', 3: '<i2', 4: '<i4', 5: '<i8', 6: '<f8', 7: '<f4', 8: '<u2'}
_MEGATRON_HEADER = struct.Struct('<9sQBQQ')
_LLM_C_MAGIC = (20240520, 20240801)

type Ranges = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class Layout:
    """A file of another tool: how to read its ids, and what it says of its documents.

    Attributes:
        format: its name in messages. path: what messages call the file. files: all that the tokens depend on.
        read: the ids in each [start, stop), any integers; where `start_bits`, `2 * id + starts_a_document`.
        find_starts: where documents start, uint64 with the end as one more, and what is to be said about them; None
            where the end-of-text token alone tells.
        end_of_text: the id that ends documents where `find_starts` is None; None takes all for one document.
        assumed: that nobody said so, and it is the one of GPT-2.
        vocab_size: where the file says it.
    """

    format: str
    path: Path
    files: tuple[Path, ...]
    n_tokens: int
    read: Callable[[Ranges], list[np.ndarray]]
    find_starts: Callable[[], tuple[np.ndarray, list[str]]] | None = None
    end_of_text: int | None = None
    assumed: bool = False
    start_bits: bool = False
    vocab_size: int | None = None


def nanogpt(path: Path, end_of_text: int | None = None) -> Layout:
    """uint16 ids and nothing else, as numpy's tofile writes them. github.com/karpathy/nanoGPT data/*/prepare.py"""
    size = _size(path, 'nanoGPT .bin')
    if size % 2:
        raise UserError(f'{path}: {size:,} bytes, and every token of a nanoGPT .bin has 2\n  the file is cut short')
    ids = IdFile(path, '<u2', 0, size // 2)
    first = ids.read([(0, min(ids.n, 4096))])[0]
    head = first[:4].tobytes()
    if head[:4] and int.from_bytes(head[:4], 'little') in _LLM_C_MAGIC:
        raise UserError(
            f'{path}: it begins with the header of llm.c (256 numbers of 4 bytes), and a nanoGPT .bin has none\n'
            '  write the ids alone, as uint16: numpy.fromfile(FILE, numpy.uint16)[512:].tofile(OTHER)'
        )
    if head[:6] == b'\x93NUMPY':
        raise UserError(
            f'{path}: a .npy file\n  write the ids alone: numpy.load(FILE).astype(numpy.uint16).tofile(OTHER)'
        )
    if len(first) >= 64 and not first[1::2].any() and first[::2].any():
        raise UserError(
            f'{path}: every second number of 2 bytes is 0, so its ids have 4 bytes or 8\n'
            '  a nanoGPT .bin has uint16: numpy.fromfile(FILE, numpy.uint32).astype(numpy.uint16).tofile(OTHER)'
        )
    told = GPT2_END_OF_TEXT if end_of_text is None else end_of_text
    return Layout('nanoGPT .bin', path, (path,), ids.n, ids.read, end_of_text=told, assumed=end_of_text is None)


def pbin(path: Path) -> Layout:
    """Bytes of data u64, bytes of an id u32, ids, pickled [(offset, length), ..] in bytes.
    github.com/Modalities/modalities src/modalities/dataloader/create_packed_data.py"""
    size = _size(path, 'Modalities .pbin')
    with path.open('rb') as stream:
        header = stream.read(PBIN_HEADER)
    if len(header) < PBIN_HEADER:
        raise UserError(f'{path}: {size} bytes, and the header alone has {PBIN_HEADER}\n  the file is cut short')
    n_bytes, width = struct.unpack('<QI', header)
    if width not in (1, 2, 4):
        old = int.from_bytes(header[8:], 'big') in (1, 2, 4)
        raise UserError(
            f'{path}: ids of {width:,} bytes\n  expected 1, 2 or 4 in bytes 8 to 12 of a Modalities .pbin'
            + ('; an early Modalities wrote big-endian numbers, which it no longer reads: pack again' if old else '')
        )
    if n_bytes == 0:
        raise UserError(
            f'{path}: the header says 0 bytes of ids: the program that wrote it did not finish\n  pack again'
        )
    if n_bytes % width or PBIN_HEADER + n_bytes >= size:
        raise UserError(
            f'{path}: the header says {n_bytes:,} bytes of ids of {width} each, and an index after them; '
            f'the file has {size:,} bytes\n  it is cut short or damaged'
        )
    ids = IdFile(path, f'<u{width}', PBIN_HEADER, n_bytes // width)
    return Layout(
        'Modalities .pbin',
        path,
        (path,),
        ids.n,
        ids.read,
        lambda: _pbin_starts(path, PBIN_HEADER + n_bytes, ids.n, width),
    )


def _pbin_starts(path: Path, at: int, n_tokens: int, width: int) -> tuple[np.ndarray, list[str]]:
    # A pair has at most 2 * 10 bytes of numbers, 9 of a frame, and 6 around them.
    limit = 64 + 40 * n_tokens
    with path.open('rb') as stream:
        stream.seek(at)
        pickled = stream.read(limit + 1)
    if len(pickled) > limit:
        raise UserError(f'{path}: the index is larger than that of {n_tokens:,} documents\n  it is damaged')
    pairs = read_pairs(pickled, str(path))
    if not len(pairs):
        raise UserError(f'{path}: the index lists no document\n  it is damaged, or nothing was packed')
    offsets, lengths = pairs[:, 0], pairs[:, 1]
    if (lengths > n_tokens * width).any() or (lengths % width).any() or int(lengths.sum()) != n_tokens * width:
        raise UserError(
            f'{path}: the documents of the index do not add up to the {n_tokens * width:,} bytes of ids\n  it is damaged'
        )
    ends = np.cumsum(lengths)
    notes = []
    # The offsets of an early Modalities count from the beginning of the file. Its merge tool takes a header's length off
    # the offsets of every file after the first, so each join moves the rest of the index by 12 bytes more.
    base = PBIN_HEADER if offsets[0] == PBIN_HEADER else 0
    before = base + (ends - lengths) - offsets
    if (before % PBIN_HEADER).any() or (before < 0).any():
        wrong = int(np.flatnonzero((before % PBIN_HEADER) | (before < 0))[0])
        raise UserError(
            f'{path}: document {wrong:,} of the index is at byte {int(offsets[wrong]):,}, and the one before it ends at '
            f'{int(ends[wrong] - lengths[wrong]):,}\n  the index is damaged: pack again'
        )
    if before.any():
        notes.append(
            f'index: that of the merge tool of Modalities, which puts documents from number '
            f'{int(np.flatnonzero(before)[0]):,} on {PBIN_HEADER} bytes too far to the front for each file joined; '
            'their places are taken from their lengths'
        )
    return _without_empty(np.append(0, ends) // width, notes), notes


def megatron(prefix: Path) -> Layout:
    """prefix.bin has the ids, prefix.idx their type, the sequences and the documents.
    github.com/NVIDIA/Megatron-LM megatron/core/datasets/indexed_dataset.py"""
    idx, binary = prefix.with_name(prefix.name + '.idx'), prefix.with_name(prefix.name + '.bin')
    size = _size(idx, 'Megatron .idx')
    with idx.open('rb') as stream:
        header = stream.read(_MEGATRON_HEADER.size)
    if header[:9] != MEGATRON_MAGIC:
        raise UserError(f'{idx}: it begins with {header[:9]!r}\n  expected {MEGATRON_MAGIC!r} of a Megatron .idx')
    if len(header) < _MEGATRON_HEADER.size:
        raise UserError(f'{idx}: {size} bytes, and the header has {_MEGATRON_HEADER.size}\n  the file is cut short')
    _, version, code, n_sequences, n_marks = _MEGATRON_HEADER.unpack(header)
    dtype = _MEGATRON_DTYPES.get(code)
    if version != 1 or dtype is None or 'f' in dtype:
        raise UserError(
            f'{idx}: version {version}, type {code} of ids ({dtype or "unknown"})\n'
            '  expected version 1 and a type of integers: 1, 2, 3, 4, 5 or 8'
        )
    expected = _MEGATRON_HEADER.size + 12 * n_sequences + 8 * n_marks
    if size not in (expected, expected + n_sequences):
        raise UserError(
            f'{idx}: the header says {n_sequences:,} sequences and {n_marks:,} ends of documents, so {expected:,} bytes; '
            f'it has {size:,}\n  the file is cut short or damaged'
        )
    width = np.dtype(dtype).itemsize
    n_bytes = _size(binary, 'Megatron .bin')
    if n_bytes % width:
        raise UserError(f'{binary}: {n_bytes:,} bytes, and its ids have {width} each\n  the file is cut short')
    ids = IdFile(binary, dtype, 0, n_bytes // width)
    return Layout(
        'Megatron .bin/.idx', prefix, (idx, binary), ids.n, ids.read,
        lambda: _megatron_starts(idx, n_sequences, n_marks, width, ids.n),
    )  # fmt: skip


def _megatron_starts(
    idx: Path, n_sequences: int, n_marks: int, width: int, n_tokens: int
) -> tuple[np.ndarray, list[str]]:
    with idx.open('rb') as stream:
        stream.seek(_MEGATRON_HEADER.size)
        lengths = np.fromfile(stream, '<i4', n_sequences).astype(np.int64)
        pointers = np.fromfile(stream, '<i8', n_sequences)
        marks = np.fromfile(stream, '<i8', n_marks)
        modes = np.fromfile(stream, 'i1')
    starts = np.append(0, np.cumsum(lengths))
    if (lengths < 0).any() or not np.array_equal(pointers, starts[:-1] * width):
        raise UserError(f'{idx}: its sequences do not follow one another\n  the file is damaged')
    if starts[-1] != n_tokens:
        raise UserError(
            f'{idx}: it speaks of {starts[-1]:,} tokens, and {idx.with_suffix(".bin").name} has {n_tokens:,}\n'
            '  the two are not of one data set, or one of them is cut short'
        )
    if not len(marks) or marks[0] != 0 or marks[-1] != n_sequences or (np.diff(marks) < 0).any():
        raise UserError(
            f'{idx}: the ends of its documents do not lead from 0 to {n_sequences:,}\n  the file is damaged'
        )
    if modes.any():
        raise UserError(f'{idx}: it marks sequences that are no text (modes)\n  pretrax reads text alone')
    notes = []
    return _without_empty(starts[marks], notes), notes


def _without_empty(starts: np.ndarray, notes: list[str]) -> np.ndarray:
    whole = np.unique(starts)
    if len(whole) < len(starts):
        notes.append(f'documents: {len(starts) - len(whole):,} without a token left out')
    return whole.astype(np.uint64)


class IdFile:
    """Integers of one type that lie one after another in a file."""

    def __init__(self, path: Path, dtype: str, offset: int, n: int):
        self.n = n
        self._path, self._dtype, self._offset = path, np.dtype(dtype), offset
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def read(self, ranges: Ranges) -> list[np.ndarray]:
        """The integers in each [start, stop)."""
        return [np.frombuffer(self._bytes(start, stop), self._dtype) for start, stop in ranges]

    def _bytes(self, start: int, stop: int) -> bytearray:
        width = self._dtype.itemsize
        content = bytearray((stop - start) * width)
        view, at = memoryview(content), 0
        while at < len(content):
            try:
                n = os.preadv(self._file, [view[at:]], self._offset + start * width + at)
            except OSError as error:
                raise UserError(f'{self._path}: cannot be read: {error.strerror}') from error
            if n == 0:
                raise UserError(
                    f'{self._path}: it ends at token {start + at // width:,} of {self.n:,}\n'
                    '  it was cut after it had been opened: restore it, and start again'
                )
            at += n
        return content


def _size(path: Path, what: str) -> int:
    try:
        size = path.stat().st_size
    except OSError as error:
        raise UserError(f'{path}: cannot be read: {error.strerror}\n  expected a {what}') from None
    if size == 0:
        raise UserError(f'{path}: the file is empty')
    return size
