"""What a teacher says about rows of tokens, in files: the k most likely next tokens, and the probability of all others.

A row is found by a digest of its tokens, segments and positions. So it does not matter in which order, in which batches
and on how many processes rows are read, and rows that an epoch repeats are stored once. Letters: R rows, L sequence
length.

A directory has:

    teacher.json    what all rows have in common: the teacher, the temperature, k, the data
    part-00000/     rows.npy       uint64 [R], the digests
                    ids.npy        uint16, or uint32 if the vocabulary is larger, [R, L, k], most likely first
                    log_probs.npy  f32 [R, L, k]
                    log_tail.npy   f32 [R, L], of all other tokens together; -inf: there are none
                    manifest.json  the digests of these files, which are checked before they are read (parts.py)
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from pretrax.data.batches.source import HostBatch
from pretrax.distill.parts import (
    PartsInBucket,
    fetch_parts,
    part_name,
    part_numbers,
    problem_of,
    repair_parts,
    write_part,
)
from pretrax.errors import Report, UserError
from pretrax.storage import AnyPath, BucketPath
from pretrax.storage.connection import kind_of_error
from pretrax.storage.locate import working_directory
from pretrax.system.atomic import write_file
from pretrax.system.json_file import parse_json

FORMAT = 2
DESCRIPTION = 'teacher.json'
ARRAYS = ('ids', 'log_probs', 'log_tail')


@dataclasses.dataclass(frozen=True)
class Description:
    """Facts about all rows of a directory."""

    teacher: str  # the fingerprint of its weights
    place: str  # where the weights were
    temperature: float  # temperature of the probabilities
    top_k: int  # tokens that are kept
    vocab_size: int  # vocabulary size of the teacher
    sequence_length: int  # sequence length of the rows
    tokens: str | None  # the fingerprint of the data; None: unknown
    tokenizer: str | None  # its sha256; None: there is none

    @property
    def fingerprint(self) -> str:
        """Identifies what a student learns from; the place of the teacher does not matter."""
        facts = dataclasses.asdict(self) | {'place': None}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class HostTopK(NamedTuple):
    """The probabilities of a teacher for rows, in host memory."""

    ids: np.ndarray  # int32 [R, L, k]
    log_probs: np.ndarray  # float32 [R, L, k]
    log_tail: np.ndarray  # float32 [R, L]


def _nobody_else() -> None:
    """Confirms a directory that no other process writes."""


class TeacherFiles:
    """The rows of a directory.

    Args:
        place: written by `pretrax distill prepare`. If it is in a bucket, it is copied to this machine.
        process: the index of this process, which has a copy of its own.
        report: removes damaged parts, and receives a line about each; None: they are an error, and nothing is written.
        confirm: raises an exception if this process may no longer write the directory.

    Raises:
        UserError: it is missing or damaged, or another version of pretrax has written it; or its bucket cannot be
            reached.
    """

    def __init__(
        self, place: AnyPath, process: int = 0, report: Report | None = None, confirm: Callable[[], None] = _nobody_else
    ):
        self.place, self.directory = place, working_directory(place, process)
        self._confirm, self._remote = confirm, None
        self.description = read_description(place)
        self._parts: list[HostTopK] = []
        self._digests = np.empty(0, np.uint64)
        self._places = np.empty((0, 2), np.int64)  # part, and row in it, of each digest
        try:
            if isinstance(place, BucketPath):
                self._remote = PartsInBucket(place, confirm) if report is not None else None
                fetch_parts(place, self.directory, afresh=report is not None)
            if report is not None:
                repair_parts(place, self.directory, self._remote, report)
            for number in range(max(part_numbers(self.directory), default=-1) + 1):
                self._open(part_name(number), verified=report is not None)
        except OSError as error:
            raise kind_of_error(error)(
                f'{place}: {error.strerror} ({error.filename})\nrun the same command again'
            ) from error

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._digests)

    @property
    def rows(self) -> np.ndarray:
        """The digests of the rows, uint64 [R], sorted."""
        return self._digests

    def read(self, batch: HostBatch) -> HostTopK:
        """What the teacher says about the rows of a batch. Raises UserError if some of them are missing."""
        has, places = self._find(digests(batch))
        if not has.all():
            raise UserError(
                f'distill.cache: {self.place} has {has.sum():,} of {len(has):,} rows of a batch: '
                'it was prepared for fewer steps, or for another seed or order of the data\n'
                'run `pretrax distill prepare` with this configuration and '
                f'--out {self.place}, which adds what is missing'
            )
        rows = [HostTopK(*(array[row] for array in self._parts[part])) for part, row in places.tolist()]
        ids, log_probs, log_tail = (np.stack(arrays) for arrays in zip(*rows, strict=True))
        return HostTopK(ids.astype(np.int32), log_probs, log_tail)

    def has(self, batch: HostBatch) -> np.ndarray:
        """Which rows of a batch are here, bool [R]."""
        return self._find(digests(batch))[0]

    def write(self, rows: np.ndarray, top: HostTopK) -> None:
        """Adds rows as a new part.

        Args:
            rows: uint64 [R], their digests.
            top: what the teacher says about them.

        Raises:
            UserError: the part cannot be written.
            Exception: what `confirm` raises.
        """
        number = len(self._parts)
        ids = top.ids.astype(np.uint16 if self.description.vocab_size <= 1 << 16 else np.uint32)
        try:
            arrays: dict[str, np.ndarray] = dict(zip(('rows', *ARRAYS), (rows, ids, *top[1:]), strict=True))
            self._confirm()
            part = write_part(self.directory, number, arrays)
            if self._remote is not None:
                self._remote.add(part)
        except OSError as error:
            raise kind_of_error(error)(
                f'{self.place / part_name(number)}: {error.strerror}\n'
                'make room, and run the same command again: it continues'
            ) from error
        self._open(part_name(number), verified=True)

    def _open(self, name: str, verified: bool) -> None:
        d, path = self.description, self.directory / name
        if not verified and (said := problem_of(path)):
            raise self._damaged(name, said)
        expected = [(), (d.sequence_length, d.top_k), (d.sequence_length, d.top_k), (d.sequence_length,)]
        try:
            rows, *arrays = (np.load(path / f'{name}.npy', mmap_mode='r') for name in ('rows', *ARRAYS))
        except (FileNotFoundError, EOFError, ValueError) as error:
            raise self._damaged(name, str(error)) from error
        if [array.shape for array in (rows, *arrays)] != [(len(rows), *shape) for shape in expected]:
            raise self._damaged(name, 'its arrays have other shapes')
        places = np.stack([np.full(len(rows), len(self._parts)), np.arange(len(rows))], axis=1)
        together = np.concatenate([self._digests, rows])
        order = np.argsort(together, kind='stable')
        self._digests = together[order]
        self._places = np.concatenate([self._places, places])[order]
        self._parts.append(HostTopK(*arrays))

    def _damaged(self, name: str, why: str) -> UserError:
        said = ' '.join(why.split())[:200]
        return UserError(
            f'distill.cache: {self.place / name} is damaged: {said}\n'
            'run `pretrax distill prepare` again with the configuration that wrote it and '
            f'--out {self.place}: it computes the rows of this part again'
        )

    def _find(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which digests are here, and the place of each of them."""
        if not len(self):
            return np.zeros(len(wanted), bool), np.zeros((len(wanted), 2), np.int64)
        at = np.minimum(np.searchsorted(self._digests, wanted), len(self) - 1)
        return self._digests[at] == wanted, self._places[at]


