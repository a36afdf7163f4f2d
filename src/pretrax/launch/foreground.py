"""Launchers that wait for their processes: on this machine, over ssh, on a Ray cluster."""

import os
import signal
import socket
from collections.abc import Sequence
from typing import Any

from pretrax.errors import Report, UserError, system_errors
from pretrax.launch.engine import Engine
from pretrax.launch.group import output_file
from pretrax.launch.record import LaunchRecord, write_record
from pretrax.storage import AnyPath
from pretrax.storage.locate import working_directory
from pretrax.system.launchers import has_ended, identity, is_here


class Foreground(Engine):
    """A launcher that runs as long as its run does."""

    def status(self, record: LaunchRecord) -> str:
        where = f'{record.engine} launcher {record.job} on {record.host}'
        if _has_ended(record):
            return f'{where}: ended'
        if not is_here(record.facts['launcher']):
            return f'{where}: only seen from there'
        return f'{where}: running, {record.nodes} process{"es" if record.nodes > 1 else ""}'

    def is_running(self, record: LaunchRecord) -> bool:
        return is_here(record.facts['launcher'])

    def log_command(
        self, record: LaunchRecord, run_dir: AnyPath, process: int | None, lines: int, follow: bool
    ) -> Sequence[str]:
        file = output_file(working_directory(run_dir), process or 0)
        if not file.is_file():
            where = 'it writes to the terminal of the launcher' if not process else f'there is no {file}'
            raise UserError(f'no output of process {process or 0} is kept on this machine: {where}')
        return ['tail', '-n', str(lines), *(['-F'] if follow else []), str(file)]

    def stop(self, record: LaunchRecord) -> str:
        if _has_ended(record):
            return f'the launcher {record.job} on {record.host} has ended already'
        if not is_here(record.facts['launcher']):
            raise UserError(
                f'the launcher runs on {record.host}, maybe in a container\n'
                f'run this command there, or kill -TERM {record.job}'
            )
        with system_errors(f'the launcher {record.job} cannot be asked to stop'):
            os.kill(int(record.job), signal.SIGTERM)
        return f'asked the launcher {record.job} to stop: its processes save the state and end'


def _has_ended(record: LaunchRecord) -> bool:
    """Whether the launcher has certainly ended: its process is gone, or this machine was rebooted since."""
    launcher = record.facts['launcher']
    is_restarted = record.host == socket.gethostname() and identity()['boot'] not in ('', launcher.get('boot'))
    return is_restarted or has_ended(launcher)


ENGINE = Foreground()


def record_launcher(run_dir: AnyPath, engine: str, nodes: int, say: Report, **facts: Any) -> None:
    """Records that this process launches a run. A file that cannot be written is a warning."""
    launcher = identity()
    record = LaunchRecord(engine=engine, job=launcher['pid'], nodes=nodes, facts={'launcher': launcher, **facts})
    try:
        write_record(run_dir, record)
    except OSError as error:
        say(f'WARNING: launch: `pretrax launch status` will not find this run: {error.strerror}')
