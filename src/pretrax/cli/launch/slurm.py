"""Submit a run, or a sweep as an array of jobs, to Slurm.

The job saves and is requeued at its time limit, when it is preempted, and when a node is lost.
"""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pretrax.cli._arguments import AllowChanges, Overrides, Retries, Verbose, flags
from pretrax.errors import UserError

if TYPE_CHECKING:
    from pretrax.launch.slurm_script import Resources
    from pretrax.storage import AnyPath


def slurm(
    config: Annotated[
        str, typer.Argument(metavar='CONFIG', help='A YAML file: a configuration, or a sweep of `pretrax bench`.')
    ],
    overrides: Overrides = (),
    nodes: Annotated[int, typer.Option('--nodes', '-N', min=1, help='Number of nodes; each runs one process.')] = 1,
    gpus_per_node: Annotated[int | None, typer.Option('--gpus-per-node', min=1, help='GPUs of each node.')] = None,
    cpus_per_node: Annotated[
        int | None,
        typer.Option('--cpus-per-node', min=1, help='Cores of each node. [default: whole nodes, not shared]'),
    ] = None,
    time: Annotated[
        str | None, typer.Option(metavar='TIME', help='Time limit: 24h, 90m, 1-12:00:00. [default: the partition\'s]')
    ] = None,
    partition: Annotated[str | None, typer.Option('--partition', '-p', metavar='NAME', show_default=False, help='Partition of the cluster.')] = None,
    account: Annotated[str | None, typer.Option('--account', '-A', metavar='NAME', show_default=False, help='Account that the time is charged to.')] = None,
    qos: Annotated[str | None, typer.Option('--qos', metavar='NAME', show_default=False, help='Quality of service.')] = None,
    constraint: Annotated[str | None, typer.Option('--constraint', '-C', metavar='FEATURE', show_default=False, help='Features that the nodes must have.')] = None,
    container: Annotated[
        str | None, typer.Option(metavar='IMAGE', help='Run the processes in this image, through Pyxis (srun --container-image).')
    ] = None,
    sbatch: Annotated[
        tuple[str, ...], typer.Option('--sbatch', metavar='OPTION=VALUE', help='Another option of sbatch, such as mem=64G; may be repeated.')
    ] = (),
    elastic: Annotated[bool, typer.Option('--elastic', help='Continue with fewer nodes if one is lost.')] = False,
    retries: Retries = 3,
    check: Annotated[bool, typer.Option('--check', help='Run `pretrax doctor` on each node first.')] = False,
    out: Annotated[
        str | None, typer.Option('--out', '-o', metavar='DIR', help='For a sweep: directory for the results. [default: sweeps/NAME]')
    ] = None,
    at_once: Annotated[
        int | None, typer.Option('--at-once', min=1, metavar='N', help='For a sweep: most rows that run at the same time.')
    ] = None,
    dry_run: Annotated[bool, typer.Option('--dry-run', help='Print the script, and submit nothing.')] = False,
    allow_changes: AllowChanges = False,
    verbose: Verbose = False,
) -> None:  # fmt: skip
    from pretrax.launch.slurm_script import Resources, minutes_of, stop_within
    from pretrax.launch.sweep import is_sweep

    resources = Resources(
        nodes, gpus_per_node, cpus_per_node, None if time is None else minutes_of(time), partition, account, qos,
        constraint, tuple(sbatch),
    )  # fmt: skip
    if is_sweep(config):
        if overrides or nodes > 1 or elastic or container or check:
            raise UserError(
                f'{config} is a sweep: each row is one process on one node, and takes no changes to the configuration'
            )
        return _sweep(config, resources, out, at_once, dry_run)
    if out is not None or at_once is not None:
        raise UserError(f'{config} is a configuration; --out and --at-once belong to a sweep')
    values = {
        '--gpus-per-node': gpus_per_node,
        '--container': container,
        '--stop-within': stop_within(resources),
        '--retries': retries if retries != 3 else None,
    }
    words = [
        config,
        *overrides,
        *flags(elastic=elastic, check=check, allow_changes=allow_changes, verbose=verbose),
    ]
    words += [word for name, value in values.items() if value is not None for word in (name, str(value))]
    return _run(config, overrides, words, resources, elastic, dry_run)


