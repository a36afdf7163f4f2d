"""Processes that end with the one that started them."""

import contextlib
import ctypes
import resource
import signal
import sys


def end_with_parent(number: int = signal.SIGTERM) -> None:
    """Asks Linux to signal this new process when its parent ends. Other systems cannot do this."""
    if sys.platform == 'linux':
        die_with_parent = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(die_with_parent, number)


def prepare_training() -> None:
    """Prepares a new process that will train.

    The process ignores requests to save or to print stacks until training handles them. It may open as many files as the
    system allows. When its parent ends, it saves and ends too.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS refuses an unlimited number
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # each process has connections to all others
    end_with_parent()
