"""Messages about mistakes in a configuration: where, what was given, what is expected, the nearest valid choice.

A `Problem` has a key but no file; `report` adds the origin of each key, and prints at most ten lines.
"""

import collections
import difflib
import functools
import json
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pydantic

from pretrax.config.one_of import OneOf
from pretrax.config.other_tools import advice_for, assignment, other_tools, spelled
from pretrax.errors import UserError

type Path = tuple[str | int, ...]

# Keys whose values are secrets, and the variable of the environment that is written instead of a plain value.
SECRETS: dict[Path, str] = {('log', 'notify', 'url'): 'PRETRAX_NOTIFY_URL'}

_SECTION = 'a mapping of keys to values'
MOST_SHOWN = 4  # two lines each, and a line that counts the rest


@dataclass(frozen=True)
class Problem:
    """One mistake: the key, what is wrong with it, and how to fix it."""

    path: Path
    what: str
    hint: str = ''
    whole: bool = False  # `what` already names the key


class ProblemsError(ValueError):
    """Mistakes found by a validator; pydantic wraps this error, and `from_validation` unpacks it."""

    def __init__(self, *problems: Problem):
        super().__init__('; '.join(problem.what for problem in problems))
        self.problems = problems


def mistake(path: Path, what: str, hint: str = '') -> ProblemsError:
    """The error of a validator that finds one mistake, at a path below what it validates."""
    return ProblemsError(Problem(path, what, hint))


def nearest(given: str, valid: Iterable[str], lead: str = '; did you mean ') -> str:
    """The most similar valid name, as the end of a sentence; '' if none is similar."""
    valid = list(valid)
    by_lower = {name.lower(): name for name in valid}
    near = difflib.get_close_matches(given.lower(), by_lower, n=1, cutoff=0.6)
    return f'{lead}{by_lower[near[0]]}?' if near else ''


def shown(value: Any) -> str:
    """A value roughly as the user wrote it, shortened to fit a line."""
    try:
        text = json.dumps(value, ensure_ascii=False) if not isinstance(value, str) else repr(value)
    except (TypeError, ValueError):  # bytes and other values of YAML tags
        text = repr(value)
    return text if len(text) <= 60 else f'{text[:45]}... ({len(text)} characters)'


def dotted(path: Path) -> str:
    """('sample', 'prompts', 0) as sample.prompts[0]."""
    text = ''
    for part in path:
        plain = part if isinstance(part, str) and re.fullmatch(r'[\w-]{1,60}', part) else shown(part)
        text += f'[{part}]' if isinstance(part, int) else f'.{plain}'
    return text.removeprefix('.')


