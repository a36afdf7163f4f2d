"""Reads YAML files and `key=value` strings into plain values, each with its origin. Nothing is merged here."""

import difflib
import io
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pretrax.config.packaged import packaged_names
from pretrax.config.problems import Path as KeyPath
from pretrax.config.problems import Problem, dotted, report, shown
from pretrax.errors import UserError, first_line
from pretrax.storage import AnyPath
from pretrax.tables import read_table

MISSING = re.compile(r'\\*\?\?\?')  # merging would drop it silently
_HINTS = pathlib.Path(__file__).with_name('yaml_hints.yaml')
MERGE = 'tag:yaml.org,2002:merge'
RESOLVED = '# Every value of this run and where it came from; pretrax '  # how a file of `resolved_yaml` begins
LARGEST_FILE = 256 * 1024  # bytes; a larger file is not a configuration
MOST_REFERENCES = 1000  # in a file; OmegaConf takes a millisecond for each


@dataclass(frozen=True)
class Layer:
    """The values of one file, or of the command line."""

    values: dict[str, Any]
    origins: dict[KeyPath, str]
    directory: AnyPath = field(default_factory=Path)
    is_resolved: bool = False  # written by `resolved_yaml`


def read_file(path: AnyPath) -> Layer:
    """Reads one YAML file, without the files it extends; interpolations stay as written.

    Raises:
        UserError: there is no such file, or it is not a YAML mapping with unique string keys.
    """
    return parse(read_text(path), str(path), path.parent)


def parse(text: str, name: str, directory: AnyPath) -> Layer:
    """Does what `read_file` does, from text; messages call it `name`."""
    if number := re.search(r'\d{1000,}', text):
        line = text.count('\n', 0, number.start()) + 1
        raise UserError(f'{name}:{line}: {shown(number[0])} is too long for a number')
    if text.count('${') > MOST_REFERENCES:
        raise UserError(f'{name} has {text.count("${"):,} references ${{...}}; expected at most {MOST_REFERENCES:,}')
    origins: dict[KeyPath, str] = {}
    try:
        # Python's loader first: it reports deep nesting as an error, but the C loader overflows the stack.
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None:
            raise UserError(f'{name} is empty; expected a mapping such as  steps: 300\n    see docs/configuration.md')
        if not isinstance(root, yaml.MappingNode):
            kind = 'list' if isinstance(root, yaml.SequenceNode) else 'single value'
            raise UserError(f'{name}:1: the file is a {kind}; expected a mapping of keys to values: steps: 300')
        _refuse_tags(text)
        values, problems = _plain(text)
        problems = [*_walk(root, (), origins, lambda line: f'{name}:{line}')] or problems
    except RecursionError:
        raise UserError(f'{name} is nested too deeply to be a configuration') from None
    except yaml.YAMLError as error:
        raise UserError(_yaml_problem(error, name)) from error
    if problems:
        raise report(problems, Places(origins, name))
    return Layer(values, origins, directory, text.startswith(RESOLVED))


def parse_overrides(overrides: Iterable[str]) -> Layer:
    """Reads `a.b=value` strings, with values in YAML, as one layer.

    Raises:
        UserError: it is not a list, a string is not `key=value`, a key is given twice, or a value is not YAML.
    """
    if isinstance(overrides, str | Mapping):  # of a caller in Python
        pairs = [overrides] if isinstance(overrides, str) else [f'{key}={value}' for key, value in overrides.items()]
        raise UserError(f'overrides is {shown(overrides)}; expected a list of key=value\nwrite {pairs}')
    merged: dict[str, Any] = {}
    origins: dict[KeyPath, str] = {}
    for override in overrides:
        key, equals, text = override.partition('=')
        if not equals or not re.fullmatch(r'[A-Za-z_][\w-]*(\.[A-Za-z_][\w-]*)*', key):
            why = 'the key is not a dotted name' if equals else 'there is no "="'
            hint = _whole_list(key) if equals else ''
            raise UserError(f'override {shown(override)}: {why}; expected key=value, for example  mesh.d=4{hint}')
        path = tuple(key.split('.'))
        if path[0] == 'extends':
            raise UserError(f'override {shown(override)}: extends belongs in a file; write the key in a YAML file')
        if clash := next((p for p in origins if p == path[: len(p)] or path == p[: len(path)]), None):
            raise UserError(f'override {shown(override)}: {dotted(clash)} is already given on this command line')
        section = merged
        for part in path[:-1]:
            section = section.setdefault(part, {})
        section[path[-1]], inside = _override_value(override, path, text)
        origins |= {path: 'override'} | inside
    return Layer(merged, origins)


