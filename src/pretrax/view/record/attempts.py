"""The attempts to train a run: each process, or group of processes, that trained some of its steps."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

RUNNING, FINISHED, STOPPED, FAILED, LOST = 'running', 'finished', 'stopped', 'failed', 'lost'
type State = Literal['running', 'finished', 'stopped', 'failed', 'lost']


@dataclasses.dataclass
class Attempt:
    """One attempt. Times are in seconds since 1970; None: not known.

    Attributes:
        started: when a launcher started the processes.
        began: when the training began to prepare its first step.
        stepped: when its first step was done; the compilation lies between.
        ended: when it ended.
        first_step: the step that it continued from.
        last_step: the last step that is known of it.
        outcome: how it ended; 'running' if it has not ended, or if nothing says how.
        why: the reason of a stop or a failure.
        processes: number of processes that a launcher started; None: no launcher.
    """

    started: float | None = None
    began: float | None = None
    stepped: float | None = None
    ended: float | None = None
    first_step: int | None = None
    last_step: int | None = None
    outcome: State = RUNNING
    why: str = ''
    processes: int | None = None

    @property
    def start(self) -> float | None:
        """When it was first heard of."""
        return self.began if self.started is None else self.started


def attempts_of(events: Iterable[Mapping[str, Any]]) -> list[Attempt]:
    """The attempts that the lines of `attempts.jsonl` describe, oldest first.

    An attempt that another one follows, and whose end nobody has written, was lost.
    """
    attempts: list[Attempt] = []
    for event in events:
        kind, time, step = event['event'], float(event['time']), event.get('step')
        current = attempts[-1] if attempts else None
        is_open = current is not None and current.outcome == RUNNING
        if kind == 'started' or (kind == 'began' and (not is_open or current is None or current.began is not None)):
            if is_open and current is not None:
                current.outcome = LOST
            attempts.append(current := Attempt())
        if current is None:
            continue
        if kind == 'started':
            processes = event.get('processes')
            current.started, current.processes = time, len(processes) if isinstance(processes, list) else 0
        elif kind == 'began':
            current.began, current.first_step = time, _number(step)
        elif kind == 'stepped':
            current.stepped, current.last_step = time, _number(step)
        elif kind in (FINISHED, STOPPED, FAILED):
            current.ended, current.outcome, current.why = time, kind, str(event.get('why') or '')
            current.last_step = _number(step) if step is not None else current.last_step
        elif kind == 'ended':
            _end(current, time, event)
    return attempts


def _end(attempt: Attempt, time: float, event: Mapping[str, Any]) -> None:
    """A launcher saw the processes end. What the training itself wrote about its end is more exact."""
    if attempt.outcome != RUNNING:
        return
    code, why = event.get('code'), str(event.get('why') or '')
    attempt.ended, attempt.why = time, why
    attempt.outcome = FINISHED if code == 0 else FAILED if code in (1, 2, 78) else LOST


def _number(step: Any) -> int | None:
    return step if type(step) is int else None
