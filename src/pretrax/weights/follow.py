"""Follows a run while it trains: loads each new checkpoint for a program that uses the weights."""

import threading
import time
from collections.abc import Callable
from typing import Any

from pretrax.checkpoint import steps_in
from pretrax.errors import Report, UserError, first_line
from pretrax.storage import AnyPath, BucketPath
from pretrax.weights.trained import Trained

POLL_SECONDS, POLL_BUCKET_SECONDS = 1.0, 15.0


def follow(trained: Trained, use: Callable[[Any, int], None], report: Report, stop: threading.Event) -> None:
    """Calls `use` with the weights and the step of each checkpoint that is the newest of its run, until it is stopped.

    A checkpoint that cannot be read, for example since it has just been removed, is reported once; the weights in use
    stay, and the next checkpoint is tried. The same holds for one with another model or tokenizer, which another run
    has written.

    Args:
        use: takes the weights, on the devices.
        stop: ends it, also between two looks.
    """
    failed, held = None, trained.step  # held: the step of the weights in use, if its run still has it
    seconds = POLL_BUCKET_SECONDS if isinstance(trained.directory, BucketPath) else POLL_SECONDS
    while not stop.wait(seconds):
        try:
            steps = steps_in(trained.directory)
            if held not in steps:
                held = None  # removed; a checkpoint of the same step is another one
            if not steps:
                raise FileNotFoundError(f'it has no checkpoint now; the weights of step {trained.step} stay in use')
            if steps[-1] == held:
                continue
            newest = trained.at(steps[-1])
            _check_same(trained, newest)
            use(newest.weights(), newest.step)
            trained, held, failed = newest, newest.step, None
        except Exception as error:  # files of another process: anything can be wrong with them for a moment
            reason = first_line(error) or repr(error)
            problem = f'{trained.directory}: cannot follow: {reason}'
            if problem != failed:
                report(problem)
            failed = problem


def _check_same(trained: Trained, newest: Trained) -> None:
    """Raises UserError if the programs or the tokenizer in use do not fit a checkpoint, for example of another run."""
    old, new = trained.description, newest.description
    parts = {
        'model': (old['config']['model'], new['config']['model']),
        'tokenizer': (old.get('tokenizer'), new.get('tokenizer')),
    }
    for part, (one, other) in parts.items():
        if one != other:
            raise UserError(f'step {newest.step} has another {part}; the weights of step {trained.step} stay in use')


def written_at(directory: AnyPath, step: int) -> int:
    """When a checkpoint was written, in seconds since 1970; in a bucket, now."""
    place = directory / str(step)
    return int(time.time() if isinstance(place, BucketPath) else place.stat().st_mtime)
