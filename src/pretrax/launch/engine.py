"""What each engine provides for a run that it has started: its status, its logs, and a way to stop it."""

import subprocess
from collections.abc import Sequence

from pretrax.launch.record import LaunchRecord
from pretrax.storage import AnyPath

NO_ANSWER = 124  # exit code of a command that was ended, as `timeout` has it


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


def run_tool(command: Sequence[str], seconds: float, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a program of a scheduler, which reads `text`. One that does not answer or start is a failure, too."""
    try:
        return subprocess.run(command, input=text or '', capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, NO_ANSWER, '', f'no answer in {seconds:g} s')
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, '', f'{command[0]} cannot be started: {error.strerror}')
