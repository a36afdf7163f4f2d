"""Files of sweeps, searches and scaling laws: a base configuration, changes to it, and how its runs are started."""

import json
from collections.abc import Mapping
from typing import Any

import pydantic

from pretrax.config import RunConfig, load
from pretrax.config.problems import from_validation, report
from pretrax.config.schema import Count, CountOrZero, Section, default
from pretrax.config.source import Places, read_file
from pretrax.storage import AnyPath


class RunOptions(Section):
    """How several runs are started: keys of the file of a search or of a fit."""

    at_once: Count = default(1, 'runs that train at once')
    devices: Count | None = default(None, 'devices of each run; null: all')
    launch: list[str] = default([], 'words after `pretrax launch`; []: processes here')
    retries: CountOrZero = default(3, 'restarts of a run without a new checkpoint')


def read_section[S: Section](path: AnyPath, kind: type[S]) -> tuple[S, Places]:
    """The content of a file, and the places of its keys. Raises UserError, which names a key and its place."""
    layer = read_file(path)
    place = Places(layer.origins, str(path))
    try:
        return kind.model_validate_json(json.dumps(layer.values)), place
    except pydantic.ValidationError as error:
        raise report(from_validation(error, layer.values, kind), place) from error


def changed_config(base: AnyPath, values: Mapping[str, Any], written_in: AnyPath) -> RunConfig:
    """A configuration with other values of some keys, which the file `written_in` gives. Raises UserError."""
    return load(base, [f'{key}={json.dumps(value)}' for key, value in values.items()], written_in=written_in)
