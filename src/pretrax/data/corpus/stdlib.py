"""The built-in corpus: the source files of Python's standard library, real text that every machine has."""

import fnmatch
import platform
import sysconfig
from pathlib import Path

from pretrax.data.corpus.files import TextFile
from pretrax.data.corpus.listing import AGAIN, FileCounts, Listing
from pretrax.errors import UserError

# Tests, third-party packages, and generated tables.
SKIPPED_DIRECTORIES = (
    '__pycache__',
    '_bundled',
    'config-*',
    'dist-packages',
    'encodings',
    'idle_test',
    'lib2to3',
    'pydoc_data',
    'site-packages',
    'test',
    'tests',
)
SKIPPED_FILES = ('_casefix.py', '_sysconfigdata*.py', 'entities.py', 'stringprep.py', 'test_*.py')


def add_stdlib(listing: Listing, root: Path | None = None) -> tuple[list[TextFile], FileCounts]:
    """Adds the .py files of the standard library, sorted, except SKIPPED_DIRECTORIES and SKIPPED_FILES."""
    root = root or Path(sysconfig.get_path('stdlib'))
    files, counts = listing.add_tree(
        root,
        lambda name: name.endswith('.py') and not _matches(name, SKIPPED_FILES),
        lambda name: _matches(name, SKIPPED_DIRECTORIES),
        lambda path, state: TextFile(path, 'python', state),
    )
    if not files and not counts.left_out[AGAIN]:
        raise UserError(
            f'text: stdlib: this Python has no source files in {root}\n  use your own text: data.text=path/to/*.txt'
        )
    return files, counts


def stdlib_files(root: Path | None = None) -> list[TextFile]:
    """The files that `add_stdlib` adds."""
    return add_stdlib(Listing(), root)[0]


def stdlib_rule() -> str:
    """Which files `stdlib_files` returns, for messages."""
    return (
        f'the standard library of Python {platform.python_version()}, .py files except in the directories '
        f'{", ".join(SKIPPED_DIRECTORIES)} and the files {", ".join(SKIPPED_FILES)}'
    )


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