def _run(
    config: str, overrides: Overrides, words: list[str], resources: 'Resources', elastic: bool, dry_run: bool
) -> None:
    from pretrax.config import load
    from pretrax.launch.local import pretrax_command
    from pretrax.launch.request import check_request
    from pretrax.launch.slurm_job import devices_here
    from pretrax.launch.slurm_script import run_script
    from pretrax.storage import BucketPath

    loaded = load(config, overrides)
    check_request(loaded, resources.nodes, devices_here(resources.gpus_per_node))
    run_dir = loaded.run_dir
    place = (
        Path.cwd() / f'{run_dir.name}-slurm-%j.txt'
        if isinstance(run_dir, BucketPath)
        else run_dir.absolute() / 'slurm-%j.txt'
    )
    script = run_script(
        loaded.name, resources, pretrax_command('launch', 'slurm-job', *words), directory=Path.cwd(), output=place, elastic=elastic,
    )  # fmt: skip
    if dry_run:
        return _print(script, run_dir)
    job = _submit(script, resources, run_dir, place, {})
    print(f'log: {str(place).replace("%j", job)}')
    for verb in ('status', 'logs', 'stop'):
        print(f'  pretrax launch {verb} {shlex.quote(str(run_dir))}')
    return None


def _sweep(sweep: str, resources: 'Resources', out: str | None, at_once: int | None, dry_run: bool) -> None:
    from pretrax.launch.local import pretrax_command
    from pretrax.launch.slurm_script import rows_script
    from pretrax.launch.sweep import read_sweep
    from pretrax.storage import BucketPath, locate

    file = locate(sweep)
    directory = locate(out or f'sweeps/{file.stem}')
    _, rows = read_sweep(file, Path('run'))
    place = (
        Path.cwd() / f'{file.stem}-slurm-%A-%a.txt'
        if isinstance(directory, BucketPath)
        else directory.absolute() / 'slurm-%A-%a.txt'
    )
    command = pretrax_command('bench', sweep, *(['--out', out] if out else []))
    script = rows_script(
        file.stem, resources, command, directory=Path.cwd(), output=place, rows=len(rows), at_once=at_once
    )
    if dry_run:
        return _print(script, directory)
    job = _submit(script, resources, directory, place, {'rows': len(rows)})
    print(f'{len(rows)} rows; logs: {str(place).replace("%A", job).replace("%a", "ROW")}')
    for line in (f'pretrax launch status {directory}', f'{shlex.join(["pretrax", *command[3:]])} --show   # the table'):
        print(f'  {line}')
    return None


def _print(script: str, run_dir: 'AnyPath') -> None:
    """Prints a script that is not submitted."""
    from pretrax.launch.slurm import warn_of_local_files

    warn_of_local_files(run_dir, lambda text: print(text, file=sys.stderr))
    print(script, end='')


def _submit(script: str, resources: 'Resources', run_dir: 'AnyPath', log: Path, facts: dict) -> str:
    """Checks and submits a script, and records the job. Returns its number."""
    from pretrax.launch.engines import refuse_if_running
    from pretrax.launch.record import LaunchRecord, write_record
    from pretrax.launch.slurm import check_cluster, submit, warn_of_local_files

    check_cluster(resources)
    refuse_if_running(run_dir)
    warn_of_local_files(run_dir, lambda text: print(text, file=sys.stderr))
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / 'launch.sbatch').write_text(script)
    except OSError as error:
        raise UserError(
            f'{run_dir} cannot be written: {error.strerror}\ngive another directory: run_dir=PATH'
        ) from error
    job, expected = submit(script)
    name = str(log).replace('%j', job).replace('%A', job)
    write_record(run_dir, LaunchRecord(engine='slurm', job=job, nodes=resources.nodes, facts={'log': name, **facts}))
    print(f'submitted Slurm job {job}, with the script {run_dir}/launch.sbatch{f"; {expected}" if expected else ""}')
    return job
