"""Lists the files that paths, directories, globs and URLs name: each file once, with an account of what is left out.

    listing = Listing()
    listing.add('books')          # a directory, searched recursively
    listing.add('./books/*.txt')  # adds only files that are not in `files` yet
    listing.counts.lines('text')  # ['text: 12 found = 9 files + 3 the same file again', ...]

Two names belong to one file if they lead to the same inode: symbolic links, hard links, `a` and `./a`. If a file has
several names, the name without a symbolic link is kept, otherwise the first in order.
"""

import collections
import fnmatch
import glob
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pretrax.data.corpus.files import INDEX_SUFFIX, SUFFIXES, TextFile, kind_suffix, listed_names, nearest, text_file
from pretrax.data.corpus.storage import (
    Location,
    State,
    Url,
    canonical_url,
    connect,
    locate,
    state,
    state_of,
    storage_errors,
)
from pretrax.errors import UserError

MAX_EXAMPLES = 10  # files and folders left out that are named
HIDDEN, OTHER_SUFFIX = 'hidden', 'with another suffix'
AGAIN, FOLDER_AGAIN, LOOP = 'the same file again', 'the same folder again', 'loop'
BROKEN, UNREADABLE, SPECIAL = 'broken link', 'unreadable', 'neither a file nor a folder'


@dataclass
class FileCounts:
    """The number of files found, and of files and folders that were left out for each reason."""

    read: int = 0  # files that are read
    # By reason. A folder counts as one, whatever is in it.
    left_out: collections.Counter[str] = field(default_factory=collections.Counter)
    # Suffixes of files left out for their suffix
    suffixes: collections.Counter[str] = field(default_factory=collections.Counter)
    # A line for each of the first files and folders that a user may have expected to be read
    examples: list[str] = field(default_factory=list)
    keys: set[Hashable] = field(default_factory=set)  # identify the files that are read, whatever their names

    def leave_out(self, path: Location, reason: str, explanation: str = '') -> None:
        """Counts a file or a folder that is not read; with an explanation, it is an example."""
        self.left_out[reason] += 1
        if reason == OTHER_SUFFIX:
            self.suffixes[path.suffix or 'none'] += 1
        if explanation and len(self.examples) < MAX_EXAMPLES:
            self.examples.append(f'{path}: {explanation}')

    def __add__(self, other: 'FileCounts') -> 'FileCounts':
        return FileCounts(
            self.read + other.read,
            self.left_out + other.left_out,
            self.suffixes + other.suffixes,
            (self.examples + other.examples)[:MAX_EXAMPLES],
            self.keys | other.keys,
        )

    def lines(self, name: str) -> list[str]:
        """The account to print, which begins with a name; no lines if nothing was left out."""
        if not self.left_out:
            return []
        suffixes = ', '.join(suffix for suffix, _ in self.suffixes.most_common(4))
        reasons = ''.join(
            f' + {n:,} {reason}{f" ({suffixes})" if reason == OTHER_SUFFIX else ""}'
            for reason, n in sorted(self.left_out.items())
        )
        found = self.read + sum(self.left_out.values())
        return [
            f'{name}: {found:,} found = {self.read:,} files{reasons}',
            *(f'{name}: left out: {example}' for example in self.examples),
        ]

    def record(self) -> dict[str, Any]:
        """The numbers, as JSON."""
        return {'read': self.read, 'left_out': dict(sorted(self.left_out.items()))}


class _Candidate(NamedTuple):
    """A name of a file; `key` is the same for all names of the file, and `is_linked` if a symbolic link leads to it."""

    location: Location
    state: State
    key: Hashable
    is_linked: bool


class Listing:
    """The files of several specifications, each once."""

    def __init__(self):
        self.files: list[TextFile] = []
        self.counts = FileCounts()
        self._names: dict[Hashable, Location] = {}

    def add(self, spec: str) -> tuple[list[TextFile], FileCounts]:
        """Adds the files that a path, a directory (searched recursively for SUFFIXES), a glob or a URL of these names.

        Returns those that were not listed before, sorted by path, and the account of this specification.

        Raises UserError if there is no such file, or the file named directly is empty.
        """
        location, counts = locate(spec), FileCounts()
        search = _local(location, spec, counts) if isinstance(location, Path) else _remote(location, spec, counts)
        candidates = list(search)
        if len(candidates) == 1 and candidates[0].location == location and candidates[0].state.size == 0:
            raise UserError(f'{spec}: the file is empty')
        return self._add(candidates, counts, text_file)

    def add_files(self, paths: Iterable[Path]) -> list[TextFile]:
        """Adds local files, which may be empty; returns those that were not listed before."""
        return self._add([_candidate(path, path.stat(), path.is_symlink()) for path in paths], FileCounts(), text_file)[
            0
        ]

    def add_tree(
        self, root: Path, wanted: Callable[[str], bool], skipped: Callable[[str], bool], make: Callable[..., TextFile]
    ) -> tuple[list[TextFile], FileCounts]:
        """Adds the files below a folder with a wanted name, without folders with a skipped name; `make` a TextFile."""
        counts = FileCounts()
        found = list(_Search(('**', '*'), counts, wanted, skipped).run(root))
        for reason in (HIDDEN, OTHER_SUFFIX):  # `wanted` is a rule of its own
            del counts.left_out[reason]
        return self._add(found, counts, make)

    def _add(
        self, candidates: list[_Candidate], counts: FileCounts, make: Callable[..., TextFile]
    ) -> tuple[list[TextFile], FileCounts]:
        kept = []
        for candidate in sorted(candidates, key=lambda one: (one.is_linked, _order(one.location))):
            first = self._names.setdefault(candidate.key, candidate.location)
            if first is candidate.location:
                kept.append(candidate)
            else:
                counts.leave_out(candidate.location, AGAIN, f'the same file as {first}')
        kept.sort(key=lambda one: _order(one.location))
        files = [make(one.location, one.state) for one in kept]
        counts.read, counts.keys = len(files), {one.key for one in kept}
        self.files += files
        self.counts += counts
        return files, counts


