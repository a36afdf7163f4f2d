"""Finds the files that a path, a directory, a glob or a URL names, and their kinds.

The suffix before `.gz` or `.zst` determines the kind: `.jsonl` and `.ndjson` have one document per line, `.csv`, `.tsv`
and `.parquet` one per row, and any other file is one document.
"""

import difflib
import glob
import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from pretrax.data.corpus.content import COMPRESSED
from pretrax.data.corpus.storage import Location, State, Url, connect, locate, refusal, state, state_of
from pretrax.errors import UserError

type Kind = Literal['text', 'python', 'jsonl', 'csv', 'tsv', 'parquet']

KINDS: dict[str, Kind] = {'.jsonl': 'jsonl', '.ndjson': 'jsonl', '.csv': 'csv', '.tsv': 'tsv', '.parquet': 'parquet'}
# Directories are searched for these suffixes. A file that is named or matched by a glob may have any suffix.
SUFFIXES = ('.txt', '.md', '.py', *KINDS)
INDEX_SUFFIX = '.pretrax-index'  # written by data/corpus/line_index.py next to the file


class TextFile(NamedTuple):
    """A text file, its kind, and its state when it was found; readers raise UserError if the state has changed.

    The kind 'text' is one UTF-8 document, and 'python' is one document decoded as in PEP 263.
    """

    path: Location
    kind: Kind
    state: State

    @property
    def size(self) -> int:
        """Stored bytes; 0 if the storage does not report a size."""
        return self.state.size or 0

    @property
    def is_compressed(self) -> bool:
        return self.path.suffix in COMPRESSED


def find_files(spec: str) -> list[TextFile]:
    """The files that a path, a directory (searched recursively for SUFFIXES), a glob or a URL of these names, sorted.

    Raises:
        UserError: there is no such file, or the file named directly is empty.
    """
    location = locate(spec)
    files = _remote_files(location, spec) if isinstance(location, Url) else _local_files(location, spec)
    if len(files) == 1 and files[0].path == location and files[0].state.size == 0:
        raise UserError(f'{spec}: the file is empty')
    return files


def walk(root: Path, wanted: Callable[[str], bool], left_out: Callable[[str], bool] | None = None) -> list[Path]:
    """Files below root with a wanted name, sorted by path, without hidden files and without skipped directories."""
    found = []
    for directory, children, names in os.walk(root):
        children[:] = [name for name in children if not name.startswith('.') and not (left_out and left_out(name))]
        found += [Path(directory, name) for name in names if not name.startswith('.') and wanted(name)]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def nearest(path: Path) -> str:
    """A hint for a missing path: the sibling with the most similar name, otherwise the content of its directory."""
    parent = path if path.is_dir() else path.parent
    missing = path.name
    while not parent.is_dir():
        parent, missing = parent.parent, parent.name
    names = sorted(entry.name for entry in parent.iterdir())
    close = [] if parent == path else difflib.get_close_matches(missing, names, n=1)
    if close:
        return f'did you mean {parent / close[0]}?'
    return f'{parent.resolve()} has {_held(parent)}'


def _local_files(path: Path, spec: str) -> list[TextFile]:
    if path.is_dir():
        paths = walk(path, lambda name: _kind_suffix(name) in SUFFIXES)
        if not paths:
            raise UserError(f'{spec}: no {", ".join(SUFFIXES)} file in this directory\n  it has {_held(path)}')
    elif path.is_file():
        paths = [path]
    elif glob.has_magic(str(path)):
        matched = (Path(name) for name in glob.glob(str(path), recursive=True))
        paths = sorted(found for found in matched if found.is_file() and found.suffix != INDEX_SUFFIX)
        if not paths:
            raise UserError(f'{spec}: no file matches\n  {nearest(Path(os.path.dirname(path) or "."))}')
    else:
        if os.path.lexists(path):
            raise UserError(f'{spec}: neither a file nor a directory: a broken link, a pipe or a device')
        raise UserError(f'{spec}: no such file or directory\n  {nearest(path)}')
    return [_text_file(found, state(found)) for found in paths]


def _remote_files(url: Url, spec: str) -> list[TextFile]:
    filesystem, path = connect(url)
    magic = '*' in path if url.is_http else glob.has_magic(path)  # in a URL, '?' starts the query
    try:
        filesystem.invalidate_cache()
        if magic:
            found = filesystem.glob(path, detail=True)
        elif url.is_http or filesystem.info(path)['type'] != 'directory':
            return [_text_file(url, state(url))]
        else:
            found = {
                name: info
                for name, info in filesystem.find(path, detail=True).items()
                if _kind_suffix(name) in SUFFIXES
                and not any(part.startswith('.') for part in name[len(path) :].split('/'))
            }
    except Exception as error:
        raise refusal(url, error) from error
    files = [
        _text_file(Url(filesystem.unstrip_protocol(name)), state_of(info))
        for name, info in sorted(found.items(), key=lambda item: item[0].split('/'))
        if info['type'] == 'file' and not name.endswith(INDEX_SUFFIX)
    ]
    if not files:
        raise UserError(f'{spec}: no {"file matches" if magic else ", ".join(SUFFIXES) + " file in this directory"}')
    return files


def _text_file(location: Location, state: State) -> TextFile:
    return TextFile(location, KINDS.get(_kind_suffix(location.name), 'text'), state)


def _kind_suffix(name: str) -> str:
    path = Path(name)
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def _held(directory: Path) -> str:
    names = sorted(entry.name + '/' * entry.is_dir() for entry in directory.iterdir())
    more = f' and {len(names) - 8} more' if len(names) > 8 else ''
    return ', '.join(names[:8]) + more if names else 'nothing'
