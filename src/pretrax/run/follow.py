"""Follows a run while it trains: loads each new checkpoint for a program that uses the weights."""

import threading
import time
from collections.abc import Callable
from typing import Any

from pretrax.checkpoint import steps_in
from pretrax.errors import Report, first_line
from pretrax.run.trained import Trained
from pretrax.storage import AnyPath, BucketPath

POLL_SECONDS, POLL_BUCKET_SECONDS = 1.0, 15.0


def follow(trained: Trained, use: Callable[[Any, int], None], report: Report, stop: threading.Event) -> None:
    """Calls `use` with the weights and the step of each checkpoint that is the newest of its run, until it is stopped.

    A checkpoint that cannot be read, for example since it has just been removed, is reported; the next one is tried.

    Args:
        trained: the checkpoint that is used now.
        use: takes the weights, on the devices.
        stop: ends it, also between two looks.
    """
    failed = None
    seconds = POLL_BUCKET_SECONDS if isinstance(trained.directory, BucketPath) else POLL_SECONDS
    while not stop.wait(seconds):
        try:
            steps = steps_in(trained.directory)
            if not steps or steps[-1] == trained.step:
                continue
            newest = trained.at(steps[-1])
            use(newest.weights(), newest.step)
            trained, failed = newest, None
        except Exception as error:  # files of another process: anything can be wrong with them for a moment
            reason = first_line(error) or repr(error)
            problem = f'{trained.directory}: cannot follow: {reason}'
            if problem != failed:
                report(problem)
            failed = problem


def written_at(directory: AnyPath, step: int) -> int:
    """When a checkpoint was written, in seconds since 1970; in a bucket, now."""
    place = directory / str(step)
    return int(time.time() if isinstance(place, BucketPath) else place.stat().st_mtime)
