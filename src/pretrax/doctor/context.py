"""The context of a check: the process, its machine and its run."""

import dataclasses
import socket
from pathlib import Path

from pretrax.config import RunConfig


@dataclasses.dataclass(frozen=True)
class Context:
    """A process, its machine, and the run that is to be trained.

    Attributes:
        config: config of the run; None: only the machine is checked.
        index: index of the process.
        processes: how many there are.
        seconds: for each check.
        root: directory with `proc`, `sys` and `dev`, for tests.
    """

    config: RunConfig | None
    index: int = 0
    processes: int = 1
    seconds: float = 120.0
    root: Path = Path('/')

    @property
    def host(self) -> str:
        """The name of the machine."""
        return socket.gethostname()

    def read(self, path: str) -> str:
        """The text of a file of the system, such as 'proc/meminfo'; '' if it cannot be read."""
        try:
            return (self.root / path).read_text(errors='replace').strip()
        except OSError:
            return ''
