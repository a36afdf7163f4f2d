"""States in the memory of a host: where their pieces are, and how one state is read from several. Imports no JAX.

    $PRETRAX_MEMORY/<writer>/<step>/manifest.json, state/...

A piece is what the devices of one process, the writer, held of the state of a step. It is a directory as that of a
checkpoint, with a manifest that lists only its own files, and has another name until it is whole. A launcher makes the
directory, in a file system in memory, and removes it at its end; so a piece outlives the process that wrote it.

Pieces belong together if they have the same step and the same `line`: the name of what one attempt computes between two
rollbacks. So steps that were trained twice are never mixed.
"""

import collections
import contextlib
import io
import os
import pathlib
import shutil
from collections.abc import Iterable, Mapping
from typing import Any

from pretrax.checkpoint.chunks import Chunks
from pretrax.checkpoint.files import Files, open_file
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
        pieces: of one step and one line, those that are to be read first first.

    Attributes:
        step, line: of all pieces.
    """

    def __init__(self, pieces: list[Piece]):
        self.step, self.line = pieces[0].step, pieces[0].line
        self._copies: dict[str, list[Piece]] = collections.defaultdict(list)
        for piece in pieces:
            for name in piece.manifest.files:
                self._copies[name].append(piece)
        self._writers = {piece.writer for piece in pieces}
        first = min(pieces, key=lambda piece: piece.writer).manifest
        files = {name: copies[0].manifest.files[name] for name, copies in self._copies.items()}
        description = first.description | {'where': ' and '.join(dict.fromkeys(piece.where for piece in pieces))}
        self._manifest = first.model_copy(update={'files': files, 'description': description})

    def __str__(self) -> str:
        return f'of step {self.step} in memory'

    def manifest(self) -> Manifest:
        """The manifest of the whole state; its description says `where` the pieces are.

        Raises DamagedError if a chunk of an array is in no piece, or that of process 0 is missing: when it is whole,
        the metrics of the step are written.
        """
        if 0 not in self._writers:
            raise damaged(self, 'the piece of process 0 is missing')
        for name in self._manifest.arrays:
            for file, _ in Chunks(self, self._manifest, name):
                if file not in self._copies:
                    raise damaged(self, f'{file} is in no piece')
        return self._manifest

    def open(self, name: str) -> io.RawIOBase | io.BytesIO:
        for piece in self._copies.get(name, ()):
            file = piece.manifest.files[name]
            with contextlib.suppress(OSError):
                stream = piece.open(name)
                if file.size <= BLOCK:
                    with stream:
                        stream = io.BytesIO(stream.read() or b'')
                if digest(stream) == (file.size, file.xxh3):
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


def states_of(pieces: Iterable[Piece], reader: int = 0) -> list[PiecedState]:
    """The states that pieces belong to, the oldest first. The process `reader` reads what it wrote itself first."""
    states = collections.defaultdict(list)
    for piece in sorted(pieces, key=lambda piece: (piece.writer != reader, piece.writer)):
        states[piece.step, piece.line].append(piece)
    return [PiecedState(states[key]) for key in sorted(states)]


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
