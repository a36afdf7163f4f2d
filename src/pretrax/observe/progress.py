"""What a person sees while a run trains: a live bar in a terminal, one plain line for each report anywhere else.

    step 120/300  40.0%  loss 3.1234  bpb 1.432  45.1k tok/s  mfu 12.3%  eta 0:42

Only what is known is shown: no MFU for an unknown device, no ETA before two reports are in. The first report starts
the clock of the ETA, so that compilation is not in it; evaluations and checkpoints are, as they will come again.
"""

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import rich.console
import rich.progress
import rich.table


class Progress:
    """Reports of one run, from one process. `message` works at any time; `update` between `start` and `close`.

    Args:
        stream: standard output by default. The bar is drawn only if it is a terminal that can move its cursor.
        clock: seconds from anywhere.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic):
        self._stream = stream or sys.stdout
        self._clock = clock
        self._console = rich.console.Console(file=self._stream)
        self._bar: rich.progress.Progress | None = None
        self._task = rich.progress.TaskID(0)
        self._total = 0
        self._origin: tuple[int, float] | None = None  # step and time of the first report
        self._drawn = float('-inf')

    def start(self, total_steps: int, resumed_step: int = 0) -> None:
        """Begin reporting a run of `total_steps`, of which `resumed_step` were done before."""
        self._total = total_steps
        self._origin = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            text = rich.progress.TextColumn('{task.description}', markup=False, table_column=rich.table.Column())
            wide = self._console.width >= 105  # below, the bar would push the end of the line out of sight
            bar = rich.progress.Progress(
                *([rich.progress.BarColumn(bar_width=20)] if wide else []),
                text,
                console=self._console,
                auto_refresh=False,  # drawn by `update`: no thread beside the one that feeds the device
            )
            state = f'step {resumed_step}/{total_steps}  compiling'
            self._task = bar.add_task(state, total=total_steps, completed=resumed_step)
            bar.start()
            bar.refresh()
            self._bar = bar

    def update(self, metrics: Mapping[str, Any]) -> None:
        """Report one step: `step` and what there is of `loss`, `bits_per_byte`, `tokens_per_second`, `mfu`.

        An evaluation, which has a `val_loss`, is a line of its own and stays on the screen.
        """
        step, now = metrics['step'], self._clock()
        if 'val_loss' in metrics:
            self.message(format_line(metrics, self._total))
            return
        if self._origin is None:
            self._origin = (step, now)
        first_step, first_time = self._origin
        eta = (now - first_time) / (step - first_step) * (self._total - step) if step > first_step else None
        line = format_line(metrics, self._total, eta)
        if self._bar is None:
            self._write(line)
        else:
            self._bar.update(self._task, completed=step, description=line)
            if now - self._drawn >= 0.1 or step >= self._total:  # steps can be faster than eyes
                self._bar.refresh()
                self._drawn = now

    def message(self, text: str) -> None:
        """Print a paragraph above the bar: start-up report, evaluation, sample.

        Nothing in it is markup, and control codes, which a model may well sample, do not reach the terminal.
        """
        text = text.translate(_CONTROL)
        if self._bar is None:
            self._write(text)
        else:
            self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)

    def close(self) -> None:
        """Leave the bar as it last was and give the terminal back. Safe to call twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> 'Progress':
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, line: str) -> None:
        encoding = self._stream.encoding or 'utf-8'  # a sample must not stop a run whose log is ASCII
        print(line.encode(encoding, 'replace').decode(encoding), file=self._stream, flush=True)


def format_line(metrics: Mapping[str, Any], total_steps: int, eta: float | None = None) -> str:
    """One report as text. What `metrics` does not have, or has as None, is left out.

    `mfu` is a fraction of one, `eta` seconds, `bits_per_byte` and `val_bits_per_byte` as their names say.
    """
    step = metrics['step']
    parts = [f'step {step}/{total_steps}']
    if 'val_loss' not in metrics:
        parts.append(f'{100 * step / total_steps:.1f}%' if total_steps else '')
    for key, show in _SHOWN.items():
        if metrics.get(key) is not None:
            parts.append(show(metrics[key]))
    parts += [
        f'{key.removeprefix("val_loss/")} {value:.4f}' for key, value in metrics.items() if key.startswith('val_loss/')
    ]
    if eta is not None:
        parts.append(f'eta {_duration(eta)}')
    return '  '.join(part for part in parts if part)


def _rate(value: float) -> str:
    """45_123 -> '45.1k': three digits, as more are noise."""
    for unit in ('', 'k', 'M'):
        if value < 999.5:
            return f'{value:.3g}{unit}'
        value /= 1000
    return f'{value:.3g}G'


def _duration(seconds: float) -> str:
    """42 -> '0:42', 3700 -> '1:01:40', 200_000 -> '2d 7:33:20'."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if not hours:
        return f'{minute}:{second:02}'
    return (f'{days}d ' if days else '') + f'{hour}:{minute:02}:{second:02}'


_CONTROL = {code: '\ufffd' for code in (*range(32), 127, *range(128, 160)) if chr(code) not in '\n\t'}

_SHOWN: dict[str, Callable[[Any], str]] = {
    'loss': lambda value: f'loss {value:.4f}',
    'bits_per_byte': lambda value: f'bpb {value:.3f}',
    'val_loss': lambda value: f'val loss {value:.4f}',
    'val_bits_per_byte': lambda value: f'val bpb {value:.3f}',
    'tokens_per_second': lambda value: f'{_rate(value)} tok/s',
    'mfu': lambda value: f'mfu {100 * value:.1f}%',
}
