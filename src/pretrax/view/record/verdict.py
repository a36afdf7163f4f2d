"""What the losses of a run say about it: that they are not finite, diverged, do not fall, or show overfitting."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

_LEAST = 10  # losses; fewer say nothing
_BLOCKS, _SHORTEST = 20, 5  # medians of as many parts of a curve are compared, so that an outlier counts for nothing
_UNTRAINED = 4.0  # nats: a model that has learned nothing has ln(vocabulary); below, training began from good weights

KEYS = ('loss', 'val_loss', 'nll')  # of the metrics that the verdict reads


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
    """The verdict on the losses in `metrics`."""
    return verdict(*(Losses.from_columns(metrics, key) for key in KEYS))


def verdict(training: Losses, validation: Losses, likelihood: Losses) -> str:
    """What is wrong with a run: one word or two, a colon, and the numbers; '' if nothing is, or too little is known.

    Args:
        likelihood: the cross-entropy, if the loss has other terms too: they may be so large that its fall is not seen.
    """
    steps, values = training
    is_bad = ~np.isfinite(values)
    if len(values) and is_bad[-1]:
        since = steps[len(values) - np.argmin(is_bad[::-1]) if not is_bad.all() else 0]
        return f'not finite: the loss is {values[-1]} since step {since:,}'
    values, steps = values[~is_bad], steps[~is_bad]
    if len(values) < _LEAST:
        return ''
    blocks = _medians(values)
    first, last, best = blocks[0], blocks[-1], min(blocks)
    has_risen = last - best > max(0.05 * abs(best), 0.5 * (values[0] - best), 0.01)  # 0.01 nats are nothing
    if has_risen or last - values[0] > 0.5 * abs(values[0]) + 1:  # it rose at once
        lowest = steps[np.argmin(values)]
        return f'diverged: the loss rose from {_text(values.min())} (step {lowest:,}) to {_text(last)}'
    if text := _overfit(validation, Losses(steps, values)):
        return text
    likely = likelihood.values[np.isfinite(likelihood.values)]
    terms = [blocks, *([_medians(likely)] if len(likely) >= _LEAST else [])]
    if terms[-1][0] >= _UNTRAINED and all(one[0] - one[-1] < 0.01 * abs(one[0]) for one in terms):
        return f'not learning: the loss was {_text(first)} at the start, and is {_text(last)}'
    return ''


def _overfit(validation: Losses, training: Losses) -> str:
    """The validation loss rises, by much or in two values, while the training loss falls."""
    steps, values = validation
    if len(values) < 3 or not np.isfinite(values).all():
        return ''
    at = int(np.argmin(values))
    last, both = values[-1] - values[at], min(values[-2:]) - values[at]
    has_risen = last > 0.1 * abs(values[at]) or both > 0.02 * abs(values[at])
    before = training.values[training.steps <= steps[at]][-_SHORTEST:]
    has_fallen = not len(before) or np.median(training.values[-_SHORTEST:]) < 0.99 * np.median(before)
    if not (has_risen and has_fallen):
        return ''
    place = f'{_text(values[at])} (step {steps[at]:,})'
    return f'overfit: the validation loss rose from {place} to {_text(values[-1])}'


def _medians(values: np.ndarray) -> list[float]:
    """The medians of parts of a curve."""
    return [float(np.median(part)) for part in np.array_split(values, min(_BLOCKS, len(values) // _SHORTEST))]


def _text(loss: float) -> str:
    return f'{loss:,.0f}' if abs(loss) >= 1e4 else f'{loss:.4g}'
