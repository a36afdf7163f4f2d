"""A configuration as text: resolved YAML with origins, and the difference of two."""

import functools
import json
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, Literal, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from pydantic import BaseModel

from pretrax import __version__
from pretrax.config.effects import effect_of
from pretrax.config.interpolation import escaped
from pretrax.config.problems import SECRETS, Path, dotted, leaves
from pretrax.config.schema import Component, RunConfig
from pretrax.config.source import RESOLVED

_REFERENCE = re.compile(r'\$\{oc\.env: *\w+ *(, *null *)?\}')  # a value that is from the environment as a whole


class Absent(Enum):
    """The value of a key that only the other configuration has."""

    ABSENT = '(absent)'

    def __str__(self) -> str:
        return self.value


ABSENT = Absent.ABSENT


def resolved_yaml(config: RunConfig) -> str:
    """Every value as YAML, with its origin as a comment. Loading this text gives an equal configuration."""
    header = [f'{RESOLVED}{__version__}.']
    header += [f'# {note}' for note in config.notes]
    lines = list(_lines(written_values(config), (), functools.partial(origin, config)))
    width = min(48, max(len(text) for text, comment in lines if comment))
    body = [f'{text:<{width}}  # {comment}' if comment else text for text, comment in lines]
    return '\n'.join([*header, *body]) + '\n'


def written_values(config: RunConfig) -> dict[str, Any]:
    """The values as pretrax writes them: a text from the environment, which may be a secret, is its reference.

    Also a secret that was given as a plain text, as a whole or in part, is written as a reference. Values that the
    compiled step depends on, numbers, and choices between fixed words are written as they are, so that a resumed run
    notices a change.
    """
    references = {
        path: _with_default(text, _value_at(config, path))
        for path, text in config.references.items()
        if _may_be_secret(config, path)
    }
    references |= _references_of_sources(config.data.options, references)
    for path, variable in SECRETS.items():
        if not _REFERENCE.fullmatch(references.get(path, '')):
            references[path] = f'${{oc.env:{variable},null}}'
    return _written(config.model_dump(mode='json'), (), references)


def _references_of_sources(options: Any, references: Mapping[Path, str]) -> dict[Path, str]:
    """The references of keys next to `data.mixture`, for the sources that take these keys over."""
    shared = [path for path in references if path[0] == 'data' and len(path) > 1 and path[1] != 'mixture']
    return {
        ('data', 'mixture', number, *path[1:]): references[path]
        for number, source in enumerate(getattr(options, 'mixture', None) or ())
        for path in shared
        if getattr(source, str(path[1]), None) == getattr(options, str(path[1]), None)
    }


def shown_prompts(prompts: Sequence[str], references: Mapping[Path, str]) -> list[str]:
    """`sample.prompts` as pretrax shows them: a prompt from the environment,
    which may be a secret, is its reference, of `RunConfig.references`.
    """
    whole = references.get(('sample', 'prompts'))
    return [references.get(('sample', 'prompts', i), whole or prompt) for i, prompt in enumerate(prompts)]


def shown_samples(shown: Sequence[str], prompts: Sequence[str], texts: Sequence[str]) -> list[tuple[str, str]]:
    """Each prompt, and the text that begins with it, as pretrax shows them; see `shown_prompts`."""
    return [(text, text + more.removeprefix(prompt)) for text, prompt, more in zip(shown, prompts, texts, strict=False)]


def printable_override(override: str) -> str:
    """KEY=VALUE as it may be printed, with the reference of a secret; '' if a secret is a part of the value."""
    key, _, value = override.partition('=')
    for path, variable in SECRETS.items():
        if key == dotted(path) and not _REFERENCE.fullmatch(value):
            return f'{key}=${{oc.env:{variable},null}}'
        if dotted(path).startswith(f'{key}.') and '=' in override:
            return ''
    return override


def diff(old: RunConfig, new: RunConfig) -> list[tuple[str, Any, Any]]:
    """The dotted keys whose values differ, with the old and the new value as written; `ABSENT` if there is none."""
    changed = {key for key, *_ in diff_values(old.model_dump(mode='json'), new.model_dump(mode='json'))}
    return [change for change in diff_values(written_values(old), written_values(new)) if change[0] in changed]


