"""Train in a Kubernetes cluster: a JobSet, or a plain Job, which restarts all pods when one is lost.

Each node has a pod with one process. `--dry-run` prints the manifests, which `kubectl apply -f -` takes.
"""

import dataclasses
from typing import TYPE_CHECKING

from pretrax.cli._arguments import Launch
from pretrax.errors import UserError
from pretrax.launch.options import PodOptions
from pretrax.option import option

if TYPE_CHECKING:
    from pretrax.cost.topology import Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Launch):
    pods: PodOptions
    check: bool = option('Run `pretrax doctor` in each pod before training.', default=False)


def kubernetes(options: Options) -> None:
    from pretrax.launch import kubernetes as engine
    from pretrax.launch.crash import attempt_label
    from pretrax.launch.manifests import Pods, as_yaml, manifests, object_name
    from pretrax.launch.options import check_quantity
    from pretrax.launch.registry import refuse_if_running
    from pretrax.launch.shipped import check_variables, keep_record, record_directory, shipped
    from pretrax.launch.sizes import check_request
    from pretrax.system.target import Target

    loaded, asked = options.load(), options.pods
    if asked.kind not in ('jobset', 'job'):
        raise UserError(f'--kind {asked.kind}: expected jobset or job')
    if not asked.image.strip():
        raise UserError('--image: expected the name of an image, such as europe-docker.pkg.dev/PROJECT/images/pretrax')
    for name in ('cpu', 'memory', 'shared_memory'):
        check_quantity(f'--{name.replace("_", "-")}', getattr(asked, name))
    variables = dict(asked.variables)
    for claim, path in asked.volumes:
        if not path.startswith('/'):
            raise UserError(f'--volume {claim}:{path}: expected CLAIM:/PATH, an absolute path in the container')
    nodes, devices, tpu = _accelerators(asked, variables)
    check_request(loaded, nodes * asked.slices, devices)
    engine.check_run_dir(loaded.run_dir, [path for _, path in asked.volumes])
    files = shipped(loaded)
    if not asked.secret:
        check_variables(files, variables, 'give it with --env NAME=VALUE, or the Secret that has it: --secret NAME')
    platform, kind = ('tpu', tpu.kind) if tpu else ('gpu' if asked.gpus else 'cpu', '')
    given = None if asked.secret else tuple(variables)
    count = nodes * asked.slices * devices
    options.check_start(Target(count, platform, kind, slices=asked.slices, has_these_files=False, variables=given))
    changed = {
        'name': object_name(loaded.name, nodes * asked.slices, str(loaded.run_dir)),
        'run_dir': str(loaded.run_dir),
        'nodes': nodes,
        'accelerator': tpu and (tpu.version, tpu.sides, tpu.chips_per_host),
        'words': tuple(options.flags('check', 'allow_changes')),
        'launched': attempt_label(),
    }
    pods = Pods(**vars(asked) | changed)
    objects = manifests(pods, files)
    if options.dry_run:
        print(as_yaml(objects), end='')
        return
    engine.check_cluster(pods)
    run = record_directory(loaded, print)
    refuse_if_running(run)
    engine.submit(pods, objects, print)
    keep_record(run, engine.record_of(pods), print)
    print(f'launch: {pods.kind}/{pods.name}: {pods.processes} x {devices} devices; run_dir {loaded.run_dir}')
    print(f'  pretrax launch status {run}\n  pretrax launch logs {run} --follow\n  pretrax launch stop {run}')
    print(engine.next_command(pods))


def _accelerators(asked: PodOptions, variables: dict[str, str]) -> tuple[int, int, 'Topology | None']:
    """Pods of a slice, devices of a pod, and the TPU."""
    from pretrax.cost.topology import check_rentable, parse_topology

    nodes, gpus, slices = asked.nodes, asked.gpus, asked.slices
    if asked.tpu is None:
        if slices > 1:
            raise UserError(f'--slices {slices} is for TPUs: give --tpu NAME, or --nodes instead of --slices')
        simulated = variables.get('JAX_NUM_CPU_DEVICES', '1')
        return nodes or 1, gpus or (int(simulated) if simulated.isdecimal() else 1), None
    if gpus:
        raise UserError('--tpu and --gpus-per-node: give one of them')
    if slices > 1 and asked.kind == 'job':
        raise UserError('--slices: a plain Job is one slice\nleave out --kind job')
    topology = parse_topology(asked.tpu, slices)
    check_rentable(topology)
    if nodes not in (None, topology.hosts):
        raise UserError(
            f'--nodes {nodes}: {topology.version}:{topology.sides} has {topology.hosts} hosts '
            f'of {topology.chips_per_host} chips{" per slice" if slices > 1 else ""}\nleave out --nodes'
        )
    return topology.hosts, topology.devices_per_host, topology
