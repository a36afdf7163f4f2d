"""The user's text: which files a path, directory or glob names, and the documents in them.

A `.jsonl` file holds a document a line; any other file is one document. Both may be compressed (`.gz`, `.zst`). Bytes
are taken as they are: UTF-8 is checked, line ends are kept.
"""

import difflib
import glob
import gzip
import hashlib
import json
import os
import tokenize
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import zstandard

from pretrax.errors import UserError

SUFFIXES = ('.txt', '.md', '.py', '.jsonl')
COMPRESSED = ('.gz', '.zst')
_BLOCK = 1 << 20


class TextFile(NamedTuple):
    """A file of text and how to read it: 'text' (one UTF-8 document), 'jsonl' (one a line), 'python' (PEP 263)."""

    path: Path
    kind: Literal['text', 'jsonl', 'python']


@dataclass(frozen=True)
class Corpus:
    """The documents of some files, in their order."""

    files: Sequence[TextFile]
    field: str = 'text'

    def documents(self) -> Iterator[str]:
        """Every document, empty ones included."""
        for file in self.files:
            yield from read_documents(file, self.field)

    def fingerprint(self) -> str:
        """sha256 over kind and content of the files, and over the field where jsonl is read; names do not count."""
        total = hashlib.sha256()
        for file in self.files:
            with _opened(file.path) as stream:
                content = hashlib.file_digest(stream, 'sha256').digest()
            total.update(f'{file.kind} {self.field if file.kind == "jsonl" else ""}\n'.encode() + content)
        return total.hexdigest()


def find_files(spec: str) -> list[TextFile]:
    """The files that a path, a directory (searched recursively for SUFFIXES) or a glob names, sorted.

    Raises UserError when that is none, or a file named directly is empty.
    """
    path = Path(spec).expanduser()
    if path.is_dir():
        paths = walk(path, lambda name: _kind_suffix(name) in SUFFIXES)
        if not paths:
            raise UserError(f'{spec}: no {", ".join(SUFFIXES)} file in this directory\n  it holds {_held(path)}')
    elif path.is_file():
        paths = [path]
        if path.stat().st_size == 0:
            raise UserError(f'{spec}: the file is empty')
    elif glob.has_magic(spec):
        paths = sorted(found for name in glob.glob(str(path), recursive=True) if (found := Path(name)).is_file())
        if not paths:
            raise UserError(f'{spec}: no file matches\n  {nearest(Path(os.path.dirname(path) or "."))}')
    else:
        raise UserError(f'{spec}: no such file or directory\n  {nearest(path)}')
    return [TextFile(found, 'jsonl' if _kind_suffix(found.name) == '.jsonl' else 'text') for found in paths]


def walk(root: Path, wanted: Callable[[str], bool], left_out: Callable[[str], bool] | None = None) -> list[Path]:
    """Files below root with a wanted name, sorted by path; hidden files and directories, and those left out, are not
    entered."""
    found = []
    for directory, children, names in os.walk(root):
        children[:] = [name for name in children if not name.startswith('.') and not (left_out and left_out(name))]
        found += [Path(directory, name) for name in names if not name.startswith('.') and wanted(name)]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def nearest(path: Path) -> str:
    """What exists near a path: for a missing one the sibling with the most similar name, else what its parent holds."""
    parent = path if path.is_dir() else path.parent
    missing = path.name
    while not parent.is_dir():
        parent, missing = parent.parent, parent.name
    names = sorted(entry.name for entry in parent.iterdir())
    close = [] if parent == path else difflib.get_close_matches(missing, names, n=1)
    if close:
        return f'did you mean {parent / close[0]}?'
    return f'{parent.resolve()} holds {_held(parent)}'


