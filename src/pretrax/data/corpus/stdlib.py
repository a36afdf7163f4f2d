"""The embedded corpus: the sources of the running interpreter's standard library, real text that every machine has."""

import fnmatch
import platform
import sysconfig
from pathlib import Path

from pretrax.data.corpus.files import TextFile, walk
from pretrax.data.corpus.storage import state
from pretrax.errors import UserError

# Tests, what others ship inside the library, and tables that a program wrote.
LEFT_OUT_DIRECTORIES = (
    '__pycache__', '_bundled', 'config-*', 'dist-packages', 'encodings', 'idle_test', 'lib2to3', 'pydoc_data',
    'site-packages', 'test', 'tests',
)  # fmt: skip
LEFT_OUT_FILES = ('_casefix.py', '_sysconfigdata*.py', 'entities.py', 'stringprep.py', 'test_*.py')


def stdlib_files(root: Path | None = None) -> list[TextFile]:
    """The .py files of the standard library in sorted order, without LEFT_OUT_DIRECTORIES and LEFT_OUT_FILES."""
    root = root or Path(sysconfig.get_path('stdlib'))
    found = walk(
        root,
        lambda name: name.endswith('.py') and not _matches(name, LEFT_OUT_FILES),
        lambda name: _matches(name, LEFT_OUT_DIRECTORIES),
    )
    if not found:
        raise UserError(
            f'text: stdlib: this Python ships no sources in {root}\n  use text of your own: data.text=path/to/*.txt'
        )
    return [TextFile(path, 'python', state(path)) for path in found]


def stdlib_rule() -> str:
    """What `stdlib_files` takes and leaves out, in words."""
    return (
        f'the standard library of Python {platform.python_version()}, .py files but for the directories '
        f'{", ".join(LEFT_OUT_DIRECTORIES)} and the files {", ".join(LEFT_OUT_FILES)}'
    )


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
