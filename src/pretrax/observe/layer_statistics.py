"""Statistics of layers: `layer_statistics.jsonl`, one JSON object for each step that was logged (`log.layers`).

A value is a number, a list with a value for each layer, or a list of lists with a value for each head, expert and the
like of a layer. A value that is not finite is null, and `nonfinite` names it, as in `metrics.jsonl`:

    {"step": 100, "residual_rms": [1.1, null], "nonfinite": {"residual_rms[1]": "inf"}}

Keys and units: view/definitions.yaml; formulas: docs/metrics.md.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pretrax.errors import Report
from pretrax.observe.metrics import is_metrics, read_metrics
from pretrax.observe.step_lines import StepLines
from pretrax.storage import AnyPath

FILE = 'layer_statistics.jsonl'  # in the run directory
_PLACE = re.compile(r'(\w[^\[]*)((?:\[\d+\])+)')

type Values = float | list[Values] | None


class LayerStatisticsLog(StepLines):
    """Appends to `layer_statistics.jsonl` in the directory of a run."""

    def __init__(self, directory: Path, resumed_step: int, say: Report):
        super().__init__(directory / FILE, resumed_step, say, is_metrics)

    def write(self, step: int, statistics: Mapping[str, np.ndarray]) -> None:
        """Appends the statistics of a step: arrays or numbers of NumPy by name."""
        nonfinite: dict[str, str] = {}
        values = {name: _standard(array.tolist(), name, nonfinite) for name, array in statistics.items()}
        self.append({'step': step, **values} | ({'nonfinite': nonfinite} if nonfinite else {}))


def read_layer_statistics(run_dir: AnyPath, report: Report = print) -> list[dict[str, Any]]:
    """All lines of a run's `layer_statistics.jsonl`, with NaN and infinity restored.

    Raises:
        UserError: the file does not exist.
    """
    records = read_metrics(run_dir / FILE, report)
    for record in records:
        for key in [key for key in record if '[' in key]:
            value, place = record.pop(key), _PLACE.fullmatch(key)
            if place is not None:
                _restore(record.get(place[1]), [int(i) for i in re.findall(r'\d+', place[2])], value)
    return records


def _restore(values: Any, place: list[int], value: float) -> None:
    """Sets the value at a place in nested lists; a place that does not exist is left out."""
    *outer, last = place
    for i in outer:
        values = values[i] if isinstance(values, list) and i < len(values) else None
    if isinstance(values, list) and last < len(values):
        values[last] = value


def _standard(value: Values, name: str, nonfinite: dict[str, str]) -> Values:
    """The value with null for what is not finite, whose places are added to `nonfinite`."""
    if isinstance(value, list):
        return [_standard(inner, f'{name}[{i}]', nonfinite) for i, inner in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        nonfinite[name] = str(value)
        return None
    return float(f'{value:.7g}') if isinstance(value, float) else value  # all digits of an f32
