"""Train in a Kubernetes cluster: a JobSet, or a plain Job, which restarts all pods when one is lost.

Each node has a pod with one process. `--dry-run` prints the manifests, which `kubectl apply -f -` takes.
"""

from typing import Annotated, Any

import typer

from pretrax.cli._arguments import AllowChanges, ConfigFile, Overrides, flags
from pretrax.errors import UserError


def kubernetes(
    config: ConfigFile,
    image: Annotated[str, typer.Option(metavar='IMAGE', help='Container image with pretrax; see the Dockerfile.')],
    overrides: Overrides = (),
    nodes: Annotated[
        int | None, typer.Option('--nodes', '-N', min=1, help='Number of pods. [default: hosts of the TPU slice, or 1]')
    ] = None,
    gpus: Annotated[int, typer.Option('--gpus-per-node', min=0, help='NVIDIA GPUs of each pod.')] = 0,
    tpu: Annotated[
        str | None, typer.Option(metavar='NAME', help='A TPU slice in GKE, such as v5p:4x4x4 or v5e-16.')
    ] = None,
    slices: Annotated[int, typer.Option(min=1, help='Number of TPU slices.')] = 1,
    kind: Annotated[str, typer.Option(metavar='KIND', help='jobset, or job, which needs no controller.')] = 'jobset',
    namespace: Annotated[str | None, typer.Option('--namespace', '-n', help='Namespace of all objects.')] = None,
    volume: Annotated[
        tuple[str, ...], typer.Option(metavar='CLAIM:/PATH', help='Mounts a PersistentVolumeClaim; may be repeated.')
    ] = (),
    secret: Annotated[
        tuple[str, ...], typer.Option(metavar='NAME', help='Its keys become variables; may be repeated.')
    ] = (),
    env: Annotated[
        tuple[str, ...], typer.Option(metavar='NAME=VALUE', help='A variable, not secret; may be repeated.')
    ] = (),
    node_label: Annotated[
        tuple[str, ...],
        typer.Option(metavar='KEY=VALUE', help='Label of the nodes that may be used; may be repeated.'),
    ] = (),
    service_account: Annotated[
        str | None, typer.Option(help='Service account of the pods, for example to reach a bucket.')
    ] = None,
    priority_class: Annotated[str | None, typer.Option(help='Priority class of the pods.')] = None,
    queue: Annotated[str | None, typer.Option(help='A queue of Kueue, which starts the run.')] = None,
    cpu: Annotated[str | None, typer.Option(help='CPUs that each pod requests.')] = None,
    memory: Annotated[str | None, typer.Option(help='Memory that each pod requests, such as 64Gi.')] = None,
    shared_memory: Annotated[str, typer.Option(help='Size of /dev/shm.')] = '16Gi',
    grace: Annotated[int, typer.Option(min=1, help='Seconds for the last checkpoint when a pod has to stop.')] = 300,
    max_restarts: Annotated[int, typer.Option(min=0, help='Restarts because of failures.')] = 100,
    keep: Annotated[int, typer.Option(min=0, help='Seconds until the finished objects are removed.')] = 7 * 24 * 3600,
    check: Annotated[bool, typer.Option('--check', help='Run `pretrax doctor` in each pod before training.')] = False,
    dry_run: Annotated[bool, typer.Option('--dry-run', help='Print the manifests, and do nothing.')] = False,
    allow_changes: AllowChanges = False,
) -> None:
    from pretrax.config import load
    from pretrax.launch import kubernetes as engine
    from pretrax.launch.crash import attempt_label
    from pretrax.launch.engines import refuse_if_running
    from pretrax.launch.manifests import Pods, as_yaml, check_quantity, manifests, object_name
    from pretrax.launch.request import check_request
    from pretrax.launch.shipped import check_variables, keep_record, record_directory, shipped

    loaded = load(config, overrides)
    if kind not in ('jobset', 'job'):
        raise UserError(f'--kind {kind}: expected jobset or job')
    if not image.strip():
        raise UserError('--image: expected the name of an image, such as europe-docker.pkg.dev/PROJECT/images/pretrax')
    for option, quantity in (('--cpu', cpu), ('--memory', memory), ('--shared-memory', shared_memory)):
        check_quantity(option, quantity)
    variables = _pairs('--env', env, '=')
    volumes = _pairs('--volume', volume, ':')
    for claim, path in volumes:
        if not path.startswith('/'):
            raise UserError(f'--volume {claim}:{path}: expected CLAIM:/PATH, an absolute path in the container')
    pods_per_slice, devices, wanted = _accelerators(nodes, gpus, tpu, slices, dict(variables), kind)
    check_request(loaded, pods_per_slice * slices, devices)
    engine.check_run_dir(loaded.run_dir, [path for _, path in volumes])
    files = shipped(loaded)
    if not secret:
        check_variables(
            files, dict(variables), 'give it with --env NAME=VALUE, or the Secret that has it: --secret NAME'
        )
    pods = Pods(
        name=object_name(loaded.name, pods_per_slice * slices, str(loaded.run_dir)), run_dir=str(loaded.run_dir),
        image=image, nodes=pods_per_slice, slices=slices, kind=kind, gpus=gpus, tpu=wanted, namespace=namespace, volumes=tuple(volumes), secrets=tuple(secret),
        variables=tuple(variables), node_labels=tuple(_pairs('--node-label', node_label, '=')),
        service_account=service_account, priority_class=priority_class, queue=queue, cpu=cpu, memory=memory,
        shared_memory=shared_memory, grace=grace, restarts=max_restarts, keep=keep,
        words=tuple(flags(check=check, allow_changes=allow_changes)), launched=attempt_label(),
    )  # fmt: skip
    objects = manifests(pods, files)
    if dry_run:
        print(as_yaml(objects), end='')
        return
    engine.check_cluster(pods)
    run = record_directory(loaded, print)
    refuse_if_running(run)
    engine.submit(pods, objects, print)
    keep_record(run, engine.record_of(pods), print)
    print(f'launch: {kind}/{pods.name}: {pods.processes} x {devices} devices; run_dir {loaded.run_dir}')
    print(f'  pretrax launch status {run}\n  pretrax launch logs {run} --follow\n  pretrax launch stop {run}')
    print(engine.next_command(pods))


