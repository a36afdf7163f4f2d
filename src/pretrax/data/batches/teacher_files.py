"""What a teacher says about rows of tokens, in files: the k most likely next tokens, and the probability of all others.

A row is found by a digest of its tokens, segments and positions. So it does not matter in which order, in which batches and on
how many processes rows are read, and rows that an epoch repeats are stored once. Letters: R rows, L sequence length.

A directory has:

    teacher.json    what all rows have in common: the teacher, the temperature, k, the data
    part-00000/     rows.npy       uint64 [R], the digests
                    ids.npy        uint16, or uint32 if the vocabulary is larger, [R, L, k], most likely first
                    log_probs.npy  f32 [R, L, k]
                    log_tail.npy   f32 [R, L], of all other tokens together; -inf: there are none

A part appears whole or not at all.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pretrax.data.batches.source import HostBatch
from pretrax.errors import UserError
from pretrax.machine.atomic import new_directory, write_file

FORMAT = 1
DESCRIPTION = 'teacher.json'
ARRAYS = ('ids', 'log_probs', 'log_tail')


@dataclasses.dataclass(frozen=True)
class Description:
    """What all rows of a directory have in common.

    Attributes:
        teacher: the fingerprint of its weights.
        place: where they were.
        temperature: of the probabilities.
        top_k: tokens that are kept.
        vocab_size: of the teacher.
        sequence_length: of the rows.
        tokens: the fingerprint of the data; None: unknown.
        tokenizer: its sha256; None: there is none.
    """

    teacher: str
    place: str
    temperature: float
    top_k: int
    vocab_size: int
    sequence_length: int
    tokens: str | None
    tokenizer: str | None

    @property
    def fingerprint(self) -> str:
        """Identifies what a student learns from; the place of the teacher does not matter."""
        facts = dataclasses.asdict(self) | {'place': None}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class HostTopK(NamedTuple):
    """What a teacher says about rows, in host memory.

    Attributes:
        ids: int32 [R, L, k].
        log_probs: float32 [R, L, k].
        log_tail: float32 [R, L].
    """

    ids: np.ndarray
    log_probs: np.ndarray
    log_tail: np.ndarray


class TeacherFiles:
    """The rows of a directory.

    Args:
        directory: written by `pretrax distill prepare`.

    Raises:
        UserError: it is missing or damaged, or another version of pretrax has written it.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        self.description = read_description(directory)
        self._parts: list[HostTopK] = []
        self._digests = np.empty(0, np.uint64)
        self._places = np.empty((0, 2), np.int64)  # part, and row in it, of each digest
        for path in parts_of(directory):
            self._open(path)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._digests)

    def read(self, batch: HostBatch) -> HostTopK:
        """What the teacher says about the rows of a batch. Raises UserError if some of them are missing."""
        has, places = self._find(digests(batch))
        if not has.all():
            raise UserError(
                f'distill.cache: {self.directory} has {has.sum():,} of {len(has):,} rows of a batch: '
                'it was prepared for fewer steps, or for another seed or order of the data\n'
                'run `pretrax distill prepare` with this configuration and '
                f'--out {self.directory}, which adds what is missing'
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
        """
        path = self.directory / f'part-{len(self._parts):05}'
        ids = top.ids.astype(np.uint16 if self.description.vocab_size <= 1 << 16 else np.uint32)
        try:
            with new_directory(path, sync=True) as partial:
                for name, array in zip(('rows', *ARRAYS), (rows, ids, *top[1:]), strict=True):
                    np.save(partial / f'{name}.npy', array, allow_pickle=False)
        except OSError as error:
            raise UserError(
                f'{path}: {error.strerror}\nmake room, and run the same command again: it continues'
            ) from error
        self._open(path)

    def _open(self, path: Path) -> None:
        d = self.description
        expected = [(), (d.sequence_length, d.top_k), (d.sequence_length, d.top_k), (d.sequence_length,)]
        try:
            rows, *arrays = (np.load(path / f'{name}.npy', mmap_mode='r') for name in ('rows', *ARRAYS))
        except (OSError, EOFError, ValueError) as error:
            raise _damaged(path, str(error)) from error
        if [array.shape for array in (rows, *arrays)] != [(len(rows), *shape) for shape in expected]:
            raise _damaged(path, 'its arrays have other shapes')
        places = np.stack([np.full(len(rows), len(self._parts)), np.arange(len(rows))], axis=1)
        together = np.concatenate([self._digests, rows])
        order = np.argsort(together, kind='stable')
        self._digests = together[order]
        self._places = np.concatenate([self._places, places])[order]
        self._parts.append(HostTopK(*arrays))

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


def create(directory: Path, description: Description) -> TeacherFiles:
    """Creates a directory, or opens it to continue.

    Raises:
        UserError: it has rows of another teacher, other tokens, another temperature or another k.
    """
    if not (directory / DESCRIPTION).is_file():
        if directory.is_dir() and any(path.name != 'lock' for path in directory.iterdir()):
            raise UserError(f'--out {directory}: it has other files\nuse a new directory')
        directory.mkdir(parents=True, exist_ok=True)
        content = {'format': FORMAT, **dataclasses.asdict(description)}
        write_file(directory / DESCRIPTION, json.dumps(content, indent=2).encode(), sync=True)
    there = read_description(directory)
    for name, ours in dataclasses.asdict(description).items():
        theirs = getattr(there, name)
        if name != 'place' and ours != theirs:
            raise UserError(
                f'--out {directory}: it was prepared with another {name}: {theirs} there, {ours} now\n'
                'use another directory, or remove this one'
            )
    return TeacherFiles(directory)


def read_description(directory: Path) -> Description:
    """What all rows of a directory have in common. Raises UserError as `TeacherFiles`."""
    path = directory / DESCRIPTION
    try:
        values: dict[str, Any] = json.loads(path.read_bytes())
        found = values.pop('format')
        if found != FORMAT:
            raise UserError(f'{path}: format {found}, and this version of pretrax reads {FORMAT}\nprepare it again')
        return Description(**values)
    except FileNotFoundError as error:
        raise UserError(
            f'distill.cache: {directory} has no {DESCRIPTION}\n'
            f'write it first: pretrax distill prepare CONFIG distill.teacher=RUN --out {directory}'
        ) from error
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _damaged(path, str(error)) from error


def parts_of(directory: Path) -> Iterator[Path]:
    """The parts of a directory, in order. A part that is missing between others is opened too, which is an error."""
    numbers = [int(path.name[5:]) for path in directory.glob('part-*') if path.name[5:].isdigit()]
    return (directory / f'part-{number:05}' for number in range(max(numbers, default=-1) + 1))


def _damaged(path: Path, why: str) -> UserError:
    said = ' '.join(why.split())[:200]
    return UserError(f'{path}: damaged: {said}\nremove {path.parent}, and run `pretrax distill prepare` again')
