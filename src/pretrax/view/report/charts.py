"""The curves of a report: its columns as arrays for the page, and which of them each chart shows."""

from typing import Any, NamedTuple

from pretrax.view.definitions import definition_of
from pretrax.view.record.run_record import RunRecord
from pretrax.view.report.encoding import Arrays

_GROUPS = (
    ('Loss', ('loss', 'val_loss', 'val_loss_ema')),
    ('Bits per byte', ('bits_per_byte', 'val_bits_per_byte')),
    ('Validation loss by source', ('val_loss/',)),
    ('Tasks', ('task/',)),
    ('Standard errors of tasks', ('task_stderr/',)),
    ('Cross-entropy of multi-token prediction', ('mtp_nll/',)),
    ('Gradient norm', ('grad_norm', 'clipped_grad_norm')),
    ('Learning rate', ('learning_rate',)),
    ('Tokens per second', ('tokens_per_second',)),
    ('MFU', ('mfu', 'mfu_full')),
    ('Goodput', ('goodput',)),
    ('Load of experts', ('expert_load_max', 'expert_load_min')),
    ('Routing', ('expert_load_entropy', 'dropped_fraction')),
)  # a key that ends in / stands for all keys with this beginning
_SELDOM = ('targets', 'skipped_steps', 'skipped_in_a_row', 'steps_without_targets')  # at the end


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
    for title, wanted in _GROUPS:
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
    """What the page needs to draw the charts; arrays by their index."""
    metrics = record.metrics
    has_times = record.axis('time', next(iter(metrics.values()))) is not None if len(metrics) else False
    series = {
        key: {'values': arrays.add(column.values), 'lines': arrays.add(column.lines), 'name': definition_of(key).name}
        for key, column in metrics.items()
    }
    return {
        'series': series,
        'steps': arrays.add(metrics.steps),
        'times': arrays.add(metrics.times) if has_times else None,
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
