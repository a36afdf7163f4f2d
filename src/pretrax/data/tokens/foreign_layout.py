"""The file layouts of other tools: nanoGPT .bin, Modalities .pbin, Megatron .bin/.idx. docs/formats.md describes them.

Opening a file checks only its header and size. Ids are read with `pread`, so truncating a file during a run gives an
error message; with a memory map it would kill the process.
"""

import functools
import os
import struct
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from pretrax.data.tokens.foreign_pickle import read_pairs
from pretrax.errors import UserError, system_errors

NANOGPT = 'nanoGPT .bin'
GPT2_END_OF_TEXT = 50256
PBIN_HEADER = 12
MEGATRON_MAGIC = b'MMIDIDX\x00\x00'
_MEGATRON_DTYPES = {1: 'u1', 2: 'i1', 3: '<i2', 4: '<i4', 5: '<i8', 6: '<f8', 7: '<f4', 8: '<u2'}
_MEGATRON_HEADER = struct.Struct('<9sQBQQ')
_AT_ONCE = 1 << 20  # numbers of a .idx
_LLM_C_MAGIC = (20240520, 20240801)

_WIDTHS = {'uint16': 2, 'uint32': 4}
_NO_VOCABULARY = 1 << 24  # no vocabulary has an id this large

type Ranges = Sequence[tuple[int, int]]
type IdType = Literal['uint16', 'uint32']  # of a nanoGPT .bin


@dataclass(frozen=True)
class Layout:
    """A file of another tool: how to read its ids and document boundaries."""

    format: str  # name of the format, for messages
    path: Path  # the file, for messages
    files: tuple[Path, ...]  # all files that hold the tokens
    n_tokens: int  # number of tokens
    # Returns the ids in each range [start, stop), any integers; `2 * id + starts_a_document` if `start_bits`
    read: Callable[[Ranges], list[np.ndarray]]
    # Returns where documents start, uint64, followed by the end, and notes to print; None if only an end-of-text token
    # marks the boundaries
    find_starts: Callable[[], tuple[np.ndarray, list[str]]] | None = None
    # The id that ends documents if `find_starts` is None; None: the file is one document
    end_of_text: int | None = None
    assumed: bool = False  # whether `end_of_text` was not given and is assumed to be GPT-2's
    start_bits: bool = False  # see `read`
    vocab_size: int | None = None  # None if the file does not have it


