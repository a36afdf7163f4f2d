"""Maps tensors of Hugging Face checkpoints to pretrax weights, with one table per family in names.yaml.

A row has a tensor's name and its axes in the letters of `model/weights.py`: `'layers.q: (H D) M'` is a matrix whose
rows are the dimensions of all heads, head by head. If one tensor concatenates several weights along an axis, the row
lists them: `{axis: 1, parts: ['layers.q: M (H D)', 'layers.k: M (K D)']}`. {layer}, {expert} and {q_head} or {kv_head}
in a name index the leading dimensions `layers`, `E` and `H` or `K` of the pretrax weight, which the row omits. {module}
counts on from the layers; {global_layer} is the number of a layer without a window, for a tensor that has another row
for layers with one.

Where RoPE rotates the neighbors (2i, 2i + 1) of a head, D is written as `half two`: ours rotates (i, i + D/2), and the
order of the dimensions of a head is free, as long as queries and keys have the same.

In latent attention only the last `D_rope` positions of an axis are rotated: `D_qk*` marks such an axis with neighbors.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from pretrax.tables import read_table


@dataclass(frozen=True)
class Fused:
    """Several weights, concatenated along an axis of one tensor.

    With `each`, a letter, they take turns: those of the first head, those of the second, ...
    """

    axis: int
    parts: Sequence[str]
    each: str | None = None


@dataclass(frozen=True)
class NameTable:
    """The tensors of a family.

    Args:
        rows: rows by tensor name.
        prefix: prefix of tensor names, which files saved from the model without its head omit.
        ignored: patterns of tensors that are not weights: masks and tables that old versions saved.
        exact: patterns of tensors that an export writes in F32, whatever the dtype of the others is.
        stacked: rows for files that have all experts of a layer in one tensor, in the place of those for single
            experts.
        extra_layers: whether files may have layers behind the last one, for multi-token prediction. What no row maps is
            left out.
    """

    rows: Mapping[str, str | Fused]
    prefix: str = 'model.'
    ignored: Sequence[str] = ('*.rotary_emb.inv_freq',)
    exact: Sequence[str] = ()
    stacked: Mapping[str, str | Fused] = field(default_factory=dict)
    extra_layers: bool = False

    def match_tensors(self, tensors: Iterable[str]) -> 'NameTable':
        """The table for files with these tensors."""
        ends = tuple(name.rpartition('{layer}')[2] for name in self.stacked)
        if not ends or not any(name.endswith(ends) for name in tensors):
            return self
        kept = {name: row for name, row in self.rows.items() if '{expert}' not in name}
        return replace(self, rows=kept | dict(self.stacked))


def _read_tables() -> dict[str, NameTable]:
    """The table of each family in names.yaml."""
    written = read_table(Path(__file__).with_suffix('.yaml'))

    def merged(groups: Iterable[str]) -> dict[str, str | Fused]:
        found = {name: row for group in groups for name, row in written['groups'][group].items()}
        return {name: row if isinstance(row, str) else Fused(**row) for name, row in found.items()}

    tables = {}
    for family, fields in written['families'].items():
        table = NameTable(**fields | {key: merged(fields[key]) for key in ('rows', 'stacked') if key in fields})
        tables[family] = replace(table, rows=_with_modules(table.rows)) if table.extra_layers else table
    return tables


def _with_modules(rows: Mapping[str, str | Fused]) -> dict[str, str | Fused]:
    """The rows of a family, and of its modules of multi-token prediction: a layer's, and a module's own."""

    def moved(part: str) -> str:
        return part.replace('layers.', 'multi_token.layer.', 1)

    module = 'model.layers.{module}.'
    return {
        **rows,
        **{
            name.replace('{layer}', '{module}'): moved(row)
            if isinstance(row, str)
            else replace(row, parts=[moved(part) for part in row.parts])
            for name, row in rows.items()
            if '.{layer}.' in name
        },
        module + 'enorm.weight': 'multi_token.embedding_norm: M',
        module + 'hnorm.weight': 'multi_token.hidden_norm: M',
        module + 'eh_proj.weight': Fused(
            1, ('multi_token.from_embedding: M_next M', 'multi_token.from_hidden: M_next M')
        ),
        module + 'shared_head.norm.weight': 'multi_token.norm: M',
    }


TABLES = _read_tables()


@dataclass(frozen=True)
class TensorPart:
    """A pretrax weight inside a tensor: its path and the letters of the tensor's axes, grouped where axes are merged.

    `paired` are the letters of axes in which rotated pairs are next to each other.
    """

    path: str
    axes: tuple[tuple[str, ...], ...]
    paired: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str) -> 'TensorPart':
        path, _, axes = text.partition(':')
        groups = re.findall(r'\(([^)]*)\)|(\w+)', axes.replace('*', ''))  # '()' is an axis of size 1
        grouped = tuple(tuple((merged or single).split()) for merged, single in groups)
        return TensorPart(path.strip(), grouped, tuple(re.findall(r'(\w+)\*', axes)))

    @property
    def letters(self) -> tuple[str, ...]:
        return tuple(letter for group in self.axes for letter in group)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of this weight inside the tensor."""
        return tuple(int(np.prod([_size(letter, sizes) for letter in group])) for group in self.axes)

    def to_ours(self, array: np.ndarray, ours: tuple[str, ...], sizes: Mapping[str, int]) -> np.ndarray:
        """Converts the tensor to the axes of the pretrax weight."""
        split = array.reshape([_size(letter, sizes) for letter in self.letters])
        for letter in self.paired:
            split = split.take(_halves(sizes[letter], sizes['D_rope']), axis=self.letters.index(letter))
        in_order = split.transpose([self.letters.index(letter) for letter in self._split(ours)])
        return in_order.reshape([sizes[letter] for letter in ours])

    def to_theirs(self, array: np.ndarray, ours: tuple[str, ...], sizes: Mapping[str, int]) -> np.ndarray:
        """Converts the pretrax weight to the axes of the tensor."""
        letters = self._split(ours)
        split = array.reshape([_size(letter, sizes) for letter in letters])
        split = split.transpose([letters.index(letter) for letter in self.letters])
        for letter in self.paired:
            back = np.argsort(_halves(sizes[letter], sizes['D_rope']))
            split = split.take(back, axis=self.letters.index(letter))
        return split.reshape(self.shape(sizes))

    def _split(self, ours: tuple[str, ...]) -> tuple[str, ...]:
        """The letters of a pretrax weight, split as in the tensor."""
        return tuple(part for letter in ours for part in ((letter,) if letter in self.letters else PARTS[letter]))


