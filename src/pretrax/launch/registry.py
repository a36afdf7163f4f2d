"""Finds the engine of a launched run by the name in its record."""

import importlib

from pretrax.errors import UserError
from pretrax.launch.engine import Engine
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
