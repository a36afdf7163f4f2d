"""What the losses of a run say about it: that they are not finite, diverged, do not fall, or show overfitting."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

_LEAST = 10  # losses; fewer say nothing
_BLOCKS = 20  # medians of as many parts of a curve are compared, so that an outlier counts for nothing


class Losses(NamedTuple):
    """Losses in the order in which they were written. Two arrays of the same length."""

    steps: np.ndarray
    values: np.ndarray

    @classmethod
    def from_columns(cls, metrics: Mapping[str, Any], key: str) -> 'Losses':
        """The numbers of a key of `metrics`, whose columns have `steps` and `values`; none if it has no such key."""
        column = metrics.get(key)
        return cls(np.array([], np.int64), np.array([])) if column is None else cls(column.steps, column.values)


def verdict_of(metrics: Mapping[str, Any]) -> str:
    """The verdict on the losses and validation losses in `metrics`."""
    return verdict(Losses.from_columns(metrics, 'loss'), Losses.from_columns(metrics, 'val_loss'))


def verdict(training: Losses, validation: Losses) -> str:
    """What is wrong with a run: one word or two, a colon, and the numbers; '' if nothing is, or too little is known."""
    steps, values = training
    is_bad = ~np.isfinite(values)
    if len(values) and is_bad[-1]:
        since = steps[len(values) - np.argmin(is_bad[::-1]) if not is_bad.all() else 0]
        return f'not finite: the loss is {values[-1]} since step {since:,}'
    values, steps = values[~is_bad], steps[~is_bad]
    if len(values) < _LEAST:
        return ''
    blocks = [float(np.median(block)) for block in np.array_split(values, min(_BLOCKS, len(values)))]
    first, last = blocks[0], blocks[-1]
    best = min(values[0], *blocks)
    if last - best > max(0.05 * abs(best), 0.5 * (values[0] - best)):
        lowest = steps[np.argmin(values)]
        return f'diverged: the loss rose from {_text(values.min())} (step {lowest:,}) to {_text(last)}'
    if len(validation.values) >= 3 and np.isfinite(validation.values).all():
        at = int(np.argmin(validation.values))
        lowest, now = validation.values[at], validation.values[-1]
        if now - lowest > 0.02 * abs(lowest):
            place = f'{_text(lowest)} (step {validation.steps[at]:,})'
            return f'overfit: the validation loss rose from {place} to {_text(now)}'
    if first - last < 0.01 * abs(first):
        return f'not learning: the loss was {_text(first)} at the start, and is {_text(last)}'
    return ''


def _text(loss: float) -> str:
    return f'{loss:,.0f}' if abs(loss) >= 1e4 else f'{loss:.4g}'
