"""Index huge .jsonl files, so that workers can share one file.

The index of a file, with the position of each document, is written next to it.
"""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pretrax.errors import UserError, first_line
from pretrax.option import argument

if TYPE_CHECKING:
    from pretrax.data.corpus.files import TextFile
    from pretrax.data.corpus.line_index import LineIndex

_PAUSE = 10.0  # seconds between progress lines


def index(
    files: tuple[str, ...] = argument('.jsonl files; .gz and .zst are supported.', metavar='FILE...'),
) -> None:
    from pretrax.data.corpus.files import INDEX_SUFFIX
    from pretrax.data.corpus.line_index import write_index
    from pretrax.data.corpus.listing import find_files

    for file in find_files(*files):
        fresh = _fresh(file)
        found = fresh or write_index(file, _progress(file))
        print(f'{file.path}: {len(found.starts):,} lines, {found.n_bytes / 1e6:,.1f} MB{_frames(file, found)}')
        print(f'  {file.path}{INDEX_SUFFIX}: {"up to date" if fresh else "written"}')


def _fresh(file: 'TextFile') -> 'LineIndex | None':
    from pretrax.data.corpus.line_index import find_index

    try:
        return find_index(file)
    except UserError as error:
        print(first_line(error))
        return None


def _frames(file: 'TextFile', found: 'LineIndex') -> str:
    if not file.is_compressed:
        return ''
    if len(found.frames) > 1:
        return f' in {len(found.frames):,} frames'
    tool = 'bgzip' if file.path.suffix == '.gz' else 'pzstd'
    return f' in one frame: one worker reads it from the beginning ({tool} writes several frames)'


def _progress(file: 'TextFile') -> Callable[[int], None]:
    printed = time.perf_counter()

    def report(n_bytes: int) -> None:
        nonlocal printed
        if (now := time.perf_counter()) - printed > _PAUSE:
            printed = now
            print(f'{file.path}: {n_bytes / 1e9:,.1f} GB read')

    return report
