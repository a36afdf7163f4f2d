"""Converts weights between Hugging Face checkpoints and pretrax, piece by piece.

A piece is the part of one pretrax weight that one tensor holds: one layer of a stacked weight, or one expert of one
layer. No array here is larger than one tensor of the checkpoint in f32. If one tensor has all experts, they are read
one by one.
"""

import collections
import dataclasses
import fnmatch
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pretrax.errors import UserError
from pretrax.huggingface.files import HuggingFaceCheckpoint, some
from pretrax.huggingface.names import NameTable, TensorPart, TensorRow, rows
from pretrax.huggingface.text_part import text_config
from pretrax.model.architecture import Architecture
from pretrax.model.weights import MODULES, Weights, layers_with
from pretrax.shardlib.types import map_type

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
    at: tuple[int, ...]  # index into the pretrax weight: (number among the layers that have it,), or with (expert,)


def mapped(table: NameTable, arch: Architecture, present: set[str]) -> list[Mapped]:
    """Every tensor of a checkpoint of this architecture. `present` has the paths of the pretrax weights."""
    found = []
    for row in rows(table):
        if not all(part.path in present for part in row.parts):
            continue
        with_weight = layers_with(arch, row.parts[0].path.removeprefix('layers.'))
        of_file = {
            'layer': with_weight,
            'global_layer': with_weight,
            'module': range(arch.n_layers, arch.n_layers + arch.multi_token.n_layers),
            'expert': range(arch.sizes['E']),
            'q_head': range(arch.attention.n_heads),
            'kv_head': range(arch.attention.n_kv_heads),
        }
        counted = re.findall(r'\{(\w+)\}', row.name)
        for numbered in itertools.product(*(enumerate(of_file[name]) for name in counted)):
            numbers = {name: number for name, (_, number) in zip(counted, numbered, strict=True)}
            found.append(Mapped(row, row.name.format(**numbers), tuple(i for i, _ in numbered)))
    return found


