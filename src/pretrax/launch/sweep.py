"""A sweep: a YAML file that names a configuration and changes of it, as a list of configurations to time.

    base: ../quickstart.yaml          # relative to this file
    change: {data: {name: synthetic, vocab_size: 2048}}   # in every row
    grid: {model.n_layers: [2, 4], batch.tokens: [2048, 4096]}   # every combination
    rows: [{model.preset: gpt2}]      # and these
    steps: 10

Keys of `change`, `grid` and `rows` are those of a configuration, dotted as on the command line, and `devices`.
"""

import dataclasses
import itertools
import json
import math
import pathlib
from typing import Any

import pydantic

from pretrax.config import RunConfig, load
from pretrax.config.problems import Problem, from_validation, report, shown
from pretrax.config.schema import Count, Positive, Section
from pretrax.config.source import Places, read_file
from pretrax.errors import UserError
from pretrax.observe.sweep_report import value_text

DEVICES = 'devices'
MOST_ROWS = 10_000


class Sweep(Section):
    """What the file of a sweep says."""

    base: str = pydantic.Field(min_length=1, description='the configuration, relative to this file')
    change: dict[str, Any] = pydantic.Field(default={}, description='keys of the configuration, for every row')
    grid: dict[str, list[Any]] = pydantic.Field(default={}, description='keys with lists: a row for each combination')
    rows: list[dict[str, Any]] = pydantic.Field(default=[], description='further rows, each with its own keys')
    steps: Count = pydantic.Field(default=10, description='steps timed in a row; their median counts')
    warmup: Count = pydantic.Field(default=3, description='steps before them, which do not count')
    minutes: Positive = pydantic.Field(default=10.0, description='after which a row is ended')


@dataclasses.dataclass(frozen=True)
class Row:
    """One configuration of a sweep.

    Attributes:
        changes: what tells it from the other rows, as the file has it.
        config: all of it.
        devices: that its process sees; None: all.
    """

    changes: dict[str, Any]
    config: RunConfig
    devices: int | None

    @property
    def label(self) -> str:
        return ' '.join(f'{key}={value_text(value)}' for key, value in self.changes.items()) or 'as it is'


def read_sweep(path: pathlib.Path, run_dir: pathlib.Path) -> tuple[Sweep, list[Row]]:
    """The sweep of a file, and its rows, each a configuration that is valid by itself.

    Args:
        path: the file.
        run_dir: of all rows; what they prepare of their data lies there, once for all.

    Raises:
        UserError: the file or a row is no sweep or configuration; names the key, or the row.
    """
    layer = read_file(path)
    place = Places(layer.origins, str(path))
    try:
        sweep = Sweep.model_validate_json(json.dumps(layer.values))
    except pydantic.ValidationError as error:
        raise report(from_validation(error, layer.values, Sweep), place) from error
    empty = [key for key, values in sweep.grid.items() if not values]
    if empty:
        raise report([Problem(('grid', empty[0]), 'is an empty list; expected the values to try')], place)
    count = len(sweep.rows)
    if sweep.grid:
        count += math.prod(len(values) for values in sweep.grid.values())
    if count > MOST_ROWS:
        raise UserError(f'{path}: {count:,} rows; expected at most {MOST_ROWS:,}\ntake some values of grid: out')
    names = list(sweep.grid)
    changes = [dict(zip(names, values, strict=True)) for values in itertools.product(*sweep.grid.values())]
    changes = (changes if sweep.grid or not sweep.rows else []) + sweep.rows
    base = path.parent / sweep.base
    try:
        read_file(base)
    except UserError as error:
        raise UserError(f'{place(("base",))}: base: {error}') from error
    rows = [_row(path, base, number, sweep.change, own, run_dir) for number, own in enumerate(changes, 1)]
    return sweep, rows


def _row(
    path: pathlib.Path, base: pathlib.Path, number: int, shared: dict[str, Any], own: dict[str, Any], run_dir: pathlib.Path
) -> Row:  # fmt: skip
    values = shared | own
    devices = values.pop(DEVICES, None)
    if devices is not None and (type(devices) is not int or devices < 1):
        raise UserError(
            f'{path}: row {number}: devices is {shown(devices)}; expected a number of devices, or none at all'
        )
    for key in ('name', 'run_dir', 'extends'):
        if key in values:
            raise UserError(f'{path}: row {number}: {key} is not for a row to say\ntake it out')
    overrides = [f'{key}={json.dumps(value)}' for key, value in values.items()]
    try:
        config = load(base, [*overrides, 'name=bench', f'run_dir={json.dumps(str(run_dir))}'])
    except UserError as error:
        said = ' '.join(f'{key}={value_text(value)}' for key, value in own.items())
        raise UserError(f'{path}: row {number}{f" ({said})" if said else ""} is no configuration:\n{error}') from error
    return Row(own, config, devices)
