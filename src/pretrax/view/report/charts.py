"""The curves of a report as arrays for the page, which of them each chart shows, and layer statistics as heat maps."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pretrax.errors import UserError
from pretrax.observe.layer_statistics import read_layer_statistics
from pretrax.storage import AnyPath
from pretrax.tables import read_table
from pretrax.view.definitions import Definition, definition_of, definition_of_statistic
from pretrax.view.record.run_record import RunRecord
from pretrax.view.report.encoding import Arrays

_GROUPS: dict[str, list[str]] = read_table(Path(__file__).with_suffix('.yaml'))
_SELDOM = ('targets', 'skipped_steps', 'skipped_in_a_row', 'steps_without_targets', 'replays')  # at the end


class ChartSpec(NamedTuple):
    """One chart. `keys`: its curves. `is_fraction`: its numbers are shown in percent."""

    id: str
    title: str
    keys: list[str]
    is_fraction: bool


def charts_of(record: RunRecord) -> list[ChartSpec]:
    """The charts of a run, those that people look at most first."""
    rest = [key for key in record.metrics if key != 'tokens']  # an axis
    groups: list[tuple[str, list[str]]] = []
    for title, wanted in _GROUPS.items():
        keys = [key for one in wanted for key in rest if key == one or (one[-1] == '/' and key.startswith(one))]
        rest = [key for key in rest if key not in keys]
        if keys:
            groups.append((title, keys))
    rest.sort(key=lambda key: key in _SELDOM)
    groups += [(definition_of(key).name, [key]) for key in rest]
    return [
        ChartSpec(
            f'chart-{number}', title[:1].upper() + title[1:], keys, all(definition_of(key).is_fraction for key in keys)
        )
        for number, (title, keys) in enumerate(groups)
    ]


def curves_data(record: RunRecord, charts: list[ChartSpec], arrays: Arrays) -> dict[str, Any]:
    """The data of the charts; arrays by their index. Long curves are thinned."""
    metrics = record.metrics
    columns = {key: column.thinned() for key, column in metrics.items()}
    drawn = np.zeros(len(metrics.steps), bool)
    for column in columns.values():
        drawn[column.lines] = True
    place = np.cumsum(drawn) - 1  # of a line among those that are drawn
    has_times = record.axis('time', next(iter(metrics.values()))) is not None if len(metrics) else False
    series = {
        key: {
            'values': arrays.add(column.values),
            'lines': arrays.add(place[column.lines]),
            'name': definition_of(key).name,
        }
        for key, column in columns.items()
    }
    return {
        'series': series,
        'steps': arrays.add(metrics.steps[drawn]),
        'times': arrays.add(metrics.times[drawn]) if has_times else None,
        'sizes': record.sizes,
        'charts': [chart._asdict() for chart in charts],
        'marks': _marks(record),
    }


def _marks(record: RunRecord) -> list[dict[str, Any]]:
    """Steps at which a run continued from a checkpoint or returned to one."""
    restarts = [
        {'kind': 'restart', 'step': one.first_step, 'time': one.stepped or one.began}
        for one in record.attempts[1:]
        if one.first_step is not None and one.stepped is not None  # it trained
    ]
    rollbacks = [{'kind': 'rollback', 'step': event['step'], 'time': event['time']} for event in record.rollbacks]
    return restarts[-200:] + rollbacks[-200:]


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
