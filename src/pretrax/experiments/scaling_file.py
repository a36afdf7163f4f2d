"""The file of `pretrax scaling`: points, finished runs, or a grid of sizes and budgets to train; and what to fit.

runs: [../runs/size-*]               # or points: FILE, or base, sizes and budgets
approaches: [2, 3]
optimal_for: [1e18, 1e20]            # budgets in FLOPs to print the best sizes for
"""

from collections.abc import Mapping
from typing import Any, Literal

from pretrax.config import RunConfig
from pretrax.config.problems import Problem, report
from pretrax.config.schema import CountOrZero, Positive, default
from pretrax.errors import UserError
from pretrax.experiments.base_file import RunOptions, changed_config, read_section
from pretrax.experiments.trial_job import check_words
from pretrax.storage import AnyPath, locate


class Scaling(RunOptions):
    """The file of a fit."""

    points: str | None = default(None, 'a .csv or .jsonl file, relative to this one')
    runs: list[str] = default([], 'run directories, relative to this file; * is allowed')
    base: str | None = default(None, 'the configuration of a grid, relative to this file')
    change: dict[str, Any] = default({}, 'keys of the configuration, for every run of the grid')
    sizes: list[dict[str, Any]] = default([], 'keys of the configuration that make each size')
    budgets: list[Positive] = default([], 'training FLOPs, 6 N D, of the runs of each size')
    approaches: list[Literal[1, 2, 3]] = default([1, 2, 3], 'what to fit', min_length=1)
    optimal_for: list[Positive] = default([], 'FLOPs to print the best sizes for')
    metric: str = default('val_loss', 'key of metrics.jsonl', min_length=1)
    bootstrap: CountOrZero = default(100, 'samples for the intervals; 0: no intervals')
    seed: CountOrZero = default(0, 'of the bootstrap')


def read_scaling(path: AnyPath) -> Scaling:
    """Reads the file of a fit. Raises UserError."""
    scaling, place = read_section(path, Scaling)
    given = [key for key in ('points', 'runs', 'base') if getattr(scaling, key)]
    problems = []
    if len(given) != 1:
        has = ' and '.join(given) or 'none of them'
        raise UserError(f'{path} has {has}; expected one of points, runs, or base with sizes and budgets')
    if scaling.base and not (scaling.sizes and scaling.budgets):
        problems.append(Problem(('base',), 'makes a grid, which needs sizes and budgets', 'add both lists'))
    if not scaling.base:
        problems += [
            Problem((key,), 'applies to a grid, which has a base', 'remove it')
            for key in ('change', 'sizes', 'budgets')
            if getattr(scaling, key)
        ]
    if problems:
        raise report(problems, place)
    check_words(scaling.launch)
    return scaling


def size_config(path: AnyPath, scaling: Scaling, number: int, own: Mapping[str, Any]) -> RunConfig:
    """The configuration of a size of a grid, with `name`, `run_dir` and the like in `own`. Raises UserError."""
    assert scaling.base is not None
    values = scaling.change | scaling.sizes[number] | dict(own)
    try:
        return changed_config(locate(scaling.base, path.parent), values, path)
    except UserError as error:
        raise UserError(f'{path}: sizes[{number}] is not a valid configuration:\n{error}') from error


def steps_of(flops: float, params: int, batch_tokens: int) -> int:
    """Steps that train a model of this size for a budget of 6 N D FLOPs."""
    return max(2, round(flops / (6 * params * batch_tokens)))
