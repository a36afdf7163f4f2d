"""How a run ended, for Python: what it measured, and a summary of five lines."""

import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np

from pretrax.amounts import prefixed
from pretrax.observe.metrics import is_metrics, restored
from pretrax.observe.progress import is_evaluation
from pretrax.run.setup import Run
from pretrax.storage.locate import working_directory
from pretrax.storage.parts import open_joined
from pretrax.system.line_files import parse_lines, read_pieces
from pretrax.train.step import TrainState
from pretrax.view.record.columns import read_columns
from pretrax.view.record.verdict import KEYS, verdict_of

METRICS = 'metrics.jsonl'


type OnStep = Callable[[int, dict[str, float]], object]  # number of the step, metrics


@dataclasses.dataclass(frozen=True, repr=False, eq=False)
class Result:
    """How a run ended. It prints in five lines.

    Attributes:
        run: the run on its devices, with its configuration `config` and its directory `run_dir`.
        state: the state after the last step, on the mesh of the run. `state.weights` are f32.
        stopped: why it stopped early, such as 'signal' or 'time limit'; None: all steps are done.
    """

    run: Run
    state: TrainState
    stopped: str | None

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the last step that was logged, with their units on the page of metrics; {} if none was."""
        return self._newest[False]

    @property
    def validation(self) -> dict[str, Any]:
        """The metrics of the last evaluation, such as `val_loss` in nats per token; {} if there was none."""
        return self._newest[True]

    @functools.cached_property
    def history(self) -> dict[str, np.ndarray]:
        """The metrics of the whole run, also of earlier processes, by name: arrays of the same length, in the order of
        the steps. A `pandas.DataFrame` takes them as they are.

        `step` is int64. All others are float64, and NaN at the steps that did not measure them; `time` is in seconds
        since 1970.
        """
        with self._lines() as file:
            columns = read_columns(file)
        steps, rows = np.unique(columns.steps, return_inverse=True)

        def column(lines: np.ndarray, values: np.ndarray) -> np.ndarray:
            found = np.full(len(steps), np.nan)
            found[rows[lines]] = values
            return found

        times = column(np.arange(len(rows)), columns.times)
        history = {'step': steps, 'time': times}
        for key in list(columns):  # one after another: both forms of a long run need too much memory
            one = columns.by_key.pop(key)
            history[key] = column(one.lines, one.values)
        return history

    @property
    def verdict(self) -> str:
        """What is wrong with the losses, such as 'diverged: ...'; '' if nothing is, or too little is known."""
        with self._lines() as file:
            return verdict_of(read_columns(file, keys=KEYS))

    @functools.cached_property
    def _newest(self) -> dict[bool, dict[str, Any]]:
        """The newest metrics of an evaluation (True) and of a step, without their times."""
        found: dict[bool, dict[str, Any]] = {True: {}, False: {}}
        with self._lines() as file:
            for _, _, content in read_pieces(file):
                lines = content.split(b'\n')
                for kind, texts in _TEXTS.items():
                    if not any(text in content for text in texts):
                        continue
                    candidates = (line for line in reversed(lines) if any(text in line for text in texts))
                    records = (record for line in candidates for record in parse_lines(line) if type(record) is dict)
                    ours = (record for record in records if is_metrics(record) and is_evaluation(record) is kind)
                    found[kind] = next((one for one in ours if kind or 'tokens_per_second' in one), found[kind])
        return {
            kind: {key: value for key, value in restored(each).items() if key != 'time'} for kind, each in found.items()
        }

    def _lines(self) -> BinaryIO:
        """The open `metrics.jsonl`; no lines if it is gone."""
        run_dir = self.run.run_dir
        here = working_directory(run_dir) / METRICS
        with contextlib.suppress(FileNotFoundError):
            return open_joined(here if here.is_file() else run_dir / METRICS)
        return io.BytesIO()

    def __repr__(self) -> str:
        run, metrics = self.run, self.metrics | self.validation
        bits = metrics.get('val_bits_per_byte', metrics.get('bits_per_byte'))
        losses = [f'{name} {metrics[key]:.4f}' for name, key in _LOSSES.items() if metrics.get(key) is not None]
        speed = f'{prefixed(metrics["tokens_per_second"], space="")} tokens/s' if self.metrics else 'not measured'
        mfu = f', MFU {100 * metrics["mfu"]:.1f}%' if metrics.get('mfu') is not None else ''
        page = 'report.html' if (working_directory(run.run_dir) / 'report.html').is_file() else METRICS
        return '\n'.join(
            [
                f'run: {run.run_dir}, {self.stopped or "done"} at step {int(self.state.step):,} of {run.steps:,}',
                f'verdict: {self.verdict or "nothing wrong with the losses"}',
                ', '.join(losses or ['loss: not measured']) + (f', {bits:.3f} bits per byte' if bits else ''),
                f'speed: {speed}{mfu}',
                f'next: result.history, pretrax.load(result), {run.run_dir / page}',
            ]
        )


_TEXTS = {True: (b'"val_loss"', b'"task/'), False: (b'"tokens_per_second"',)}  # of the lines that `_newest` parses
_LOSSES = {'loss': 'loss', 'validation loss': 'val_loss'}
