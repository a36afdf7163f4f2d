"""States in the memory of a host: where their pieces are, and how one state is read from several. Imports no JAX.

    $PRETRAX_MEMORY/<writer>/<step>/manifest.json, state/...

A piece is what the devices of one process, the writer, held of the state of a step. It is a directory as that of a
checkpoint, with a manifest that lists only its own files, and has another name until it is whole. A launcher makes the
directory, in a file system in memory, and removes it at its end; so a piece outlives the process that wrote it.

Pieces belong together if they have the same step and the same `line`: the name of what one attempt computes between two
rollbacks. So steps that were trained twice are never mixed.
"""

import contextlib
import io
import itertools
import os
import pathlib
import shutil
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

from pretrax.checkpoint.chunks import Chunks, Index, overlap
from pretrax.checkpoint.files import File, Files, open_file
from pretrax.checkpoint.manifest import (
    DELETING,
    UNFINISHED,
    Manifest,
    damaged,
    is_step,
    read_manifest,
    steps_in,
)
from pretrax.errors import UserError
from pretrax.system.digest import BLOCK, digest

VARIABLE = 'PRETRAX_MEMORY'
_KEY = 'piece'  # of a manifest's description


def piece_facts(line: str, writer: int) -> dict[str, Any]:
    """The part of a manifest's description that makes it that of a piece."""
    return {_KEY: {'line': line, 'writer': writer}}


def line_of(description: Mapping[str, Any]) -> str | None:
    """The line of the pieces whose description this is; None: it is that of a checkpoint."""
    return description.get(_KEY, {}).get('line')


class Piece:
    """A piece of a state.

    Attributes:
        manifest: lists the files of the piece, and all arrays of the state.
        step, line, writer: as in the module's docstring.
        where: whose memory it is in, for reports.
    """

    where = 'memory of this machine'

    def __init__(self, manifest: Manifest):
        facts = manifest.description[_KEY]
        self.manifest, self.step = manifest, manifest.step
        self.place = pathlib.Path(str(manifest.place))
        self.line, self.writer = str(facts['line']), int(facts['writer'])

    def open(self, name: str) -> io.RawIOBase | io.BytesIO:
        """Opens one of its files, which can be read twice. Its digest is not checked. Raises OSError."""
        return open_file(self.manifest.place, name, self.manifest.files[name])


class PiecedState(Files):
    """A state of which some pieces can be reached.

    Args:
        step, line: of all pieces.
        pieces: those that are to be read first first.
        further: reaches for pieces of other hosts, which are read if the others do not have a file as it was written;
            one of them is that of process 0. None: there are none.

    Attributes:
        read: where the files were that have been read, for reports.
    """

    def __init__(self, step: int, line: str, pieces: Iterable[Piece], further: Iterator[Piece] | None = None):
        self.step, self.line, self.read = step, line, set[str]()
        self._copies: dict[str, list[Piece]] = {}
        self._files: dict[str, File] = {}
        self._first: Manifest | None = None
        self._writers: set[int] = set()
        self._further, self._reaching = further, threading.Lock()
        for piece in pieces:
            self._add(piece)

    def _add(self, piece: Piece) -> None:
        self._first = self._first or piece.manifest
        self._writers.add(piece.writer)
        for name, file in piece.manifest.files.items():
            self._files.setdefault(name, file)
            self._copies.setdefault(name, []).append(piece)

    def __str__(self) -> str:
        return f'of step {self.step} in memory'

    def manifest(self, needed: Mapping[str, Collection[Index]] | None = None) -> Manifest:
        """The manifest of the files that can be read.

        Args:
            needed: reach for pieces until these parts of arrays are there; {}: read no array; None: read all of them.

        Raises DamagedError if a part is in no piece, or that of process 0 is missing: when it is whole, the metrics of
        the step are written.
        """
        first = self._first or self._reach()
        if first is None or (self._further is None and 0 not in self._writers):
            raise damaged(self, 'the piece of process 0 is missing')
        manifest = first.model_copy(update={'files': self._files})
        for name in manifest.arrays if needed is None else needed:
            for file, at in Chunks(self, manifest, name):
                if needed is None or any(overlap(index, at) is not None for index in needed[name]):
                    while file not in self._copies:
                        if self._reach() is None:
                            raise damaged(self, f'{file} is in no piece')
        return manifest

    def _reach(self) -> Manifest | None:
        """Adds the next one of the further pieces; None: there is none."""
        with self._reaching:
            piece = next(self._further, None) if self._further is not None else None
            if piece is not None:
                self._add(piece)
        return piece and piece.manifest

    def _pieces_with(self, name: str) -> Iterator[Piece]:
        """The pieces that have a file, also further ones."""
        for number in itertools.count():
            while len(self._copies.get(name, ())) <= number:
                if self._reach() is None:
                    return
            yield self._copies[name][number]

    def open(self, name: str) -> io.RawIOBase | io.BytesIO:
        for piece in self._pieces_with(name):
            file = piece.manifest.files[name]
            with contextlib.suppress(OSError):
                stream = piece.open(name)
                if file.size <= BLOCK:
                    with stream:
                        stream = io.BytesIO(stream.read() or b'')
                if digest(stream) == (file.size, file.xxh3):
                    self.read.add(piece.where)
                    stream.seek(0)
                    return stream
                stream.close()
        raise damaged(self, f'no piece has {name} as it was written')


