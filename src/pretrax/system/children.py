"""Processes that this one starts: they can be followed, sent signals, and ended with all that they have started."""

import contextlib
import ctypes
import os
import resource
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

NO_ANSWER = 124  # exit code of a command that was ended, as `timeout` has it


class Child(subprocess.Popen[bytes]):
    """A process in a session of its own. It reads nothing unless `streams` says otherwise.

    Args:
        environment: all of its variables; None: those of this process.
        prepare: runs in the new process before the program.
        streams: `stdin`, `stdout`, `stderr` and `cwd`, as `subprocess.Popen` takes them.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        prepare: Callable[[], None] | None = None,
        **streams: Any,
    ):
        streams = {'stdin': subprocess.DEVNULL} | streams
        with warnings.catch_warnings():
            # JAX warns of forks, since its threads are lost in the new process, which runs another program at once.
            warnings.filterwarnings('ignore', r'os\.fork\(\) was called', RuntimeWarning)
            super().__init__(command, env=environment, preexec_fn=prepare, start_new_session=True, **streams)

    def tell(self, number: int) -> None:
        """Writes the name of a signal to its standard input, as `pretrax launch node --controlled` reads it."""
        self.write_line(signal.Signals(number).name.encode())

    def write_line(self, line: bytes) -> None:
        """Writes a line to its standard input, if it runs."""
        assert self.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self.stdin.write(line + b'\n')
            self.stdin.flush()

    def close_input(self) -> None:
        """Ends its standard input, on which `pretrax launch node --controlled` ends."""
        assert self.stdin is not None
        with contextlib.suppress(OSError):
            self.stdin.close()

    def wait_up_to(self, seconds: float) -> None:
        """Waits for its end, but no longer: it may be inside a driver or a file system that hangs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(max(0.0, seconds))

    def end(self, seconds: float) -> None:
        """Kills it and what it has started, and waits for its end, but no longer than these seconds."""
        self.kill_all()
        self.wait_up_to(seconds)

    def kill_all(self) -> None:
        """Kills it, stopped or not, and the processes that it has started. It still has to be waited for."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


@contextlib.contextmanager
def handling(numbers: Sequence[int], handler: Callable[[int], object]) -> Iterator[None]:
    """Handles signals inside this context; `handler` receives their numbers."""
    before = {number: signal.signal(number, lambda received, _: handler(received)) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Asks Linux to signal this new process when its parent ends. Other systems cannot do this."""
    if sys.platform == 'linux':
        die_with_parent = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(die_with_parent, number)


def prepare_training() -> None:
    """Prepares a new process that will train.

    The process ignores requests to save or to print stacks until training handles them. It may open as many files as
    the system allows. When its parent ends, it saves and ends too.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses an unlimited number
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each process has connections to all others
    end_with_parent()


# The signals that reach a launched training.
STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # SIGHUP: the terminal was closed
PASSED_ON = (*STOP, signal.SIGUSR1, signal.SIGUSR2)


def signals_from_now_on() -> list[int]:
    """Keeps signals for a `Node` until there is one. The first process of a container ignores others."""
    waiting: list[int] = []
    for number in PASSED_ON:
        signal.signal(number, lambda got, _: waiting.append(got))
    return waiting


def run_tool(
    command: Sequence[str], seconds: float, text: str = '', environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs a program, which reads `text`. One that does not answer or start is a failure, too."""
    try:
        return subprocess.run(
            command, input=text, env=environment, capture_output=True, text=True, errors='replace', timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, NO_ANSWER, '', f'no answer in {seconds:g} s')
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, '', f'{command[0]} cannot be started: {error.strerror}')
