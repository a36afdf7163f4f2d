"""`pretrax data index FILE...`: where the documents of huge .jsonl files begin."""

import time

from pretrax.data.corpus.files import INDEX_SUFFIX, TextFile, find_files
from pretrax.data.corpus.line_index import LineIndex, find_index, write_index
from pretrax.errors import UserError

_PAUSE = 10.0  # seconds between two lines about one file


def index(specs: list[str]) -> None:
    """Indexes each file that needs it, and says what it holds."""
    for file in [file for spec in specs for file in find_files(spec)]:
        fresh = _fresh(file)
        found = fresh or write_index(file, _progress(file))
        print(f'{file.path}: {len(found.starts):,} lines, {found.n_bytes / 1e6:,.1f} MB{_frames(file, found)}')
        print(f'  {file.path}{INDEX_SUFFIX}: {"up to date" if fresh else "written"}')


def _fresh(file: TextFile) -> LineIndex | None:
    try:
        return find_index(file)
    except UserError as error:
        print(error.args[0].splitlines()[0])
        return None


def _frames(file: TextFile, found: LineIndex) -> str:
    if not file.is_compressed:
        return ''
    if len(found.frames) > 1:
        return f' in {len(found.frames):,} frames'
    tool = 'bgzip' if file.path.suffix == '.gz' else 'pzstd'
    return f' in one frame: always read from its beginning, by one worker ({tool} compresses in many)'


def _progress(file: TextFile):
    said = time.perf_counter()

    def say(n_bytes: int) -> None:
        nonlocal said
        if (now := time.perf_counter()) - said > _PAUSE:
            said = now
            print(f'{file.path}: {n_bytes / 1e9:,.1f} GB read')

    return say
