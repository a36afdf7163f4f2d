"""The names that pretrax 0.1 had for options of the model, whose section `model:` was flat.

What pretrax itself stored is read with its former names. What a user writes is answered with the name of today.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pretrax.config import registry
from pretrax.config.problems import Path
from pretrax.config.show import value_text
from pretrax.config.source import Layer
from pretrax.errors import UserError
from pretrax.storage import AnyPath

_MOST_SHOWN = 7  # of at most ten lines


def upgraded(values: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration that pretrax stored, with the names of today."""
    names, model = _names_of(values), values.get('model')
    return dict(values) | ({'model': names.nest(model)} if names and isinstance(model, Mapping) else {})


def upgraded_layer(layer: Layer) -> Layer:
    """Returns a file that pretrax wrote with the names of today; each value keeps its line."""
    names = _names_of(layer.values)
    if names is None:
        return layer
    moved: dict[Path, Path] = {
        path: ('model', *names.RENAMED[str(path[1])].split('.')) for path in _former(layer, names)
    }
    origins = {moved.get(path[:2], path[:2]) + path[2:]: place for path, place in layer.origins.items()}
    return Layer(upgraded(layer.values), origins, layer.directory)


def check_names(layers: Sequence[Layer], values: Mapping[str, Any], file: AnyPath | None = None) -> None:
    """Checks that no layer has a former name.

    Args:
        layers: as the user wrote them.
        values: values of all layers, which say what the model is.
        file: where the keys of the last layer are written, if that is not the command line.

    Raises:
        UserError: a line for each former name has the new one.
    """
    names = _names_of(values)
    if names is None:
        return
    lines, files = [], []
    for layer in layers:
        for path in _former(layer, names):
            key, place = f'model.{names.RENAMED[path[1]]}', layer.origins.get(path, '')
            is_override = place == 'override' and file is None
            place = str(file) if place == 'override' and file is not None else place
            value = f': write {key}={value_text(layer.values["model"][path[1]])}' if is_override else ''
            lines.append(f'{place}: model.{path[1]} is now {key}{value}')
            files += (
                [place.rpartition(':')[0] or place] if not is_override and place not in ('given', 'manifest') else []
            )
    if lines:
        more = [f'and {len(lines) - _MOST_SHOWN} more'] if len(lines) > _MOST_SHOWN else []
        fix = [f'run: pretrax config upgrade {" ".join(map(shlex.quote, dict.fromkeys(files)))}'] if files else []
        raise UserError('\n'.join([*lines[:_MOST_SHOWN], *more, *fix]))


def _names_of(values: Mapping[str, Any]) -> Any:
    """The module with the former names of the options of a configuration's model; None: they have no others."""
    model = values.get('model')
    name = model.get('name', registry.DEFAULTS['model']) if isinstance(model, Mapping) else None
    return registry.option_names('model', name)


def _former(layer: Layer, names: Any) -> Iterator[tuple[str, str]]:
    """The paths of the former names in a layer."""
    model = layer.values.get('model')
    if isinstance(model, Mapping):
        yield from (('model', key) for key, value in model.items() if names.is_former(key, value))