def memory_directory() -> pathlib.Path | None:
    """The directory for pieces on this host; None: no launcher has made one."""
    place = os.environ.get(VARIABLE)
    return pathlib.Path(place) if place and pathlib.Path(place).is_dir() else None


def pieces_in(memory: pathlib.Path | None) -> list[Piece]:
    """The whole pieces in the memory of this host. One that is damaged, or removed meanwhile, is left out."""
    pieces = []
    for folder in _writers(memory):
        with contextlib.suppress(OSError):
            for step in steps_in(folder):
                with contextlib.suppress(UserError, KeyError, ValueError, TypeError):
                    pieces.append(Piece(read_manifest(folder, step)))
    return pieces


def states_of(
    pieces: Iterable[Piece],
    reader: int = 0,
    known: Iterable[tuple[int, str]] = (),
    further: Callable[[int, str], Iterator[Piece] | None] = lambda step, line: None,
) -> list[PiecedState]:
    """The states that pieces belong to, the oldest first. The process `reader` reads what it wrote itself first.

    Args:
        known: steps and lines of states of which further pieces can be reached, and how.
    """
    states: dict[tuple[int, str], list[Piece]] = {key: [] for key in known}
    for piece in sorted(pieces, key=lambda piece: (piece.writer != reader, piece.writer)):
        states.setdefault((piece.step, piece.line), []).append(piece)
    return [PiecedState(*key, states[key], further(*key)) for key in sorted(states)]


def newest_in(memory: pathlib.Path | None) -> int:
    """The newest step whose whole state is in the memory of this host; 0: none."""
    for state in reversed(states_of(pieces_in(memory))):
        with contextlib.suppress(UserError):
            state.manifest()
            return state.step
    return 0


def newest_description(memory: pathlib.Path | None) -> tuple[int, dict[str, Any]] | None:
    """Step and description of the newest piece; None: there is no piece."""
    found = max(pieces_in(memory), key=lambda piece: piece.step, default=None)
    return found and (found.step, found.manifest.description)


def keep_only(memory: pathlib.Path, step: int, line: str | None) -> list[Piece]:
    """Removes everything from the memory of this host but the pieces of this step and line, and returns these.

    Several processes may do so together, while none writes there.
    """
    kept = [piece for piece in pieces_in(memory) if (piece.step, piece.line) == (step, line)]
    for folder in _writers(memory):
        with contextlib.suppress(OSError):
            for place in folder.iterdir():
                if place not in [piece.place for piece in kept]:
                    remove_piece(place)
    return kept


def remove_piece(place: pathlib.Path) -> None:
    """Removes a piece, which is none from the first moment on. It may be gone already."""
    with contextlib.suppress(OSError):
        if place.suffix not in UNFINISHED:
            place = place.rename(place.with_name(f'{place.name}{DELETING}'))
        shutil.rmtree(place, ignore_errors=True)


def _writers(memory: pathlib.Path | None) -> list[pathlib.Path]:
    try:
        return [] if memory is None else [folder for folder in memory.iterdir() if is_step(folder.name)]
    except OSError:  # its launcher has removed it
        return []