def digests(batch: HostBatch) -> np.ndarray:
    """A digest of what a teacher sees of each row: its tokens, segments and positions. uint64 [R]."""
    seen = np.ascontiguousarray(np.stack([batch.tokens, batch.segments, batch.positions], axis=1), np.int32)
    found = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in seen]
    return np.frombuffer(b''.join(found), np.uint64)


def create(
    place: AnyPath, description: Description, report: Report = print, confirm: Callable[[], None] = _nobody_else
) -> TeacherFiles:
    """Creates a directory, or opens it to continue. Damaged parts are removed and reported.

    Args:
        report: receives a line about each damaged part.
        confirm: raises an exception if this process may no longer write the directory.

    Raises:
        UserError: it has rows of another teacher, other tokens, another temperature or another k.
    """
    if not (place / DESCRIPTION).is_file():
        if place.is_dir() and any(path.name != 'lock' for path in place.iterdir()):
            raise UserError(f'--out {place}: it has other files\nuse a new directory')
        content = json.dumps({'format': FORMAT, **dataclasses.asdict(description)}, indent=2).encode()
        if isinstance(place, BucketPath):
            (place / DESCRIPTION).create(content)  # or another process has, which is compared below
        else:
            place.mkdir(parents=True, exist_ok=True)
            write_file(place / DESCRIPTION, content, sync=True)
    there = read_description(place)
    for name, ours in dataclasses.asdict(description).items():
        theirs = getattr(there, name)
        if name != 'place' and ours != theirs:
            raise UserError(
                f'--out {place}: it was prepared with another {name}: {theirs} there, {ours} now\nuse another directory'
            )
    return TeacherFiles(place, report=report, confirm=confirm)


def read_description(directory: AnyPath) -> Description:
    """Reads the facts about all rows of a directory. Raises UserError as `TeacherFiles`."""
    path = directory / DESCRIPTION
    try:
        values: dict[str, Any] = parse_json(path.read_bytes())
        found = values.pop('format')
        if found != FORMAT:
            raise UserError(f'{path}: format {found}, but this version of pretrax reads {FORMAT}\nprepare it again')
        return Description(**values)
    except FileNotFoundError as error:
        raise UserError(
            f'distill.cache: {directory} has no {DESCRIPTION}\n'
            f'write it first: pretrax distill prepare CONFIG distill.teacher=RUN --out {directory}'
        ) from error
    except OSError as error:
        raise kind_of_error(error)(f'{path}: {error.strerror}\nrun the same command again') from error
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        said = ' '.join(str(error).split())[:200]
        raise UserError(
            f'{path}: damaged: {said}\nrestore it from a copy, or run `pretrax distill prepare` with another --out'
        ) from error
