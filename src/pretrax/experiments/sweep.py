"""A sweep: a YAML file with a base configuration and changes to it, which make a list of configurations to time.

    base: ../quickstart.yaml          # relative to this file
    change: {data: {name: synthetic, vocab_size: 2048}}   # in every row
    grid: {model.n_layers: [2, 4], batch.tokens: [2048, 4096]}   # every combination
    rows: [{model.preset: gpt2}]      # additional rows
    steps: 10

Keys of `change`, `grid` and `rows` are configuration keys, dotted as on the command line, and `devices`.
"""

import dataclasses
import itertools
import math
import pathlib
from typing import Any

import pydantic

from pretrax.config import RunConfig
from pretrax.config.problems import Problem, report, shown
from pretrax.config.schema import Count, Positive, Section, default
from pretrax.config.show import value_text
from pretrax.config.source import read_file
from pretrax.errors import UserError
from pretrax.experiments.base_file import changed_config, read_section
from pretrax.storage import AnyPath, locate

DEVICES = 'devices'
MOST_ROWS = 10_000


class Sweep(Section):
    """The file of a sweep."""

    base: str = pydantic.Field(min_length=1, description='the configuration, relative to this file')
    change: dict[str, Any] = default({}, 'keys of the configuration, for every row')
    grid: dict[str, list[Any]] = default({}, 'keys with lists: a row for each combination')
    rows: list[dict[str, Any]] = default([], 'additional rows, each with its own keys')
    steps: Count = default(10, 'timed steps per row; the result is their median')
    warmup: Count = default(3, 'steps before the timed ones')
    minutes: Positive = default(10.0, 'time limit of a row')


@dataclasses.dataclass(frozen=True)
class Row:
    """One configuration of a sweep."""

    changes: dict[str, Any]  # the keys in which it differs from the base, as written in the file
    config: RunConfig  # the whole configuration
    devices: int | None  # number of devices that its process uses; None: all

    @property
    def label(self) -> str:
        return ' '.join(f'{key}={value_text(value)}' for key, value in self.changes.items()) or 'unchanged'


def read_sweep(path: AnyPath, run_dir: pathlib.Path) -> tuple[Sweep, list[Row]]:
    """Reads a sweep, and makes its rows. Each is a valid configuration.

    Args:
        run_dir: shared by all rows, so that their data is prepared once.

    Raises:
        UserError: the file or a row is invalid; the message names the key or the row.
    """
    sweep, place = read_section(path, Sweep)
    empty = [key for key, values in sweep.grid.items() if not values]
    if empty:
        raise report([Problem(('grid', empty[0]), 'is an empty list; expected the values to try')], place)
    count = len(sweep.rows)
    if sweep.grid:
        count += math.prod(len(values) for values in sweep.grid.values())
    if count > MOST_ROWS:
        raise UserError(f'{path}: {count:,} rows; expected at most {MOST_ROWS:,}\nremove some values of grid')
    names = list(sweep.grid)
    changes = [dict(zip(names, values, strict=True)) for values in itertools.product(*sweep.grid.values())]
    changes = (changes if sweep.grid or not sweep.rows else []) + sweep.rows
    base = locate(sweep.base, path.parent)
    try:
        read_file(base)
    except UserError as error:
        raise UserError(f'{place(("base",))}: base: {error}') from error
    rows = [_row(path, base, number, sweep.change, own, run_dir) for number, own in enumerate(changes, 1)]
    return sweep, rows


def is_sweep(text: str) -> bool:
    """Whether a user means a sweep by this: a file with `base`, which no configuration has. Raises UserError."""
    path = locate(text)
    return path.is_file() and 'base' in read_file(path).values


def _row(
    path: AnyPath, base: AnyPath, number: int, shared: dict[str, Any], own: dict[str, Any], run_dir: pathlib.Path
) -> Row:
    values = shared | own
    devices = values.pop(DEVICES, None)
    if devices is not None and (type(devices) is not int or devices < 1):
        raise UserError(
            f'{path}: row {number}: devices is {shown(devices)}; expected a number of devices, or leave it out'
        )
    for key in ('name', 'run_dir', 'extends'):
        if key in values:
            raise UserError(f'{path}: row {number}: a row cannot set {key}\nremove it')
    try:
        config = changed_config(base, values | {'name': 'bench', 'run_dir': str(run_dir)}, path)
    except UserError as error:
        written = ' '.join(f'{key}={value_text(value)}' for key, value in own.items())
        raise UserError(
            f'{path}: row {number}{f" ({written})" if written else ""} is not a valid configuration:\n{error}'
        ) from error
    return Row(own, config, devices)
