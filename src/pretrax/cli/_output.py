"""The output of verbs: files at a path of the user, generated text, and the speed of generation."""

import sys
import time
from typing import TYPE_CHECKING

from pretrax.errors import UserError, unfiltered_output
from pretrax.storage import locate
from pretrax.storage.whole_file import write_whole

if TYPE_CHECKING:
    from pretrax.weights.loaded import LoadedModel


def write_output(out: str, content: str | bytes) -> None:
    """Writes a file, on a disk with its directories or in a bucket. Raises UserError."""
    path = locate(out)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content if isinstance(content, bytes) else content.encode())
    except OSError as error:
        raise UserError(f'cannot write {out}: {error.strerror}') from error


class Speed:
    """Counts the tokens of a model, and prints how many a second there were."""

    def __init__(self, model: 'LoadedModel'):
        self._compute = model.compute
        self._began = time.perf_counter()
        self.prompt_tokens = self.tokens = 0

    def report(self) -> None:
        seconds = max(time.perf_counter() - self._began, 1e-9)
        print(
            f'{self.tokens:,} tokens in {seconds:.1f} s, compilation included, computed in {self._compute}: '
            f'{self.tokens / seconds:,.1f} tokens/s, '
            f'{self.prompt_tokens / seconds:,.1f} prompt tokens/s',
            file=sys.stderr,
        )


def show(text: str, end: str = '') -> None:
    """Prints text of a model at once: to a terminal without control characters, elsewhere as it is."""
    print(text, end=end, flush=True, file=None if sys.stdout.isatty() else unfiltered_output())