class HuggingFaceWeights:
    """The pretrax weights, read from a Hugging Face checkpoint.

    Args:
        checkpoint: the open checkpoint.
        table: table of names of its family.
        arch: the architecture, from its config.json.
        like: arrays with the shapes of the pretrax weights.

    Attributes:
        dtype: of most numbers of the weights.
        notes: lines for the user: tensors that are left out, and those that are rounded.
        not_finite: how many numbers of each tensor are NaN or infinite, of the tensors that have been read.

    Raises:
        UserError: tensors are missing, unknown, or have another shape; the message names them.
    """

    def __init__(self, checkpoint: HuggingFaceCheckpoint, table: NameTable, arch: Architecture, like: Any):
        self.checkpoint, self.arch = checkpoint, arch
        self.not_finite: dict[str, int] = {}
        self._checked: set[tuple[str, int | None]] = set()
        self.shapes, self.letters = shapes(like), letters()
        self.sizes = arch.sizes | {'V': arch.vocab_size}
        tensors = checkpoint.tensors
        table = table.match_tensors(tensors)
        if arch.n_layers > len(tensors):
            raise UserError(
                f'{checkpoint.directory}: config.json says {arch.n_layers:,} layers, but the files have '
                f'{len(tensors)} tensors'
            )
        bare = not any(name.startswith(table.prefix) for name in tensors)
        self.mapped = [
            Mapped(m.row, m.name.removeprefix(table.prefix) if bare else m.name, m.at)
            for m in mapped(table, arch, set(self.shapes))
        ]
        self._use_either_name_of_a_tied_head(table)
        left_out = self._check(table)
        counts: collections.Counter[str] = collections.Counter()
        for name in {m.name for m in self.mapped}:
            counts[tensors[name].dtype] += math.prod(tensors[name].shape)
        self.dtype = counts.most_common(1)[0][0]
        self.notes = [f'{counts["F64"]:,} numbers are F64 and are rounded to F32'] if counts['F64'] else []
        if left_out:
            self.notes.append(f'{len(left_out)} tensors that are not weights are left out: {some(left_out)}')
        self._of: dict[str, list[tuple[Mapped, TensorPart]]] = {path: [] for path in self.shapes}
        for m in self.mapped:
            for part in m.row.parts:
                self._of[part.path].append((m, part))
        assert all(self._of.values()), [path for path, found in self._of.items() if not found]

    def _use_either_name_of_a_tied_head(self, table: NameTable) -> None:
        """Reads a tied embedding under the name of the head if the files have only that one."""
        heads = [row.name for row in rows(table) if row.parts[0].path == 'unembed']
        self._head = heads[0] if heads and 'unembed' not in self.shapes else None
        tensors = self.checkpoint.tensors
        self.mapped = [
            dataclasses.replace(m, name=self._head)
            if self._head in tensors and m.row.parts[0].path == 'embed' and m.name not in tensors
            else m
            for m in self.mapped
        ]

    def _check(self, table: NameTable) -> list[str]:
        """Checks the names, dtypes and shapes of the weights. Returns the names of tensors that are not weights."""
        tensors, where = self.checkpoint.tensors, self.checkpoint.directory
        expected = {m.name for m in self.mapped}
        others = sorted(set(tensors) - expected)
        n_extra = text_config(self.checkpoint.config).get('num_nextn_predict_layers') or 0  # for multi-token prediction
        extra = range(self.arch.n_layers, self.arch.n_layers + n_extra) if table.extra_layers else range(0)
        strange = [
            name for name in others
            if not any(fnmatch.fnmatch(name, pattern) for pattern in table.ignored) and _layer_of(name) not in extra
        ]  # fmt: skip
        hint = next((tensors[name].why_not for name in strange if tensors[name].why_not), '')
        if missing := sorted(expected - set(tensors)):
            raise UserError(
                _listed(f'{where}: the files lack {len(missing)} of {len(expected)} tensors', missing, 3 if hint else 6)
                + (f'\n{hint}' if hint else '')
            )
        if why_not := next((tensors[name].why_not for name in sorted(expected) if tensors[name].why_not), ''):
            raise UserError(why_not)
        if unknown := [name for name in strange if not self._repeats_embedding(name)]:
            raise UserError(
                _listed(
                    f'{where}: {len(unknown)} tensors do not belong to this architecture', unknown, 3 if hint else 6
                )
                + f'\n{
                    hint or "config.json may belong to another model, or pretrax does not support a part of this one"
                }'
            )
        for m in self.mapped:
            found, wanted = tensors[m.name].shape, m.row.shape(self.sizes)
            if found != wanted:
                raise UserError(
                    f'{where}: {m.name} has shape {list(found)}, but config.json implies {list(wanted)}\n'
                    'config.json and the weights belong to different models'
                )
        return [name for name in others if _layer_of(name) not in extra]

    def _repeats_embedding(self, name: str) -> bool:
        """Whether a tensor is a tied head stored separately. It must then have the numbers of the embedding."""
        if name != self._head:
            return False
        tensors = self.checkpoint.tensors
        head, embedding = tensors[name], next(tensors[m.name] for m in self.mapped if m.row.parts[0].path == 'embed')
        if head.why_not:
            raise UserError(head.why_not)
        kind = np.uint8 if head.dtype == embedding.dtype else np.float32  # of bytes, so that NaN is equal to itself
        one, other = (x.read().view(kind) if kind is np.uint8 else x.read().astype(kind) for x in (head, embedding))
        if not np.array_equal(one, other):
            raise UserError(
                f'{self.checkpoint.directory}: config.json ties {name} to the embedding, but they differ\n'
                'set "tie_word_embeddings": false in config.json if the head is separate'
            )
        return True

    def pieces(self, path: str) -> Iterator[Piece]:
        """The f32 pieces of one weight, in the order of their leading dimensions."""
        for m, part in self._of[path]:
            letters, slices = self.letters[path][len(m.at) :], m.row.slices(part, self.sizes)
            experts = range(self.sizes['E']) if self._has_all_experts(m, part) else (None,)
            for expert in experts:
                whole = self._read(m.name, expert)
                values = [whole[where] for where in slices]
                values = values[0] if len(values) == 1 else np.concatenate(values, axis=m.row.axis)
                if expert is None:
                    at, ours = m.at, part.to_ours(values, letters, self.sizes)
                else:
                    at, ours = (*m.at, expert), part.to_ours(values, letters, self.sizes | {'E': 1})[0]
                yield at, self._padded(ours.astype(np.float32), path, len(at))

    def counted(self, path: str) -> int:
        """The number of leading dimensions that index its pieces."""
        m, part = self._of[path][0]
        return len(m.at) + self._has_all_experts(m, part)

    def _has_all_experts(self, m: Mapped, part: TensorPart) -> bool:
        """Whether the first dimension of a tensor and of the weight counts experts."""
        is_stacked = len(part.axes) > 1 and part.axes[0] == ('E',) and (len(m.row.parts) == 1 or m.row.axis > 0)
        return is_stacked and self.letters[part.path][len(m.at)] == 'E'

    def _read(self, name: str, expert: int | None) -> np.ndarray:
        """A tensor, or [1, ...] of one expert, of at most 32 bits; counts the numbers that are not finite, once."""
        tensor = self.checkpoint.tensors[name]
        stored = tensor.read() if expert is None else tensor.read(expert)[None]
        with np.errstate(over='ignore'):
            values = stored.astype(np.float32) if stored.dtype == np.float64 else stored
        if (name, expert) not in self._checked:
            self._checked.add((name, expert))
            finite = np.isfinite(values)
            if values is not stored and (too_large := np.isfinite(stored) & ~finite).any():
                raise UserError(
                    f'{tensor.file}: {name} is F64 and has {stored[too_large][0]:g}, but the largest number of F32 is '
                    '3.4e+38\n'
                    'scale the weights down, or use the checkpoint that they were made from'
                )
            if count := values.size - np.count_nonzero(finite):
                self.not_finite[name] = self.not_finite.get(name, 0) + int(count)
        return values

    def _padded(self, array: np.ndarray, path: str, counted: int) -> np.ndarray:
        """Pads with zeros where pretrax pads the vocabulary."""
        more = [(0, ours - theirs) for ours, theirs in zip(self.shapes[path][counted:], array.shape, strict=True)]
        return np.pad(array, more) if any(after for _, after in more) else np.require(array, requirements='C')


