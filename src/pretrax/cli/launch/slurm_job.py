"""Supervise a run from inside a Slurm job. The script of `launch slurm` runs this on the first node.

It starts a step on each node of the job, and starts them again when a process is lost. Exit code 75: the run is not
finished, and the job should be requeued.
"""

import dataclasses
import functools
import os
import sys

from pretrax.cli._arguments import AllowChanges, Configuration, Retries, Verbose
from pretrax.option import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Configuration):
    gpus_per_node: int | None = option('GPUs of each process. [default: as the job says]', min=1)
    container: str | None = option('Run the processes in this image, through Pyxis.', metavar='IMAGE')
    retries: Retries = 3
    elastic: bool = option('Continue with fewer nodes if one is lost.', default=False)
    check: bool = option('Run `pretrax doctor` on each node first.', default=False)
    stop_within: int | None = option(
        'Time to save after a request to stop. [default: no limit]', min=1, metavar='SECONDS'
    )
    allow_changes: AllowChanges = False
    verbose: Verbose = False


def slurm_job(options: Options) -> int:
    from pretrax.launch.restarts import RestartOptions
    from pretrax.launch.slurm_job import SlurmJob, devices_here, node_python, supervise
    from pretrax.observe.lasting_output import LastingOutput
    from pretrax.storage import BucketPath

    loaded = options.load()
    mounts = () if isinstance(loaded.run_dir, BucketPath) else (loaded.run_dir.absolute(),)
    job = SlurmJob(os.environ, options.container, options.gpus_per_node, mounts)
    node = [node_python(options.container), '-m', 'pretrax', 'launch', 'node', *options.words, '--lasting']
    node += options.flags('check', 'allow_changes', 'verbose')
    return supervise(
        loaded,
        job,
        node,
        RestartOptions(retries=options.retries, elastic=options.elastic, stop_within=options.stop_within),
        devices_per_node=devices_here(options.gpus_per_node),
        say=functools.partial(print, flush=True, file=LastingOutput(sys.stdout)),
    )