# Letters that a tensor may split: a head into halves; the heads of states by the key head that they share
PARTS = {'D': ('two', 'half'), 'N_state': ('N_key', 'N_shared')}


def _size(letter: str, sizes: Mapping[str, int]) -> int:
    return {'two': 2, 'half': sizes['D'] // 2}.get(letter) or sizes[letter]


def _halves(size: int, rotated: int) -> list[int]:
    """Where the positions of an axis are in a file that has the pairs of its last `rotated` ones next to each other."""
    first = size - rotated
    return [*range(first), *range(first, size, 2), *range(first + 1, size, 2)]


@dataclass(frozen=True)
class TensorRow:
    """A parsed row of a table: a tensor's name and its parts, in order along `axis`."""

    name: str
    parts: tuple[TensorPart, ...]
    axis: int
    each: str | None

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        shapes = [part.shape(sizes) for part in self.parts]
        return tuple(
            sum(shape[axis] for shape in shapes) if axis == self.axis else size for axis, size in enumerate(shapes[0])
        )

    def slices(self, part: TensorPart, sizes: Mapping[str, int]) -> list[tuple[slice, ...]]:
        """The slices of a part in the tensor, in their order along `axis`."""
        turns = 1 if self.each is None else sizes[self.each]
        lengths = [other.shape(sizes)[self.axis] // turns for other in self.parts]
        number = self.parts.index(part)
        if self.each is not None and set(lengths) == {1}:
            alternate = slice(number, None, len(lengths))
            return [tuple(alternate if axis == self.axis else slice(None) for axis in range(len(part.axes)))]
        starts = [turn * sum(lengths) + sum(lengths[:number]) for turn in range(turns)]
        return [
            tuple(
                slice(start, start + lengths[number]) if axis == self.axis else slice(None)
                for axis in range(len(part.axes))
            )
            for start in starts
        ]


def rows(table: NameTable) -> list[TensorRow]:
    """Parses the rows of a table."""
    found = []
    for name, row in table.rows.items():
        fused = Fused(0, (row,)) if isinstance(row, str) else row
        found.append(TensorRow(name, tuple(map(TensorPart.parse, fused.parts)), fused.axis, fused.each))
    return found
