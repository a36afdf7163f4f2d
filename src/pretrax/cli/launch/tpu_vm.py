"""Train on TPU VMs of Google Cloud, outside Kubernetes: a queued resource, whose VMs train from boot on.

The command waits for the run, and asks for new slices when Google takes some back. Without it the run continues on the
slices that it has; the same command waits again.
"""

import dataclasses
from typing import TYPE_CHECKING

from pretrax.cli._arguments import Launch
from pretrax.errors import UserError
from pretrax.launch.options import SliceOptions
from pretrax.option import option

if TYPE_CHECKING:
    from pretrax.cost.topology import Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Launch):
    slices: SliceOptions
    watch: bool = option('Wait for the run, or return when the slices are asked for.', '--watch/--detach', default=True)
    every: float = option('Seconds between checks of the run.', default=60.0, min=0.1)
    check: bool = option('Run `pretrax doctor` on each VM before training.', default=False)


def tpu_vm(options: Options) -> int:
    from pretrax.cost.topology import parse_topology
    from pretrax.launch import tpu_vm as engine
    from pretrax.launch.manifests import TPUS, object_name
    from pretrax.launch.registry import refuse_if_running
    from pretrax.launch.shipped import check_variables, keep_record, record_directory, shipped
    from pretrax.launch.sizes import check_request
    from pretrax.system.target import Target

    loaded, asked = options.load(), options.slices
    topology = parse_topology(asked.accelerator, asked.slices)
    accelerator, processes = _accelerator(topology), topology.hosts * topology.slices
    check_request(loaded, processes, topology.devices_per_host)
    engine.check_run_dir(loaded.run_dir)
    if not asked.image and not asked.setup:
        raise UserError(
            'how do the VMs get pretrax? give --image IMAGE, which the Dockerfile of pretrax builds (--target tpu),\n'
            "or --setup COMMAND, such as: --setup 'pip install /mnt/pretrax[tpu]'"
        )
    files = shipped(loaded)
    check_variables(files, [], 'TPU VMs have no such variable: write the value, or read it in --setup')
    target = Target(topology.n_devices, 'tpu', topology.kind, slices=topology.slices, has_these_files=False)
    options.check_start(target)
    changed = {
        'name': object_name(loaded.name, processes, str(loaded.run_dir)),
        'accelerator': accelerator,
        'hosts': topology.hosts,
        'runtime': asked.runtime or TPUS[topology.version]['runtime'],
        'words': tuple(options.flags('check', 'allow_changes')),
    }
    wanted = engine.Slices(**vars(asked) | changed)
    watcher = engine.Watch(wanted, files, lambda line: print(line, flush=True), options.every)
    if options.dry_run:
        print(engine.dry_run(wanted, files), end='')
        return 0
    engine.check_gcloud()
    run = record_directory(loaded, print)
    refuse_if_running(run)  # a queued resource of this run is not a reason: the same command waits again
    watcher.create()
    keep_record(run, engine.record_of(wanted), print)
    print(
        f'  pretrax launch status {run}\n  pretrax launch logs {run} --follow\n  pretrax launch stop {run}', flush=True
    )
    if not options.watch:
        return 0
    try:
        return watcher.run()
    except KeyboardInterrupt:
        print('launch: the run goes on; this command waits for it again', flush=True)
        return 130


def _accelerator(topology: 'Topology') -> str:
    """gcloud's name of a slice. Raises UserError if there is none."""
    from pretrax.cost.topology import check_rentable, parse_topology

    check_rentable(topology)
    size = topology.chips * (1 if topology.version in ('v5e', 'v6e') else 2)
    if parse_topology(f'{topology.version}-{size}').shape != topology.shape:
        raise UserError(
            f'--accelerator {topology.name}: gcloud chooses the shape of a slice by its size\n'
            f'give --accelerator {topology.version}-{size}; launch kubernetes takes {topology.version}:{topology.sides}'
        )
    prefix = 'v5litepod' if topology.version == 'v5e' else topology.version
    return f'{prefix}-{size}'