def read_documents(file: TextFile, field: str) -> Iterator[str]:
    """The documents of a file, empty ones included. A blank jsonl line is an empty document.

    Raises UserError with the place (line, byte) for what is not UTF-8, not JSON, lacks the field, or is cut short.
    """
    if file.kind == 'jsonl':
        for number, line in enumerate(_lines(_blocks(file.path)), start=1):
            yield _json_text(line, field, f'{file.path}:{number}') if line.strip() else ''
    else:
        raw = b''.join(_blocks(file.path))
        if file.kind == 'python':
            encoding = tokenize.detect_encoding(iter(raw.splitlines(keepends=True)).__next__)[0]
            yield _decode(raw, encoding, str(file.path)).replace('\r\n', '\n')
        else:
            yield _decode(raw, 'utf-8', str(file.path))


def _json_text(line: bytes, field: str, place: str) -> str:
    try:
        record = json.loads(_decode(line, 'utf-8', place))
    except json.JSONDecodeError as error:
        raise UserError(
            f'{place}: not JSON: {error.msg} at character {error.pos}\n  expected one object a line'
        ) from None
    if not isinstance(record, dict):
        raise UserError(f'{place}: a JSON {type(record).__name__}\n  expected an object with the text in {field!r}')
    if field not in record:
        close = difflib.get_close_matches(field, record, n=1) or [name for name, x in record.items() if type(x) is str]
        hint = f'\n  to read {close[0]!r}: data.field={close[0]}' if close else ''
        found = ', '.join(map(repr, list(record)[:12])) or 'none'
        raise UserError(f'{place}: no field {field!r}\n  fields found: {found}{hint}')
    text = record[field]
    if not isinstance(text, str):
        raise UserError(f'{place}: field {field!r} is {json.dumps(text)[:60]}\n  expected a string')
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f'{place}: field {field!r} holds half a surrogate pair at character {error.start}') from None
    return text


def _decode(raw: bytes, encoding: str, place: str) -> str:
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        bad = raw[error.start : error.start + 4].hex(' ')
        raise UserError(
            f'{place}: not {encoding} at byte {error.start}: {bad} ({error.reason})\n'
            f'  convert the file, for example: iconv -f latin1 -t utf-8'
        ) from None


def _opened(path: Path):
    try:
        return path.open('rb')
    except OSError as error:
        raise UserError(f'{path}: {error.strerror}') from None


def _blocks(path: Path) -> Iterator[bytes]:
    """The decompressed content, block by block."""
    with _opened(path) as stream:
        try:
            if path.suffix == '.gz':
                with gzip.open(stream) as plain:
                    while block := plain.read(_BLOCK):
                        yield block
            elif path.suffix == '.zst':
                yield from _zstd_blocks(stream)
            else:
                while block := stream.read(_BLOCK):
                    yield block
        except EOFError:
            raise UserError(f'{path}: the compressed data is cut short\n  copy or compress the file again') from None
        except (gzip.BadGzipFile, zlib.error, zstandard.ZstdError) as error:
            raise UserError(f'{path}: not readable as {path.suffix}: {error}') from None
        except OSError as error:
            raise UserError(f'{path}: {error.strerror or error}') from None


def _zstd_blocks(stream) -> Iterator[bytes]:
    # zstandard's stream_reader ends quietly where a frame is cut off, so frames are followed here.
    frame = None
    while block := stream.read(_BLOCK):
        while block:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            yield frame.decompress(block)
            block = frame.unused_data if frame.eof else b''
            frame = None if frame.eof else frame
    if frame is not None:
        raise EOFError


def _lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    unfinished: list[bytes] = []
    for block in blocks:
        *complete, rest = block.split(b'\n')
        for line in complete:
            yield b''.join([*unfinished, line])
            unfinished.clear()
        unfinished.append(rest)
    if last := b''.join(unfinished):
        yield last


def _kind_suffix(name: str) -> str:
    path = Path(name)
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def _held(directory: Path) -> str:
    names = sorted(entry.name + '/' * entry.is_dir() for entry in directory.iterdir())
    more = f' and {len(names) - 8} more' if len(names) > 8 else ''
    return ', '.join(names[:8]) + more if names else 'nothing'
