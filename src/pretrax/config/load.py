"""Loads a file and overrides into a checked `RunConfig` that knows the origin of each value.

Later layers win: the files in `extends`, the file, the overrides. Then interpolations are resolved, plugins are loaded,
and the schema is checked.

Loading a configuration executes the Python files in its `plugins:`. Read `plugins:` before you load a configuration
from another user.
"""

import contextlib
import importlib
import importlib.util
import json
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic

from pretrax.config import registry
from pretrax.config.interpolation import resolve, without_secrets
from pretrax.config.packaged import find_packaged
from pretrax.config.problems import Path as KeyPath
from pretrax.config.problems import Problem, ProblemsError, from_validation, report, scalars, shown
from pretrax.config.renamed import check_names, upgraded, upgraded_layer
from pretrax.config.schema import Federation, RunConfig, Storage
from pretrax.config.source import MISSING, Layer, Places, decoded, parse_overrides, read_file
from pretrax.errors import UserError
from pretrax.storage import AnyPath, BucketPath, StorageSettings, locate, use_settings


def load(path: str | AnyPath, overrides: Iterable[str] = (), *, written_in: AnyPath | None = None) -> RunConfig:
    """Reads a configuration file, and reaches buckets as its section `storage` says from then on.

    Args:
        path: a YAML file, also in a bucket (gs:// or s3://), or a packaged one such as 'quickstart'.
        overrides: `key=value` strings such as 'mesh.d=4'; keys are dotted, values are YAML.
        written_in: the file that has the overrides, if they are not from the command line.

    Raises:
        UserError: at most ten lines that name the file, the key, what was given and what is expected.
    """
    with _references_in_messages():
        path = locate(path) if isinstance(path, str) else path
        if isinstance(path, Path) and not path.suffix and (packaged := find_packaged(str(path))) and not path.exists():
            path = packaged
        return _checked([*_with_bases(path, ()), parse_overrides(overrides)], str(path), written_in=written_in)


def from_values(values: Mapping[str, Any], overrides: Iterable[str] = ()) -> RunConfig:
    """Does what `load` does, from a dict with the keys of a configuration file."""
    try:
        with _references_in_messages():
            given = Layer(dict(values), dict.fromkeys(_paths(values, ()), 'given'))
            return _checked([given, parse_overrides(overrides)], 'values')
    except RecursionError:
        raise UserError('values: nested too deeply to be a configuration') from None


def read_resolved(path: AnyPath) -> RunConfig:
    """A run's config.yaml, which another user may have written. Raises UserError as `from_manifest`."""
    return from_manifest(read_file(path).values)


def from_manifest(values: Mapping[str, Any]) -> RunConfig:
    """The configuration in the manifest of a checkpoint or a compiled step, which another user may have written.

    Imports no plugin, and takes no variable of the environment into a URL.

    Raises:
        UserError: the values are not a configuration, or name a component of a plugin that was not imported.
    """
    try:
        with _references_in_messages():
            values = upgraded(values)
            given = Layer(values, dict.fromkeys(_paths(values, ()), 'manifest'))
            return _checked([given], 'manifest', recorded=True)
    except RecursionError:
        raise UserError('the configuration in the manifest is nested too deeply') from None
    except UserError as error:
        plugins = values.get('plugins')
        if not plugins or 'is not a registered' not in str(error):
            raise
        raise UserError(
            f'{error}\nit was written with plugins, which are imported only if you name them: {shown(plugins)}'
        ) from error


def model_name(path: AnyPath) -> Any:
    """The name of the model's component in a configuration, or in the base of a sweep, a search or a fit.

    Raises:
        UserError: the file, or one that it is based on, cannot be read.
    """
    values = _merged(_with_bases(path, ()))[0]
    if isinstance(base := values.get('base'), str):
        return model_name(locate(base, path.parent))
    model = values.get('model')
    return model.get('name', registry.DEFAULTS['model']) if isinstance(model, Mapping) else registry.DEFAULTS['model']


