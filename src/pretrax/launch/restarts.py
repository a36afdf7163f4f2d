"""Decides whether another attempt follows one that has ended. It starts no process, so that any launcher can use it."""

import dataclasses
import signal

from pretrax.checkpoint.manifest import steps_in
from pretrax.errors import CONFIGURATION, DONE, MISTAKE, TRY_AGAIN
from pretrax.storage import AnyPath

LONGEST_WAIT = 60.0  # seconds


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How an attempt ended."""

    code: int  # the most telling exit code of all processes; negative: the signal that killed that process
    why: str  # the reason, for the user
    step: int  # step of the newest checkpoint at that time; 0: there is none
    lost: tuple[int, ...] = ()  # numbers of the processes that were killed or hung
    gone: tuple[int, ...] = ()  # numbers of the processes whose machine is gone
    quarantined: tuple[int, ...] = ()  # numbers of the processes whose machine computes something wrong

    @property
    def exit_code(self) -> int:
        """Exit code of the launcher, as a shell writes it."""
        return 128 - self.code if self.code < 0 else MISTAKE if self.code == CONFIGURATION else self.code


@dataclasses.dataclass(frozen=True, kw_only=True)
class RestartOptions:
    """When the processes of a run are started again."""

    retries: int = 3  # how many attempts without a new checkpoint may be followed by another one
    # Continue with fewer processes after one is lost twice in a row, and try all of them again later
    elastic: bool = False
    # The supervisor is started again, on machines that work, if it exits with 75. It does so if it is asked to stop
    # before the run is finished, or if the machine of a process is gone.
    requeued: bool = False
    # Seconds for the processes to save and end after a request to stop; then they are killed. None: no limit.
    stop_within: float | None = None


class Restarts:
    """Counts consecutive attempts that made no new checkpoint.

    Args:
        retries: how many such attempts may be followed by another one.
        step: step of the newest checkpoint before the first attempt.
    """

    def __init__(self, retries: int, step: int):
        self._retries, self._step = retries, step
        self.failures = 0

    def wait(self, ended: Outcome) -> float | None:
        """Seconds until the next attempt; None: no further attempt. Call it once per attempt."""
        if ended.code in (DONE, MISTAKE, CONFIGURATION):
            return None
        self.failures = 0 if ended.step > self._step else self.failures + 1
        self._step = ended.step
        if self.failures > self._retries:
            return None
        return min(LONGEST_WAIT, 2.0 ** (self.failures - 1)) if self.failures else 0.0

    def reset(self) -> None:
        """Starts counting again, since the next attempt differs from the ones before."""
        self.failures = 0


def outcome(codes: dict[int, int], hung: tuple[int, ...], step: int) -> Outcome:
    """The outcome of an attempt, from the ends of its processes.

    Args:
        codes: exit codes of the processes that ended by themselves, by number.
        hung: numbers of the processes that had to be killed.
    """
    killed = tuple(number for number, code in codes.items() if code < 0)
    mistaken = [number for number, code in codes.items() if code in (MISTAKE, CONFIGURATION)]
    failed = [number for number, code in codes.items() if code not in (DONE, TRY_AGAIN) and code > 0]
    if mistaken:
        return Outcome(
            codes[mistaken[0]], f'process {mistaken[0]} ended because of a mistake that would repeat itself', step
        )
    if killed:
        names = ' and '.join(f'process {number} ({_name(-codes[number])})' for number in killed)
        return Outcome(codes[killed[0]], f'killed: {names}', step, killed)
    if failed:
        return Outcome(codes[failed[0]], f'process {failed[0]} failed with exit code {codes[failed[0]]}', step)
    if TRY_AGAIN not in codes.values():
        return Outcome(DONE, 'done', step)
    if hung:
        names = ' and '.join(f'process {number}' for number in hung)
        return Outcome(TRY_AGAIN, f'no sign of life: {names}', step, hung)
    return Outcome(TRY_AGAIN, f'exit code {TRY_AGAIN}: the training is not finished', step)


def newest_checkpoint(run_dir: AnyPath, otherwise: int = 0) -> int:
    """Step of the newest whole checkpoint; 0: none. `otherwise`: returned if the disk or bucket is unreadable."""
    try:
        return max(steps_in(run_dir / 'checkpoints'), default=0)
    except OSError:  # the processes report it
        return otherwise


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f'signal {number}'
