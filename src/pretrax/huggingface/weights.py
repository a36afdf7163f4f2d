"""Converts weights between Hugging Face checkpoints and pretrax, piece by piece.

A piece is the part of one pretrax weight that one tensor holds: one layer of a stacked weight, or one expert of one layer.
No array here is larger than one tensor of the checkpoint in f32.
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
from pretrax.huggingface.names import NameTable, TensorPart, TensorRow, rows
from pretrax.model.families import Architecture
from pretrax.model.weights import Weights
from pretrax.shardlib.types import map_type

COUNTED = {'layer': 'layers', 'expert': 'E'}
Piece = tuple[tuple[int, ...], np.ndarray]  # (index along the leading dimensions, values)


def letters(annotation: Any = Weights) -> dict[str, tuple[str, ...]]:
    """The dimension letters of each weight, by path."""
    found: dict[str, tuple[str, ...]] = {}
    map_type(lambda path, array: found.setdefault(path, tuple(dim.name for dim in array.dims)), annotation)
    return found


def shapes(like: Any) -> dict[str, tuple[int, ...]]:
    """The shape of each weight of a model, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(like)
    return {jax.tree_util.keystr(path, simple=True, separator='.'): leaf.shape for path, leaf in leaves}


@dataclass(frozen=True)
class Mapped:
    """One tensor of a checkpoint and the table row that maps it."""

    row: TensorRow
    name: str  # the name in the file
    at: tuple[int, ...]  # (layer,) or (layer, expert)


def mapped(table: NameTable, arch: Architecture, present: set[str]) -> list[Mapped]:
    """Every tensor of a checkpoint of this architecture. `present` has the paths of the pretrax weights."""
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
    """The pretrax weights, read from a Hugging Face checkpoint.

    Args:
        checkpoint: the open checkpoint.
        table: table of names of its family.
        arch: the architecture, from its config.json.
        like: arrays with the shapes of the pretrax weights.

    Raises:
        UserError: tensors are missing, unknown, or have another shape; the message names them.
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
        self._of: dict[str, list[tuple[Mapped, TensorPart]]] = {path: [] for path in self.shapes}
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
                _listed(f'{where}: {len(unknown)} tensors do not belong to this architecture', unknown)
                + '\nconfig.json may belong to another model, or pretrax does not support a part of this one'
            )
        for m in self.mapped:
            found, wanted = tensors[m.name].shape, m.row.shape(self.sizes)
            if found != wanted:
                raise UserError(
                    f'{where}: {m.name} has shape {list(found)}, but config.json implies {list(wanted)}\n'
                    'config.json and the weights belong to different models'
                )

    def _repeats_embedding(self, name: str) -> bool:
        """Whether a tensor is a tied head stored separately. It must then equal the embedding."""
        if name != 'lm_head.weight' or 'unembed' in self.shapes:
            return False
        embedding = next(m.name for m in self.mapped if m.row.parts[0].path == 'embed')
        one, other = self.checkpoint.tensors[name].read(), self.checkpoint.tensors[embedding].read()
        if not np.array_equal(one.view(np.uint8), other.view(np.uint8)):
            raise UserError(
                f'{self.checkpoint.directory}: config.json ties lm_head to the embedding, but they differ\n'
                'set "tie_word_embeddings": false in config.json if the head is separate'
            )
        return True

    def pieces(self, path: str) -> Iterator[Piece]:
        """The f32 pieces of one weight, in the order of their leading dimensions."""
        for m, part in self._of[path]:
            whole = self.checkpoint.tensors[m.name].read()
            values = whole[m.row.slices(part, self.sizes)]
            ours = part.to_ours(values, self.letters[path][len(m.at) :], self.sizes)
            yield m.at, self._padded(ours.astype(np.float32), path, len(m.at))

    def counted(self, path: str) -> int:
        """The number of leading dimensions that index its pieces."""
        return len(self._of[path][0][0].at)

    def _padded(self, array: np.ndarray, path: str, counted: int) -> np.ndarray:
        """Pads with zeros where pretrax pads the vocabulary."""
        more = [(0, ours - theirs) for ours, theirs in zip(self.shapes[path][counted:], array.shape, strict=True)]
        return np.pad(array, more) if any(after for _, after in more) else np.ascontiguousarray(array)


def tensors_of(
    table: NameTable, arch: Architecture, like: Any, dtype: str
) -> tuple[
    dict[str, tuple[int, ...]], Callable[[str, tuple[int, ...], np.ndarray], Iterator[tuple[str, tuple, np.ndarray]]]
]:
    """The tensors that an export writes, and the conversion of pieces to parts of these tensors.

    Returns:
        The shape of each tensor by name, and `convert(path, at, piece)`, which yields (name, index, values).
    """
    sizes, ours, present = arch.sizes | {'V': arch.vocab_size}, letters(), shapes(like)
    found = mapped(table, arch, set(present))
    by_path: dict[str, dict[tuple[int, ...], tuple[Mapped, TensorPart]]] = {path: {} for path in present}
    for m in found:
        for part in m.row.parts:
            by_path[part.path][m.at] = m, part
    if unmapped := [path for path, places in by_path.items() if not places]:
        raise UserError(f'this family has no tensor names for the weights {", ".join(unmapped)}')

    def convert(path: str, at: tuple[int, ...], piece: np.ndarray) -> Iterator[tuple[str, tuple, np.ndarray]]:
        counted = len(next(iter(by_path[path])))
        inner = [range(n) for n in piece.shape[: counted - len(at)]]
        for more in itertools.product(*inner):
            m, part = by_path[path][at + more]
            own = ours[path][counted:]
            values = piece[more][tuple(slice(sizes[letter]) for letter in own)]  # removes the vocabulary's padding
            yield m.name, m.row.slices(part, sizes), part.to_theirs(values, own, sizes).astype(DTYPES[dtype])

    return {m.name: m.row.shape(sizes) for m in found}, convert


def _listed(what: str, names: list[str], most: int = 6) -> str:
    more = f'\n  and {len(names) - most} more' if len(names) > most else ''
    return '\n  '.join([what + ':', *names[:most]]) + more
