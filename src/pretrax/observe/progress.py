"""Progress of a run: a live bar in a terminal, and one plain line per report elsewhere.

    step 120/300  40.0%  loss 3.1234  bpb 1.432  45.1k tok/s  mfu 12.3%  eta 0:42

Only known numbers are shown: no MFU for an unknown device, no ETA before the second report. The ETA counts from the
first report, so that it leaves out compilation; it includes evaluations and checkpoints, which will happen again.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import rich.console
import rich.progress
import rich.table

from pretrax.amounts import clock_text, prefixed
from pretrax.errors import printable, unfiltered_output
from pretrax.observe.lasting_output import LastingOutput


class Progress(contextlib.AbstractContextManager['Progress']):
    """Shows the progress of a run. `message` works at any time, `update` between `start` and `close`.

    Args:
        stream: standard output by default. The bar is drawn only in a terminal that can move its cursor.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._stream: Any = LastingOutput(stream or unfiltered_output())
        self._clock = clock
        self._bar: rich.progress.Progress | None = None
        self._task = rich.progress.TaskID(0)
        self._total = 0
        self._work: Callable[[int], float] = lambda steps: steps
        self._origin: tuple[int, float] | None = None  # step and time of the first report
        self._drawn = float('-inf')

    @functools.cached_property
    def _console(self) -> rich.console.Console:
        """Made at its first use: a standby learns late where it writes."""
        return rich.console.Console(file=self._stream)

    def start(
        self, total_steps: int, resumed_step: int = 0, work: Callable[[int], float] = lambda steps: steps
    ) -> None:
        """Begins a run of `total_steps`, of which the first `resumed_step` are done.

        `work`: work of the first n steps, such as their tokens, by which the ETA counts.
        """
        self._total, self._work = total_steps, work
        self._origin = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            text = rich.progress.TextColumn('{task.description}', markup=False, table_column=rich.table.Column())
            wide = self._console.width >= 105  # on narrower terminals the bar would hide the end of the line
            bar = rich.progress.Progress(
                *([rich.progress.BarColumn(bar_width=20)] if wide else []),
                text,
                console=self._console,
                auto_refresh=False,  # drawn by `update`, so that no thread competes with the training
            )
            state = f'step {resumed_step}/{total_steps}  compiling'
            self._task = bar.add_task(state, total=total_steps, completed=resumed_step)
            bar.start()
            bar.refresh()
            self._bar = bar

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Reports one step: `step` and, if known, `loss`, `bits_per_byte`, `tokens_per_second` and `mfu`.

        An evaluation, which has a `val_loss` or tasks, is a separate line that stays on the screen.
        """
        step, now = metrics['step'], self._clock()
        if is_evaluation(metrics):
            self.message(format_line(metrics, self._total))
            return
        if self._origin is None:
            self._origin = (step, now)
        first_step, first_time = self._origin
        eta = None
        if step > first_step:
            done, left = self._work(step) - self._work(first_step), self._work(self._total) - self._work(step)
            eta = (now - first_time) / done * left
        line = format_line(metrics, self._total, eta)
        if self._bar is None:
            self._write(line)
        else:
            self._bar.update(self._task, completed=step, description=line)
            if now - self._drawn >= 0.1 or step >= self._total:  # more often than eyes can follow is useless
                self._bar.refresh()
                self._drawn = now

    def message(self, text: str) -> None:
        """Prints a paragraph above the bar: start-up report, evaluation, sample.

        It contains no markup. Control codes, which a model may sample, do not reach the terminal.
        """
        text = printable(text)
        if self._bar is None:
            self._write(text)
        else:
            self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def close(self) -> None:
        """Leaves the bar as it is and releases the terminal. May be called twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, line: str) -> None:
        encoding = self._stream.encoding or 'utf-8'  # a sample must not stop a run whose log is ASCII
        print(line.encode(encoding, 'replace').decode(encoding), file=self._stream, flush=True)


def format_line(metrics: Mapping[str, Any], total_steps: int, eta: float | None = None) -> str:
    """One report as text. Missing metrics, or those that are None, are left out. `total_steps`: 0 if it is not known.

    Units: `mfu` is a fraction of 1, `eta` is in seconds.
    """
    step = metrics['step']
    parts = [f'step {step}/{total_steps}' if total_steps else f'step {step}']
    if not is_evaluation(metrics):
        parts.append(f'{100 * step / total_steps:.1f}%' if total_steps else '')
    for key, show in _SHOWN.items():
        if metrics.get(key) is not None:
            parts.append(show(metrics[key]))
    for prefix in ('val_loss/', 'task/'):
        parts += [f'{key.removeprefix(prefix)} {value:.4f}' for key, value in metrics.items() if key.startswith(prefix)]
    if eta is not None:
        parts.append(f'eta {clock_text(eta)}')
    return '  '.join(part for part in parts if part)


def is_evaluation(metrics: Mapping[str, Any]) -> bool:
    """Whether a line of metrics is that of an evaluation: a validation loss or tasks."""
    return any(key == 'val_loss' or key.startswith('task/') for key in metrics)


_SHOWN: dict[str, Callable[[Any], str]] = {
    'loss': lambda value: f'loss {value:.4f}',
    'bits_per_byte': lambda value: f'bpb {value:.3f}',
    'val_loss': lambda value: f'val loss {value:.4f}',
    'val_loss_ema': lambda value: f'of the average {value:.4f}',
    'val_bits_per_byte': lambda value: f'val bpb {value:.3f}',
    'noise_scale': lambda value: f'noise scale {prefixed(value, space="")} tokens',
    'tokens_per_second': lambda value: f'{prefixed(value, space="")} tok/s',
    'mfu': lambda value: f'mfu {100 * value:.1f}%',
}
