"""The content of a file, decompressed, block by block and line by line. What is cut short or damaged is refused.

A compressed file is a row of frames (members, in gzip's words), and decompression can start at any of them. `bgzip`,
`pzstd` and concatenation make files of many frames, `gzip` and `zstd` a single one.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO

import zstandard

from pretrax.data.corpus.storage import Location, opened, refusal
from pretrax.errors import UserError

COMPRESSED = ('.gz', '.zst')
LONGEST_LINE = 1 << 30
_BLOCK = 1 << 20
_COMPRESSED_BLOCK = 1 << 16  # what one of these becomes must fit in memory


def blocks(location: Location, start: int = 0, began: Callable[[int, int], None] | None = None) -> Iterator[bytes]:
    """The decompressed content.

    Args:
        start: where in the file to begin: any byte of a plain one, the first byte of a frame of a compressed one.
        began: called before each frame with its place in the file, and in the content from `start` on.
    """
    with opened(location) as stream:
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
                f'{location}: the compressed data is cut short\n  copy or compress the file again'
            ) from None
        except (zlib.error, zstandard.ZstdError) as error:
            raise UserError(f'{location}: not readable as {location.suffix}: {error}') from None
        except Exception as error:
            raise refusal(location, error) from error


def _frames(stream: BinaryIO, suffix: str, start: int, began: Callable[[int, int], None]) -> Iterator[bytes]:
    # The ready-made readers of both formats hide where frames begin, and zstandard's ends quietly where one is cut off.
    frame: Any = None
    position, n_bytes = start, 0  # of what `block` begins with, and of the content before it
    while block := stream.read(_COMPRESSED_BLOCK):
        while block:
            if frame is None:
                if suffix == '.gz' and position:  # zeros may pad its members
                    member = block.lstrip(b'\0')
                    position += len(block) - len(member)
                    if not (block := member):
                        break
                began(position, n_bytes)
                frame = zlib.decompressobj(31) if suffix == '.gz' else _zstd_frame()
            plain = frame.decompress(block)
            n_bytes += len(plain)
            yield plain
            rest = frame.unused_data if frame.eof else b''
            position += len(block) - len(rest)
            block = rest
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError


def _zstd_frame():
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()  # as `zstd --long=31` writes them


def lines(parts: Iterable[bytes], name: object) -> Iterator[bytes]:
    """The lines of some content, without b'\\n'. Refuses one that is longer than LONGEST_LINE bytes."""
    unfinished: list[bytes] = []
    length = 0
    for part in parts:
        *complete, rest = part.split(b'\n')
        for line in complete:
            yield b''.join([*unfinished, line]) if unfinished else line
            unfinished.clear()
            length = 0
        if rest:
            unfinished.append(rest)
            length += len(rest)
        if length > LONGEST_LINE:
            raise UserError(f'{name}: a line of more than {LONGEST_LINE >> 20:,} MiB; are these lines of JSON?')
    if last := b''.join(unfinished):
        yield last
