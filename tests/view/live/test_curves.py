"""Curves with a bounded number of points, compared with the lines that they stand for."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrax.observe.metrics import MetricsLog, read_metrics
from pretrax.view.live import curves as live_curves
from pretrax.view.live.curves import Curve, Curves
from pretrax.view.record.columns import parse_columns

NUMBERS = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf, -math.inf]))


def of(steps, values):
    return np.array(steps, np.int64), np.array(values, np.float64)


def expected(values, per_point):
    """(mean, low, high) of the finite ones of each group of numbers, computed one by one."""
    found = []
    for start in range(0, len(values), per_point):
        finite = [value for value in values[start : start + per_point] if math.isfinite(value)]
        found.append((math.fsum(finite) / len(finite), min(finite), max(finite)) if finite else None)
    return found


class Client:
    """What a page knows of curves that it is sent changes of."""

    def __init__(self):
        self.points = {}

    def apply(self, changes):
        for key, change in changes.items():
            low, high = change['low'] or change['value'], change['high'] or change['value']
            new = list(zip(change['step'], change['value'], low, high, strict=True))
            self.points[key] = self.points.get(key, [])[: change['start']] + new


@settings(max_examples=80, deadline=None)
@given(values=st.lists(NUMBERS, max_size=70), cuts=st.lists(st.integers(1, 20)), most=st.sampled_from([4, 8, 64]))
def test_a_point_is_one_number_or_the_mean_and_range_of_some(values, cuts, most):
    curve, client, at = Curves(), Client(), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_curves, 'MOST_POINTS', most)
        for size in [*cuts, len(values) + 1]:
            steps = range(at, min(at + size, len(values)))
            lines = [json.dumps({'step': step, 'loss': values[step]}) for step in steps]
            text = ''.join(f'{line}\n' for line in lines)
            curve.extend(parse_columns(text.encode()))
            client.apply(curve.changes())
            at = max(at, steps.stop)
    points = client.points.get('loss', [])
    per_point = 1
    while len(values) > most * per_point:
        per_point *= 2
    assert len(points) == math.ceil(len(values) / per_point) <= most
    for number, ((step, *known), wanted) in enumerate(zip(points, expected(values, per_point), strict=True)):
        assert step == min((number + 1) * per_point, len(values)) - 1
        if wanted is None:
            assert known == [None] * 3
        elif per_point == 1:
            assert known == [values[step]] * 3
        else:
            assert known == pytest.approx(wanted, rel=1e-9, abs=1e-9)


def test_nonfinite_numbers_are_named():
    curve = Curve()
    curve.extend(*of([1, 2, 3, 4], [1.0, math.nan, -math.inf, math.inf]))
    assert list(curve.nonfinite) == [(2, 'nan'), (3, '-inf'), (4, 'inf')]
    assert curve.change(0)['value'] == [1.0, None, None, None]


@settings(max_examples=60, deadline=None)
@given(
    before=st.lists(NUMBERS, min_size=1, max_size=40),
    keep=st.integers(0, 40),
    after=st.lists(NUMBERS, max_size=40),
    most=st.sampled_from([8, 64]),
)
def test_after_a_rewind_a_page_has_what_the_file_has(tmp_path_factory, before, keep, after, most):
    path = tmp_path_factory.mktemp('run') / 'metrics.jsonl'
    quiet = {'say': lambda _: None}
    with MetricsLog(path, **quiet) as log:
        for step, value in enumerate(before):
            log.write({'step': step, 'loss': value})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_curves, 'MOST_POINTS', most)
        first, client = Curves(), Client()
        first.extend(parse_columns(path.read_bytes()))
        client.apply(first.changes())
        with MetricsLog(path, resumed_step=keep - 1, **quiet) as log:
            for step, value in enumerate(after, keep):
                log.write({'step': step, 'loss': value})
        second, whole = Curves(), Client()
        second.extend(parse_columns(path.read_bytes()))
        second.replaces(first)
        client.apply(second.changes())
        whole.apply(second.whole())
    records = read_metrics(path)
    assert client.points.get('loss', []) == whole.points.get('loss', client.points.get('loss', []))
    assert second.lines == len(records)
    if len(records) <= most:
        shown = [(step, value) for step, value, *_ in whole.points.get('loss', [])]
        assert shown == [(r['step'], r['loss'] if math.isfinite(r['loss']) else None) for r in records]


def test_a_rewind_sends_only_what_differs():
    first, second = Curves(), Curves()
    line = '{"step": %d, "loss": %d}\n'
    first.extend(parse_columns(''.join(line % (step, step) for step in range(100)).encode()))
    first.changes()
    second.extend(parse_columns(''.join(line % (step, step) for step in range(40)).encode()))
    second.replaces(first)
    assert second.changes()['loss'] == {
        'start': 40, 'per_point': 1, 'step': [], 'value': [], 'low': [], 'high': [], 'nonfinite': [],
    }  # fmt: skip
    assert second.changes() == {}


def test_a_million_lines_are_a_few_thousand_points():
    curve = Curve()
    for start in range(0, 1_000_000, 10_000):
        steps = np.arange(start, start + 10_000)
        curve.extend(steps, np.sin(steps / 1e5))
    assert curve.per_point == 256
    assert len(curve.points.steps) == math.ceil(1_000_000 / 256)
    assert np.allclose(curve.points.means, np.sin((curve.points.steps - 127.5) / 1e5), atol=1e-3)


def test_a_file_of_a_thousand_keys_keeps_the_first_ones():
    curves = Curves()
    curves.extend(parse_columns(json.dumps({'step': 1} | {f'k{n}': n for n in range(1000)}).encode() + b'\n'))
    assert len(curves.by_key) == live_curves.MOST_KEYS