def check_files(spec: str) -> None:
    """Raises UserError as `Listing.add` does. Stops at the first file of a directory."""
    location = locate(spec)
    if isinstance(location, Path) and location.is_dir():
        search = _Search(('**', '*'), FileCounts(), lambda name: kind_suffix(name) in SUFFIXES)
        if next(search.run(location), None) is not None:
            return
    Listing().add(spec)


def find_files(*specs: str) -> list[TextFile]:
    """The files that some specifications name, each once, as `Listing.add` finds them."""
    listing = Listing()
    for spec in specs:
        listing.add(spec)
    return listing.files


def _order(location: Location) -> tuple[str, ...]:
    return location.parts if isinstance(location, Path) else tuple(location.url.split('/'))


def _local(path: Path, spec: str, counts: FileCounts) -> Iterable[_Candidate]:
    if path.is_dir():
        found = list(_Search(('**', '*'), counts, lambda name: kind_suffix(name) in SUFFIXES).run(path))
        if not found:
            raise UserError(
                f'{spec}: no {", ".join(SUFFIXES)} file in this directory\n  it has {listed_names(path)}'
                + ''.join(f'\n  left out: {example}' for example in counts.examples[:3])
            )
        return found
    if path.is_file():
        return [_candidate(path, path.stat(), path.is_symlink())]
    if glob.has_magic(str(path)):
        literal = next(
            (n for n in range(len(path.parts)) if not Path(*path.parts[: n + 1]).exists()), len(path.parts) - 1
        )
        pattern = path.parts[literal:]
        search = _Search(pattern + ('*',) * (pattern[-1] == '**'), counts)
        found = list(search.run(Path(*path.parts[:literal])))
        if not found:
            raise UserError(f'{spec}: no file matches\n  {nearest(Path(os.path.dirname(path) or "."))}')
        return found
    if os.path.lexists(path):
        raise UserError(f'{spec}: neither a file nor a directory: a broken link, a pipe or a device')
    is_name = re.fullmatch(r'[\w-]+(/[\w.-]+)?', spec) and (path.parent == Path() or not path.parent.exists())
    hub = f'\n  a data set of Hugging Face is written hf:{spec}' if is_name else ''
    raise UserError(f'{spec}: no such file or directory\n  {nearest(path)}{hub}')


def _candidate(path: Path, stat: os.stat_result, is_linked: bool) -> _Candidate:
    # Some network file systems have no inodes, so the real path helps; others give one inode to two files.
    inode = stat.st_ino or os.path.realpath(path)
    key = (stat.st_dev, inode, stat.st_size, stat.st_mtime_ns)
    return _Candidate(path, State.from_stat(stat), key, is_linked)


