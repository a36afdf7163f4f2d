"""Statistics of layers: `layer_statistics.jsonl`, one JSON object for each step that was logged (`log.layers`).

A value is a number, a list with a value for each layer, or a list of lists with a value for each head, expert and the
like of a layer. A value that is not finite is null, and `nonfinite` names it, as in `metrics.jsonl`:

    {"step": 100, "residual_rms": [1.1, null], "nonfinite": {"residual_rms[1]": "inf"}}

Keys and units: view/definitions.py; formulas: docs/metrics.md.
"""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pretrax.errors import Report
from pretrax.observe.metrics import MetricsLog, read_metrics
from pretrax.storage import AnyPath

FILE = 'layer_statistics.jsonl'  # in the run directory
_PLACE = re.compile(r'(\w[^\[]*)((?:\[\d+\])+)')

type Values = float | list[Values] | None


class LayerStatisticsLog:
    """Appends to `layer_statistics.jsonl`. Only one process of a run may open it.

    Args:
        directory: the run directory.
        resumed_step: the step that training continues from; lines of later steps are removed.
        say: receives a message for removed lines.
    """

    def __init__(self, directory: Path, resumed_step: int, say: Report):
        self._path, self._say = directory / FILE, say
        self._log: MetricsLog | None = None  # a run without statistics has no file
        if self._path.exists():
            self._open(resumed_step)

    def write(self, step: int, statistics: Mapping[str, np.ndarray]) -> None:
        """Appends the statistics of a step: arrays or numbers of NumPy by name."""
        nonfinite: dict[str, str] = {}
        values = {name: _standard(array.tolist(), name, nonfinite) for name, array in statistics.items()}
        log = self._log or self._open(step)
        log.write({'step': step, **values} | ({'nonfinite': nonfinite} if nonfinite else {}))

    def rewind(self, step: int) -> None:
        """Removes the lines of later steps, which will be trained again."""
        if self._log is not None:
            self._log.rewind(step)

    def close(self) -> None:
        """Closes the file. May be called twice."""
        if self._log is not None:
            self._log.close()

    def _open(self, step: int) -> MetricsLog:
        self._log = MetricsLog(self._path, resumed_step=step, say=self._say)
        return self._log


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
