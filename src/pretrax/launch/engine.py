"""The engines that start and stop the processes of a run: what each provides, and which one has started a run."""

import importlib
import subprocess
from collections.abc import Sequence

from pretrax.errors import UserError
from pretrax.launch.record import FILE, LaunchRecord, read_record
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


# The modules with an `ENGINE`, which are imported when a run of theirs is asked for.
_MODULES = {
    'local': 'pretrax.launch.foreground',
    'ssh': 'pretrax.launch.foreground',
    'ray': 'pretrax.launch.foreground',
    'slurm': 'pretrax.launch.slurm',
    'kubernetes': 'pretrax.launch.kubernetes',
    'tpu-vm': 'pretrax.launch.tpu_vm',
}


def engine_of(record: LaunchRecord) -> Engine:
    """The engine of a launched run. Raises UserError if this version does not know it."""
    if record.engine not in _MODULES:
        raise UserError(
            f'this run was launched with {record.engine!r}, which this version does not know\n'
            f'known: {", ".join(_MODULES)}'
        )
    return importlib.import_module(_MODULES[record.engine]).ENGINE


def refuse_if_running(run_dir: AnyPath) -> None:
    """Raises UserError if a run that was launched before still runs, or waits to run."""
    if not (run_dir / FILE).is_file():
        return
    record = read_record(run_dir)
    if engine_of(record).is_running(record):
        raise UserError(
            f'{run_dir} runs already: {engine_of(record).status(record)}\n'
            f'stop it first: pretrax launch stop {run_dir}\nor give this run another name: name=NAME'
        )


def run_tool(command: Sequence[str], seconds: float, text: str | None = None) -> subprocess.CompletedProcess[str]:
    """Runs a program of a scheduler, which reads `text`. One that does not answer or start is a failure, too."""
    try:
        return subprocess.run(command, input=text or '', capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, NO_ANSWER, '', f'no answer in {seconds:g} s')
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, '', f'{command[0]} cannot be started: {error.strerror}')
