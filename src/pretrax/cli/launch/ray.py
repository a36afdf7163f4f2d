"""Train on an existing Ray cluster, or run the rows of a sweep there.

Starts one actor per worker, on a node of its own if there are enough, and restarts all of them from the newest
checkpoint if one is lost. The nodes need this version of pretrax, this directory, and a run directory that they share,
or a bucket. A file of `pretrax bench`, which has `base:`, runs one task per row, and shows the table.
"""

import contextlib
import dataclasses
import functools
import json
import os
import shlex
import subprocess
import sys

from pretrax.cli._arguments import Launch, Retries, Standbys, Variables, Verbose, variables
from pretrax.errors import UserError
from pretrax.option import argument, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Launch):
    config: str = argument('A configuration, or a sweep of `pretrax bench`.', metavar='CONFIG')
    workers: int | None = option('Processes, each with all devices of its worker; rows at once of a sweep.', min=1)
    cpus: float = option('CPUs that Ray reserves per worker.', '--cpus-per-worker', default=1, min=0)
    gpus: int = option('GPUs per worker.', '--gpus-per-worker', default=0, min=0)
    resources: str = option('Other resources per worker, such as \'{"TPU": 4}\'.', default='{}', metavar='JSON')
    devices: int | None = option(
        'Devices per worker. [default: its GPUs or TPUs, or one CPU]', '--devices-per-worker', min=1
    )
    address: str = option('Address of the cluster: auto, HOST:PORT or ray://HOST:PORT.', default='auto')
    retries: Retries = 3
    elastic: bool = option('Continue without a node that is lost, until the cluster has room again.', default=False)
    wait: bool = option('Wait for nodes that an autoscaler adds, if the cluster is too small now.', default=False)
    check: bool = option('Run `pretrax doctor` on the nodes before each start.', default=False)
    directory: str | None = option('Working directory on the nodes. [default: this one]', metavar='PATH')
    standbys: Standbys = True
    environment: Variables = ()
    out: str | None = option('Directory for the results of a sweep. [default: sweeps/NAME]', '-o', metavar='DIR')
    verbose: Verbose = False

    @property
    def bundle(self) -> dict[str, float]:
        """The resources of a worker, by Ray's names; those that are 0 are left out. Raises UserError."""
        try:
            others = json.loads(self.resources)
        except json.JSONDecodeError:
            others = None
        if not isinstance(others, dict) or not all(type(amount) in (int, float) for amount in others.values()):
            raise UserError(f'--resources {self.resources}: expected JSON such as \'{{"TPU": 4}}\'')
        amounts = {'CPU': self.cpus, 'GPU': float(self.gpus), **others}
        return {name: float(amount) for name, amount in amounts.items() if amount}

    @property
    def place(self) -> str:
        """The working directory on the nodes."""
        return self.directory or os.getcwd()


def ray(options: Options) -> int:
    from pretrax.experiments.sweep import is_sweep

    bundle = options.bundle
    if is_sweep(options.config):
        if options.overrides:
            raise UserError(
                f'{options.overrides[0]}: the changes of a sweep are in its file, under change, grid and rows'
            )
        return _sweep(options, bundle)
    if options.out is not None:
        raise UserError('--out is for the results of a sweep; write run_dir=PATH')
    if options.workers is None:
        raise UserError('the number of workers is missing: --workers N')
    return _train(options, options.workers, bundle)


def _train(options: Options, workers: int, bundle: dict[str, float]) -> int:
    from pretrax.doctor.host_facts import remove_token, write_token
    from pretrax.launch.elastic import Slots
    from pretrax.launch.foreground import record_launcher
    from pretrax.launch.ray import RayLaunch, Workers
    from pretrax.launch.ray_cluster import Cluster
    from pretrax.launch.registry import refuse_if_running
    from pretrax.launch.restarts import RestartOptions
    from pretrax.launch.sizes import check_request, misfit, restricted_to
    from pretrax.launch.supervisor import Supervisor
    from pretrax.observe.lasting_output import LastingOutput
    from pretrax.storage.locate import working_directory
    from pretrax.system.ray_connection import connect_ray
    from pretrax.system.target import Target

    devices = options.devices or int(bundle.get('GPU', 0) or bundle.get('TPU', 0)) or 1
    added = {**restricted_to(options.devices if 'GPU' not in bundle else None), **variables(options.environment)}
    no_standbys = [] if options.standbys else ['--no-standbys']
    arguments = [*options.words, *options.flags('allow_changes', 'verbose', 'check'), *no_standbys]
    loaded = options.load()
    check_request(loaded, workers, devices)
    if not options.dry_run:
        refuse_if_running(loaded.run_dir)
    platform = next((kind.lower() for kind in ('GPU', 'TPU') if kind in bundle), 'cpu')
    options.check_start(Target(workers * devices, platform, has_these_files=options.directory is None))
    if options.dry_run:
        print(
            f'{workers} actors, each with {_written(bundle)}, in {options.place}, '
            'on nodes of their own if there are enough:'
        )
        print(shlex.join(['pretrax', 'launch', 'node', *arguments]))
        return 0
    say = functools.partial(print, flush=True, file=LastingOutput(sys.stdout))
    cluster = Cluster(connect_ray(options.address), bundle)
    if not options.wait:
        cluster.check(workers)
    token = write_token(loaded)
    try:
        asked = Workers(workers, arguments, options.words, token, directory=options.place, environment=added)
        launch = RayLaunch(cluster, asked, working_directory(loaded.run_dir), options.elastic, say)
        slots = Slots(workers, lambda number: misfit(loaded, number * devices) is None, ready=launch.ready)
        say(
            f'launch: {workers} workers with {_written(bundle)} each, on a Ray cluster of {len(cluster.nodes())} '
            f'nodes; output in {loaded.run_dir}/output'
        )
        record_launcher(loaded.run_dir, 'ray', workers, say)
        restarts = RestartOptions(retries=options.retries, elastic=options.elastic)
        with contextlib.closing(launch):
            return Supervisor(loaded, launch.start, slots, restarts, say=say).run()
    finally:
        remove_token(loaded, token)


def _sweep(options: Options, bundle: dict[str, float]) -> int:
    from pathlib import Path

    from pretrax.experiments.ray_sweep import run_rows, show_command
    from pretrax.experiments.sweep import read_sweep
    from pretrax.launch.ray_cluster import Cluster
    from pretrax.storage import locate
    from pretrax.system.ray_connection import connect_ray

    words = [options.config, *(['--out', options.out] if options.out else [])]
    added = variables(options.environment)
    rows = len(read_sweep(locate(options.config), Path('run'))[1])
    if options.dry_run:
        print(f'{rows} tasks, each with {_written(bundle)}, in {options.place}:')
        print(shlex.join(['pretrax', 'bench', *words, '--row', 'N']))
        return 0
    cluster = Cluster(connect_ray(options.address), bundle)
    if not options.wait:
        cluster.check(1)
    say = functools.partial(print, flush=True)
    say(f'launch: {rows} rows with {_written(bundle)} each, on a Ray cluster of {len(cluster.nodes())} nodes')
    is_done = run_rows(
        cluster, words, rows, directory=options.place, environment=added, at_once=options.workers, say=say
    )
    code = subprocess.run(show_command(words)).returncode
    return code or int(not is_done)


def _written(bundle: dict[str, float]) -> str:
    return ', '.join(f'{name} {amount:g}' for name, amount in bundle.items())
