"""`pretrax config upgrade`: writes the names of today into a file of pretrax 0.1, whose section `model:` was flat.

Comments, the order of the keys and the layout stay. A file may be a configuration, a sweep, a search or a fit of
scaling laws. The new text is read back and compared before it is written.
"""

import collections
import dataclasses
import itertools
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from pretrax.config import registry
from pretrax.config.load import model_name
from pretrax.config.source import parse, read_text
from pretrax.errors import UserError, system_errors
from pretrax.storage import AnyPath
from pretrax.storage.locate import write_whole

_OF_SEVERAL_RUNS = ('change', 'grid', 'rows', 'parameters', 'sizes')  # sections whose keys are dotted keys of runs
_WIDEST = 120  # columns
_REFERENCE = re.compile(r'(\$\{\s*)model\.(\w+)(?=\s*[.\[}])(\s*\.)?')
_RELATIVE = re.compile(r'\$\{\s*\.')
_COMMENT = re.compile(r'(?:^|(?<=\s))#.*')
# What may be moved into braces as it is.
_PLAIN = re.compile(r"""[\w.+/-]+|'[^'\n]*'|"[^"\n]*"|\[[\w., +-]*\]|\{[\w., :+-]*\}|\$\{[\w.]+\}""")


@dataclasses.dataclass
class _Entry:
    """A key of the section and its value."""

    path: tuple[str, ...]  # its new keys, below `model`
    lead: list[str]  # the lines above it: comments, and empty lines
    body: list[str]  # its lines, without indentation; the first one begins with the last of the keys
    after: str | None = None  # in braces, the text between it and the next key


class _Loader(yaml.SafeLoader):
    """Gives an alias its own place in the text, and not that of its anchor."""

    def compose_node(self, parent: Any, index: Any) -> yaml.Node:
        if self.check_event(yaml.AliasEvent):
            event = self.get_event()
            return yaml.ScalarNode('alias', f'*{event.anchor}', event.start_mark, event.end_mark)
        node = super().compose_node(parent, index)
        assert node is not None
        return node


def upgrade_file(path: AnyPath, out: AnyPath | None = None) -> list[str]:
    """Writes a file with the names of today, whole or not at all: in its place, or to `out`.

    Returns a line for each name that changed; nothing is written if there is none.

    Raises:
        UserError: a file cannot be read or written, or cannot be rewritten without a loss.
    """
    text = read_text(path)
    new, changes = upgraded_text(text, str(path), model_name(path))
    if not changes:
        return []
    place = out or path
    place = Path(os.path.realpath(place)) if isinstance(place, Path) else place  # a link stays a link
    with system_errors(f'{place} cannot be written'):
        mode = place.stat().st_mode if isinstance(place, Path) and place.exists() else None
        write_whole(place, new.encode(), sync=True)
        if mode is not None and isinstance(place, Path):
            place.chmod(mode)
    return changes


def upgraded_text(text: str, name: str, model: Any) -> tuple[str, list[str]]:
    """The text of a file with the names of today, and a line for each that changed.

    Args:
        model: the name of the model's component, which the file or what it is based on gives.

    Raises:
        UserError: the text is not YAML, or this function cannot keep its meaning and its comments.
    """
    before = parse(text, name, Path())
    names = registry.option_names('model', model)
    if names is None:
        return text, []
    root = yaml.compose(text, _Loader)
    changes: list[str] = []
    edits = sorted(_edits(root, (), text, names, changes))
    new = text
    for start, end, replacement in reversed(edits):
        new = new[:start] + replacement + new[end:]
    new = _REFERENCE.sub(lambda match: _renamed_reference(match, names), new)
    if new == text:
        return text, []
    expected = _upgraded_values(before.values, (), names)
    try:
        is_same = parse(new, name, Path()).values == expected
    except UserError:
        is_same = False
    if not is_same or _comments(new) != _comments(text):
        raise UserError(
            f'{name} cannot be rewritten without a loss; nothing was changed\nchange by hand:\n'
            + '\n'.join(f'    {change}' for change in changes[:6])
        )
    return new, changes or ['references ${model. ...}']


