"""What runs that differ only in their seed have in common: means over seeds, with Student's t intervals."""

import json
import math
from collections.abc import Sequence

import numpy as np

from pretrax.view.compare.arms import Arm
from pretrax.view.compare.statistics import Interval, paired
from pretrax.view.tables import text_table

KEYS = ('val_loss', 'val_bits_per_byte', 'loss')


def mean_of(values: Sequence[float], confidence: float = 0.95) -> Interval | None:
    """Student's t interval of a mean. None: fewer than two values."""
    return paired([0.0] * len(values), values, confidence)


def summary_text(arm: Arm, confidence: float = 0.95) -> list[str]:
    """A row for each key that all runs have: the last values by seed, their mean, its interval, their deviation."""
    rows = [['', *(f'seed {seed}' for seed in arm.seeds), 'mean', f'{confidence:.0%} interval', 'sd']]
    for key in KEYS:
        values = [run.metrics.last(key) for run in arm.runs]
        finite = [value for value in values if value is not None and math.isfinite(value)]
        if len(finite) == len(values) and (interval := mean_of(finite, confidence)) is not None:
            between = f'{interval.low:.4f} to {interval.high:.4f}'
            cells = [*(f'{value:.4f}' for value in finite), f'{interval.estimate:.4f}', between]
            rows.append([key, *cells, f'{np.std(finite, ddof=1):.4f}'])
    return text_table(rows, left=(0,), drop=rows[0][-4:0:-1])


def mean_metrics(arm: Arm, confidence: float = 0.95) -> str:
    """Lines of metrics of common steps: the mean over seeds, and its interval from KEY_low to KEY_high."""
    lines: dict[int, dict[str, float]] = {}
    for key in KEYS:
        columns = [run.metrics.get(key) for run in arm.runs]
        if any(column is None for column in columns):
            continue
        by_step = [
            dict(zip(column.steps.tolist(), column.values.tolist(), strict=True)) for column in columns if column
        ]
        for step in sorted(set.intersection(*(set(one) for one in by_step))):
            values = [one[step] for one in by_step]
            if all(map(math.isfinite, values)) and (interval := mean_of(values, confidence)) is not None:
                found = {key: interval.estimate, f'{key}_low': interval.low, f'{key}_high': interval.high}
                lines.setdefault(int(step), {'step': int(step)}).update(found)
    return ''.join(json.dumps(lines[step]) + '\n' for step in sorted(lines))
