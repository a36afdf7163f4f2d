"""Loads a file and overrides into a checked `RunConfig` that knows the origin of each value.

Later layers win: the files in `extends`, the file, the overrides. Then interpolations are resolved, plugins are loaded,
and the schema is checked.

Loading a configuration executes the Python files in its `plugins:`. Read `plugins:` before you load a configuration
from somebody else.
"""

import importlib
import importlib.util
import json
import re
import sys
import textwrap
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pydantic
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pretrax.config import registry
from pretrax.config.packaged import find_packaged
from pretrax.config.problems import Path as KeyPath
from pretrax.config.problems import Problem, from_validation, report, shown
from pretrax.config.schema import RunConfig
from pretrax.config.source import MISSING, Layer, Places, decoded, of_omegaconf, parse_overrides, read_file
from pretrax.errors import UserError


def load(path: str | Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Reads a configuration file.

    Args:
        path: a YAML file, or the name of a packaged configuration such as 'quickstart'.
        overrides: `key=value` strings such as 'mesh.d=4'; keys are dotted, values are YAML.

    Raises:
        UserError: at most ten lines that name the file, the key, what was given and what is expected.
    """
    path = Path(path)
    if not path.suffix and (packaged := find_packaged(str(path))) and not path.exists():
        path = packaged
    return _checked([*_with_bases(path, ()), parse_overrides(overrides)], str(path))


def from_values(values: Mapping[str, Any], overrides: Iterable[str] = ()) -> RunConfig:
    """The same as `load`, from a dict with the keys of a configuration file."""
    given = Layer(dict(values), dict.fromkeys(_paths(values, ()), 'given'))
    return _checked([given, parse_overrides(overrides)], 'values')


def load_plugin(plugin: str, directory: Path) -> str:
    """Runs a plugin, once per process: a Python file (relative to `directory`) or an importable module.

    Returns the absolute path of a file, or the module's name.

    Raises:
        UserError: there is no such plugin, or it fails; the message names the exception and the line.
    """
    is_file = plugin.endswith('.py') or '/' in plugin
    path = (directory / plugin).resolve() if is_file else None
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


def _with_bases(path: Path, below: tuple[Path, ...]) -> list[Layer]:
    """The layers of the files that a file extends, in order, then its own."""
    layer = read_file(path)
    if 'extends' not in layer.values:
        return [layer]
    place = layer.origins[('extends',)]
    extends = _resolved({'extends': layer.values.pop('extends')}, layer.origins, place)['extends']
    bases = [extends] if isinstance(extends, str) else extends
    if not isinstance(bases, list) or not bases or not all(isinstance(base, str) and base for base in bases):
        raise UserError(f'{place}: extends is {shown(extends)}; expected the path of a YAML file, or a list of paths')
    layers = []
    chain = (*below, path.resolve())
    for base in bases:
        base_path = path.parent / base
        if base_path.resolve() in chain:
            circle = ' -> '.join(file.name for file in (*chain, base_path))
            raise UserError(f'{place}: extends is circular: {circle}\n    remove one of the extends')
        try:
            layers += _with_bases(base_path, chain)
        except UserError as error:
            if below:  # only the outermost file adds this line
                raise
            raise UserError(f'{error}\n    (from extends: {base} in {place})') from error
    return [*layers, layer]


def _checked(layers: list[Layer], name: str) -> RunConfig:
    values, origins, notes = _merged(layers, name)
    place = Places(origins, name)
    values = _resolved(values, origins, name)
    values = _with_plugins(values, layers, place)
    values = _with_model_of_start(values, origins)
    config = _validated(values, origins, place)
    config._origins = origins
    config._notes = tuple(notes)
    return config


def _merged(layers: list[Layer], name: str) -> tuple[dict[str, Any], dict[KeyPath, str], list[str]]:
    values: dict[str, Any] = {}
    origins: dict[KeyPath, str] = {}
    notes = []
    for layer in layers:
        notes += _drop_options_of_replaced_components(values, layer, origins)
        try:
            values = OmegaConf.to_container(OmegaConf.merge(values, layer.values), resolve=False)  # type: ignore
        except OmegaConfBaseException as error:
            raise UserError(f'{name}: {str(error).splitlines()[0]}') from error
        origins |= layer.origins
    return values, origins, notes


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


def _resolved(values: dict[str, Any], origins: dict[KeyPath, str], name: str) -> dict[str, Any]:
    """Values with interpolations resolved; their origins get a remark."""
    place = Places(origins, name)
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(values), resolve=True)
    except OmegaConfBaseException as error:
        raise report([of_omegaconf(error)], place) from error
    assert isinstance(resolved, dict)
    problems = list(_impossible(resolved, ()))
    if problems:
        raise report(problems, place)
    for path, text in _strings(values, ()):
        if variables := re.findall(r'oc\.env:\s*([A-Za-z_]\w*)', text):
            origins[path] = f'{place(path)}, environment {" ".join(variables)}'
        elif re.search(r'(?<!\\)\$\{', text):
            origins[path] = f'{place(path)}, {text}'
    return resolved  # type: ignore[return-value]


def _impossible(value: Any, path: KeyPath) -> Iterator[Problem]:
    """Problems with values that YAML can express but no key accepts."""
    if isinstance(value, dict):
        for key, below in value.items():
            yield from _impossible(below, (*path, key))
    elif isinstance(value, list | tuple):
        for index, below in enumerate(value):
            yield from _impossible(below, (*path, index))
    elif isinstance(value, int | float) and not abs(value) < 2**63:  # also true for nan
        yield Problem(path, f'is {shown(value)}; expected a finite number of at most 64 bits')
    elif isinstance(value, str) and MISSING.fullmatch(value):
        yield Problem(path, f'is {value}, which OmegaConf reads as a missing value')
    elif value is not None and not isinstance(value, bool | int | float | str):
        yield Problem(path, f'is {shown(value)}; expected a number, text, true, false or null')


def _paths(values: Mapping[str, Any], path: KeyPath) -> Iterator[KeyPath]:
    for key, value in values.items():
        yield (*path, key)
        if isinstance(value, Mapping):
            yield from _paths(value, (*path, key))


def _strings(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, dict | list):
        for key, below in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _strings(below, (*path, key))
    elif isinstance(value, str):
        yield path, value


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
    if isinstance(start, dict):
        start = start.get('path')
    if not isinstance(start, str) or not start or not isinstance(model, dict):
        return values
    given = {key: value for key, value in model.items() if value is not None}
    if 'preset' in given or {'n_layers', 'd_model', 'n_heads'} <= set(given):
        return values
    name = given.get('name', registry.DEFAULTS['model'])
    section = registry.section_of_checkpoint('model', name, start) if isinstance(name, str) else None
    if section is None:
        return values
    origins |= {('model', key): f'init_from {start}' for key in section if key not in given}
    return values | {'model': section | given}


def _validated(values: dict[str, Any], origins: Mapping[KeyPath, str], place: Places) -> RunConfig:
    try:
        return _strict(values)
    except pydantic.ValidationError as error:
        problems = from_validation(error, values, RunConfig)
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
        raise report(from_validation(error, values, RunConfig), place) from error


def _strict(values: dict[str, Any]) -> RunConfig:
    try:
        text = json.dumps(values)
    except ValueError as error:
        raise UserError(f'a number in the configuration is too long: {error}') from error
    return RunConfig.model_validate_json(text)
