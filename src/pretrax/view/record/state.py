"""Whether a run is running, and how it ended, as far as its files say."""

import os
import re
import socket
import time
from pathlib import Path
from typing import NamedTuple

from pretrax.observe.attempts import FAILED, FINISHED, LOST, RUNNING, STOPPED, Attempt, State
from pretrax.storage import AnyPath, BucketPath, lease
from pretrax.system.locks import holder_of
from pretrax.view.record.columns import Columns

SILENCE = 600.0  # seconds; a run in a bucket that has written nothing for longer is lost, whatever its lease says


class RunState(NamedTuple):
    """The state of a run."""

    name: State  # 'running', 'finished', 'stopped', 'failed', or 'lost': it ended without saying how, as after a kill
    why: str = ''  # the reason, or who runs it; '' if it is not known


def state_of(path: AnyPath, attempts: list[Attempt], metrics: Columns, steps: int | None) -> RunState:
    """The state of a run: what its last attempt has written about its end, else whether a process has its lock.

    Args:
        steps: configured steps of the whole run; None: not known.
    """
    last = attempts[-1] if attempts else None
    is_done = steps is not None and int(metrics.steps.max(initial=0)) >= steps
    if last is not None and last.outcome in (FINISHED, STOPPED, FAILED):
        if last.outcome == FINISHED and not is_done and steps is not None:
            return RunState(STOPPED, last.why)  # a launcher cannot tell
        return RunState(last.outcome, last.why)
    holder = _holder(path, _newest(attempts, metrics))
    if holder:
        return RunState(RUNNING, holder)
    if is_done:
        return RunState(FINISHED)
    return RunState(LOST, last.why if last is not None else '')


def _newest(attempts: list[Attempt], metrics: Columns) -> float:
    """The newest time that the run has written; 0: none."""
    known = [time for one in attempts for time in (one.started, one.began, one.stepped, one.ended) if time is not None]
    return max([0.0, *known, *metrics.known_times[-1:].tolist()])


def _holder(path: AnyPath, newest: float) -> str:
    """The process that trains a run; '' if there is none."""
    if isinstance(path, BucketPath):
        holder = lease.holder_of(path / lease.FILE)
        return holder if time.time() - newest < SILENCE else ''
    file = path / 'lock'
    text = file.read_text(errors='replace').strip() if file.is_file() else ''
    match = re.fullmatch(r'process (\d+) on (\S+)', text)
    has_processes = Path('/proc').is_dir()
    if match and match[2] == socket.gethostname() and has_processes and not os.path.exists(f'/proc/{match[1]}'):
        return ''  # and the lock is not tried, which could refuse a run that starts at this moment
    return (holder_of(path) or '') if text else ''