def _comments(text: str) -> collections.Counter[str]:
    return collections.Counter(found[0].strip() for line in text.splitlines() for found in _COMMENT.finditer(line))


def _renamed_reference(match: re.Match[str], names: Any) -> str:
    """${model.window} -> ${model.attention.window}."""
    name, dot = match[2], match[3] or ''
    is_former = name in names.RENAMED and not (dot and name in names.SECTIONS)
    return f'{match[1]}model.{names.RENAMED[name]}{dot}' if is_former else match[0]


def _upgraded_values(value: Any, path: tuple[str, ...], names: Any) -> Any:
    """The expected values of the new text, computed from the values of the old one."""
    if isinstance(value, Mapping):
        if _is_model(path) and value.get('name', registry.DEFAULTS['model']) == registry.DEFAULTS['model']:
            value = names.nest(value)
        found = {}
        for key, below in value.items():
            one = below[0] if isinstance(below, list) and below else below  # of several values in a sweep
            is_former = _dotted_name(key, path, names) and names.is_former(key.removeprefix('model.'), one)
            new = f'model.{names.RENAMED[key.removeprefix("model.")]}' if is_former else key
            found[new] = _upgraded_values(below, (*path, key), names)
        return found
    if isinstance(value, list):
        return [_upgraded_values(below, path, names) for below in value]
    return _REFERENCE.sub(lambda match: _renamed_reference(match, names), value) if isinstance(value, str) else value


def _is_model(path: tuple[str, ...]) -> bool:
    """Whether a mapping is the section `model`, of a configuration or of one of several runs."""
    return path == ('model',) or (len(path) > 1 and path[0] in _OF_SEVERAL_RUNS and path[1:] == ('model',))


def _dotted_name(key: str, path: tuple[str, ...], names: Any) -> bool:
    is_dotted = len(path) == 1 and path[0] in _OF_SEVERAL_RUNS and key.startswith('model.')
    return is_dotted and key.removeprefix('model.') in names.RENAMED


def _edits(
    node: yaml.Node | None, path: tuple[str, ...], text: str, names: Any, changes: list[str]
) -> Iterator[tuple[int, int, str]]:
    """(start, end, new text) of each part of the text that changes."""
    if isinstance(node, yaml.SequenceNode):
        for below in node.value:
            yield from _edits(below, path, text, names, changes)
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        here = (*path, key.value)
        if _dotted_name(key.value, path, names):
            name = key.value.removeprefix('model.')
            first = value.value[0] if isinstance(value, yaml.SequenceNode) and value.value else value
            if names.is_former(name, {} if isinstance(first, yaml.MappingNode) else None):
                new = f'model.{names.RENAMED[name]}'
                changes.append(f'{key.value} -> {new}')
                start, end = key.start_mark.index, key.end_mark.index
                yield start, end, text[start:end].replace(key.value, new)
        if _is_model(here) and isinstance(value, yaml.MappingNode):
            yield from _section_edits(value, text, names, changes)
        else:
            yield from _edits(value, here, text, names, changes)


