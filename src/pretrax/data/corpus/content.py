"""Reads and decompresses a file in blocks, and splits it into lines. Truncated or damaged data raises UserError.

A compressed file is a sequence of frames (gzip calls them members), and decompression can start at any frame. `bgzip`,
`pzstd` and concatenation write many frames, `gzip` and `zstd` write one.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

from pretrax.data.corpus.storage import Location, opened, storage_errors
from pretrax.errors import UserError
from pretrax.system.zstd import zstd

COMPRESSED = ('.gz', '.zst')
LONGEST_LINE = 1 << 30  # bytes of a line, and of a compressed file that is one document
_BLOCK = 1 << 20
# A block of zstd may expand from 4 bytes to 128 KiB, so this many bytes are at most 16 MiB of content.
_COMPRESSED_BLOCK = 512


def read_content(
    location: Location, start: int = 0, began: Callable[[int, int], None] | None = None
) -> Iterator[bytes]:
    """Yields the decompressed content in blocks.

    Args:
        start: the byte of the file to start at; in a compressed file, the first byte of a frame.
        began: called before each frame with its byte offsets in the file and in the content after `start`.

    Raises:
        UserError: the file cannot be read, or is truncated or damaged.
    """
    with opened(location) as stream, storage_errors(location):
        try:
            if start:
                stream.seek(start)
            if location.suffix in COMPRESSED:
                yield from _frames(stream, location.suffix, start, began or (lambda *_: None))
            else:
                while block := stream.read(_BLOCK):
                    yield block
        except EOFError:
            raise UserError(
                f'{location}: the compressed data is truncated\n  copy or compress the file again'
            ) from None
        except (zlib.error, zstd.ZstdError) as error:
            raise UserError(f'{location}: not readable as {location.suffix}: {error}') from None


def _frames(stream: BinaryIO, suffix: str, start: int, began: Callable[[int, int], None]) -> Iterator[bytes]:
    # The usual readers of both formats hide where frames start.
    frame: Any = None
    position, n_bytes = start, 0  # offset of `block` in the file, and length of the content before it
    while block := stream.read(_COMPRESSED_BLOCK):
        while block:
            if frame is None:
                if suffix == '.gz' and position:  # zeros may follow a member
                    member = block.lstrip(b'\0')
                    position += len(block) - len(member)
                    if not (block := member):
                        break
                began(position, n_bytes)
                frame = zlib.decompressobj(31) if suffix == '.gz' else _zstd_frame()
            plain = frame.decompress(block)
            n_bytes += len(plain)
            for start in range(0, len(plain), _BLOCK):
                yield plain[start : start + _BLOCK]
            rest = frame.unused_data if frame.eof else b''
            position += len(block) - len(rest)
            block = rest
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError


def _zstd_frame():
    return zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: 31})  # as of `zstd --long=31`


def read_document(location: Location) -> bytes:
    """The whole decompressed content. Raises UserError if a compressed file has more than LONGEST_LINE bytes."""
    blocks, n_bytes = [], 0
    for block in read_content(location):
        blocks.append(block)
        n_bytes += len(block)
        if n_bytes > LONGEST_LINE and location.suffix in COMPRESSED:
            raise UserError(
                f'{location}: it expands to more than {LONGEST_LINE >> 20:,} MiB, and is one document\n'
                '  if that is meant, decompress it first'
            )
    return b''.join(blocks)


def split_lines(parts: Iterable[bytes], name: object, longest: int | None = None) -> Iterator[bytes]:
    """Yields the lines without b'\\n'. Raises UserError if a line has more than `longest` (LONGEST_LINE) bytes."""
    unfinished: list[bytes] = []
    length, longest = 0, longest or LONGEST_LINE
    for part in parts:
        *complete, rest = part.split(b'\n')
        for line in complete:
            yield b''.join([*unfinished, line]) if unfinished else line
            unfinished.clear()
            length = 0
        if rest:
            unfinished.append(rest)
            length += len(rest)
        if length > longest:
            raise UserError(f'{name}: a line is longer than {longest >> 20:,} MiB\n  expected one document per line')
    if last := b''.join(unfinished):
        yield last


class Document(NamedTuple):
    """A text, its origin, and the ranges that count in the loss."""

    text: str  # not empty
    origin: str  # file and row for messages, such as 'mail.jsonl:12'
    # Character ranges [start, stop), in order and disjoint. Tokens that start in one of them count in the loss, and so
    # does the end-of-text token. None: all tokens count.
    answers: tuple[tuple[int, int], ...] | None = None
    # For a conversation, (start, stop, id) of each special token in the text. Its end-of-text token counts only if it
    # is a part of the text. None: the text has no special tokens.
    special_tokens: tuple[tuple[int, int, int], ...] | None = None
