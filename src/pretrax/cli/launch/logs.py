"""Print the newest output of a launched run."""

import subprocess
from typing import Annotated

import typer

from pretrax.cli._arguments import LaunchedRun
from pretrax.errors import UserError


def logs(
    run: LaunchedRun,
    process: Annotated[
        int | None,
        typer.Option('--process', '-p', min=0, help='Log of this process. [default: the whole job, or process 0]'),
    ] = None,
    lines: Annotated[int, typer.Option('--lines', '-n', min=0, help='Number of last lines to print.')] = 100,
    follow: Annotated[bool, typer.Option('--follow', '-f', help='Print new lines as they come.')] = False,
) -> None:
    from pretrax.launch.record import read_record, run_named
    from pretrax.launch.registry import engine_of

    run_dir = run_named(run)
    record = read_record(run_dir)
    command = list(engine_of(record).log_command(record, run_dir, process, lines, follow))
    try:
        code = subprocess.run(command).returncode
    except FileNotFoundError:
        raise UserError(f'there is no {command[0]} on this machine, which prints these logs') from None
    if code:
        raise typer.Exit(code)