def _section_edits(node: yaml.MappingNode, text: str, names: Any, changes: list[str]) -> Iterator[tuple[int, int, str]]:
    """The edit of a section `model:`, if one of its keys is a former one."""
    own = {key.value: value for key, value in node.value}
    if 'name' in own and own['name'].value != registry.DEFAULTS['model']:
        return
    former = [key for key, value in own.items() if names.is_former(key, {} if _is_section(value) else None)]
    if not former:
        return
    changes += [f'model.{key} -> model.{names.RENAMED[key]}' for key in former]
    if any(_RELATIVE.search(value.value) for value in own.values() if isinstance(value, yaml.ScalarNode)):
        raise UserError('model: a relative reference ${.key} may mean another key after this\nwrite ${model.key} first')
    filled = {names.RENAMED[key].partition('.')[0] for key in former}
    if node.flow_style:
        entries = list(_in_braces(node, (), text, names, filled))
        start, end = node.start_mark.index, node.end_mark.index
        first, last = node.value[0][0].start_mark.index, node.value[-1][1].end_mark.index
        tail, comment = text[last:end], re.match(r' *#.*', text[last:end])
        if comment:  # it belongs to the last key, which may move
            margin = re.search(r'(?:^|\n)([^\n]*)$', text[: node.value[-1][0].start_mark.index])
            indent = ' ' * (len(margin[1]) if margin and not margin[1].strip() else 1)
            entries[-1].after, tail = f',{comment[0]}\n{indent}', tail[comment.end() :]
        before = text.rfind('\n', 0, start) + 1
        yield start, end, _braces(entries, text[start:first], tail, start - before)
    else:
        lines = text.splitlines(keepends=True)
        entries = list(_in_lines(node, (), lines, names, filled))
        column = node.value[0][0].start_mark.column
        first = node.value[0][0].start_mark.line - len(entries[0].lead)
        last = _last_line(node)
        starts = list(itertools.accumulate(map(len, lines), initial=0))
        new = ''.join(_indented(line, column) for line in _block(entries, 0, _WIDEST - column))
        yield starts[first], starts[last + 1], new


def _is_section(value: yaml.Node) -> bool:
    return isinstance(value, yaml.MappingNode)


def _new_path(key: str, value: yaml.Node, above: tuple[str, ...], names: Any) -> tuple[str, ...]:
    is_former = not above and names.is_former(key, {} if _is_section(value) else None)
    return tuple(names.RENAMED[key].split('.')) if is_former else (*above, key)