class _Search:
    """Files below a folder whose path matches a pattern, as `glob.glob(recursive=True)` matches it, without loops.

    A folder is searched again only if other parts of the pattern apply in it: a second search with the same parts would
    find the same files. So the search ends, however links lead from one folder to another.

    Args:
        pattern: the parts of a path; '**' is any number of folders that are not hidden.
        wanted, skipped: of names; None for a glob, which says by itself what it matches.
    """

    def __init__(
        self,
        pattern: tuple[str, ...],
        counts: FileCounts,
        wanted: Callable[[str], bool] | None = None,
        skipped: Callable[[str], bool] = lambda name: False,
    ):
        self._pattern, self._counts, self._wanted, self._skipped = pattern, counts, wanted, skipped
        self._searched: dict[tuple[int, int, frozenset[int]], Path] = {}
        self._links: collections.deque[tuple[Path, frozenset[int]]] = collections.deque()

    def run(self, root: Path) -> Iterator[_Candidate]:
        if not root.is_dir():
            return
        self._root = os.path.realpath(root)
        yield from self._folder(root, self._with_empty({0}), is_linked=False)
        while self._links:  # after everything that is found without links
            yield from self._folder(*self._links.popleft(), is_linked=True)

    def _folder(self, folder: Path, at: frozenset[int], is_linked: bool) -> Iterator[_Candidate]:
        waiting = [(folder, at)]
        while waiting:
            folder, at = waiting.pop()
            try:
                entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
                stat = os.stat(folder)
            except OSError as error:
                self._counts.leave_out(folder, UNREADABLE, error.strerror or type(error).__name__)
                continue
            first = self._searched.setdefault((stat.st_dev, stat.st_ino, at), folder)
            if first is not folder:
                self._counts.leave_out(folder, FOLDER_AGAIN, f'the same folder as {first}')
                continue
            inside = []
            for entry in entries:
                path = folder / entry.name
                kind = _kind(entry)
                if self._is_left_out(entry.name, path, kind):
                    continue
                if kind == 'folder':
                    last = len(self._pattern) - 1
                    # The parts of the pattern behind those that match the name
                    below = {n + 1 for n in at if n < last and _matches_part(self._pattern[n], entry.name)}
                    if deeper := {n for n in at if self._pattern[n] == '**' and not entry.name.startswith('.')}:
                        if entry.is_symlink() and self._is_loop(path, folder):
                            self._counts.leave_out(path, LOOP, f'it leads to {os.readlink(path)}, which contains it')
                        else:
                            below |= deeper
                    if below:
                        (self._links if entry.is_symlink() else inside).append((path, self._with_empty(below)))
                elif self._matches(at, entry.name):
                    if kind == 'file':
                        yield _candidate(path, entry.stat(), is_linked or entry.is_symlink())
                    else:
                        self._counts.leave_out(path, kind, _explained(path, kind))
            if above := frozenset(n + 1 for n in at if self._pattern[n] == '..'):
                inside.append((folder / '..', self._with_empty(above)))
            waiting += reversed(inside)

    def _is_left_out(self, name: str, path: Path, kind: str) -> bool:
        if self._wanted is None:
            return path.suffix == INDEX_SUFFIX
        if name.startswith('.'):
            self._counts.leave_out(path, HIDDEN)
            return True
        if kind == 'folder':
            return self._skipped(name)
        if self._wanted(name):
            return False
        if kind == BROKEN:  # perhaps to a folder
            self._counts.leave_out(path, BROKEN, _explained(path, BROKEN))
        elif path.suffix != INDEX_SUFFIX:
            self._counts.leave_out(path, OTHER_SUFFIX)
        return True

    def _is_loop(self, link: Path, folder: Path) -> bool:
        """Whether a link in a folder leads to that folder, or to one above it or above the root."""
        target = os.path.join(os.path.realpath(link), '')
        inside = (os.path.join(os.path.realpath(folder), ''), os.path.join(self._root, ''))
        return any(one.startswith(target) for one in inside)

    def _matches(self, at: frozenset[int], name: str) -> bool:
        last = len(self._pattern) - 1
        return last in at and _matches_part(self._pattern[last], name)

    def _with_empty(self, at: Iterable[int]) -> frozenset[int]:
        """The parts, and those behind a '**', which may be no folder at all."""
        found = set(at)
        for n, part in enumerate(self._pattern):
            if n in found and part == '**':
                found.add(n + 1)
        return frozenset(found)


def _matches_part(part: str, name: str) -> bool:
    if part == '**' or (name.startswith('.') and not part.startswith('.')):
        return False
    return fnmatch.fnmatchcase(name, part) if glob.has_magic(part) else name == part


def _kind(entry: os.DirEntry[str]) -> str:
    """'folder', 'file', or the reason for leaving an entry out."""
    try:
        if entry.is_dir():
            return 'folder'
        if entry.is_file():
            return 'file'
        entry.stat()
    except OSError:  # also a link to itself
        return BROKEN
    return SPECIAL


def _explained(path: Path, reason: str) -> str:
    return f'{reason} to {os.readlink(path)}' if path.is_symlink() else reason


def _remote(url: Url, spec: str, counts: FileCounts) -> Iterable[_Candidate]:
    filesystem, path = connect(url)
    with storage_errors(url):
        filesystem.invalidate_cache()
        # In a URL, '?' starts the query. An object that exists is meant itself, whatever its name.
        magic = '*' in path if url.is_http else glob.has_magic(path) and not filesystem.exists(path)
        if magic:
            found = filesystem.glob(path, detail=True)
        elif url.is_http or filesystem.info(path)['type'] != 'directory':
            return [_Candidate(url, state(url), canonical_url(url), is_linked=False)]
        else:
            found = filesystem.find(path, detail=True)
    candidates = []
    for name, info in sorted(found.items(), key=lambda item: item[0].split('/')):
        one = Url(filesystem.unstrip_protocol(name))
        if info['type'] != 'file' or name.endswith(INDEX_SUFFIX):
            continue
        if not magic and any(part.startswith('.') for part in name[len(path) :].split('/')):
            counts.leave_out(one, HIDDEN)
        elif not magic and kind_suffix(name) not in SUFFIXES:
            counts.leave_out(one, OTHER_SUFFIX)
        else:
            candidates.append(_Candidate(one, state_of(info), canonical_url(one), is_linked=False))
    if not candidates:
        raise UserError(f'{spec}: no {"file matches" if magic else ", ".join(SUFFIXES) + " file in this directory"}')
    return candidates