def config_leaves(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything in nested dicts."""
    return ((dotted(path), value) for path, value in leaves(values))


def diff_values(old: dict[str, Any], new: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Does what `diff` does, for two nested dicts."""
    before, after = dict(leaves(old)), dict(leaves(new))
    keys = [*before, *(key for key in after if key not in before)]
    pairs = [(dotted(key), before.get(key, ABSENT), after.get(key, ABSENT)) for key in keys]
    return [(key, a, b) for key, a, b in pairs if a != b]


def origin(config: RunConfig, *path: str) -> str:
    """The origin of a value: 'configs/a.yaml:3', 'override', 'default', 'preset gpt2', 'derived', ..."""
    section: BaseModel = config
    depth = 0
    while True:
        key = path[depth]
        if isinstance(section, Component) and key not in type(section).model_fields:
            section = section.options
        value = getattr(section, key)
        depth += 1
        if depth == len(path) or not isinstance(value, BaseModel):
            break
        section = value
    # path[:depth] is a field; deeper keys are in a plain mapping, which may have been given as a whole.
    given = config.origins.get(path) or config.origins.get(path[:depth])
    if given:
        return given
    field = type(section).model_fields[key]
    if isinstance(section, Component) and key == 'name':
        return 'default'
    if not field.default_factory_takes_validated_data and value == field.get_default(call_default_factory=True):
        return 'default'
    preset = getattr(section, 'preset', None)
    return f'preset {preset}' if preset else 'derived'


def value_text(value: Any) -> str:
    """A value as part of a label."""
    return value if isinstance(value, str) else json.dumps(value)


def _may_be_secret(section: Any, path: Path) -> bool:
    """Whether a value is free text that does not affect the compiled step."""
    for part in path:
        if not isinstance(section, BaseModel):
            return True
        if isinstance(section, Component) and part not in type(section).model_fields:
            section = section.options
        field = type(section).model_fields.get(str(part))
        if field is None or _only_words(field.annotation):
            return False
        section = getattr(section, str(part))
    return effect_of('.'.join(map(str, path))).on != 'step'


def _value_at(value: Any, path: Path) -> Any:
    for part in path:
        if isinstance(value, Component) and part not in type(value).model_fields:
            value = value.options
        value = getattr(value, str(part)) if isinstance(value, BaseModel) else value[part]
    return value


def _only_words(annotation: Any) -> bool:
    """Whether a type has fixed words, and no free text."""
    inner = get_args(annotation)
    if get_origin(annotation) is Literal:
        return True
    return bool(inner) and any(map(_only_words, inner)) and not {str, pathlib.Path} & set(inner)


def _written(value: Any, path: Path, references: Mapping[Path, str]) -> Any:
    if isinstance(value, dict | list) and path in references:
        return references[path]
    if isinstance(value, dict):
        return {key: _written(below, (*path, key), references) for key, below in value.items()}
    if isinstance(value, list):
        return [_written(below, (*path, index), references) for index, below in enumerate(value)]
    return references.get(path, escaped(value)) if isinstance(value, str) else value


def _with_default(reference: str, value: Any) -> str:
    """The reference of a section or a list with a default for readers without its variable: words for its texts."""
    is_one = isinstance(value, BaseModel | Mapping | Sequence) and not isinstance(value, str) and ',' not in reference
    return f'{reference[:-1]},{json.dumps(_without_texts(value))}}}' if is_one else reference


def _without_texts(value: Any) -> Any:
    """The names of components and of the sources of a mixture stay, and so does a choice between fixed words."""
    if isinstance(value, Component):
        return value.model_dump(mode='json', exclude_none=True) | _without_texts(value.options)
    if isinstance(value, BaseModel):
        kept = value.model_dump(mode='json', exclude_none=True)
        fields = type(value).model_fields.items()
        free = [name for name, field in fields if name in kept and name != 'name' and not _only_words(field.annotation)]
        return kept | {name: _without_texts(getattr(value, name)) for name in free}
    if isinstance(value, Mapping):
        return {key: _without_texts(below) for key, below in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_without_texts(below) for below in value]
    return 'hidden' if isinstance(value, str) else value


def _lines(values: dict[str, Any], path: tuple[str, ...], origin_of: Callable[..., str]) -> Iterator[tuple[str, str]]:
    for key, value in values.items():
        here, margin = (*path, key), '  ' * len(path)
        if isinstance(value, dict) and value:
            yield f'{margin}{_scalar(key)}:', ''
            yield from _lines(value, here, origin_of)
        else:
            yield f'{margin}{_scalar(key)}: {_flow(value)}', origin_of(*here)


def _flow(value: Any) -> str:
    if isinstance(value, list):
        return f'[{", ".join(_flow(item) for item in value)}]'
    if isinstance(value, dict):
        return f'{{{", ".join(f"{_scalar(key)}: {_flow(item)}" for key, item in value.items())}}}'
    return _scalar(value)


def _scalar(value: Any) -> str:
    """A value as YAML that reads back as the same value: plain if possible, else in double quotes."""
    if value is None:
        return 'null'
    if isinstance(value, bool):
        return 'true' if value else 'false'
    if isinstance(value, float):  # 1.0e-08: other readers of YAML take 1e-08 for text
        return yaml.safe_dump(value).partition('\n')[0]
    if not isinstance(value, str):
        return repr(value)
    if re.fullmatch(r'[A-Za-z_/.][\w/. +*-]*', value, re.ASCII) and not value.endswith(' ') and _reads_back(value):
        return value
    return yaml.dump(value, default_style='"', width=float('inf'), allow_unicode=True).rstrip('\n')


@functools.cache  # OmegaConf makes a new parser for each text: a tenth of the time of a small run
def _reads_back(text: str) -> bool:
    """Whether OmegaConf reads a plain text as itself, and not as a number or a reference."""
    read = OmegaConf.from_dotlist([f'value={text}'])['value']
    return isinstance(read, str) and read == text
