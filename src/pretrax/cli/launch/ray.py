"""Train on an existing Ray cluster, or run the rows of a sweep there.

Starts one actor per worker, on a node of its own if there are enough, and restarts all of them from the newest checkpoint if
one is lost. The nodes need this version of pretrax, this directory, and a run directory that they share, or a bucket. A file
of `pretrax bench`, which has `base:`, runs one task per row, and shows the table.
"""

import functools
import json
import os
import shlex
import subprocess
import sys
from typing import Annotated

import typer

from pretrax.cli._arguments import AllowChanges, Overrides, Retries, Variables, Verbose, flags, variables
from pretrax.errors import UserError


def ray(
    config: Annotated[str, typer.Argument(metavar='CONFIG', help='A configuration, or a sweep of `pretrax bench`.')],
    overrides: Overrides = (),
    workers: Annotated[
        int | None, typer.Option(min=1, help='Processes, each with all devices of its worker; rows at once of a sweep.')
    ] = None,
    cpus: Annotated[float, typer.Option('--cpus-per-worker', min=0, help='CPUs that Ray reserves per worker.')] = 1,
    gpus: Annotated[int, typer.Option('--gpus-per-worker', min=0, help='GPUs per worker.')] = 0,
    resources: Annotated[
        str, typer.Option(metavar='JSON', help='Other resources per worker, such as \'{"TPU": 4}\'.')
    ] = '{}',
    devices: Annotated[
        int | None,
        typer.Option('--devices-per-worker', min=1, help='Devices per worker. [default: its GPUs or TPUs, or one CPU]'),
    ] = None,
    address: Annotated[str, typer.Option(help='Address of the cluster: auto, HOST:PORT or ray://HOST:PORT.')] = 'auto',
    retries: Retries = 3,
    elastic: Annotated[
        bool, typer.Option('--elastic', help='Continue without a node that is lost, until the cluster has room again.')
    ] = False,
    wait: Annotated[
        bool, typer.Option('--wait', help='Wait for nodes that an autoscaler adds, if the cluster is too small now.')
    ] = False,
    check: Annotated[
        bool, typer.Option('--check', help='Run `pretrax doctor` on the nodes before each start.')
    ] = False,
    directory: Annotated[
        str | None, typer.Option(metavar='PATH', help='Working directory on the nodes. [default: this one]')
    ] = None,
    environment: Variables = (),
    out: Annotated[
        str | None,
        typer.Option('--out', '-o', metavar='DIR', help='For the results of a sweep. [default: sweeps/NAME]'),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option('--dry-run', help='Print what each worker gets and runs, and start nothing.')
    ] = False,
    allow_changes: AllowChanges = False,
    verbose: Verbose = False,
) -> None:
    from pretrax.launch.sizes import restricted_to
    from pretrax.launch.sweep import is_sweep

    bundle = _bundle(resources, cpus, gpus)
    place = directory or os.getcwd()
    words = [config, *overrides]
    if is_sweep(config):
        if overrides:
            raise UserError(f'{overrides[0]}: the changes of a sweep are in its file, under change, grid and rows')
        words += ['--out', out] if out else []
        code = _sweep(words, bundle, place, variables(environment), address, workers, wait, dry_run)
    elif out is not None:
        raise UserError('--out is for the results of a sweep; write run_dir=PATH')
    elif workers is None:
        raise UserError('the number of workers is missing: --workers N')
    else:
        count = devices or int(bundle.get('GPU', 0) or bundle.get('TPU', 0)) or 1
        added = {**restricted_to(devices if 'GPU' not in bundle else None), **variables(environment)}
        given = flags(allow_changes=allow_changes, verbose=verbose, check=check)
        code = _train(
            words, given, bundle, place, added, address, workers, count,
            retries, elastic, wait, dry_run,
        )  # fmt: skip
    if code:
        raise typer.Exit(code)