def _layer_of(name: str) -> int | None:
    """The number of the layer in the name of a tensor."""
    number = re.match(r'(?:model\.)?layers\.(\d+)\.', name)
    return int(number[1]) if number is not None else None


def tensors_of(
    table: NameTable, arch: Architecture, like: Any
) -> tuple[
    dict[str, tuple[int, ...]], Callable[[str, tuple[int, ...], np.ndarray], Iterator[tuple[str, tuple, np.ndarray]]]
]:
    """The tensors that an export writes, and the conversion of pieces to parts of these tensors.

    Returns:
        The shape of each tensor by name, and `convert(path, at, piece)`, which yields (name, index, values). It yields
        nothing of multi-token prediction if the family has no tensors for it.
    """
    sizes, ours, present = arch.sizes | {'V': arch.vocab_size}, letters(), shapes(like)
    found = mapped(table, arch, set(present))
    by_path: dict[str, dict[tuple[int, ...], tuple[Mapped, TensorPart]]] = {path: {} for path in present}
    for m in found:
        for part in m.row.parts:
            by_path[part.path][m.at] = m, part
    unmapped = [path for path, places in by_path.items() if not places]
    if not all(path.startswith(MODULES) for path in unmapped):
        raise UserError(f'this family has no tensor names for the weights {", ".join(unmapped)}')

    def convert(path: str, at: tuple[int, ...], piece: np.ndarray) -> Iterator[tuple[str, tuple, np.ndarray]]:
        if path in unmapped:
            return
        counted = len(next(iter(by_path[path])))
        inner = [range(n) for n in piece.shape[: counted - len(at)]]
        for more in itertools.product(*inner):
            m, part = by_path[path][at + more]
            own = ours[path][counted:]
            values = piece[more][tuple(slice(sizes[letter]) for letter in own)]  # removes the vocabulary's padding
            theirs, places = part.to_theirs(values, own, sizes), m.row.slices(part, sizes)
            for where, values in zip(places, np.split(theirs, len(places), axis=m.row.axis), strict=True):
                yield m.name, where, values

    return {m.name: m.row.shape(sizes) for m in found}, convert


def _listed(what: str, names: list[str], most: int = 6) -> str:
    more = f'\n  and {len(names) - most} more' if len(names) > most else ''
    return '\n  '.join([what + ':', *names[:most]]) + more
