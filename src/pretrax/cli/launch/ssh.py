"""Train on hosts that are reached with OpenSSH.

Starts one process on each host, restarts all of them from the newest checkpoint if one is lost, and ends all of them when
it ends. ~/.ssh/config is respected. The hosts need this version of pretrax in the same directory, and a run directory that
they share, or a bucket.
"""

import functools
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from pretrax.cli._arguments import AllowChanges, ConfigFile, Overrides, Retries, Variables, Verbose, flags, variables
from pretrax.errors import UserError


def ssh(
    config: ConfigFile,
    overrides: Overrides = (),
    hosts: Annotated[
        str | None, typer.Option(metavar='HOSTS', help='Such as box1,box2,user@box3:2222. The first one coordinates.')
    ] = None,
    hosts_file: Annotated[
        Path | None, typer.Option('--hosts-file', metavar='FILE', help='A file with a host on each line.')
    ] = None,
    devices: Annotated[
        int | None, typer.Option('--devices-per-node', min=1, help='Devices per host. [default: all of them]')
    ] = None,
    retries: Retries = 3,
    elastic: Annotated[
        bool, typer.Option('--elastic', help='Continue without a host that is lost, until it answers again.')
    ] = False,
    patience: Annotated[
        float, typer.Option(min=0, help='Minutes to wait for a lost host, which may be booting. Not with --elastic.')
    ] = 10,
    check: Annotated[
        bool, typer.Option('--check', help='Run `pretrax doctor` on the hosts before each start.')
    ] = False,
    directory: Annotated[
        str | None, typer.Option(metavar='PATH', help='Working directory on the hosts. [default: this one]')
    ] = None,
    python: Annotated[
        str | None,
        typer.Option(metavar='PATH', help='Python with pretrax on the hosts. [default: the path of this one]'),
    ] = None,
    coordinator: Annotated[
        str | None,
        typer.Option(
            '--coordinator-address',
            metavar='ADDRESS',
            help='Address of the first host for the others, if they need another one.',
        ),
    ] = None,
    environment: Variables = (),
    program: Annotated[
        str, typer.Option('--ssh', metavar='COMMAND', help="The ssh client with options, such as 'ssh -F FILE'.")
    ] = 'ssh',
    dry_run: Annotated[
        bool, typer.Option('--dry-run', help='Print the command for each host, and start nothing.')
    ] = False,
    allow_changes: AllowChanges = False,
    verbose: Verbose = False,
) -> None:
    import shlex

    from pretrax.config import load
    from pretrax.launch.elastic import Slots
    from pretrax.launch.engines import refuse_if_running
    from pretrax.launch.foreground import record_launcher
    from pretrax.launch.host_checks import check_hosts, devices_of_hosts
    from pretrax.launch.request import check_request
    from pretrax.launch.sizes import misfit
    from pretrax.launch.ssh import Ssh, SshLaunch, parse_hosts, read_hosts
    from pretrax.launch.supervisor import Supervisor
    from pretrax.observe.lasting_output import LastingOutput
    from pretrax.storage.working_directory import working_directory

    if (hosts is None) == (hosts_file is None):
        raise UserError('give --hosts box1,box2 or --hosts-file FILE' + (', not both' if hosts else ''))
    given = parse_hosts(hosts.split(',') if hosts_file is None and hosts else read_hosts(hosts_file or Path()))
    loaded = load(config, overrides)
    words = [config, *overrides]
    say = functools.partial(print, flush=True, file=LastingOutput(sys.stdout))
    added = variables(environment)  # perhaps secrets
    launch = SshLaunch(
        Ssh(program, directory or os.getcwd(), python or sys.executable), given,
        [*words, *flags(allow_changes=allow_changes, verbose=verbose, check=check)],
        environment=dict.fromkeys(added, '***') if dry_run else added, devices=devices, coordinator=coordinator,
        directory=working_directory(loaded.run_dir), patience=0.0 if elastic else 60 * patience, say=say,
    )  # fmt: skip
    if devices is not None:
        check_request(loaded, len(given), devices)
    if dry_run:
        for process in launch.processes(given):
            print(f'{process.host}: {shlex.join(process.command)}')
        return
    refuse_if_running(loaded.run_dir)
    say(f'launch: checking {len(given)} hosts')
    found = check_hosts(launch, loaded, words)
    count = devices or devices_of_hosts(given, found)
    check_request(loaded, len(given), count)
    say(
        f'launch: {len(given)} processes with {count} device{"s" if count > 1 else ""} each on '
        f'{", ".join(host.name for host in given)}; output in {loaded.run_dir}/output'
    )
    slots = Slots(
        len(given), lambda number: misfit(loaded, number * count) is None, ready=launch.ready if elastic else None
    )
    record_launcher(loaded.run_dir, 'ssh', len(given), say, hosts=[host.name for host in given])
    code = Supervisor(loaded, launch.start, slots=slots, retries=retries, elastic=elastic, say=say).run()
    if code:
        raise typer.Exit(code)
