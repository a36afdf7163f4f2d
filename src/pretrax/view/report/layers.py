"""The layer statistics of a run, for the heat maps of its report."""

from typing import Any, NamedTuple

import numpy as np

from pretrax.errors import UserError
from pretrax.observe.layer_statistics import read_layer_statistics
from pretrax.storage import AnyPath
from pretrax.view.definitions import Definition, definition_of_statistic
from pretrax.view.report.encoding import Arrays

_MOST_NUMBERS = 1_500_000  # of all heat maps together
_NOT_STATISTICS = ('step', 'time', 'nonfinite')
_NOT_BY_LAYER = {'loss_by_position': 'part of the sequence', 'loss_by_source': 'source'}


class LayerChart(NamedTuple):
    """A chart of one statistic: of all weights of a layer, or of one weight, which the reader chooses."""

    definition: Definition
    choices: list[tuple[str, int]]  # (name of the weight, or 'all', index in `layers_data`)
    every: int  # each this many lines of the file is shown


def layer_charts(layers: list[dict[str, Any]]) -> list[LayerChart]:
    """The charts of `layers_data`: one for each statistic."""
    charts: dict[str, LayerChart] = {}
    for index, one in enumerate(layers):
        statistic, _, weight = one['name'].partition('/')
        chart = charts.setdefault(statistic, LayerChart(definition_of_statistic(statistic), [], one['every']))
        chart.choices.append((weight or 'all', index))
    return list(charts.values())


def layers_data(directory: AnyPath, arrays: Arrays) -> list[dict[str, Any]]:
    """The statistics by name: steps, rows and values; none if the run has none."""
    try:
        records = read_layer_statistics(directory, report=lambda warning: None)
    except UserError:
        return []
    shapes: dict[str, tuple[int, ...]] = {}
    found: dict[str, tuple[list[int], list[np.ndarray]]] = {}
    every = max(1, -(-sum(map(_numbers, records[-1:])) * len(records) // _MOST_NUMBERS))
    for number, record in enumerate(records):
        if number % every and number != len(records) - 1:
            continue
        for name, value in record.items():
            values = None if name in _NOT_STATISTICS else _array(value)
            if values is not None and shapes.setdefault(name, values.shape) == values.shape:
                steps, each = found.setdefault(name, ([], []))
                steps.append(record['step'])
                each.append(values)
    return [
        {
            'name': name,
            'steps': arrays.add(np.array(steps, np.float64)),
            'values': arrays.add(np.concatenate([values.ravel() for values in each])),
            'layers': shapes[name][0],
            'heads': shapes[name][1] if len(shapes[name]) > 1 else 1,
            'rows': _rows(name, shapes[name]),
            'every': every,
        }
        for name, (steps, each) in found.items()
    ]


def _array(value: Any) -> np.ndarray | None:
    """A value, a value per layer, or per layer and head; None if it is none of them. null becomes NaN."""
    try:
        values = np.atleast_1d(np.array(value, np.float64))
    except (TypeError, ValueError, OverflowError):
        return None
    return values if values.ndim in (1, 2) and values.size else None


def _rows(name: str, shape: tuple[int, ...]) -> str:
    """What the rows of a heat map are."""
    if name in _NOT_BY_LAYER:
        return _NOT_BY_LAYER[name]
    inner = 'expert' if name.startswith('expert') else 'head'
    return f'layer.{inner}' if len(shape) > 1 else 'layer'


def _numbers(record: dict[str, Any]) -> int:
    arrays = (_array(value) for name, value in record.items() if name not in _NOT_STATISTICS)
    return sum(values.size for values in arrays if values is not None)
