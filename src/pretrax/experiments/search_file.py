"""The file of `pretrax search`: a base configuration, the keys to vary, and how.

base: ../quickstart.yaml          # relative to this file
change: {steps: 100}              # in every trial
parameters:
  optimizer.learning_rate: {low: 1e-4, high: 3e-2, log: true}
  model.n_layers: {low: 1, high: 4}              # integers, since both ends are
  optimizer.name: [adamw, lion]                  # one of these
trials: 20
"""

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

import pydantic

from pretrax.config import RunConfig
from pretrax.config.problems import Problem, report
from pretrax.config.schema import Count, CountOrZero, Section, default
from pretrax.config.show import value_text
from pretrax.config.source import read_file
from pretrax.errors import UserError
from pretrax.experiments.base_file import RunOptions, changed_config, read_section
from pretrax.experiments.trial_job import check_words
from pretrax.storage import AnyPath, locate

_OF_A_TRIAL = ('name', 'run_dir', 'extends')  # keys that the search sets itself


class Range(Section):
    """Numbers from `low` to `high`, both included: integers if both ends are."""

    low: int | float = pydantic.Field(description='the smallest value')
    high: int | float = pydantic.Field(description='the largest value')
    log: bool = default(False, 'uniform in the logarithm')
    step: int | float | None = default(None, 'distance of the values; null: any value', gt=0)

    @pydantic.model_validator(mode='after')
    def _check(self) -> 'Range':
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f'low is {self.low} and high is {self.high}; expected low < high')
        if self.log and self.low <= 0:
            raise ValueError(f'low is {self.low}; a logarithm needs low > 0')
        if self.log and self.step is not None:
            raise ValueError('log and step exclude each other; leave one out')
        if self.is_integer and type(self.step) is float:
            raise ValueError(f'step is {self.step}, but both ends are integers; write 1.0 for fractions')
        return self

    @property
    def is_integer(self) -> bool:
        return type(self.low) is int and type(self.high) is int


class Asha(Section):
    """Asynchronous successive halving. Li et al. 2018, arXiv:1810.05934."""

    first: Count | None = default(None, 'step of the first decision; null: eval.every')
    reduction: int = default(3, 'one of this many trials goes on at each rung', ge=2, le=100)


class Search(RunOptions):
    """The file of a search."""

    base: str = pydantic.Field(min_length=1, description='the configuration, relative to this file')
    change: dict[str, Any] = default({}, 'keys of the configuration, for every trial')
    parameters: dict[str, Range | list[str | int | float | bool | None]] = pydantic.Field(
        min_length=1, description='keys of the configuration with a range or a list of values'
    )
    sampler: Literal['tpe', 'cmaes', 'random', 'grid'] = default('tpe', 'chooses the values')
    asha: Asha | None = default(None, 'stops poor trials early; null: no trial')
    trials: Count | None = default(None, 'number of trials; null: of the grid, or 20')
    metric: str = default('val_loss', 'key of metrics.jsonl to minimize', min_length=1)
    seed: CountOrZero = default(0, 'of the sampler')

    @property
    def number_of_trials(self) -> int:
        combinations = math.prod(map(len, self.grid.values())) if self.grid else math.inf
        return int(min(combinations, self.trials or (20 if math.isinf(combinations) else combinations)))

    @property
    def grid(self) -> dict[str, list[Any]]:
        """Values of each parameter for the sampler `grid`; {} for the others."""
        return {key: _values(given) for key, given in self.parameters.items()} if self.sampler == 'grid' else {}


class Space:
    """A search and its base: makes the configuration of a trial.

    Attributes:
        name: name of the search.
        search: the file.
        base: the configuration with the changes for every trial.
    """

    def __init__(self, path: AnyPath, search: Search, base_path: AnyPath):
        self.name, self.search = path.stem, search
        self._path, self._base_path = path, base_path
        self.base = self.config({})

    def config(self, values: Mapping[str, Any], **own: str) -> RunConfig:
        """The configuration with these values of the parameters, and `name` and `run_dir`. Raises UserError."""
        return changed_config(self._base_path, self.search.change | dict(values) | own, self._path)

    @property
    def identity(self) -> str:
        """What all trials of a search have in common, as text."""
        own = self.search.model_dump(
            mode='json', exclude={'trials', 'at_once', 'devices', 'launch', 'retries', 'base', 'change'}
        )
        base = json.loads(self.base.model_dump_json(exclude={'name', 'run_dir'}))
        return json.dumps([own, base], sort_keys=True)


def read_search(path: AnyPath) -> Space:
    """Reads the file of a search. Both ends of each range, and each value of a list, make a valid configuration.

    Raises:
        UserError: the file or a value is invalid; the message names the key.
    """
    search, place = read_section(path, Search)
    problems = [
        Problem((section, key), 'is set by the search', 'remove it')
        for section in ('change', 'parameters')
        for key in getattr(search, section)
        if key in _OF_A_TRIAL
    ]
    for key, given in search.parameters.items():
        if isinstance(given, list) and len({json.dumps(value) for value in given}) != max(len(given), 2):
            problems.append(Problem(('parameters', key), 'needs two or more different values'))
        elif search.sampler == 'grid' and isinstance(given, Range) and not given.is_integer and given.step is None:
            problems.append(Problem(('parameters', key), 'has no list of values', 'a grid needs a list, or a step'))
        elif search.sampler == 'cmaes' and isinstance(given, list):
            problems.append(Problem(('parameters', key), 'is a list; CMA-ES needs ranges', 'use sampler: tpe'))
    if search.sampler == 'cmaes' and len(search.parameters) < 2:
        problems.append(Problem(('sampler',), 'is cmaes, which needs two or more parameters', 'use sampler: tpe'))
    if search.launch and search.devices is not None:
        problems.append(
            Problem(
                ('devices',), 'applies to processes on this machine', 'write it as an option of the engine in launch'
            )
        )
    if problems:
        raise report(problems, place)
    check_words(search.launch)
    base = locate(search.base, path.parent)
    try:
        read_file(base)
        space = Space(path, search, base)
    except UserError as error:
        raise UserError(f'{path}: base and change are not a valid configuration:\n{error}') from error
    for key, given in search.parameters.items():
        for value in given if isinstance(given, list) else (given.low, given.high):
            try:
                space.config({key: value})
            except UserError as error:
                raise UserError(
                    f'{place(("parameters", key))}: {key}={value_text(value)} is not valid:\n{error}'
                ) from error
    if search.metric.startswith('val_') and not space.base.eval.every:
        raise UserError(f'{path}: eval.every is 0, so there is no {search.metric}\nset change: {{eval.every: 50}}')
    return space


def _values(given: Range | list[Any]) -> list[Any]:
    if isinstance(given, list):
        return given
    step = given.step or 1
    count = int((given.high - given.low) / step + 1e-9) + 1
    return [given.low + number * step for number in range(count)]
