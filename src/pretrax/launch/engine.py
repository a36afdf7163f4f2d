"""What each engine provides for a run that it has started: its status, its logs, and a way to stop it."""

from collections.abc import Sequence

from pretrax.launch.record import LaunchRecord
from pretrax.storage import AnyPath


class Engine:
    """What starts and stops the processes of a run: a scheduler, or a launcher that waits for them."""

    def status(self, record: LaunchRecord) -> str:
        """What the engine says about the job, in a line. Raises UserError if it cannot be asked."""
        raise NotImplementedError

    def is_running(self, record: LaunchRecord) -> bool:
        """Whether the job certainly runs, or waits to run. Raises UserError if the engine cannot be asked."""
        del record
        return False

    def log_command(
        self, record: LaunchRecord, run_dir: AnyPath, process: int | None, lines: int, follow: bool
    ) -> Sequence[str]:
        """The command that prints a process's last lines; None: the whole job's. Raises UserError if there is none."""
        raise NotImplementedError

    def stop(self, record: LaunchRecord) -> str:
        """Asks the job to save and end. Returns what was done, in a line. Raises UserError if it cannot be asked."""
        raise NotImplementedError
