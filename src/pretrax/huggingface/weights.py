"""Our weights out of a Hugging Face checkpoint and back, a piece at a time.

A piece is what one tensor holds of one of our weights: of a stacked weight, a layer (of stacked experts, an expert of a
layer). Nothing here is larger than a tensor of the checkpoint in f32.
"""

import fnmatch
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pretrax.errors import UserError
from pretrax.huggingface.files import DTYPES, HuggingFaceCheckpoint
from pretrax.huggingface.names import NameTable, Part, Row, rows
from pretrax.model.families import Architecture
from pretrax.model.weights import Weights
from pretrax.shardlib.types import map_type

COUNTED = {'layer': 'layers', 'expert': 'E'}
Piece = tuple[tuple[int, ...], np.ndarray]  # where along the leading dimensions, and the rest


def letters(annotation: Any = Weights) -> dict[str, tuple[str, ...]]:
    """The letters of each weight's dimensions, by its path."""
    found: dict[str, tuple[str, ...]] = {}
    map_type(lambda path, array: found.setdefault(path, tuple(dim.name for dim in array.dims)), annotation)
    return found


def shapes(like: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each weight that a model has, by its path."""
    leaves = jax.tree_util.tree_leaves_with_path(like)
    return {jax.tree_util.keystr(path, simple=True, separator='.'): leaf.shape for path, leaf in leaves}


@dataclass(frozen=True)
class Mapped:
    """One tensor of a checkpoint and what it is to us."""

    row: Row
    name: str  # as it stands in the file
    at: tuple[int, ...]  # layer, and expert


def mapped(table: NameTable, arch: Architecture, present: set[str]) -> list[Mapped]:
    """Every tensor that a checkpoint of this architecture has; `present` are the paths of our weights."""
    found = []
    for row in rows(table):
        if not all(part.path in present for part in row.parts):
            continue
        counted = re.findall(r'\{(\w+)\}', row.name)
        counts = [arch.sizes[COUNTED[name]] for name in counted]
        for at in itertools.product(*map(range, counts)):
            found.append(Mapped(row, row.name.format(**dict(zip(counted, at, strict=True))), at))
    return found


class HuggingFaceWeights:
    """Our weights as a checkpoint holds them.

    Args:
        checkpoint: open files.
        table: the names of its family.
        arch: the architecture, from its config.json.
        like: our weights' shapes.

    Raises:
        UserError: tensors that are missing, unknown, or of another shape, each named.
    """

    def __init__(self, checkpoint: HuggingFaceCheckpoint, table: NameTable, arch: Architecture, like: Any):
        self.checkpoint, self.arch = checkpoint, arch
        self.shapes, self.letters = shapes(like), letters()
        self.sizes = arch.sizes | {'V': arch.vocab_size}
        tensors = dict(checkpoint.tensors)
        bare = not any(name.startswith(table.prefix) for name in tensors)
        self.mapped = [
            Mapped(m.row, m.name.removeprefix(table.prefix) if bare else m.name, m.at)
            for m in mapped(table, arch, set(self.shapes))
        ]
        self._check(table, bare)
        self._of: dict[str, list[tuple[Mapped, Part]]] = {path: [] for path in self.shapes}
        for m in self.mapped:
            for part in m.row.parts:
                self._of[part.path].append((m, part))
        assert all(self._of.values()), [path for path, found in self._of.items() if not found]

    def _check(self, table: NameTable, bare: bool) -> None:
        tensors, where = self.checkpoint.tensors, self.checkpoint.directory
        expected = {m.name for m in self.mapped}
        if missing := sorted(expected - set(tensors)):
            raise UserError(_listed(f'{where}: the files lack {len(missing)} of {len(expected)} tensors', missing))
        unknown = sorted(
            name for name in set(tensors) - expected
            if not any(fnmatch.fnmatch(name, pattern) for pattern in table.ignored) and not self._repeats_embedding(name)
        )  # fmt: skip
        if unknown:
            raise UserError(
                _listed(f'{where}: {len(unknown)} tensors are no weights of this architecture', unknown)
                + '\nconfig.json may be of another model, or a part of the model is one that pretrax does not have'
            )
        for m in self.mapped:
            found, wanted = tensors[m.name].shape, m.row.shape(self.sizes)
            if found != wanted:
                raise UserError(
                    f'{where}: {m.name} is {list(found)}, and config.json makes it {list(wanted)}\n'
                    'config.json and the weights are not of one model'
                )

    def _repeats_embedding(self, name: str) -> bool:
        """A tied head may stand in the file all the same; it then has to be the embedding."""
        if name != 'lm_head.weight' or 'unembed' in self.shapes:
            return False
        embedding = next(m.name for m in self.mapped if m.row.parts[0].path == 'embed')
        one, other = self.checkpoint.tensors[name].read(), self.checkpoint.tensors[embedding].read()
        if not np.array_equal(one.view(np.uint8), other.view(np.uint8)):
            raise UserError(
                f'{self.checkpoint.directory}: config.json ties lm_head to the embedding, and they differ in the file\n'
                'write "tie_word_embeddings": false into config.json if the head is its own'
            )
        return True

    def pieces(self, path: str) -> Iterator[Piece]:
        """The pieces of one of our weights, f32, in the order of the dimensions that they count."""
        for m, part in self._of[path]:
            whole = self.checkpoint.tensors[m.name].read()
            share = whole[m.row.share(part, self.sizes)]
            ours = part.to_ours(share, self.letters[path][len(m.at) :], self.sizes)
            yield m.at, self._padded(ours.astype(np.float32), path, len(m.at))

    def counted(self, path: str) -> int:
        """How many leading dimensions its pieces count."""
        return len(self._of[path][0][0].at)

    def _padded(self, array: np.ndarray, path: str, counted: int) -> np.ndarray:
        """Rows of zeros where our vocabulary is padded."""
        more = [(0, ours - theirs) for ours, theirs in zip(self.shapes[path][counted:], array.shape, strict=True)]
        return np.pad(array, more) if any(after for _, after in more) else np.ascontiguousarray(array)


def tensors_of(
    table: NameTable, arch: Architecture, like: Any, dtype: str
) -> tuple[
    dict[str, tuple[int, ...]], Callable[[str, tuple[int, ...], np.ndarray], Iterator[tuple[str, tuple, np.ndarray]]]
]:
    """The tensors that an export writes, and how a piece of ours becomes parts of them.

    Returns:
        The shape of each tensor by name, and `convert(path, at, piece)`: (name, where in it, values) of each.
    """
    sizes, ours, present = arch.sizes | {'V': arch.vocab_size}, letters(), shapes(like)
    found = mapped(table, arch, set(present))
    by_path: dict[str, dict[tuple[int, ...], tuple[Mapped, Part]]] = {path: {} for path in present}
    for m in found:
        for part in m.row.parts:
            by_path[part.path][m.at] = m, part
    if unmapped := [path for path, places in by_path.items() if not places]:
        raise UserError(f'weights that the tensors of this family have no name for: {", ".join(unmapped)}')

    def convert(path: str, at: tuple[int, ...], piece: np.ndarray) -> Iterator[tuple[str, tuple, np.ndarray]]:
        counted = len(next(iter(by_path[path])))
        inner = [range(n) for n in piece.shape[: counted - len(at)]]
        for more in itertools.product(*inner):
            m, part = by_path[path][at + more]
            own = ours[path][counted:]
            values = piece[more][tuple(slice(sizes[letter]) for letter in own)]  # without the vocabulary's padding
            yield m.name, m.row.share(part, sizes), part.to_theirs(values, own, sizes).astype(DTYPES[dtype])

    return {m.name: m.row.shape(sizes) for m in found}, convert


def _listed(what: str, names: list[str], most: int = 6) -> str:
    more = f'\n  and {len(names) - most} more' if len(names) > most else ''
    return '\n  '.join([what + ':', *names[:most]]) + more
