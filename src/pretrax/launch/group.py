"""The processes of one attempt, as a supervisor sees them."""

import contextlib
import random
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pretrax.system import process_hosts

TAIL = 20  # lines shown of the output of a process
_PORTS = range(20000, 32000)  # below those that Linux gives to outgoing connections


class Group(contextlib.AbstractContextManager['Group']):
    """The processes of one attempt, numbered from 0. They run when the object exists, and none runs after `end`."""

    def __len__(self) -> int:
        raise NotImplementedError

    def __exit__(self, *_: object) -> None:
        self.end()

    def codes(self) -> dict[int, int]:
        """Exit codes of the processes that have ended, by number. Negative: the signal that killed the process."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Starts standbys for the next attempt once the first step of this one is done. Called again and again."""

    def send(self, number: int) -> None:
        """Sends a signal to all processes."""
        raise NotImplementedError

    def end(self) -> None:
        """Kills all processes, and what they have started. A second call does nothing."""
        raise NotImplementedError

    def processes(self) -> list[Any]:
        """What `attempts.jsonl` says about the processes, in their order: their ids, or where they run."""
        return [self.host(number) for number in range(len(self))]

    def tail(self, number: int) -> list[str]:
        """The last lines that a process wrote; none if they are not kept."""
        del number
        return []

    def host(self, number: int) -> str:
        """The name of the machine of a process; '' if it is this one."""
        del number
        return ''

    def gone(self) -> Sequence[int]:
        """The processes whose machine is gone, so that they cannot be started there again. Called at the end."""
        return ()


def free_port(address: str = '') -> int:
    """A free port of an address of this machine; '': of any."""
    with socket.socket() as free:
        free.bind((address, 0))
        return free.getsockname()[1]


def likely_free_port() -> int:
    """A port that is probably free on another machine."""
    return random.choice(_PORTS)


def identity(number: int, hosts: Sequence[str], address: str) -> dict[str, str]:
    """Environment that tells a process its number, how many there are, the HOST:PORT of the first, and where all are.

    `hosts`: the machine of each process; '' for this one.
    """
    where = {process_hosts.VARIABLE: ','.join(hosts)} if any(hosts) else {}
    return {
        'JAX_COORDINATOR_ADDRESS': address,
        'JAX_NUM_PROCESSES': str(len(hosts)),
        'JAX_PROCESS_ID': str(number),
        **where,
    }


def output_file(run_dir: Path, number: int) -> Path:
    """The file with the output of a process."""
    return run_dir / 'output' / f'process-{number}.txt'


def copy_output(run_dir: Path, number: int, piece: bytes) -> None:
    """Appends output of a process to its file, and writes that of process 0 to the terminal."""
    with contextlib.suppress(OSError), output_file(run_dir, number).open('ab') as output:
        output.write(piece)  # a full disk does not end the training
    if number == 0:
        with contextlib.suppress(OSError, ValueError):  # the terminal is closed
            sys.stdout.write(piece.decode(errors='replace'))
            sys.stdout.flush()


def last_lines(file: Path, begin: int) -> list[str]:
    """The last lines of a file, of those after this offset."""
    with file.open('rb') as output:
        output.seek(begin)
        return output.read().decode(errors='replace').splitlines()[-TAIL:]
