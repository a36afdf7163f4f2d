"""A fit of scaling laws in words, as JSON, and as a picture."""

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pretrax.cost.scaling_laws import Fit, Point
from pretrax.view.charts.chart import COLORS, number_text
from pretrax.view.charts.picture import figure_bytes
from pretrax.view.tables import text_table

_NAMES = {1: '1 envelope', 2: '2 IsoFLOP', 3: '3 L(N, D)'}


def as_text(points: Sequence[Point], fits: Sequence[Fit], targets: Sequence[float]) -> list[str]:
    """The coefficients, then a row for each budget and approach."""
    lines = [
        f'{len(points)} runs, {_size(min(p.params for p in points))} to {_size(max(p.params for p in points))} '
        'parameters'
    ]
    for fit in fits:
        shown = [_coefficient(fit, name) for name in fit.values if name != 'log k']
        lines.append(f'approach {_NAMES[fit.approach]}: {", ".join(shown)}')
    rows = [['FLOPs', 'approach', 'parameters', '95% interval', 'tokens', 'tokens per parameter', 'loss']]
    for flops in targets:
        for fit in fits:
            params = fit.optimum(flops)
            tokens = flops / 6 / params
            interval, loss = fit.interval(flops), fit.loss(params, tokens)
            between = '' if interval is None else f'{_size(interval[0])} to {_size(interval[1])}'
            last = '' if loss is None else f'{loss:.4f}'
            approach, ratio = _NAMES[fit.approach], f'{tokens / params:.3g}'
            rows.append([f'{flops:.3g}', approach, _size(params), between, _size(tokens), ratio, last])
    return [
        *lines,
        *(['', *text_table(rows, left=(1,), drop=('tokens per parameter', '95% interval'))] if targets else []),
    ]


def as_json(points: Sequence[Point], fits: Sequence[Fit], targets: Sequence[float]) -> str:
    """Points, coefficients and intervals, and the best sizes."""
    found = {
        'points': [{'params': point.params, 'tokens': point.tokens, 'loss': point.loss} for point in points],
        'fits': [{'approach': fit.approach, 'values': fit.values, 'intervals': fit.intervals} for fit in fits],
        'optimal': [
            {
                'flops': flops,
                'approach': fit.approach,
                'params': fit.optimum(flops),
                'tokens': flops / 6 / fit.optimum(flops),
                'interval_of_params': fit.interval(flops),
            }
            for flops in targets
            for fit in fits
        ],
    }
    return json.dumps(found, indent=1) + '\n'


def picture(points: Sequence[Point], fits: Sequence[Fit], targets: Sequence[float], suffix: str) -> bytes:
    """The losses of the runs by FLOPs with one color per size, and the best size by FLOPs with its interval."""

    def draw(figure: Any) -> None:
        from matplotlib import colormaps

        left, right = figure.subplots(1, 2)
        sizes = sorted({point.params for point in points})
        for point in sorted(points, key=lambda point: point.params):
            color = colormaps['viridis'](sizes.index(point.params) / max(len(sizes) - 1, 1))
            curve = point.curve or ((point.tokens, point.loss),)
            left.plot(
                [6 * point.params * tokens for tokens, _ in curve],
                [loss for _, loss in curve],
                color=color,
                linewidth=0.8,
            )
            left.plot([point.flops], [point.loss], 'o', color=color, markersize=4)
        left.set_xscale('log')
        left.set(xlabel='FLOPs', ylabel='loss, nats per token', title=f'{len(points)} runs, dark: few parameters')
        budgets = [point.flops for point in points] + list(targets)
        flops = np.geomspace(min(budgets), max(budgets), 60)
        for fit in fits:
            color = COLORS[fit.approach - 1]
            right.plot(
                flops,
                [fit.optimum(c) for c in flops],
                color=color,
                label=f'{_NAMES[fit.approach]}: a = {fit.values["a"]:.3f}',
            )
            if fit.samples:
                low, high = np.array([fit.interval(c) for c in flops]).T
                right.fill_between(flops, low, high, color=color, alpha=0.15, linewidth=0)
            if fit.optima:
                right.plot(*np.array(fit.optima).T, '.', color=color, markersize=4)
        right.set_xscale('log')
        right.set_yscale('log')
        right.set(xlabel='FLOPs', ylabel='parameters', title='best size')
        right.legend(frameon=False)

    return figure_bytes(draw, suffix, height=4.2)


def _coefficient(fit: Fit, name: str) -> str:
    value = f'{name} = {fit.values[name]:.4g}'
    if name not in fit.intervals:
        return value
    low, high = fit.intervals[name]
    return f'{value} ({low:.4g} to {high:.4g})'


def _size(value: float) -> str:
    return number_text(value, digits=3) if math.isfinite(value) and value >= 1e6 else f'{value:,.0f}'
