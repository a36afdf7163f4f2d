"""A plugin for islands: the data component `recorded`, synthetic tokens, writes which rows a process has read; and the
clock of the process is off by some seconds.

data: {name: recorded, vocab_size: 64}
"""

import os
import re
import time

import numpy as np

from pretrax import register
from pretrax.data.batches.synthetic import SyntheticSource

ROWS, CLOCK = 'RECORDED_ROWS', 'RECORDED_CLOCK'  # variables: the file; seconds that the clock is ahead

_clock = time.time
time.time = lambda: _clock() + float(os.environ.get(CLOCK, '0'))


class Recorded(SyntheticSource):
    """Appends the number of the batch and of the row for each row that an island asks for, in the order of all islands.

    An island asks a source of a user for one row at a time. A run that checks its source asks for several.
    """

    def batch(self, step, rows, batch_rows):
        first, *more = (step * batch_rows + np.arange(batch_rows)[rows]).tolist()
        if not more:
            with open(os.environ[ROWS], 'a') as lines:
                lines.write(f'{step} {first}\n')
        return super().batch(step, rows, batch_rows)


@register('data', 'noted')
def recorded(request, *, vocab_size: int):
    return Recorded(request, vocab_size, request.sequence_length + 1)


def rows_of(path) -> dict[int, set[int]]:
    """{batch: rows} of such a file."""
    found: dict[int, set[int]] = {}
    for line in path.read_text().splitlines(keepends=True):
        if re.fullmatch(r'\d+ \d+\n', line):  # no kill has cut it
            batch, row = map(int, line.split())
            found.setdefault(batch, set()).add(row)
    return found
