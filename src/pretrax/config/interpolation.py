"""Resolves `${key}`, `${oc.env:NAME}` and `${oc.env:NAME,default}`, a subset of OmegaConf's syntax.

Every key is resolved once, and depth and size are bounded, so that a short file cannot take minutes or gigabytes.

A value from the environment may be a secret. Its reference is kept, and is written in place of the value.
`without_secrets` puts references into messages too.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from pretrax.config.problems import Path, ProblemsError, dotted, mistake, shown

DEEPEST = 64  # sections and references inside one another
LARGEST = 1 << 20  # characters of all values
_SHORTEST, _LONGEST_SHOWN = 4, 240  # characters

_OPEN = re.compile(r'(\\*)\$\{')
_KEY = re.compile(r'(\.*)([\w-]+(?:\.[\w-]+|\[[\w-]+\])*)')
_ENVIRONMENT = re.compile(r'oc\.env:\s*([A-Za-z_]\w*)\s*(?:,(.*))?', re.DOTALL)
_read: set[str] = set()  # variables that configurations of this process have read
_FORMS = 'expected ${key}, ${oc.env:NAME} or ${oc.env:NAME,default}; write \\${ for a literal ${'


@dataclass(frozen=True)
class _Node:
    """A resolved value: a leaf, or a dict or list of nodes. `reference` is that of a leaf from the environment."""

    content: Any
    size: int
    reference: str | None = None


def resolve(values: Mapping[str, Any], *, recorded: bool = False) -> tuple[dict[str, Any], dict[Path, str]]:
    """Values without interpolations, and the references of those that come from the environment.

    Args:
        recorded: whether the values come from a file that pretrax wrote, perhaps for another user. A reference stays as
            text if the variable is not set, or if it is part of a URL, which would send its value to that host.

    Raises:
        ProblemsError: a reference has no value, refers to itself, or exceeds a bound.
    """
    root = _Resolver(values, recorded).at((), 0)
    return _plain(root), dict(_references(root, ()))


def escaped(text: str) -> str:
    """The text as it is written in a configuration, where `${` would be an interpolation."""
    return _OPEN.sub(lambda match: match[1] * 2 + '\\${', text)


def without_secrets(text: str) -> str:
    """A message with references for values from the environment, also where it quotes or shortens them."""
    read = [(name, part) for name in _read for part in _texts(os.environ.get(name))]
    for name, value in sorted(read, key=lambda item: -len(item[1])):
        reference, one_line = f'${{oc.env:{name}}}', ' '.join(value.split())
        quoted = [repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False), f"'{value}'", f'"{value}"']
        # Shorter ones may be a part of any word, so that they are replaced only in quotes
        plain = [value, repr(value)[1:-1], json.dumps(value)[1:-1]] if len(value) >= _SHORTEST else []
        for form in sorted({*quoted, *plain} - {''}, key=len, reverse=True):
            text = text.replace(form, reference)
        if len(one_line) >= _SHORTEST:  # on other lines than before
            text = re.sub(r'\s+'.join(map(re.escape, one_line.split(' '))), lambda _, to=reference: to, text)
        for most in range(min(len(one_line), _LONGEST_SHOWN), _SHORTEST - 1, -1):  # its beginning, before an ellipsis
            if one_line[:most] in text:
                text = re.sub(re.escape(one_line[:most]) + r' ?\.\.\.', lambda _, to=reference: f'{to}...', text)
    return text


def _texts(value: Any) -> Iterator[str]:
    """A text, and those in it if it is YAML."""
    if isinstance(value, dict | list):
        for below in [*value.keys(), *value.values()] if isinstance(value, dict) else value:
            yield from _texts(below)
    elif value is not None and not isinstance(value, bool):
        yield str(value)
        with contextlib.suppress(yaml.YAMLError, ValueError, RecursionError):
            inside = yaml.safe_load(value) if isinstance(value, str) and value[:1] in '[{' else None
            yield from _texts(inside)


class _Resolver:
    def __init__(self, values: Mapping[str, Any], recorded: bool):
        self._values, self._recorded = values, recorded
        self._done: dict[Path, _Node] = {}
        self._open: set[Path] = set()
        self._made = 0  # characters of all texts that were put together

    def at(self, path: Path, depth: int) -> _Node:
        """The value of a key that is given under this path."""
        if path in self._done:
            return self._done[path]
        if path in self._open:
            raise mistake(path, 'refers to itself')
        if depth > DEEPEST:
            raise mistake(path, f'is deeper than {DEEPEST} sections and references')
        self._open.add(path)
        raw = self._given(path)
        if isinstance(raw, Mapping):
            node = self._section(path, {key: self.at((*path, key), depth + 1) for key in raw})
        elif isinstance(raw, list | tuple):
            node = self._section(path, [self.at((*path, index), depth + 1) for index in range(len(raw))])
        else:
            node = self._text(raw, path, depth) if isinstance(raw, str) else _Node(raw, 1)
        self._open.remove(path)
        self._done[path] = node
        return node

    def _given(self, path: Path) -> Any:
        value: Any = self._values
        for part in path:
            value = value[part]
        return value

    def _section(self, path: Path, nodes: dict[Any, _Node] | list[_Node]) -> _Node:
        size = 1 + sum(node.size for node in (nodes.values() if isinstance(nodes, dict) else nodes))
        if size > LARGEST:
            raise _too_large(path)
        return _Node(nodes, size)

    def _text(self, text: str, path: Path, depth: int) -> _Node:
        """The value of a text: of any type if it is one reference, else text."""
        if '${' not in text:
            return _Node(text, 1 + len(text))
        parts = list(self._parts(text, path, depth))
        if len(parts) == 1 and isinstance(parts[0], _Node):
            return self._kept(parts[0])
        value = written = run = ''
        for part in parts:
            if isinstance(part, _Node) and isinstance(part.content, dict | list):
                raise mistake(path, f'is {shown(text)}, which puts a section or a list into a text')
            said = str(part.content) if isinstance(part, _Node) else part
            value += said
            if isinstance(part, _Node) and part.reference is not None:
                before = escaped(run)
                slashes = len(before) - len(before.rstrip('\\'))
                written, run = written + before + '\\' * slashes + part.reference, ''
            else:
                run += said
        node = _Node(value, 1 + len(value), written + escaped(run) if written else None)
        return self._kept(node)

    def _parts(self, text: str, path: Path, depth: int) -> Iterator[str | _Node]:
        position = 0
        while match := _OPEN.search(text, position):
            slashes = len(match[1])
            if before := text[position : match.start()] + '\\' * (slashes // 2) + ('${' if slashes % 2 else ''):
                yield before
            position = match.end()
            if not slashes % 2:
                end = _end(text, position, path)
                node = self._reference(text[position:end], path, depth + 1)
                self._made += node.size
                if self._made > LARGEST:
                    raise _too_large(path)
                yield node
                position = end + 1
        if position < len(text):
            yield text[position:]

    def _reference(self, inside: str, path: Path, depth: int) -> _Node:
        """The value of what is between `${` and `}`."""
        if depth > DEEPEST:
            raise mistake(path, f'is deeper than {DEEPEST} sections and references')
        if match := _ENVIRONMENT.fullmatch(inside):
            return self._environment(match[1], match[2], path, depth)
        match = _KEY.fullmatch(inside)
        if match is None:
            raise mistake(path, f'cannot be resolved: ${{{shown(inside)[1:-1]}}}', _FORMS)
        up = len(match[1])
        start = path[: max(len(path) - up, 0)] if up else ()
        wanted: Path = (*start, *(part for part in re.split(r'[.\[\]]+', match[2]) if part))
        return self._find(wanted, path, depth)

    def _find(self, wanted: Path, path: Path, depth: int) -> _Node:
        """The value of another key, which may be inside a section that is itself given by a reference."""
        given: Any = dict(self._values)
        for number, name in enumerate(wanted):
            part: Any = _index(given, name)
            if not _has(given, part):
                raise mistake(path, f'cannot be resolved: there is no key {dotted(wanted)}')
            wanted = (*wanted[:number], part, *wanted[number + 1 :])
            given = given[part]
            if isinstance(given, str) and number < len(wanted) - 1:
                node = self.at(wanted[: number + 1], depth)
                for inner in wanted[number + 1 :]:
                    content: Any = node.content
                    inner = _index(content, inner)
                    if not _has(content, inner):
                        raise mistake(path, f'cannot be resolved: there is no key {dotted(wanted)}')
                    node = content[inner]
                return node
        return self.at(wanted, depth)

    def _environment(self, name: str, default: str | None, path: Path, depth: int) -> _Node:
        reference, other = f'${{oc.env:{name}}}', None
        if default is not None:
            other = self._text(default.strip(), path, depth)
            if isinstance(other.content, dict | list):
                raise mistake(path, 'has a section as the default of an environment variable')
            written = default.strip() if '${' not in default else other.reference or escaped(str(other.content))
            reference = f'${{oc.env:{name},{written}}}'
        value: Any = os.environ.get(name)
        if value:
            _read.add(name)
        if value is None and other is not None:
            value = _default(other.content)
        elif value is None and not self._recorded:
            raise mistake(
                path,
                f"cannot be resolved: Environment variable '{name}' not found",
                f'set it, or give a default: ${{oc.env:{name},default}}',
            )
        elif value is None:
            value = reference
        return _Node(value, 1 + len(str(value)), reference)

    def _kept(self, node: _Node) -> _Node:
        """The node; the value of a recorded reference in a URL is the reference."""
        written = node.reference
        if self._recorded and written and '://' in written and not re.match(r'(gs|s3)://\$\{', written):
            return _Node(written, 1 + len(written), written)
        return node


def _end(text: str, start: int, path: Path) -> int:
    """The place of the `}` that closes a reference, whose default may have pairs of `{` and `}`."""
    open_ones = 1
    for match in re.compile(r'[{}]').finditer(text, start):
        open_ones += 1 if match[0] == '{' else -1
        if open_ones == 0:
            return match.start()
    raise mistake(path, f'cannot be resolved: {shown(text)} has a ${{ that is not closed', _FORMS)


def _default(content: Any) -> Any:
    """The default of a variable: text without its quotes, or null."""
    text = '' if content is None else str(content)
    if len(text) > 1 and text[0] == text[-1] and text[0] in '"\'':
        return text[1:-1]
    return None if content is None or text == 'null' else text


def _index(given: Any, part: str | int) -> str | int:
    return int(part) if isinstance(given, list | tuple) and isinstance(part, str) and part.isdecimal() else part


def _has(given: Any, part: str | int) -> bool:
    if isinstance(given, list | tuple):
        return isinstance(part, int) and 0 <= part < len(given)
    return isinstance(given, Mapping) and part in given


def _too_large(path: Path) -> ProblemsError:
    return mistake(path, f'makes the configuration larger than {LARGEST >> 20} MiB', 'use fewer references')


def _plain(node: _Node) -> Any:
    if isinstance(node.content, dict):
        return {key: _plain(below) for key, below in node.content.items()}
    if isinstance(node.content, list):
        return [_plain(below) for below in node.content]
    return node.content


def _references(node: _Node, path: Path) -> Iterator[tuple[Path, str]]:
    if isinstance(node.content, dict | list):
        for key, below in node.content.items() if isinstance(node.content, dict) else enumerate(node.content):
            yield from _references(below, (*path, key))
    elif node.reference is not None:
        yield path, node.reference
