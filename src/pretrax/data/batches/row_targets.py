"""Rows without a target, such as the beginning of a prompt that is longer than a row: they are read, but teach nothing.

They are counted before training, in all rows of a small split and in a sample of a large one.
"""

from collections.abc import Callable, Sequence

import numpy as np

from pretrax.data.batches.source import HostBatch
from pretrax.errors import UserError

MOST_TOKENS = 1 << 22  # that are read to count; 2 seconds from a disk
MOST_ROWS = 1 << 13
_RUNS = 8  # of consecutive rows in a sample
_AT_ONCE = 256  # rows


def report_rows_without_targets(
    name: str,
    read: Callable[[np.ndarray], HostBatch],
    n: int | None,
    sequence_length: int,
    say: Callable[[str], None],
    batch_rows: float | None = None,
) -> None:
    """Counts the rows without a target, and prints their share.

    Args:
        name: path or URL of the tokens, for messages.
        read: reads the rows with these numbers, int64 [R].
        n: rows in all; None: unknown, so that the first 64 are the sample.
        batch_rows: rows of a step; None: unknown.

    Raises:
        UserError: no row has a target.
    """
    has_target = np.concatenate([read(rows).mask.any(axis=1) for rows in _pieces(_sample(n, sequence_length))])
    empty, counted = int((~has_target).sum()), len(has_target)
    if empty == counted and n is not None and not any(read(rows).mask.any() for rows in _pieces(np.arange(n))):
        raise UserError(
            f'{name}: none of the {n:,} rows has a target, so there is nothing to learn\n'
            '  only answers count in the loss, and there is none: all tokens belong to prompts\n'
            '  check data.prompt_field and data.answer_field (or data.messages_field), or learn all text with '
            'data.field'
        )
    which = f'{counted:,} rows' if counted == n else f'a sample of {counted:,} rows'
    if not empty:
        say(f'targets: each of {which} has some')
        return
    share = empty / counted
    empty_steps = 0.0 if batch_rows is None else share**batch_rows
    parts = [
        f'rows without targets: {share:.1%} ({empty:,} of {which}) are read but teach nothing, since their answers '
        'begin after the end of the row',
        f'{empty_steps:.2g} of the steps will have nothing to learn, and change nothing' if empty_steps >= 1e-6 else '',
        'a longer batch.sequence_length has fewer of them',
    ]
    say('; '.join(filter(None, parts)))


def _sample(n: int | None, sequence_length: int) -> np.ndarray:
    """The rows to read: all, if that is quick; otherwise some runs of consecutive rows, evenly apart."""
    most = min(MOST_ROWS, max(_RUNS, MOST_TOKENS // sequence_length))
    if n is None:
        return np.arange(64)
    if n <= most:
        return np.arange(n)
    length = most // _RUNS
    return (np.linspace(0, n - length, _RUNS).astype(np.int64)[:, None] + np.arange(length)).ravel()


def _pieces(rows: np.ndarray) -> Sequence[np.ndarray]:
    return np.split(rows, range(_AT_ONCE, len(rows), _AT_ONCE))