def load_plugin(plugin: str, directory: AnyPath) -> str:
    """Runs a plugin, once per process: a Python file (relative to `directory`) or an importable module.

    Returns the absolute path of a file, or the module's name.

    Raises:
        UserError: there is no such plugin, or it fails; the message names the exception and the line.
    """
    is_file = plugin.endswith('.py') or '/' in plugin
    found = locate(plugin, directory) if is_file else None
    if isinstance(found, BucketPath):
        raise UserError(f'plugins: {found} is in a bucket; expected a local file\n    copy it to this machine')
    path = found and Path(os.path.realpath(found))
    name = f'pretrax_plugin:{path}' if path else plugin
    if path and not path.is_file():
        raise UserError(f'plugins: {path} does not exist; paths are relative to the file that names them')
    if not path and not re.fullmatch(r'\w+(\.\w+)*', plugin):
        raise UserError(f'plugins: {shown(plugin)} is not a module; expected a .py file or the name of a module')
    try:
        if not path:
            importlib.import_module(plugin)
        elif name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, path)
            if spec is None or spec.loader is None:
                raise UserError(f'plugins: {path} is not a Python file; expected a name ending in .py')
            sys.modules[name] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # user code can raise anything; `from error` keeps the details
        sys.modules.pop(name, None)
        if isinstance(error, ModuleNotFoundError) and error.name == plugin:
            raise UserError(
                f'plugins: there is no module {plugin!r}; expected a .py file or the name of a module\n'
                f'    for a file write  {plugin}.py'
            ) from error
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        where = f'{path or plugin}{f":{line}" if line else ""}'
        reason = textwrap.shorten(f'{type(error).__name__}: {error}', 200, placeholder=' ...')
        raise UserError(f'plugins: {where} failed: {reason}') from error
    return str(path or plugin)


@contextlib.contextmanager
def _references_in_messages() -> Iterator[None]:
    """Errors name the variable of the environment that a value comes from, and not the value, which may be a secret."""
    try:
        yield
    except UserError as error:
        error.args = (without_secrets(str(error)),)
        raise error from None


def _with_bases(path: AnyPath, below: tuple[AnyPath, ...]) -> list[Layer]:
    """The layers of the files that a file extends, in order, then its own."""
    layer = read_file(path)
    layer = upgraded_layer(layer) if layer.is_resolved else layer
    if 'extends' not in layer.values:
        return [layer]
    place = layer.origins[('extends',)]
    extends = _resolved({'extends': layer.values.pop('extends')}, layer.origins, place)[0]['extends']
    bases = [extends] if isinstance(extends, str) else extends
    if not isinstance(bases, list) or not bases or not all(isinstance(base, str) and base for base in bases):
        raise UserError(f'{place}: extends is {shown(extends)}; expected the path of a YAML file, or a list of paths')
    layers = []
    chain = (*below, _real(path))
    for base in bases:
        base_path = locate(base, path.parent)
        if _real(base_path) in chain:
            circle = ' -> '.join(file.name for file in (*chain, base_path))
            raise UserError(f'{place}: extends is circular: {circle}\n    remove one of the extends')
        try:
            layers += _with_bases(base_path, chain)
        except UserError as error:
            if below:  # only the outermost file adds this line
                raise
            raise UserError(f'{error}\n    (from extends: {base} in {place})') from error
    return [*layers, layer]


def _real(path: AnyPath) -> AnyPath:
    return Path(os.path.realpath(path)) if isinstance(path, Path) else path


def _checked(layers: list[Layer], name: str, recorded: bool = False, written_in: AnyPath | None = None) -> RunConfig:
    values, origins, notes = _merged(layers)
    for layer in layers:
        _check_indentation(layer)
    check_names(layers, values, written_in)
    place = Places(origins, name)
    values, references = _resolved(values, origins, name, recorded)
    if not recorded:
        if isinstance(values.get('storage'), dict):  # checked with the rest; `init_from` may be in a bucket
            with contextlib.suppress(pydantic.ValidationError):
                use_settings(StorageSettings(**Storage.model_validate(values['storage']).model_dump()))
        values = _with_plugins(values, layers, place)
        values = _with_model_of_start(values, origins)
    if warmup_note := _settle_warmup(values, origins):
        notes.append(warmup_note)
    config = _validated(values, origins, references, place)
    if config.federation.bucket is None and config.federation != Federation():
        notes.append('federation has no bucket, so this run trains alone')
    config._origins = origins
    config._references = references
    config._notes = tuple(notes)
    return config


