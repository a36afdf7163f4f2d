"""`pretrax launch local CONFIG [key=value ...]`: a run in several processes on this machine, started again when it fails."""

import functools

import typer

from pretrax.config import load
from pretrax.errors import UserError
from pretrax.launch.local import LocalLaunch, train_command
from pretrax.launch.sizes import devices_per_process


def local(
    path: str, overrides: list[str], processes: int, devices: int | None, retries: int, elastic: bool,
    allow_changes: bool,
) -> None:  # fmt: skip
    """Checks the configuration, once for all processes, and runs it; exits with the code of the run."""
    config = load(path, overrides)
    section = config.processes
    if section.index is not None or section.coordinator is not None:
        raise UserError('processes.index and processes.coordinator are for the launcher to say; leave them out')
    if section.count is not None and (elastic or section.count != processes):
        raise UserError(
            f'processes.count is {section.count}, and the launcher is to start {processes}'
            f'{", or fewer (--elastic)" if elastic else ""}\nleave processes.count out'
        )
    count, why = devices_per_process(config, processes, devices)
    say = functools.partial(print, flush=True)
    others = (
        ''
        if processes == 1
        else f'; output of {"1" if processes == 2 else f"1 to {processes - 1}"} in {config.run_dir}/output'
    )
    say(f'launch: {_n(processes, "process", "es")} with {_n(count, "device")} each ({why}){others}')
    arguments = [path, *overrides, *(['--allow-changes'] if allow_changes else [])]
    code = LocalLaunch(
        config, train_command(arguments), processes=processes, devices=count, retries=retries, elastic=elastic, say=say
    ).run()
    if code:
        raise typer.Exit(code)


def _n(count: int, what: str, plural: str = 's') -> str:
    return f'{count} {what}{plural if count > 1 else ""}'
