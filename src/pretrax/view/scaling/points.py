"""The points of a fit of scaling laws: from finished runs, or from a table."""

import csv
import io
import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pretrax.cost.scaling_laws import Point
from pretrax.errors import UserError
from pretrax.storage import AnyPath
from pretrax.system.json_file import parse_json
from pretrax.view.record.run_record import RunRecord

_LARGEST = 64 * 2**20  # bytes of a table


def point_of(run: RunRecord, metric: str) -> Point:
    """The point of a finished run, with its curve.

    Raises:
        UserError: the run is not finished, or lacks the metric or the number of its parameters.
    """
    params = run.environment.get('parameters')
    column = run.metrics.get(metric)
    tokens = None if column is None else run.axis('tokens', column)
    if column is None or tokens is None or not len(column.values):
        raise UserError(f'{run.path} has no {metric}\nit has: {", ".join(run.metrics)}')
    if not isinstance(params, int | float) or params <= 0:
        raise UserError(f'{run.path}/environment.json does not say how many parameters the model has')
    if run.steps is None or int(column.steps[-1]) < run.steps:
        raise UserError(f'{run.path} is not finished: {metric} ends at step {int(column.steps[-1])} of {run.steps}')
    keep = np.isfinite(column.values) & (tokens > 0)
    if not keep[-1]:
        raise UserError(f'{run.path}: the last {metric} is not finite; leave this run out')
    curve = tuple(zip(tokens[keep].tolist(), column.values[keep].tolist(), strict=True))
    return Point(float(params), curve[-1][0], curve[-1][1], curve)


def read_table(path: AnyPath) -> list[Point]:
    """Points from a .csv file with a heading, or a .jsonl file: `params`, `tokens` and `loss`.

    Rows with the same `run` are the curve of one run, whose row with the most tokens is its end.

    Raises:
        UserError: the file cannot be read, or a row is not a point; the message names the row.
    """
    try:
        text = path.read_bytes()[:_LARGEST].decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f'{path} cannot be read: {error}\nexpected a .csv or .jsonl file with params, tokens, loss'
        ) from None
    if path.suffix == '.csv':
        rows: list[Mapping[str, Any]] = list(csv.DictReader(io.StringIO(text)))
    elif path.suffix == '.jsonl':
        rows = []
        for number, line in enumerate(text.splitlines(), 1):
            try:
                rows.append(parse_json(line))
            except ValueError:
                raise UserError(f'{path}:{number} is not JSON: {line[:60]!r}') from None
    else:
        raise UserError(f'{path}: expected a name that ends in .csv or .jsonl')
    runs: dict[Any, list[tuple[float, float, float]]] = {}
    for number, row in enumerate(rows, 2 if path.suffix == '.csv' else 1):
        try:
            numbers = float(row['params']), float(row['tokens']), float(row['loss'])
            if not all(math.isfinite(value) and value > 0 for value in numbers):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f'{path}:{number} has no params, tokens and loss above 0: {
                    str(dict(row) if isinstance(row, dict) else row)[:100]
                }'
            ) from None
        runs.setdefault(row.get('run') or number, []).append(numbers)
    points = []
    for name, lines in runs.items():
        if len({params for params, _, _ in lines}) != 1:
            raise UserError(f'{path}: run {name} has more than one number of params')
        curve = tuple(sorted((tokens, loss) for _, tokens, loss in lines))
        points.append(Point(lines[0][0], *curve[-1], curve if len(curve) > 1 else ()))
    return points


def matching(directory: pathlib.Path, patterns: Sequence[str]) -> list[pathlib.Path]:
    """The run directories that these patterns name. Raises UserError for one that names nothing."""
    found: dict[pathlib.Path, None] = {}
    for pattern in patterns:
        base = pathlib.Path('/') if pathlib.Path(pattern).is_absolute() else directory
        here = base / pattern
        named = [here] if here.exists() else sorted(base.glob(pattern.lstrip('/')))  # a name may have brackets
        paths = [path for path in named if (path / 'metrics.jsonl').is_file()]
        if not paths:
            raise UserError(f'runs: {pattern} names no run in {base}; expected directories with a metrics.jsonl')
        found.update(dict.fromkeys(paths))
    return list(found)
