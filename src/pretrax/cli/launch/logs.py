"""Print the newest output of a launched run."""

import subprocess

from pretrax.cli._arguments import LaunchedRun
from pretrax.errors import UserError
from pretrax.option import option


def logs(
    run: LaunchedRun,
    process: int | None = option('Log of this process. [default: the whole job, or process 0]', '-p', min=0),
    lines: int = option('Number of last lines to print.', '-n', default=100, min=0),
    follow: bool = option('Print new lines as they come.', '-f', default=False),
) -> int:
    from pretrax.launch.record import read_record
    from pretrax.launch.registry import engine_of
    from pretrax.storage import locate_run

    run_dir = locate_run(run)
    record = read_record(run_dir)
    command = list(engine_of(record).log_command(record, run_dir, process, lines, follow))
    try:
        return subprocess.run(command).returncode
    except FileNotFoundError:
        raise UserError(f'there is no {command[0]} on this machine, which prints these logs') from None