def _whole_list(key: str) -> str:
    """What to write instead of an item of a list, such as sample.prompts.0; '' for other keys."""
    item = re.fullmatch(r'([A-Za-z_][\w.-]*?)(?:\.(\d+)|\[(\d+)\])(?:\W.*)?', key)
    if item is None:
        return ''
    is_schedule = item[1] in ('batch.tokens', 'batch.sequence_length')
    whole = f'[[0, 1024], [{item[2] or item[3]}, 2048]]' if is_schedule else '[...]'
    return f'\n    a list is given as a whole: {item[1]}={whole}'


def decoded(text: str) -> Any:
    """The text of an environment variable, parsed as YAML: '3' is a number."""
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f'value={text}']), resolve=False)['value']  # type: ignore
    except (yaml.YAMLError, OmegaConfBaseException, ValueError):
        return text


class Places:
    """The origin of a key, or else of a key inside it, or of the section around it."""

    def __init__(self, origins: Mapping[KeyPath, str], name: str):
        self.origins, self.name = origins, name

    def __call__(self, path: KeyPath) -> str:
        while path:
            inside = (place for key, place in self.origins.items() if key[: len(path)] == path)
            if place := self.origins.get(path) or next(inside, ''):
                return place
            path = path[:-1]
        return self.name


def _refuse_tags(text: str) -> None:
    """Raises an error for tags such as `!!int x`, which no key needs."""
    for token in yaml.scan(text, Loader=yaml.SafeLoader):
        if isinstance(token, yaml.TagToken):
            raise yaml.MarkedYAMLError(
                problem=f'the tag {"".join(filter(None, token.value))}', problem_mark=token.start_mark
            )


def _plain(text: str) -> tuple[Any, list[Problem]]:
    """The values that OmegaConf reads, which refuses circles, alias bombs and duplicate keys."""
    try:
        return OmegaConf.to_container(OmegaConf.load(io.StringIO(text)), resolve=False), []
    except OmegaConfBaseException as error:
        reason = (first_line(error) or type(error).__name__).strip('"')
        path = tuple(part for part in re.split(r'[.\[\]]', str(error.full_key or '')) if part)
        return None, [Problem(path, f'cannot be resolved: {reason}', '')]


def _override_value(override: str, path: KeyPath, text: str) -> tuple[Any, dict[KeyPath, str]]:
    """The value, and the origins of the keys in it if it is a mapping."""
    if text.startswith('*'):  # a glob; YAML would take it for an alias
        return text, {}
    if text.count('${') > MOST_REFERENCES:
        raise UserError(f'override {shown(override)}: expected at most {MOST_REFERENCES:,} references ${{...}}')
    origins: dict[KeyPath, str] = {}
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None or node.end_mark.index < len(text.rstrip()):
            rest = text[node.end_mark.index :].strip() if node else text
            raise UserError(
                f'override {shown(override)}: {f"{shown(rest)} would be ignored" if rest else "no value is given"}\n'
                '    null means no value, \'""\' an empty string; put text with # in quotes inside the quotes of the '
                'shell'
            )
        _refuse_tags(text)
        values = OmegaConf.to_container(OmegaConf.from_dotlist([f'value={text}']), resolve=False)
        problems = list(_walk(node, path, origins, lambda _: 'override'))
    except RecursionError:
        raise UserError(f'override {shown(override)}: nested too deeply') from None
    except UserError:
        raise
    except (yaml.YAMLError, OmegaConfBaseException, ValueError) as error:
        detail = getattr(error, 'problem', None) or first_line(error)
        raise UserError(
            f'override {shown(override)}: the value is not YAML: {detail}\n'
            '    put text with special characters in quotes inside the quotes of the shell: \'key="..."\''
        ) from error
    if problems:
        raise report(problems, lambda _: f'override {shown(override)}')
    assert isinstance(values, dict)
    return values['value'], origins


