"""Several processes of a run compare what they run before the first step: a difference ends all of them.

Each process reads its own configuration, environment, text and code, and JAX compares none of it: processes that differ
would train together, with results that belong to neither. The islands of a federation compare less: they may run on
other hardware.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from pretrax.checkpoint.agreement import decide
from pretrax.config import RunConfig, config_leaves, may_change_on_resume, registry, written_values
from pretrax.data.batches.source import Source
from pretrax.errors import UserError
from pretrax.model.architecture import KEYS
from pretrax.run.variables import SETTINGS

if TYPE_CHECKING:
    from pretrax.run.setup import Run

# Keys and environment variables that identify a process, or locate things on its machine
_OWN_KEYS = re.compile(r'processes\..*|storage\.profile|faults\.stack_trace_to')
# Keys of an island: where and how it computes; and sections of which other facts than the keys are compared
_OF_ISLAND = re.compile(
    r'(mesh|precision|model|data|plugins|init_from)\b.*|batch\.(tokens|micro)|federation\.(bucket|name)'
)
_LONGEST = 1000  # characters of a term
_OWN_FLAGS = re.compile(r'--xla_(dump_\S*|force_host_platform_device_count)\b')
_FLAGS = ('XLA_FLAGS', 'LIBTPU_INIT_ARGS')
_PACKAGES = ('jax', 'jaxlib', 'numpy', 'optax', 'pretrax')
_MOST = 5  # differences that a message shows


def check_same_run(config: RunConfig) -> None:
    """Raises UserError in all processes if configuration, plugins, versions, code or compiler flags differ."""
    # Only a process that has joined others asks for their number: the question starts JAX's backend.
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return
    values, shown = dict(config_leaves(config.model_dump(mode='json'))), dict(config_leaves(written_values(config)))
    items = {key: (value, shown.get(key)) for key, value in values.items() if not _OWN_KEYS.fullmatch(key)}
    facts: dict[str, Any] = {
        'Python': platform.python_version(),
        'code of pretrax': _digest(pathlib.Path(__file__).parents[1]),
    }
    facts |= {f'version of {name}': importlib.metadata.version(name) for name in _PACKAGES}
    facts |= {f'code of {plugin}': _digest(pathlib.Path(plugin)) for plugin in config.plugins}
    facts |= {
        name: sorted(flag for flag in os.environ.get(name, '').split() if not _OWN_FLAGS.match(flag)) for name in _FLAGS
    }
    facts |= {name: str(jax.config.values.get(name)) for name in SETTINGS}
    _compare('configuration', items | {key: (value, value) for key, value in facts.items()})


def check_same_data(source: Source) -> None:
    """Compares the tokens that the processes will read. Raises UserError in all processes if they differ."""
    if jax.process_count() > 1:
        _compare('data', {key: (value, value) for key, value in _facts_of_data(source).items()})


def _facts_of_data(source: Source) -> dict[str, Any]:
    return {
        'fingerprint of the data': source.fingerprint,
        'tokenizer': source.tokenizer_sha256,
        'vocabulary': source.vocab_size,
    }


def federation_terms(run: 'Run') -> dict[str, bool | int | float | str | None]:
    """What all islands of a federation have in common, by names that a user knows.

    Islands have the keys in common with which a run has to resume, besides those of the hardware and the size of the
    batches. Models and data are compared as they are, since they may be written in several ways and lie anywhere.
    """
    config, arch = run.config, run.recipe.model.arch
    leaves = config_leaves(config.model_dump(mode='json'))
    terms = {key: value for key, value in leaves if not (may_change_on_resume(key) or _OF_ISLAND.fullmatch(key))}
    terms |= {'steps': config.steps, 'model.name': config.model.name}
    terms |= {'federation.mixing': config.federation.kept_share, 'federation.keep': config.federation.keep}
    terms |= {f'model.{key}': arch.option(key) for key in KEYS} if arch else _options('model', config)
    shapes = [(jax.tree_util.keystr(path), leaf.shape) for path, leaf in jax.tree.leaves_with_path(run.like.weights)]
    terms['shapes of the weights'] = hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]
    terms |= {'data.name': config.data.name, **_options('data', config), **_facts_of_data(run.source)}
    terms['code of plugins'] = ' '.join(_digest(pathlib.Path(plugin)) for plugin in config.plugins)
    return {key: _term(value) for key, value in terms.items()}


def _options(kind: str, config: RunConfig) -> dict[str, Any]:
    """The options of a component as they are written, without secrets; of text and tokens, those that fill rows."""
    section = getattr(config, kind)
    if section.name != registry.DEFAULTS['data']:
        return {f'{kind}.{key}': value for key, value in written_values(config)[kind].items()}
    values = section.options.model_dump(mode='json')
    mixture = [[source[key] for key in ('name', 'weight', 'packing')] for source in values.get('mixture') or ()]
    return {'data.packing': values['packing'], 'data.exhausted': values.get('exhausted'), 'data.mixture': mixture}


def _term(value: Any) -> bool | int | float | str | None:
    """A value as it is if it is a plain one, otherwise as text, of which the end may be a digest."""
    if value is None or isinstance(value, bool | int | float):
        return value
    text = _text(value)
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return text if len(text) <= _LONGEST else f'{text[:_LONGEST]}... {digest}'


def _compare(about: str, items: Mapping[str, tuple[Any, Any]]) -> None:
    """Raises UserError in all processes if their items differ.

    Args:
        about: topic of the exchange.
        items: the value of each key, and how it is shown.
    """
    digests = {key: hashlib.sha256(_text(value).encode()).hexdigest()[:16] for key, (value, _) in items.items()}
    whole = hashlib.sha256(json.dumps(sorted(digests.items())).encode()).hexdigest()
    if decide(about, whole, lambda processes: len(set(processes)) == 1):
        return
    problem = decide(about, {key: (digest, _text(items[key][1])[:100]) for key, digest in digests.items()}, _difference)
    jax.distributed.shutdown()  # in an orderly way: otherwise the end of process 0 would be a failure of the others
    raise UserError(problem)


def _difference(processes: list[dict[str, tuple[str, str]]]) -> str:
    """The message about the keys whose digests differ."""
    keys = dict.fromkeys(key for items in processes for key in items)
    lines = []
    for key in keys:
        where: dict[str, list[int]] = {}
        for index, items in enumerate(processes):
            where.setdefault(items.get(key, ('', ''))[0], []).append(index)
        if len(where) > 1:
            texts = [(processes[group[0]].get(key, ('', 'absent'))[1], group) for group in where.values()]
            if len({text for text, _ in texts}) < len(texts):  # a reference to the environment, which may be a secret
                texts = [('one value', texts[0][1]), *(('another one', group) for _, group in texts[1:])]
            shown = [f'{text} in {_processes(group)}' for text, group in texts[:3]]
            lines.append(f'    {key}: {", ".join(shown)}{", ..." if len(texts) > 3 else ""}')
    more = [f'    and {len(lines) - _MOST} more'] if len(lines) > _MOST else []
    return '\n'.join(
        [
            'the processes of this run differ, so they would train something that none of them describes:',
            *lines[:_MOST],
            *more,
            'start all of them with the same configuration, environment, text and versions',
        ]
    )


def _processes(group: list[int]) -> str:
    names = ', '.join(map(str, group[:4])) + (f' and {len(group) - 4} more' if len(group) > 4 else '')
    return f'process {names}' if len(group) == 1 else f'processes {names}'


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


@functools.cache
def _digest(place: pathlib.Path) -> str:
    """The digest of a Python file, or of all in a directory; the name itself for a module that is not a file."""
    files = sorted(place.rglob('*.py')) if place.is_dir() else [place] if place.is_file() else []
    total = hashlib.sha256(str(place).encode() if not files else b'')
    for file in files:
        total.update(f'{file.relative_to(place)}\0'.encode())
        total.update(file.read_bytes())
    return total.hexdigest()[:16]
