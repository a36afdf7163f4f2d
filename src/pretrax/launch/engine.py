"""The engines of `pretrax launch`, and what each provides for a run: its status, its logs, and a way to stop it."""

import importlib
from collections.abc import Sequence

from pretrax.errors import UserError
from pretrax.launch.record import FILE, LaunchRecord, read_record
from pretrax.storage import AnyPath

# The modules with an `ENGINE`, which are imported when a run of theirs is asked for.
_MODULES = {
    'local': 'pretrax.launch.foreground',
    'ssh': 'pretrax.launch.foreground',
    'ray': 'pretrax.launch.foreground',
    'slurm': 'pretrax.launch.slurm',
    'kubernetes': 'pretrax.launch.kubernetes',
    'tpu-vm': 'pretrax.launch.tpu_vm',
}


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
        """The command that prints the last lines of a process; None: of the whole job.
        Raises UserError if there is none.
        """
        raise NotImplementedError

    def stop(self, record: LaunchRecord) -> str:
        """Asks the job to save and to end. Returns what was done, in a line.
        Raises UserError if that is not possible.
        """
        raise NotImplementedError


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