def _check_indentation(layer: Layer) -> None:
    """Raises UserError if keys follow the name of a section, which is empty, without indentation."""
    section, inside = None, dict[str, list[str]]()
    for key, value in layer.values.items():
        if key in RunConfig.model_fields:
            section = key if value is None else None
        elif section is not None:
            inside.setdefault(section, []).append(str(key))
    for section, keys in inside.items():
        place = layer.origins.get((section,), 'the configuration')
        shown = '\n'.join([f'    {section}:', *(f'      {key}: ...' for key in keys[:5])])
        raise UserError(f'{place}: {section} is empty, and {", ".join(keys[:5])} below it not indented\nwrite\n{shown}')


def _merged(layers: list[Layer]) -> tuple[dict[str, Any], dict[KeyPath, str], list[str]]:
    values: dict[str, Any] = {}
    origins: dict[KeyPath, str] = {}
    notes = []
    for layer in layers:
        notes += _drop_options_of_replaced_components(values, layer, origins)
        values = _laid_over(values, layer.values)
        origins |= layer.origins
    return values, origins, notes


def _laid_over(below: Any, above: Any) -> Any:
    """A copy of `above`; a mapping keeps the keys of `below` that it does not give."""
    if not isinstance(above, Mapping):
        return above
    below = below if isinstance(below, dict) else {}
    return below | {key: _laid_over(below.get(key), value) for key, value in above.items()}


def _drop_options_of_replaced_components(
    values: dict[str, Any], layer: Layer, origins: Mapping[KeyPath, str]
) -> Iterator[str]:
    """Drops the options of adamw if `optimizer.name=lion` replaces it, and yields a note for each."""
    for kind, default in registry.DEFAULTS.items():
        below, above = values.get(kind), layer.values.get(kind)
        if not isinstance(below, dict) or not isinstance(above, dict) or 'name' not in above:
            continue
        before, after = below.get('name', default), above['name']
        if before == after:
            continue
        common = RunConfig.model_fields[kind].annotation.model_fields  # type: ignore[union-attr]
        for key in [key for key in below if key not in common or key == 'options']:
            place = origins.get((kind, key), '')
            yield f'{kind}.{key} ({place}) was an option of {before}; {after} was chosen instead'
            del below[key]


def _resolved(
    values: dict[str, Any], origins: dict[KeyPath, str], name: str, recorded: bool = False
) -> tuple[dict[str, Any], dict[KeyPath, str]]:
    """Values with interpolations resolved, and the references to the environment; their origins get a remark."""
    place = Places(origins, name)
    try:
        resolved, references = resolve(values, recorded=recorded)
    except ProblemsError as error:
        raise report(error.problems, place) from error
    problems = [Problem(path, what) for path, value in scalars(resolved) if (what := _why_impossible(value))]
    if problems:
        raise report(problems, place)
    texts = ((path, value) for path, value in scalars(values) if isinstance(value, str))
    remarks = {path: text for path, text in texts if re.search(r'(?<!\\)\$\{', text)}
    for path, reference in references.items():
        remarks[path] = f'environment {" ".join(dict.fromkeys(re.findall(r"oc[.]env:([A-Za-z_]\w*)", reference)))}'
    origins |= {path: f'{place(path)}, {remark}' for path, remark in remarks.items()}
    return resolved, references


def _why_impossible(value: Any) -> str:
    """Why no key accepts a value that YAML can express; '' if one may."""
    if isinstance(value, int | float) and not abs(value) < 2**63:  # also true for nan
        return f'is {shown(value)}; expected a finite number of at most 64 bits'
    if isinstance(value, str) and MISSING.fullmatch(value):
        return f'is {value}, which OmegaConf reads as a missing value'
    if value is not None and not isinstance(value, bool | int | float | str):
        return f'is {shown(value)}; expected a number, text, true, false or null'
    return ''


def _paths(values: Mapping[str, Any], path: KeyPath) -> Iterator[KeyPath]:
    for key, value in values.items():
        yield (*path, key)
        if isinstance(value, Mapping):
            yield from _paths(value, (*path, key))