def _walk(
    node: yaml.Node, path: KeyPath, origins: dict[KeyPath, str], place: Callable[[int], str]
) -> Iterator[Problem]:
    """Records the line of every key, and yields problems with text that YAML 1.1 reads differently than people do."""
    if isinstance(node, yaml.MappingNode):
        merged = [value for key, value in node.value if key.tag == MERGE]
        for value in merged:  # <<: *anchor; keys have the lines of the anchor unless they are also given here
            for mapping in reversed(value.value) if isinstance(value, yaml.SequenceNode) else [value]:
                yield from _walk(mapping, path, origins, place)
        for key, value in ((key, value) for key, value in node.value if key.tag != MERGE):
            below = (*path, key.value)
            origins[below] = place(key.start_mark.line + 1)
            if key.tag != 'tag:yaml.org,2002:str':
                is_step = key.tag == 'tag:yaml.org,2002:int'
                hint = 'a schedule by steps is a list: [[0, 1024], [100, 2048]]' if is_step else ''
                hint = hint or f'if you mean it, put it in quotes: "{key.value}"'
                yield Problem(below, 'is not a string; keys are names', hint)
            yield from _walk(value, below, origins, place)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _walk(value, (*path, index), origins, place)
    elif MISSING.fullmatch(node.value):
        yield Problem(path, f'is {node.value}, which OmegaConf reads as a missing value', 'write the value')
    elif node.tag == 'tag:yaml.org,2002:int' and re.fullmatch(r'[-+]?0[0-7_]+|.*:.*|.*__.*|.*_', node.value):
        hint = 'write it in plain decimal digits, or in quotes if it is text'
        yield Problem(path, f'is {node.value}, which YAML reads as octal, base 60 or with stray underscores', hint)


def read_text(path: AnyPath) -> str:
    """The text of a file. Raises UserError if there is none, or it is not text."""
    name = str(path) if str(path).isprintable() else shown(str(path))
    try:
        if isinstance(path, Path) and path.is_dir():
            near = sorted(path.glob('*.yaml'))
            raise UserError(
                f'{name} is a directory; expected a YAML file{f"; did you mean {near[0]}?" if near else ""}'
            )
        if isinstance(path, Path) and path.exists() and not path.is_file() and not path.is_fifo():
            raise UserError(f'{name} is a device; expected a YAML file')
        with path.open('rb') as file:
            raw = file.read(LARGEST_FILE + 1)
    except FileNotFoundError:
        hint = _near_files(path) if isinstance(path, Path) else ''
        raise UserError(f'{name} does not exist{hint}') from None
    except UserError:
        raise
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise UserError(f'{shown(str(path))} cannot be read: {reason}') from error
    if len(raw) > LARGEST_FILE:
        raise UserError(f'{name} is larger than {LARGEST_FILE // 1024} KiB; expected a YAML file of settings')
    try:
        return raw.decode('utf-8-sig')
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b'\n') + 1
        raise UserError(
            f'{name}:{line}: the file is not UTF-8 text (byte 0x{raw[error.start]:02x} at {error.start})\n'
            '    expected a YAML file; save it as UTF-8'
        ) from error


def _near_files(path: Path) -> str:
    if not path.suffix and (near := difflib.get_close_matches(str(path), packaged_names(), n=1)):
        return f'; did you mean {near[0]}?'
    folders = dict.fromkeys([path.parent, Path(), Path('configs')])
    files = [file for folder in folders if folder.is_dir() for file in sorted(folder.glob('*.y*ml'))]
    by_stem = {file.stem: file for file in files}
    near = difflib.get_close_matches(path.stem, by_stem, n=1)
    if near:
        return f'; did you mean {by_stem[near[0]]}?'
    here = [str(file) for file in files[:5]]
    return f'; files here: {", ".join(here)}' if here else '; expected the path of a YAML file'


def _yaml_problem(error: Exception, name: str) -> str:
    if isinstance(error, yaml.MarkedYAMLError):
        open_end = 'end of stream' in str(error.problem)  # an open quote or bracket: report where it opens
        mark = error.context_mark if open_end and error.context_mark else error.problem_mark or error.context_mark
        place = f'{name}:{mark.line + 1}' if mark else name
        problem = error.problem or error.context or 'it cannot be read'
        hint = next((f'\n    {hint}' for words, hint in read_table(_HINTS).items() if words in problem), '')
        return f'{place}: not valid YAML: {problem}{hint}'
    if isinstance(error, yaml.reader.ReaderError):
        return f'{name}: the file is not text: character {error.character!r} at {error.position}; expected YAML'
    return f'{name}: not valid YAML: {first_line(error) or type(error).__name__}'
