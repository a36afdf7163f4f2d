"""Submit a run, or a sweep as an array of jobs, to Slurm.

The job saves and is requeued at its time limit, when it is preempted, and when a node is lost.
"""

import dataclasses
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from pretrax.cli._arguments import Launch, Retries, Verbose
from pretrax.errors import UserError, system_errors
from pretrax.launch.options import Resources
from pretrax.option import argument, option

if TYPE_CHECKING:
    from pretrax.storage import AnyPath


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Launch):
    config: str = argument('A YAML file: a configuration, or a sweep of `pretrax bench`.', metavar='CONFIG')
    resources: Resources
    container: str | None = option(
        'Run the processes in this image, through Pyxis (srun --container-image).', metavar='IMAGE'
    )
    elastic: bool = option('Continue with fewer nodes if one is lost.', default=False)
    retries: Retries = 3
    check: bool = option('Run `pretrax doctor` on each node first.', default=False)
    out: str | None = option('For a sweep: directory for the results. [default: sweeps/NAME]', '-o', metavar='DIR')
    at_once: int | None = option('For a sweep: most rows that run at the same time.', min=1, metavar='N')
    verbose: Verbose = False


def slurm(options: Options) -> None:
    from pretrax.experiments.sweep import is_sweep
    from pretrax.launch.sizes import gpu_key
    from pretrax.launch.slurm_script import stop_within

    config, resources = options.config, options.resources
    seconds = stop_within(resources)  # checks --time, for a sweep too
    if is_sweep(config):
        if options.overrides or resources.nodes > 1 or options.elastic or options.container or options.check:
            raise UserError(
                f'{config} is a sweep: each row is one process on one node, and takes no changes to the configuration'
            )
        return _sweep(options)
    if options.out is not None or options.at_once is not None:
        raise UserError(f'{config} is a configuration; --out and --at-once belong to a sweep')
    if resources.gpus_per_node is None and (key := gpu_key(options.load())) is not None:
        resources = dataclasses.replace(resources, gpus_per_node=_ask_for_gpus(key))
        options = dataclasses.replace(options, resources=resources)
    values = {
        '--gpus-per-node': resources.gpus_per_node or None,
        '--container': options.container,
        '--stop-within': seconds,
        '--retries': options.retries if options.retries != 3 else None,
    }
    words = [*options.words, *options.flags('elastic', 'check', 'allow_changes', 'verbose')]
    words += [word for name, value in values.items() if value is not None for word in (name, str(value))]
    return _run(options, words)


def _ask_for_gpus(key: str) -> int:
    """GPUs of each node, for a configuration that is made for GPUs. Raises UserError if nobody can be asked."""
    problem = f'the job asks for no GPUs, and {key} is for GPUs'
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UserError(f'{problem}\ngive --gpus-per-node N; to train on CPUs: --gpus-per-node 0')
    print(f'{problem}\nGPUs of each node (0: train on CPUs): ', end='', file=sys.stderr, flush=True)
    answer = sys.stdin.readline().strip()
    if not answer.isdecimal():
        raise UserError(f'{answer or "nothing"} is not a number of GPUs\ngive --gpus-per-node N')
    return int(answer)


def _run(options: Options, words: list[str]) -> None:
    from pretrax.launch.local import pretrax_command
    from pretrax.launch.sizes import check_request
    from pretrax.launch.slurm_job import devices_here
    from pretrax.launch.slurm_script import run_script
    from pretrax.system.target import Target

    loaded, resources = options.load(), options.resources
    devices = devices_here(resources.gpus_per_node)
    check_request(loaded, resources.nodes, devices)
    platform = 'gpu' if resources.gpus_per_node else 'cpu'
    options.check_start(Target(resources.nodes * devices, platform))
    run_dir = loaded.run_dir
    place = _log(run_dir, run_dir.name, 'slurm-%j.txt')
    command = pretrax_command('launch', 'slurm-job', *words)
    script = run_script(loaded.name, resources, command, directory=Path.cwd(), output=place, elastic=options.elastic)
    if options.dry_run:
        return _print(script, run_dir)
    job = _submit(script, resources, run_dir, place, {})
    print(f'log: {str(place).replace("%j", job)}')
    for verb in ('status', 'logs', 'stop'):
        print(f'  pretrax launch {verb} {shlex.quote(str(run_dir))}')
    return None


def _sweep(options: Options) -> None:
    from pretrax.experiments.sweep import read_sweep
    from pretrax.launch.local import pretrax_command
    from pretrax.launch.slurm_script import rows_script
    from pretrax.storage import locate

    file = locate(options.config)
    directory = locate(options.out or f'sweeps/{file.stem}')
    _, rows = read_sweep(file, Path('run'))
    place = _log(directory, file.stem, 'slurm-%A-%a.txt')
    command = pretrax_command('bench', options.config, *(['--out', options.out] if options.out else []))
    array = f'1-{len(rows)}' + (f'%{options.at_once}' if options.at_once else '')
    script = rows_script(file.stem, options.resources, command, directory=Path.cwd(), output=place, array=array)
    if options.dry_run:
        return _print(script, directory)
    job = _submit(script, options.resources, directory, place, {'rows': len(rows)})
    print(f'{len(rows)} rows; logs: {str(place).replace("%A", job).replace("%a", "ROW")}')
    for line in (f'pretrax launch status {directory}', f'{shlex.join(["pretrax", *command[3:]])} --show   # the table'):
        print(f'  {line}')
    return None


def _log(directory: 'AnyPath', name: str, file: str) -> Path:
    """Where Slurm writes output: in the directory, or in the current one under a name if that is a bucket."""
    return directory.absolute() / file if isinstance(directory, Path) else Path.cwd() / f'{name}-{file}'


def _print(script: str, run_dir: 'AnyPath') -> None:
    """Prints a script that is not submitted."""
    from pretrax.launch.slurm import warn_of_local_files

    warn_of_local_files(run_dir, lambda text: print(text, file=sys.stderr))
    print(script, end='')


def _submit(script: str, resources: Resources, run_dir: 'AnyPath', log: Path, facts: dict) -> str:
    """Checks and submits a script, and records the job. Returns its number."""
    from pretrax.launch.record import LaunchRecord, write_record
    from pretrax.launch.registry import refuse_if_running
    from pretrax.launch.slurm import check_cluster, submit, warn_of_local_files

    check_cluster(resources)
    refuse_if_running(run_dir)
    warn_of_local_files(run_dir, lambda text: print(text, file=sys.stderr))
    with system_errors(f'{run_dir} cannot be written', '\ngive another directory: run_dir=PATH'):
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / 'launch.sbatch').write_text(script)
    job, expected = submit(script)
    name = str(log).replace('%j', job).replace('%A', job)
    write_record(run_dir, LaunchRecord(engine='slurm', job=job, nodes=resources.nodes, facts={'log': name, **facts}))
    print(f'submitted Slurm job {job}, with the script {run_dir}/launch.sbatch{f"; {expected}" if expected else ""}')
    return job