def _with_plugins(values: dict[str, Any], layers: list[Layer], place: Places) -> dict[str, Any]:
    """Runs the plugins, and makes their paths absolute, so that config.yaml in the run directory finds them."""
    plugins = values.get('plugins')
    if not isinstance(plugins, list) or not all(isinstance(plugin, str) and plugin for plugin in plugins):
        return values  # absent, or the schema refuses it
    directory = next((layer.directory for layer in reversed(layers) if 'plugins' in layer.values), Path())
    try:
        return values | {'plugins': [load_plugin(plugin, directory) for plugin in plugins]}
    except UserError as error:
        raise UserError(f'{place(("plugins",))}: {error}') from error


def _with_model_of_start(values: dict[str, Any], origins: dict[KeyPath, str]) -> dict[str, Any]:
    """`model:` as `init_from:` gives it, unless the configuration is complete; its own keys of `model:` win."""
    start, model = values.get('init_from'), values.get('model') or {}
    layers = None
    if isinstance(start, dict):
        start, layers = start.get('path'), start.get('layers')
    if not isinstance(start, str) or not start or not isinstance(model, dict):
        return values
    given = {key: value for key, value in model.items() if value is not None}
    name = given.get('name', registry.DEFAULTS['model'])
    names = registry.option_names('model', name)
    given = {key: value for key, value in (names.dotted(given) if names else given).items() if value is not None}
    if 'preset' in given or {'n_layers', 'd_model', 'attention.n_heads'} <= set(given):
        return values
    section = registry.section_of_checkpoint('model', name, start) if isinstance(name, str) else None
    if section is None:
        return values
    section = names.dotted(section) if names else section
    section |= {'n_layers': len(layers)} if isinstance(layers, list | tuple) and 'n_layers' in section else {}
    of_start = {key: value for key, value in section.items() if key not in given}
    model = names.nest(section | given) if names else section | given
    origins |= (
        dict.fromkeys(_paths({'model': names.nest(of_start) if names else of_start}, ()), f'init_from {start}')
        | origins
    )
    return values | {'model': model}


def _settle_warmup(values: dict[str, Any], origins: Mapping[KeyPath, str]) -> str:
    """Makes `schedule.warmup` a number of steps, and shortens it if an override of `steps` ends the run before.

    Returns a line about what it changed, or ''. A plugin's schedule keeps what it gets.
    """
    schedule, steps = values.get('schedule'), values.get('steps')
    if not isinstance(schedule, dict) or isinstance(steps, bool) or not isinstance(steps, int):
        return ''
    name, warmup = schedule.get('name', registry.DEFAULTS['schedule']), schedule.get('warmup')
    if isinstance(warmup, bool) or not isinstance(warmup, int | float):
        return ''
    if name not in registry.names('schedule') or registry.plugin_factory('schedule', name) is not None:
        return ''
    if isinstance(warmup, float) and 0 < warmup < 1:
        settled, reason = round(warmup * steps), f'{warmup:g} of {steps} steps'
    elif warmup > steps > 0 and 'override' == origins.get(('steps',)) != origins.get(('schedule', 'warmup')):
        settled, reason = steps, f'instead of {warmup}, since the run has {steps} steps'
    else:
        return ''
    values['schedule'] = schedule | {'warmup': settled}
    return f'schedule.warmup: {settled} steps ({reason})'


def _validated(
    values: dict[str, Any], origins: Mapping[KeyPath, str], references: Mapping[KeyPath, str], place: Places
) -> RunConfig:
    try:
        return _strict(values)
    except pydantic.ValidationError as error:
        problems = from_validation(error, values, RunConfig, references)
    # An environment variable is always text. If text was refused, parse it as YAML and try again.
    texts = [p.path for p in problems if 'environment' in origins.get(p.path, '')]
    if not texts:
        raise report(problems, place)
    for path in texts:
        section: Any = values
        for part in path[:-1]:
            section = section[part]
        if isinstance(section[path[-1]], str):
            section[path[-1]] = decoded(section[path[-1]])
    try:
        return _strict(values)
    except pydantic.ValidationError as error:
        raise report(from_validation(error, values, RunConfig, references), place) from error


def _strict(values: dict[str, Any]) -> RunConfig:
    try:
        text = json.dumps(values)
    except ValueError as error:
        raise UserError(f'a number in the configuration is too long: {error}') from error
    return RunConfig.model_validate_json(text)
