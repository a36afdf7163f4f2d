"""Text files and their kinds; data/corpus/listing.py finds them.

The suffix before `.gz` or `.zst` determines the kind: `.jsonl` and `.ndjson` have one document per line, `.csv`, `.tsv`
and `.parquet` one per row, and any other file is one document.
"""

import difflib
from pathlib import Path
from typing import Literal, NamedTuple

from pretrax.data.corpus.content import COMPRESSED
from pretrax.data.corpus.storage import Location, State

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
    return f'{parent.resolve()} has {listed_names(parent)}'


def text_file(location: Location, state: State) -> TextFile:
    """The file with the kind that its name says."""
    return TextFile(location, KINDS.get(kind_suffix(location.name), 'text'), state)


def kind_suffix(name: str) -> str:
    """The suffix that determines the kind: the one before `.gz` or `.zst`."""
    path = Path(name)
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def listed_names(directory: Path) -> str:
    """The first names in a directory, for messages."""
    names = sorted(entry.name + '/' * entry.is_dir() for entry in directory.iterdir())
    more = f' and {len(names) - 8} more' if len(names) > 8 else ''
    return ', '.join(names[:8]) + more if names else 'nothing'