def _pairs(option: str, texts: tuple[str, ...], separator: str) -> list[tuple[str, str]]:
    pairs = []
    for text in texts:
        name, found, value = text.partition(separator)
        if not found or not name:
            raise UserError(f'{option} {text}: expected NAME{separator}VALUE')
        pairs.append((name, value))
    return pairs


def _accelerators(
    nodes: int | None, gpus: int, tpu: str | None, slices: int, variables: dict[str, str], kind: str
) -> tuple[int, int, Any]:
    """Pods of a slice, devices of a pod, and the TPU as `Pods` wants it."""
    from pretrax.scale.topology import check_rentable, parse_topology

    if tpu is None:
        if slices > 1:
            raise UserError(f'--slices {slices} is for TPUs: give --tpu NAME, or --nodes instead of --slices')
        simulated = variables.get('JAX_NUM_CPU_DEVICES', '1')
        return nodes or 1, gpus or (int(simulated) if simulated.isdecimal() else 1), None
    if gpus:
        raise UserError('--tpu and --gpus-per-node: give one of them')
    if slices > 1 and kind == 'job':
        raise UserError('--slices: a plain Job is one slice\nleave out --kind job')
    topology = parse_topology(tpu, slices)
    check_rentable(topology)
    if nodes not in (None, topology.hosts):
        raise UserError(
            f'--nodes {nodes}: {topology.version}:{"x".join(map(str, topology.shape))} has {topology.hosts} hosts '
            f'of {topology.chips_per_host} chips{" per slice" if slices > 1 else ""}\nleave out --nodes'
        )
    devices = topology.n_devices // (topology.hosts * slices)
    return topology.hosts, devices, (topology.version, 'x'.join(map(str, topology.shape)), topology.chips_per_host)
