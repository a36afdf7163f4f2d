"""Whether an attempt that has ended is followed by another one. Knows no processes, so that all engines ask the same."""

import dataclasses
import pathlib
import signal

from pretrax.errors import CONFIGURATION, DONE, MISTAKE, TRY_AGAIN

LONGEST_WAIT = 60.0  # seconds


@dataclasses.dataclass(frozen=True)
class Ended:
    """How an attempt ended.

    Attributes:
        code: the exit code that tells most of all processes; negative: the signal that killed that process.
        why: in words.
        step: of the newest checkpoint then; 0 for none.
        lost: numbers of the processes that were killed or hung.
    """

    code: int
    why: str
    step: int
    lost: tuple[int, ...] = ()

    @property
    def exit_code(self) -> int:
        """As a shell has it, and as who started the launcher shall see it."""
        return 128 - self.code if self.code < 0 else MISTAKE if self.code == CONFIGURATION else self.code


class Restarts:
    """Counts the attempts in a row that no checkpoint came of.

    Args:
        retries: attempts that may follow such an attempt.
        step: of the newest checkpoint before the first one.
    """

    def __init__(self, retries: int, step: int):
        self._retries, self._step = retries, step
        self.in_vain = 0

    def wait(self, ended: Ended) -> float | None:
        """Seconds before the next attempt; None: there is none. Call it once an attempt."""
        if ended.code in (DONE, MISTAKE, CONFIGURATION):
            return None
        self.in_vain = 0 if ended.step > self._step else self.in_vain + 1
        self._step = ended.step
        if self.in_vain > self._retries:
            return None
        return min(LONGEST_WAIT, 2.0 ** (self.in_vain - 1)) if self.in_vain else 0.0

    def forgive(self) -> None:
        """What comes next is another thing to try: the count begins anew."""
        self.in_vain = 0


def judge(codes: dict[int, int], hung: tuple[int, ...], step: int) -> Ended:
    """What the ends of processes mean together.

    Args:
        codes: of those that ended by themselves, by number.
        hung: those that did not, and had to be ended.
        step: of the newest checkpoint.
    """
    killed = tuple(number for number, code in codes.items() if code < 0)
    mistaken = [number for number, code in codes.items() if code in (MISTAKE, CONFIGURATION)]
    failed = [number for number, code in codes.items() if code not in (DONE, TRY_AGAIN) and code > 0]
    if mistaken:
        return Ended(codes[mistaken[0]], f'process {mistaken[0]} ended for a mistake that would come again', step)
    if killed:
        names = ' and '.join(f'process {number} ({_name(-codes[number])})' for number in killed)
        return Ended(codes[killed[0]], f'killed: {names}', step, killed)
    if failed:
        return Ended(codes[failed[0]], f'process {failed[0]} failed with exit code {codes[failed[0]]}', step)
    if TRY_AGAIN not in codes.values():
        return Ended(DONE, 'done', step)
    if hung:
        names = ' and '.join(f'process {number}' for number in hung)
        return Ended(TRY_AGAIN, f'no sign of life: {names}', step, hung)
    return Ended(TRY_AGAIN, f'exit code {TRY_AGAIN}: there is more to do', step)


def newest_checkpoint(run_dir: pathlib.Path) -> int:
    """The step of the newest whole checkpoint: the largest number that a directory is named; 0 for none.

    `pretrax.checkpoint` knows more, and imports JAX.
    """
    directory = run_dir / 'checkpoints'
    names = [entry.name for entry in directory.iterdir()] if directory.is_dir() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _name(number: int) -> str:
    return signal.Signals(number).name if number in set(signal.Signals) else f'signal {number}'
