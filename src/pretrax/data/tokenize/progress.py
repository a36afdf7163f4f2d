"""Reports the progress of tokenization: a bar in a terminal, otherwise a line every few seconds.

tokens: 34% of the text, 12.3 M tokens, 4.51 M tokens/s, 0:42 left
"""

import time
from collections.abc import Callable
from typing import TextIO

import rich.console
import rich.progress

from pretrax.errors import unfiltered_output

EVERY = 10.0  # seconds between plain lines


class TokenProgress:
    """Counts text and tokens as they are processed, and the stored size of each finished shard.

    Progress within a shard is an estimate: it assumes the ratio of stored bytes to text of the finished shards.
    """

    def __init__(
        self,
        total: int,
        say: Callable[[str], None],
        what: str = 'tokens',
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._total, self._say, self._what, self._clock = max(1, total), say, what, clock
        self._started = self._said = clock()
        self._done = self._skipped = self._text = self._text_done = self._tokens = 0
        console = rich.console.Console(file=stream or unfiltered_output())
        self._bar: rich.progress.Progress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            columns = (
                rich.progress.BarColumn(bar_width=20),
                rich.progress.TextColumn('{task.description}', markup=False),
            )
            self._bar = rich.progress.Progress(*columns, console=console, auto_refresh=False, transient=True)
            self._task = self._bar.add_task(self.line(), total=1.0)

    def __enter__(self) -> 'TokenProgress':
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar:
            self._bar.stop()

    def skip(self, size: int) -> None:
        """Counts a shard of `size` stored bytes that an earlier run finished."""
        self._done += size
        self._skipped += size

    def __call__(self, n_bytes: int, n_tokens: int) -> None:
        self._text += n_bytes
        self._tokens += n_tokens
        self._show(0.1 if self._bar else EVERY)

    def finished(self, size: int) -> None:
        """Counts a shard of `size` stored bytes as finished."""
        self._done += size
        self._text_done = self._text
        self._show(0.1 if self._bar else EVERY)

    @property
    def fraction(self) -> float:
        begun = self._text - self._text_done
        stored_per_byte = (self._done - self._skipped) / self._text_done if self._text_done else 1.0
        return min(1.0, (self._done + begun * stored_per_byte) / self._total)

    def line(self) -> str:
        seconds = self._clock() - self._started
        parts = [f'{self._what}: {self.fraction:.0%} of the text']
        if self._tokens:
            parts.append(f'{self._tokens / 1e6:,.1f} M tokens')
            parts += [f'{self._tokens / seconds / 1e6:.2f} M tokens/s'] if seconds else []
        before = self._skipped / self._total
        if self.fraction > before and seconds:
            left = seconds * (1 - self.fraction) / (self.fraction - before)
            parts.append(f'{int(left) // 60}:{int(left) % 60:02} left')
        return ', '.join(parts)

    def _show(self, every: float) -> None:
        if (now := self._clock()) - self._said < every:
            return
        self._said = now
        if self._bar:
            self._bar.update(self._task, completed=self.fraction, description=self.line())
            self._bar.refresh()
        else:
            self._say(self.line())
