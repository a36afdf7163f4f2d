"""`launch.json` of a run: which engine runs it, and as which job. `pretrax launch status`, `logs` and `stop` read it.

{"engine": "slurm", "job": "4711", "nodes": 4, "time": 1790000000.0, "command": ["pretrax", "launch", "slurm", ...],
 "facts": {"log": "/shared/runs/base/slurm-4711.txt"}}
"""

import socket
import sys
import time
from pathlib import Path
from typing import Any

import pydantic

from pretrax.errors import UserError, first_line
from pretrax.storage import AnyPath
from pretrax.storage.locate import write_whole
from pretrax.system.command_line import without_secrets

FILE = 'launch.json'
RUNS = Path('runs')  # where a run that is given by its bare name is


class LaunchRecord(pydantic.BaseModel):
    """How a run was launched most recently."""

    model_config = pydantic.ConfigDict(frozen=True)

    engine: str  # 'slurm', 'kubernetes', 'tpu-vm', 'ray', 'ssh' or 'local'
    job: str  # what the engine calls it
    nodes: int  # number of machines, or of processes of one machine
    time: float = pydantic.Field(default_factory=time.time)  # seconds since 1970
    host: str = pydantic.Field(default_factory=socket.gethostname)  # where the command was typed
    # The command, without secrets
    command: list[str] = pydantic.Field(default_factory=lambda: without_secrets(['pretrax', *sys.argv[1:]]))
    facts: dict[str, Any] = {}  # what else the engine needs to find the job: its namespace, its zone, its log


def write_record(run_dir: AnyPath, record: LaunchRecord) -> None:
    """Writes the record of a run, on a disk or in a bucket. Raises OSError."""
    run_dir.mkdir(parents=True, exist_ok=True)
    write_whole(run_dir / FILE, (record.model_dump_json(indent=1) + '\n').encode())


def read_record(run_dir: AnyPath) -> LaunchRecord:
    """The record of a run. Raises UserError if it was not launched, or the file cannot be read."""
    path = run_dir / FILE
    try:
        return LaunchRecord.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f'{run_dir}: there is no {FILE}: `pretrax launch` has not started this run\n'
            'give a run directory, its name below runs/, or the URL of a run in a bucket; `pretrax runs` lists them'
        ) from None
    except pydantic.ValidationError as error:
        raise UserError(f'{path} is not a record of a launch: {first_line(error)}\nlaunch the run again') from None
    except OSError as error:
        raise UserError(f'{path} cannot be read: {error.strerror}') from error
