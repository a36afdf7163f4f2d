"""Identifies a process across machines, and finds out whether another process of this machine has ended."""

import os
import socket
from pathlib import Path


def identity() -> dict[str, str]:
    """This process. Another process with its number, later or in another container, has another identity."""
    return {
        'host': socket.gethostname(),
        'pid': str(os.getpid()),
        'started': _started(os.getpid()),
        **_place(),
    }


def has_ended(other: dict[str, str]) -> bool:
    """Whether a process has ended; False if it runs, or runs where this process cannot see it."""
    place = _place()
    if not place['boot'] or any(other.get(key) != value for key, value in place.items()):
        return False
    pid = other.get('pid', '')
    return pid.isdecimal() and _started(int(pid)) != other.get('started')


def is_here(other: dict[str, str]) -> bool:
    """Whether a process runs where this one can see it, so that a signal to its id reaches no other process."""
    place = _place()
    return bool(place['boot']) and all(other.get(key) == value for key, value in place.items()) and not has_ended(other)


def _place() -> dict[str, str]:
    """The boot of the system, and the processes that this container can see; '' if the system is not Linux."""
    try:
        boot = Path('/proc/sys/kernel/random/boot_id').read_text().strip()
        return {'boot': boot, 'container': os.readlink('/proc/self/ns/pid')}
    except OSError:
        return {'boot': '', 'container': ''}


def _started(pid: int) -> str:
    """When a process was started, in ticks since the boot; '' if it has ended, or is not known."""
    try:
        state, *fields = Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()
    except OSError:
        return ''
    return '' if state in 'ZX' else fields[18]
