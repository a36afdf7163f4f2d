"""Commands that run side by side, and the ports where processes meet."""

import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from subprocess import CompletedProcess

from preloaded import programs, run

PATIENCE = 600  # seconds for what takes a few on a quiet machine


def free_port() -> int:
    """A port of this machine where nothing listens."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        return free.getsockname()[1]


def coordinator_address() -> str:
    """Where the processes of a run can meet."""
    return f'localhost:{free_port()}'


def run_side_by_side(
    commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]
) -> list[CompletedProcess]:
    """Runs commands, each in its own environment, at the same time and to their ends.

    Args:
        commands: those of `preloaded.run`.

    Raises:
        subprocess.TimeoutExpired: a command has not ended after PATIENCE; all of them are killed by then.
    """
    programs()  # is not safe to call first in threads
    with ThreadPoolExecutor(len(commands)) as threads:
        ends = [
            threads.submit(run, command, env=environment, timeout=PATIENCE)
            for command, environment in zip(commands, environments, strict=True)
        ]
    return [end.result() for end in ends]