def _train(
    words: list[str], given: list[str], bundle: dict[str, float], place: str, added: dict[str, str], address: str,
    workers: int, devices: int, retries: int, elastic: bool, wait: bool, dry_run: bool,
) -> int:  # fmt: skip
    from pretrax.config import load
    from pretrax.launch.elastic import Slots
    from pretrax.launch.engines import refuse_if_running
    from pretrax.launch.foreground import record_launcher
    from pretrax.launch.host_facts import remove_token, write_token
    from pretrax.launch.ray import RayLaunch, Workers
    from pretrax.launch.ray_cluster import Cluster
    from pretrax.launch.request import check_request
    from pretrax.launch.sizes import misfit
    from pretrax.launch.supervisor import Supervisor
    from pretrax.machine.ray_connection import connect_ray
    from pretrax.observe.lasting_output import LastingOutput
    from pretrax.storage.working_directory import working_directory

    loaded = load(words[0], words[1:])
    check_request(loaded, workers, devices)
    if dry_run:
        print(f'{workers} actors, each with {_written(bundle)}, in {place}, on nodes of their own if there are enough:')
        print(shlex.join(['pretrax', 'launch', 'node', *words, *given]))
        return 0
    say = functools.partial(print, flush=True, file=LastingOutput(sys.stdout))
    refuse_if_running(loaded.run_dir)
    cluster = Cluster(connect_ray(address), bundle)
    if not wait:
        cluster.check(workers)
    token = write_token(loaded)
    try:
        asked = Workers(workers, bundle, [*words, *given], words, token, place, added)
        launch = RayLaunch(cluster, asked, working_directory(loaded.run_dir), elastic, say)
        slots = Slots(workers, lambda number: misfit(loaded, number * devices) is None, ready=launch.ready)
        say(
            f'launch: {workers} workers with {_written(bundle)} each, on a Ray cluster of {len(cluster.nodes())} nodes; '
            f'output in {loaded.run_dir}/output'
        )
        record_launcher(loaded.run_dir, 'ray', workers, say)
        return Supervisor(loaded, launch.start, slots=slots, retries=retries, elastic=elastic, say=say).run()
    finally:
        remove_token(loaded, token)


def _sweep(
    words: list[str], bundle: dict[str, float], place: str, added: dict[str, str], address: str,
    at_once: int | None, wait: bool, dry_run: bool,
) -> int:  # fmt: skip
    from pathlib import Path

    from pretrax.launch.ray_cluster import Cluster
    from pretrax.launch.ray_sweep import run_rows, show_command
    from pretrax.launch.sweep import read_sweep
    from pretrax.machine.ray_connection import connect_ray
    from pretrax.storage import locate

    rows = len(read_sweep(locate(words[0]), Path('run'))[1])
    if dry_run:
        print(f'{rows} tasks, each with {_written(bundle)}, in {place}:')
        print(shlex.join(['pretrax', 'bench', *words, '--row', 'N']))
        return 0
    cluster = Cluster(connect_ray(address), bundle)
    if not wait:
        cluster.check(1)
    say = functools.partial(print, flush=True)
    say(f'launch: {rows} rows with {_written(bundle)} each, on a Ray cluster of {len(cluster.nodes())} nodes')
    is_done = run_rows(cluster, words, rows, directory=place, environment=added, at_once=at_once, say=say)
    code = subprocess.run(show_command(words)).returncode
    return code or int(not is_done)


def _bundle(resources: str, cpus: float, gpus: int) -> dict[str, float]:
    """The resources of a worker, by Ray's names; those that are 0 are left out."""
    try:
        others = json.loads(resources)
    except json.JSONDecodeError:
        others = None
    if not isinstance(others, dict) or not all(type(amount) in (int, float) for amount in others.values()):
        raise UserError(f'--resources {resources}: expected JSON such as \'{{"TPU": 4}}\'')
    found = {'CPU': cpus, 'GPU': float(gpus), **others}
    return {name: float(amount) for name, amount in found.items() if amount}


def _written(bundle: dict[str, float]) -> str:
    return ', '.join(f'{name} {amount:g}' for name, amount in bundle.items())