def _last_line(node: yaml.Node) -> int:
    """The last line of a node with content."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return max(_last_line(one) for one in (last if isinstance(last, tuple) else (last,)))
    end = node.end_mark
    return end.line if end.column or end.line == node.start_mark.line else end.line - 1


def _in_lines(
    node: yaml.MappingNode, above: tuple[str, ...], lines: list[str], names: Any, filled: set[str]
) -> Iterator[_Entry]:
    """The entries of a mapping that has a line for each key; those of sections that get more keys, one by one."""
    column = node.value[0][0].start_mark.column
    top = node.value[0][0].start_mark.line
    while not above and re.match(r'\s*(#|$)', lines[top - 1]):
        top -= 1
    for key, value in node.value:
        line, last = key.start_mark.line, max(_last_line(value), key.end_mark.line)
        lead = [_dedented(one, column) for one in lines[top:line]]
        top = last + 1
        while top < len(lines) and re.match(rf'\s{{{column + 1},}}#', lines[top]):
            top += 1  # a comment inside the value
        body = [_dedented(one, column) for one in lines[line:top]]
        body[-1] = body[-1].rstrip('\n') + '\n'
        if not above and key.value in filled and _is_section(value):
            inside = (
                list(_in_braces(value, (key.value,), ''.join(lines), names, filled))
                if value.flow_style
                else list(_in_lines(value, (key.value,), lines, names, filled))
            )
            comment = _COMMENT.search(lines[last if value.flow_style else line])
            inside[0].lead = [*lead, *([f'{comment[0]}\n'] if comment else []), *inside[0].lead]
            yield from inside
            continue
        path = _new_path(key.value, value, above, names)
        body[0] = path[-1] + body[0][key.end_mark.column - key.start_mark.column :]
        yield _Entry(path, lead, body)


def _in_braces(
    node: yaml.MappingNode, above: tuple[str, ...], text: str, names: Any, filled: set[str]
) -> Iterator[_Entry]:
    """The entries of a mapping in braces; those of sections that get more keys, one by one."""
    nexts = [key.start_mark.index for key, _ in node.value[1:]]
    for (key, value), following in zip(node.value, [*nexts, None], strict=True):
        end = max(key.end_mark.index, value.end_mark.index)
        after = None if following is None else text[end:following]
        if not above and key.value in filled and _is_section(value) and value.value:
            inside = list(_in_braces(value, (key.value,), text, names, filled))
            inside[-1].after = after
            yield from inside
            continue
        path = _new_path(key.value, value, above, names)
        yield _Entry(path, [], [path[-1] + text[key.end_mark.index : end] + '\n'], after)


def _grouped(entries: list[_Entry], depth: int) -> list[list[_Entry]]:
    """Entries by their key at this depth, in the order of the first of each."""
    groups: dict[str, list[_Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.path[depth], []).append(entry)
    return list(groups.values())


def _block(entries: list[_Entry], depth: int, width: int) -> Iterator[str]:
    """The lines of a mapping. A section is in braces if it fits and has no comment of its own."""
    for group in _grouped(entries, depth):
        first = group[0]
        if len(first.path) == depth + 1:
            yield from (*first.lead, *first.body)
            continue
        short = f'{first.path[depth]}: {_one_line(group, depth + 1)}\n'
        if len(short) <= width and not any(entry.lead for entry in group[1:]) and all(map(_is_short, group)):
            yield from (*first.lead, short)
            continue
        yield f'{first.path[depth]}:\n'
        yield from (_indented(line, 2) for line in _block(group, depth + 1, width - 2))


def _is_short(entry: _Entry) -> bool:
    return len(entry.body) == 1 and bool(_PLAIN.fullmatch(entry.body[0].partition(':')[2].strip()))


def _one_line(entries: list[_Entry], depth: int) -> str:
    parts = [
        group[0].body[0].strip()
        if len(group[0].path) == depth + 1
        else f'{group[0].path[depth]}: {_one_line(group, depth + 1)}'
        for group in _grouped(entries, depth)
    ]
    return f'{{{", ".join(parts)}}}'


def _braces(entries: list[_Entry], head: str, tail: str, column: int) -> str:
    """The text of a mapping in braces, which begins in this column. Breaks lines and comments where they were."""
    pieces = list(_pieces(entries, 0))
    text, width = head, column + len(head)
    is_one_line = '\n' not in head + tail and not any('\n' in (entry.after or '') for entry in entries)
    separator = ''
    for piece, after in pieces:
        if is_one_line and separator and width + len(separator) + len(piece) + 1 > _WIDEST:
            separator, width = ',\n' + ' ' * (column + 1), column + 1 - len(separator)
        text += separator + piece
        width += len(separator) + len(piece)
        separator = after if after is not None and re.search(r'[#\n]', after) else ', '
    rest = separator.replace(',', '', 1).rstrip() if '#' in separator else ''
    return text + rest + ('\n' if rest and not tail.startswith('\n') else '') + tail


def _pieces(entries: list[_Entry], depth: int) -> Iterator[tuple[str, str | None]]:
    """The text of each key in braces, with its value, and the text that came after its last part."""
    for group in _grouped(entries, depth):
        if len(group[0].path) == depth + 1:
            yield group[0].body[0].removesuffix('\n'), group[0].after
            continue
        inside = list(_pieces(group, depth + 1))
        text = f'{group[0].path[depth]}: {{'
        for number, (piece, after) in enumerate(inside):
            is_last = number == len(inside) - 1
            kept = after is not None and '#' in after
            text += piece + ('' if is_last else str(after) if kept else ', ')
        yield text + '}', inside[-1][1]


def _dedented(line: str, column: int) -> str:
    return line[column:] if not line[:column].strip() and len(line) > column else line.lstrip(' ')


def _indented(line: str, by: int) -> str:
    return ' ' * by + line if line.strip() else line