def nanogpt(path: Path, end_of_text: int | None = None, dtype: IdType | None = None) -> Layout:
    """uint16 or uint32 ids without a header, as numpy.tofile writes them. github.com/karpathy/nanoGPT data/*/prepare.py

    Args:
        end_of_text: the id that ends a document; None: GPT-2's.
        dtype: the type of an id; None: uint16.
    """
    size, width = _size(path, 'nanoGPT .bin'), _WIDTHS[dtype or 'uint16']
    if size % width:
        raise UserError(
            f'{path}: {size:,} bytes, expected a multiple of {width} for {dtype or "uint16"} ids\n'
            '  the file is truncated, or has ids of another type: dtype=uint16 or dtype=uint32'
        )
    first = IdFile(path, '<u2', 0, size // 2).read([(0, min(size // 2, 4096))])[0]
    head = first[:4].tobytes()
    if head[:4] and int.from_bytes(head[:4], 'little') in _LLM_C_MAGIC:
        raise UserError(
            f'{path}: it starts with the header of llm.c (256 numbers of 4 bytes); a nanoGPT .bin has no header\n'
            '  write only the ids, as uint16: numpy.fromfile(FILE, numpy.uint16)[512:].tofile(OTHER)'
        )
    if head[:6] == b'\x93NUMPY':
        raise UserError(
            f'{path}: a .npy file\n  write only the ids: numpy.load(FILE).astype(numpy.uint16).tofile(OTHER)'
        )
    _check_width(path, size, dtype)
    ids = IdFile(path, f'<u{width}', 0, size // width)
    end = GPT2_END_OF_TEXT if end_of_text is None else end_of_text
    name = NANOGPT if width == 2 else f'{NANOGPT} of uint32'
    return Layout(name, path, (path,), ids.n, ids.read, end_of_text=end, assumed=end_of_text is None)


def _check_width(path: Path, size: int, dtype: IdType | None) -> None:
    """Raises UserError if samples of a nanoGPT .bin contradict the type of its ids."""
    n_bytes = 1 << 16
    places = sorted({at // 8 * 8 for at in np.linspace(0, max(0, size - n_bytes), 8).astype(int).tolist()})
    file = IdFile(path, 'u1', 0, size)
    raw = b''.join(file.read([(at, min(at + n_bytes, size) // 8 * 8)])[0].tobytes() for at in places)
    if len(raw) < 128:
        return  # too short for a conclusion
    if dtype == 'uint32':
        if (largest := int(np.frombuffer(raw, '<u4').max())) >= _NO_VOCABULARY:
            raise UserError(
                f'{path}: as uint32, it has the id {largest:,}, which no vocabulary has\n  expected dtype=uint16'
            )
        return
    halves = np.frombuffer(raw, '<u2').reshape(-1, 4)
    if dtype is None and _is_small(halves[:, [1, 2, 3]], halves[:, 0]):
        raise UserError(
            f'{path}: its ids have 8 bytes\n'
            '  a nanoGPT .bin has ids of 2 or 4: numpy.fromfile(FILE, numpy.int64).astype(numpy.uint32).tofile(OTHER)\n'
            '  and dtype=uint32'
        )
    if dtype is None and _is_small(halves[:, [1, 3]], halves[:, [0, 2]]):
        up_to = f' to {largest}' if (largest := int(halves[:, [1, 3]].max())) else ''
        raise UserError(
            f'{path}: its ids seem to have 4 bytes: every second 2-byte number is 0{up_to}\n'
            '  expected dtype=uint32, or dtype=uint16 if they have 2 bytes'
        )


def _is_small(high: np.ndarray, low: np.ndarray) -> bool:
    """Whether `high` can only be the upper halves of larger numbers: all near 0, and far below those in `low`."""
    largest = int(high.max())
    return largest < 16 and int(low.max()) >= (64 * (largest + 1) if largest else 1)


def pbin(path: Path) -> Layout:
    """u64 bytes of all ids, u32 bytes per id, the ids, and a pickled list of (offset, length) in bytes.
    github.com/Modalities/modalities src/modalities/dataloader/create_packed_data.py"""
    size = _size(path, 'Modalities .pbin')
    with path.open('rb') as stream:
        header = stream.read(PBIN_HEADER)
    if len(header) < PBIN_HEADER:
        raise UserError(
            f'{path}: {size} bytes, shorter than the header of {PBIN_HEADER} bytes\n  the file is truncated'
        )
    n_bytes, width = struct.unpack('<QI', header)
    if width not in (1, 2, 4):
        old = int.from_bytes(header[8:], 'big') in (1, 2, 4)
        raise UserError(
            f'{path}: ids of {width:,} bytes\n  expected 1, 2 or 4 in bytes 8 to 12 of a Modalities .pbin'
            + ('; early versions of Modalities wrote big-endian numbers: pack the data again' if old else '')
        )
    if n_bytes == 0:
        raise UserError(
            f'{path}: the header gives 0 bytes of ids, so the program that wrote it did not finish\n'
            '  pack the data again'
        )
    if n_bytes % width or PBIN_HEADER + n_bytes >= size:
        raise UserError(
            f'{path}: the header gives {n_bytes:,} bytes of {width}-byte ids, followed by an index; '
            f'the file has {size:,} bytes\n  it is truncated or damaged'
        )
    ids = IdFile(path, f'<u{width}', PBIN_HEADER, n_bytes // width)
    find_starts = functools.partial(_pbin_starts, path, PBIN_HEADER + n_bytes, ids.n, width)
    return Layout('Modalities .pbin', path, (path,), ids.n, ids.read, find_starts)


def _pbin_starts(path: Path, at: int, n_tokens: int, width: int) -> tuple[np.ndarray, list[str]]:
    with path.open('rb') as stream:
        stream.seek(at)
        pairs = read_pairs(stream, str(path), most=2 * n_tokens)  # some documents may be empty
    if not len(pairs):
        raise UserError(f'{path}: the index has no documents\n  the file is damaged, or nothing was packed')
    offsets, lengths = pairs[:, 0], pairs[:, 1]
    if (lengths > n_tokens * width).any() or (lengths % width).any() or int(lengths.sum()) != n_tokens * width:
        raise UserError(
            f'{path}: the documents of the index do not add up to the {n_tokens * width:,} bytes of ids\n'
            '  the file is damaged'
        )
    ends = np.cumsum(lengths)
    notes = []
    # Early versions of Modalities count offsets from the start of the file. Its merge tool subtracts the header's
    # length from the offsets of every file after the first, so each merge shifts the rest of the index by another 12
    # bytes.
    base = PBIN_HEADER if offsets[0] == PBIN_HEADER else 0
    before = base + (ends - lengths) - offsets
    if (before % PBIN_HEADER).any() or (before < 0).any():
        wrong = int(np.flatnonzero((before % PBIN_HEADER) | (before < 0))[0])
        raise UserError(
            f'{path}: document {wrong:,} of the index is at byte {int(offsets[wrong]):,}, but the previous one ends at '
            f'{int(ends[wrong] - lengths[wrong]):,}\n  the index is damaged; pack the data again'
        )
    if before.any():
        notes.append(
            f'index: written by the merge tool of Modalities, which places the documents from number '
            f'{int(np.flatnonzero(before)[0]):,} on {PBIN_HEADER} bytes too early per merged file; '
            'their lengths give the correct positions'
        )
    starts = np.append(0, ends) // width
    whole = np.unique(starts)
    if len(whole) < len(starts):
        notes.append(f'documents: skipped {len(starts) - len(whole):,} without tokens')
    return whole.astype(np.uint64), notes


def megatron(prefix: Path) -> Layout:
    """prefix.bin has the ids; prefix.idx has their type, the sequences and the documents.
    github.com/NVIDIA/Megatron-LM megatron/core/datasets/indexed_dataset.py"""
    idx, binary = prefix.with_name(prefix.name + '.idx'), prefix.with_name(prefix.name + '.bin')
    size = _size(idx, 'Megatron .idx')
    with idx.open('rb') as stream:
        header = stream.read(_MEGATRON_HEADER.size)
    if header[:9] != MEGATRON_MAGIC:
        raise UserError(f'{idx}: it starts with {header[:9]!r}\n  a Megatron .idx starts with {MEGATRON_MAGIC!r}')
    if len(header) < _MEGATRON_HEADER.size:
        raise UserError(
            f'{idx}: {size} bytes, shorter than the header of {_MEGATRON_HEADER.size} bytes\n  the file is truncated'
        )
    _, version, code, n_sequences, n_marks = _MEGATRON_HEADER.unpack(header)
    dtype = _MEGATRON_DTYPES.get(code)
    if version != 1 or dtype is None or 'f' in dtype:
        raise UserError(
            f'{idx}: version {version}, id type {code} ({dtype or "unknown"})\n'
            '  expected version 1 and an integer type: 1, 2, 3, 4, 5 or 8'
        )
    expected = _MEGATRON_HEADER.size + 12 * n_sequences + 8 * n_marks
    if size not in (expected, expected + n_sequences):
        raise UserError(
            f'{idx}: {n_sequences:,} sequences and {n_marks:,} document ends need {expected:,} bytes; '
            f'the file has {size:,}\n  it is truncated or damaged'
        )
    width = np.dtype(dtype).itemsize
    n_bytes = _size(binary, 'Megatron .bin')
    if n_bytes % width:
        raise UserError(
            f'{binary}: {n_bytes:,} bytes, expected a multiple of {width}, the bytes of an id\n  the file is truncated'
        )
    ids = IdFile(binary, dtype, 0, n_bytes // width)
    find_starts = functools.partial(_megatron_starts, idx, n_sequences, n_marks, width, ids.n)
    return Layout('Megatron .bin/.idx', prefix, (idx, binary), ids.n, ids.read, find_starts)


def _megatron_starts(
    idx: Path, n_sequences: int, n_marks: int, width: int, n_tokens: int
) -> tuple[np.ndarray, list[str]]:
    at = _MEGATRON_HEADER.size
    lengths, pointers = IdFile(idx, '<i4', at, n_sequences), IdFile(idx, '<i8', at + 4 * n_sequences, n_sequences)
    marks = IdFile(idx, '<i8', at + 12 * n_sequences, n_marks)
    modes = IdFile(idx, 'i1', at + 12 * n_sequences + 8 * n_marks, _size(idx, '') - at - 12 * n_sequences - 8 * n_marks)
    disordered = UserError(f'{idx}: the document ends do not increase from 0 to {n_sequences:,}\n  the file is damaged')
    ends = marks.read([(0, 1), (n_marks - 1, n_marks)]) if n_marks else []
    if [int(end[0]) for end in ends] != [0, n_sequences]:
        raise disordered
    found, total, mark = [], 0, 0  # tokens before the sequence, and the next document
    for first in range(0, n_sequences, _AT_ONCE):
        stop = min(first + _AT_ONCE, n_sequences)
        [sizes], [places] = lengths.read([(first, stop)]), pointers.read([(first, stop)])
        starts = total + np.append(0, np.cumsum(sizes, dtype=np.int64))
        if (sizes < 0).any() or not np.array_equal(places, starts[:-1] * width):
            raise UserError(f'{idx}: its sequences are not consecutive\n  the file is damaged')
        total = int(starts[-1])
        while mark < n_marks:
            [block] = marks.read([(mark, min(mark + _AT_ONCE, n_marks))])
            if (np.diff(block) < 0).any() or block[0] < first:
                raise disordered
            inside = block[: np.searchsorted(block, stop)]
            found.append(np.unique(starts[inside - first]))
            mark += len(inside)
            if len(inside) < len(block):
                break
    if total != n_tokens:
        raise UserError(
            f'{idx}: it describes {total:,} tokens, but {idx.with_suffix(".bin").name} has {n_tokens:,}\n'
            '  the files are from different datasets, or one of them is truncated'
        )
    if any(modes.read([(start, min(start + _AT_ONCE, modes.n))])[0].any() for start in range(0, modes.n, _AT_ONCE)):
        raise UserError(f'{idx}: it marks sequences as not text (modes)\n  pretrax reads only text')
    whole = np.unique(np.append(np.concatenate(found), total)).astype(np.uint64)
    return whole, [f'documents: skipped {n_marks - len(whole):,} without tokens'] if len(whole) < n_marks else []


class IdFile:
    """Consecutive integers of one type in a file."""

    def __init__(self, path: Path, dtype: str, offset: int, n: int):
        self.n = n
        self._path, self._dtype, self._offset = path, np.dtype(dtype), offset
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def read(self, ranges: Ranges) -> list[np.ndarray]:
        """The integers in each range [start, stop)."""
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
                    '  the file was truncated after it was opened; restore it and start again'
                )
            at += n
        return content


def _size(path: Path, what: str) -> int:
    with system_errors(f'{path}: cannot be read', f'\n  expected a {what}'):
        size = path.stat().st_size
    if size == 0:
        raise UserError(f'{path}: the file is empty')
    return size
