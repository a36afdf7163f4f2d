"""Crash reports: what is known about a process that failed, was killed, or hung, in one file of the run directory.

    runs/base/crashes/20261122T120102.345/process-2.txt

The directory is named after the time at which the attempt started. On a disk that all machines share, and in a bucket,
the reports of all of them are in one place. Whoever started a process writes its report.
"""

import dataclasses
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from pretrax.amounts import natural_order
from pretrax.errors import CONFIGURATION, DONE, MISTAKE, TRY_AGAIN, printable
from pretrax.storage import AnyPath, BucketPath
from pretrax.system.atomic import write_file

DIRECTORY = 'crashes'
_MOST_STACKS = 1 << 20  # bytes, of the newest stacks


@dataclasses.dataclass(frozen=True)
class Crash:
    """A process that failed, was killed, or hung."""

    process: int  # its number
    host: str  # the name of its machine
    code: int | None  # its exit code; negative: the signal that killed it; None: it hung, and had to be killed
    seconds: float  # how long it ran
    step: int  # step of the newest checkpoint at its end
    output: Sequence[str]  # the last lines that it wrote
    stacks: str  # what it wrote to its file of stacks in this attempt

    def text(self) -> str:
        """The report."""
        how = 'it showed no sign of life and was killed' if self.code is None else in_words(self.code)
        after = f'step {self.step} is the newest checkpoint' if self.step else 'there is no checkpoint yet'
        head = [
            f'process {self.process} on {self.host or socket.gethostname()}',
            f'{how}, after {self.seconds:.0f} s; {after}',
            f'written {time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())}',
        ]
        output = self.output or ['(none)']
        stacks = self.stacks.strip() or '(none)'
        return '\n'.join(
            [*head, '', '== last lines of its output', *output, '', '== stacks of its threads', stacks, '']
        )


def attempt_label() -> str:
    """The name of an attempt that starts now: '20261122T120102.345', in UTC."""
    now = time.time()
    return time.strftime('%Y%m%dT%H%M%S', time.gmtime(now)) + f'.{int(1000 * now) % 1000:03}'


def write_crash_report(run_dir: AnyPath, attempt: str, crash: Crash) -> AnyPath:
    """Writes a report, unless the machine of the process has written one already. Returns its path.

    Raises:
        OSError: it cannot be written.
    """
    path = run_dir / DIRECTORY / attempt / f'process-{crash.process}.txt'
    if not path.is_file():
        content = printable(crash.text()).encode(errors='replace')
        if isinstance(path, BucketPath):
            path.create(content)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_file(path, content)
    return path


def newest_reports(run_dir: AnyPath) -> list[AnyPath]:
    """The reports of the newest attempt that left some. Raises OSError if the bucket cannot be reached."""
    directory = run_dir / DIRECTORY
    if isinstance(directory, BucketPath):
        names = directory.files()
    else:
        names = [path.relative_to(directory).as_posix() for path in directory.glob('*/*.txt')]
    newest = max((name.partition('/')[0] for name in names), key=natural_order, default='')
    return [directory / name for name in sorted(names) if name.partition('/')[0] == newest]


def in_words(code: int) -> str:
    """What an exit code says: 'killed by SIGKILL', 'exit code 75: not finished, to be started again'."""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f'signal {-code}'
        return f'killed by {name}{_MAY_BE_MEMORY if -code == signal.SIGKILL else ""}'
    return f'exit code {code}{_MEANINGS.get(code, ": an error, see its output")}'


_MAY_BE_MEMORY = ', which Linux sends when memory runs out'
_MEANINGS = {
    DONE: ': done',
    MISTAKE: ': a mistake that would repeat itself',
    CONFIGURATION: ': a mistake that would repeat itself',
    TRY_AGAIN: ': not finished, to be started again',
}


class StackFiles:
    """The files of stacks of a run, `stacks/process-<i>.txt`: what is written to them from now on."""

    def __init__(self, directory: Path, processes: Sequence[int]):
        self._begins = {number: _size(self._path(directory, number)) for number in processes}
        self._directory = directory

    def new(self, process: int) -> str:
        """What a process has written since this object was made; '' if that is nothing."""
        try:
            with self._path(self._directory, process).open('rb') as stacks:
                begin = self._begins[process]
                stacks.seek(max(begin, _size(Path(stacks.name)) - _MOST_STACKS))
                return stacks.read().decode(errors='replace')
        except OSError:
            return ''

    @staticmethod
    def _path(directory: Path, process: int) -> Path:
        return directory / 'stacks' / f'process-{process}.txt'


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
