"""What the decoder shards and sends, from its source: declared types, and calls of collectives with their types."""

import ast
import functools
from collections.abc import Iterator
from typing import NamedTuple

from reference_maker.source import calls, tree

FILES = ('ends.py', 'attention.py', 'mlp.py', 'moe.py', 'exchange.py', 'loss.py', 'context.py', 'pipeline.py')
WITH_TYPES = ('all_gather', 'gather', 'psum_scatter', 'all_to_all')


class Collective(NamedTuple):
    """A collective in the forward pass.

    Attributes:
        name: all_gather, psum_scatter, all_to_all, ppermute or psum.
        spec: the types of its argument and result; '' if the call names only the axis.
        file: of the model.
    """

    name: str
    spec: str
    file: str


@functools.cache
def declared(file: str, owner: str, name: str) -> str:
    """The type of a field of a class, or of a parameter of a function: 'M/d F/t'."""
    for node in ast.walk(tree(f'model/{file}')):
        if getattr(node, 'name', None) != owner:
            continue
        for each in ast.walk(node):
            here = getattr(each, 'arg', None) or getattr(getattr(each, 'target', None), 'id', None)
            if here == name and getattr(each, 'annotation', None) is not None:
                return next(
                    str(part.value)
                    for part in ast.walk(each.annotation)  # type: ignore[attr-defined]
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                )
    raise KeyError(f'{file}: {owner} has no {name}')


def shards(spec: str, axis: str) -> bool:
    """Whether an axis shards an array of this type."""
    return any(axis in dim.split('/')[1:] for dim in spec.split())


def collectives(axis: str) -> list[Collective]:
    """The collectives over an axis, in the order of the files, each once."""
    found = [each for file in FILES for each in _calls(file) if axis in _axes(each)]
    return list(dict.fromkeys(found))


def _calls(file: str) -> Iterator[Collective]:
    for node in calls(f'model/{file}'):
        name = getattr(node.func, 'id', getattr(node.func, 'attr', ''))
        texts = [each.value for each in node.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
        if name in WITH_TYPES and (specs := [text for text in texts if '->' in text]):
            yield Collective('all_gather' if name == 'gather' else name, specs[0], file)
        elif name in ('ppermute', 'psum') and texts:
            yield Collective(name, texts[0], file)


def _axes(each: Collective) -> set[str]:
    """The axes that a collective is over: those that leave their dimension."""
    before, arrow, after = each.spec.partition('->')
    if not arrow:
        return set(each.spec.split())
    old, new = ({dim.split('/')[0]: dim.split('/')[1:] for dim in part.split()} for part in (before, after))
    if each.name == 'psum_scatter':
        return {axis for name, axes in new.items() for axis in axes} - {axis for axes in old.values() for axis in axes}
    return {axis for name, axes in old.items() for axis in axes if axis not in new.get(name, axes)}