def leaves(values: Mapping[str, Any], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The path and the value of everything in nested dicts; an empty dict is a value."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def scalars(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The path and the value of everything in nested dicts and lists that is neither."""
    if isinstance(value, dict | list | tuple):
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from scalars(below, (*path, key))
    else:
        yield path, value


def report(problems: Iterable[Problem], place: Callable[[Path], str]) -> UserError:
    """The problems as one error of at most ten lines; `place` gives the file and line of a key."""
    problems = list(dict.fromkeys(problems))
    lines = []
    for problem in problems[:MOST_SHOWN]:
        said = problem.what if problem.whole else f'{dotted(problem.path)} {problem.what}'
        lines.append(_one_line(f'{place(problem.path)}: {said.strip()}'))
        if problem.hint:
            lines.append('    ' + _one_line(problem.hint))
    if len(problems) > MOST_SHOWN:
        lines.append(f'and {len(problems) - MOST_SHOWN} more')
    return UserError('\n'.join(lines))


def from_validation(
    error: pydantic.ValidationError, given: Any, model: type[pydantic.BaseModel], references: Mapping[Path, str] = {}
) -> list[Problem]:
    """The problems that pydantic found, one per key; the branches of a union are merged.

    Args:
        given: the plain values that were validated.
        model: the model of these values, for the descriptions of its keys.
        references: the text of values from the environment, which are not shown.
    """
    problems: dict[Path, Problem] = {}
    expected: dict[Path, list[str]] = {}
    for detail in error.errors(include_url=False):
        loc = detail['loc']
        path = _real_path(loc, given, detail['type'])
        cause = detail.get('ctx', {}).get('error')
        if detail['type'] == 'default_factory_not_called':  # caused by the problem of another key
            continue
        if isinstance(cause, ProblemsError):
            for problem in cause.problems:
                key = path + problem.path
                # A hint may have a part of the value
                problems[key] = Problem(key, problem.what, '' if _reference(key, references) else problem.hint)
        elif isinstance(cause, Exception):
            first, *rest = str(cause).splitlines() or [type(cause).__name__]
            said = first if first.startswith(dotted(path)) else f'{dotted(path)}: {first}'
            problems[path] = Problem(path, said, ' '.join(line.strip() for line in rest), whole=True)
        elif detail['type'] == 'extra_forbidden':
            section = _model_at(model, path[:-1], given)
            beside = [*section.model_fields, *(['extends'] if len(path) == 1 else [])] if section else []
            names_of = getattr(_model_at(model, path[:1], given), 'nested_names', None)
            nested = names_of(_at(given, path[:1])) if names_of and len(path) > 1 else {}
            is_shown = not _reference(path, references)
            advice = advice_for(str(loc[-1]), _at(given, path), given, keys_by_last_name(model), is_shown)
            problems[path] = unknown(path, beside, known_keys(model), nested, advice)
        elif detail['type'] == 'missing':
            problems[path] = Problem(path, 'is missing and has no default', _describe(model, path, given))
        else:
            expected.setdefault(path, []).append(_expected(detail['msg']))
    for path, alternatives in expected.items():
        wanted = _either(alternatives)
        is_secret = any(len(path) > 1 and secret[: len(path)] == path[: len(secret)] for secret in SECRETS)
        reference = _reference(path, references)
        value = reference or shown(_at(given, path))
        what = f'expected {wanted}' if is_secret else f'is {value}; expected {wanted}'
        hint = ('' if reference or is_secret else _fix(path, _at(given, path), wanted, model)) or _describe(
            model, path, given
        )
        problems.setdefault(path, Problem(path, what, hint))
    # A list with one bad item is not itself bad.
    return [p for p in problems.values() if not any(q != p.path and q[: len(p.path)] == p.path for q in problems)]


def _reference(path: Path, references: Mapping[Path, str]) -> str | None:
    """The reference to the environment that a value comes from, as a whole or in part; None if there is none."""
    return next((text for key, text in references.items() if key == path[: len(key)]), None)


def unknown(
    path: Path, beside: Iterable[str], anywhere: Iterable[str], nested: Mapping[str, str] = {}, advice: str = ''
) -> Problem:
    """The problem of an unknown key, with the key that was meant.

    Args:
        beside: the keys of its section; the nearest comes first.
        anywhere: dotted keys; one that ends with this key comes next.
        nested: dotted keys by names that count as those of siblings.
        advice: what to write instead, if the name is another tool's.
    """
    if advice:
        return Problem(path, 'is not a key that exists', advice)
    key = str(path[-1])
    beside = sorted(beside)
    hint = nearest(key, [*nested, *beside], 'did you mean ')
    near = hint.removeprefix('did you mean ').removesuffix('?')
    if near in nested and near not in beside:
        hint = f'did you mean {nested[near]}?'
    if not hint:
        elsewhere = [name for name in anywhere if key in (name, name.rpartition('.')[2])]
        hint = f'did you mean {elsewhere[0]}?' if elsewhere else ''
    listed = f'keys here: {", ".join(beside)}' if beside else ''
    return Problem(path, 'is not a key that exists', f'{hint} {listed}'.strip())


def known_keys(model: type[pydantic.BaseModel] | OneOf, prefix: str = '') -> list[str]:
    """Every dotted key of a model and its nested models."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        if section := _section(field.annotation):
            keys += known_keys(section, f'{prefix}{name}.')
    return keys


@functools.cache
def keys_by_last_name(model: type[pydantic.BaseModel]) -> dict[str, str]:
    """{last part: key} of sections with components, and of the default component; without parts that two keys share."""
    keys = []
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        if options_of := getattr(section, 'options_of', None):
            sections: tuple[Any, ...] = section, options_of({})
            keys += [f'{name}.{key}' for inner in sections for key in known_keys(inner)]
    last = collections.Counter(key.rpartition('.')[2] for key in keys)
    return {part: key for key in keys if last[part := key.rpartition('.')[2]] == 1}


def _fields(model: type[pydantic.BaseModel], given: Any) -> dict[str, Any]:
    """The fields of a model; of a section whose `name` chooses a component, also the options of that component."""
    options_of = getattr(model, 'options_of', None)
    options = options_of(given) if options_of and isinstance(given, dict) else None
    return model.model_fields | (options.model_fields if options else {})


def _section(annotation: Any) -> type[pydantic.BaseModel] | None:
    """The model of a field that holds one, or may: Distill for `Distill | None`."""
    if typing.get_origin(annotation) is types.UnionType:
        kinds = [kind for kind in typing.get_args(annotation) if kind is not types.NoneType]
        annotation = kinds[0] if len(kinds) == 1 else None
    return annotation if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel) else None


def _fix(path: Path, value: Any, expected: str, model: type[pydantic.BaseModel]) -> str:
    """What to write instead, for common mistakes."""
    inner = other_tools().values.get(str(path[-1])) if path else None
    if inner and expected == _SECTION and isinstance(value, str | int | float):
        section = _model_at(model, path, {})
        family = _fields(section, {}).get('family') if section else None
        names = [name for kind in typing.get_args(family and family.annotation) for name in typing.get_args(kind)]
        if (name := str(value).lower()) in names:
            inner, value = 'family', name
        return f'write {assignment(dotted((*path, inner)), value)}'
    if spelled(dotted(path), value) != value:
        return f'write {assignment(dotted(path), value)}'
    if isinstance(value, str) and expected == 'a list':
        return f'write [{value}]'
    if isinstance(value, str) and (near := nearest(value, re.findall(r"'([^']+)'", expected), 'did you mean ')):
        return near
    number = 'integer' in expected or 'number' in expected
    if isinstance(value, bool) and 'string' in expected:
        return 'YAML reads on, off, yes, no, true and false as booleans: put the word in quotes'
    if isinstance(value, int | float) and not isinstance(value, bool) and 'string' in expected:
        return 'put it in quotes'
    if isinstance(value, float) and 'integer' in expected and value.is_integer():
        return f'write {int(value)}'
    if isinstance(value, str) and number:
        if scaled := re.fullmatch(r'(\d+(?:\.\d+)?) ?([kKmMgGbB])', value):
            power = {'k': 1, 'm': 2, 'g': 3, 'b': 3}[scaled[2].lower()]
            return f'write {int(float(scaled[1]) * 1024**power)} or {int(float(scaled[1]) * 1000**power)}'
        if re.fullmatch(r'\d{1,3}(,\d{3})+', value):
            return f'write {value.replace(",", "_")}'
        if re.fullmatch(r'[-+]?\d[\d_]*(\.\d*)?([eE][-+]?\d+)?', value):
            return 'write the number without quotes'
    return ''


def _either(alternatives: Iterable[str]) -> str:
    """What a union accepts: 'a string, a number, true or false'."""
    wanted = list(dict.fromkeys(alternatives))
    if 'a number' in wanted and 'an integer' in wanted:
        wanted.remove('an integer')
    if len(wanted) > 1 and (boolean := 'a boolean, true or false') in wanted:
        wanted.remove(boolean)
        wanted += ['true', 'false']
    return ' or '.join([', '.join(wanted[:-1]), wanted[-1]] if len(wanted) > 1 else wanted)


def _expected(message: str) -> str:
    message = message.removeprefix('Input should be ').removeprefix('Value error, ').split(', got ')[0]
    words = {
        'a valid integer': 'an integer',
        'a valid number': 'a number',
        'a finite number': 'a finite number',
        'a valid string': 'a string',
        'a valid boolean': 'a boolean, true or false',
        'a valid array': 'a list',
        'a valid tuple': 'a list',
        'an object': _SECTION,
    }
    for long, short in (
        (r'greater than or equal to', 'at least'),
        (r'less than or equal to', 'at most'),
        (r'\w+ should have (at \w+ \d+ \w+).*', r'\1'),
    ):
        message = re.sub(long, short, message)
    return words.get(message, message)


def _describe(model: type[pydantic.BaseModel], path: Path, given: Any) -> str:
    """The meaning and default of a key; '' if the schema has none."""
    section = _model_at(model, path[:-1], given)
    field = _fields(section, _at(given, path[:-1])).get(str(path[-1])) if section and path else None
    if not field or not field.description:
        return ''
    default = '' if field.is_required() or field.default_factory else f' (default {shown(field.default)})'
    return f'{path[-1]}: {field.description}{"" if isinstance(field.default, pydantic.BaseModel) else default}'


def _model_at(model: type[pydantic.BaseModel], path: Path, given: Any) -> type[pydantic.BaseModel] | None:
    for depth, part in enumerate(path):
        field = _fields(model, _at(given, path[:depth])).get(str(part))
        section = _section(field.annotation) if field else None
        if not section:
            return None
        model = section
    return model


def _real_path(loc: Path, given: Any, kind: str) -> Path:
    """A pydantic location without the names of union branches: only keys of the given values."""
    path: Path = ()
    for part in loc:
        if _has(given, part):
            given = given[part]
            path = (*path, part)
    return (*path, loc[-1]) if kind == 'missing' else path


def _at(given: Any, path: Path) -> Any:
    for part in path:
        given = given[part] if _has(given, part) else None
    return given


def _has(given: Any, part: str | int) -> bool:
    return part in given if isinstance(given, dict) else isinstance(given, list) and part in range(len(given))


def _one_line(text: str) -> str:
    return textwrap.shorten(' '.join(text.split()), 240, placeholder=' ...')
