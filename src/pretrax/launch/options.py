"""What a run asks of an engine: options of `pretrax launch ENGINE`, declared once with their help. Imports little."""

import dataclasses
import re
from pathlib import Path
from typing import Annotated

import typer

from pretrax.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodOptions:
    """What a run asks of Kubernetes."""

    image: Annotated[str, typer.Option(metavar='IMAGE', help='Container image with pretrax; see the Dockerfile.')]
    nodes: Annotated[
        int | None, typer.Option('--nodes', '-N', min=1, help='Number of pods. [default: hosts of the TPU slice, or 1]')
    ] = None
    gpus: Annotated[int, typer.Option('--gpus-per-node', min=0, help='NVIDIA GPUs of each pod.')] = 0
    tpu: Annotated[
        str | None, typer.Option(metavar='NAME', help='A TPU slice in GKE, such as v5p:4x4x4 or v5e-16.')
    ] = None
    slices: Annotated[int, typer.Option(min=1, help='Number of TPU slices.')] = 1
    kind: Annotated[str, typer.Option(metavar='KIND', help='jobset, or job, which needs no controller.')] = 'jobset'
    namespace: Annotated[str | None, typer.Option('--namespace', '-n', help='Namespace of all objects.')] = None
    volume: Annotated[
        tuple[str, ...], typer.Option(metavar='CLAIM:/PATH', help='Mounts a PersistentVolumeClaim; may be repeated.')
    ] = ()
    secret: Annotated[
        tuple[str, ...], typer.Option(metavar='NAME', help='Its keys become variables; may be repeated.')
    ] = ()
    env: Annotated[
        tuple[str, ...], typer.Option(metavar='NAME=VALUE', help='A variable, not secret; may be repeated.')
    ] = ()
    node_label: Annotated[
        tuple[str, ...],
        typer.Option(metavar='KEY=VALUE', help='Label of the nodes that may be used; may be repeated.'),
    ] = ()
    service_account: Annotated[
        str | None, typer.Option(help='Service account of the pods, for example to reach a bucket.')
    ] = None
    priority_class: Annotated[str | None, typer.Option(help='Priority class of the pods.')] = None
    queue: Annotated[str | None, typer.Option(help='A queue of Kueue, which starts the run.')] = None
    cpu: Annotated[str | None, typer.Option(help='CPUs that each pod requests.')] = None
    memory: Annotated[str | None, typer.Option(help='Memory that each pod requests, such as 64Gi.')] = None
    shared_memory: Annotated[str, typer.Option(help='Size of /dev/shm.')] = '16Gi'
    grace: Annotated[int, typer.Option(min=1, help='Seconds for the last checkpoint when a pod has to stop.')] = 300
    max_restarts: Annotated[int, typer.Option(min=0, help='Restarts because of failures.')] = 100
    keep: Annotated[int, typer.Option(min=0, help='Seconds until the finished objects are removed.')] = 7 * 24 * 3600

    @property
    def volumes(self) -> list[tuple[str, str]]:
        """Names of PersistentVolumeClaims, and their paths in the container."""
        return _pairs('--volume', self.volume, ':')

    @property
    def variables(self) -> list[tuple[str, str]]:
        """Names and values of the variables in the environment."""
        return _pairs('--env', self.env, '=')

    @property
    def node_labels(self) -> list[tuple[str, str]]:
        """Keys and values of labels."""
        return _pairs('--node-label', self.node_label, '=')


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceOptions:
    """What a run asks of Google Cloud."""

    accelerator: Annotated[str, typer.Option(metavar='NAME', help='A slice, such as v5p-128 or v5e-16.')]
    zone: Annotated[str, typer.Option(metavar='ZONE', help='Zone of Google Cloud, such as us-east5-a.')]
    slices: Annotated[int, typer.Option(min=1, help='Number of slices.')] = 1
    project: Annotated[str | None, typer.Option(help='Project of Google Cloud. [default: that of gcloud]')] = None
    spot: Annotated[bool, typer.Option('--spot', help='Slices that Google may take back, for less money.')] = False
    image: Annotated[
        str | None, typer.Option(metavar='IMAGE', help='A container with pretrax; see the Dockerfile.')
    ] = None
    setup: Annotated[
        str,
        typer.Option(metavar='COMMAND', show_default=False, help='Instead of --image: installs pretrax on a VM.'),
    ] = ''
    runtime: Annotated[
        str | None, typer.Option('--runtime-version', help='Software of the VMs. [default: that of the accelerator]')
    ] = None
    network: Annotated[str | None, typer.Option(help='Network of the VMs.')] = None
    service_account: Annotated[
        str | None, typer.Option(help='Service account of the VMs, which reaches the bucket.')
    ] = None
    restarts: Annotated[
        int, typer.Option('--max-restarts', min=0, help="Restarts of a VM's process because of failures.")
    ] = 100


@dataclasses.dataclass(frozen=True, kw_only=True)
class SshOptions:
    """The hosts of a run, and how its processes run there."""

    hosts: Annotated[
        str | None,
        typer.Option(metavar='HOSTS', help='Hosts, such as box1,box2,user@box3:2222. The first host coordinates.'),
    ] = None
    hosts_file: Annotated[
        Path | None, typer.Option('--hosts-file', metavar='FILE', help='A file with a host on each line.')
    ] = None
    devices: Annotated[
        int | None, typer.Option('--devices-per-node', min=1, help='Devices per host. [default: all of them]')
    ] = None
    elastic: Annotated[
        bool, typer.Option('--elastic', help='Continue without a host that is lost, until it answers again.')
    ] = False
    patience: Annotated[
        float, typer.Option(min=0, help='Minutes to wait for a lost host, which may be booting. Not with --elastic.')
    ] = 10
    directory: Annotated[
        str | None, typer.Option(metavar='PATH', help='Working directory on the hosts. [default: this one]')
    ] = None
    python: Annotated[
        str | None,
        typer.Option(metavar='PATH', help='Python with pretrax on the hosts. [default: the path of this one]'),
    ] = None
    coordinator: Annotated[
        str | None,
        typer.Option(
            '--coordinator-address',
            metavar='ADDRESS',
            help='Address of the first host for the others, if they need another one.',
        ),
    ] = None
    program: Annotated[
        str, typer.Option('--ssh', metavar='COMMAND', help="The ssh client with options, such as 'ssh -F FILE'.")
    ] = 'ssh'


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a job asks Slurm for. `sbatch` replaces options of the same name."""

    nodes: Annotated[int, typer.Option('--nodes', '-N', min=1, help='Number of nodes; each runs one process.')] = 1
    gpus_per_node: Annotated[int | None, typer.Option('--gpus-per-node', min=1, help='GPUs of each node.')] = None
    cpus_per_node: Annotated[
        int | None,
        typer.Option('--cpus-per-node', min=1, help='Cores of each node. [default: whole nodes, not shared]'),
    ] = None
    time: Annotated[
        str | None, typer.Option(metavar='TIME', help="Time limit: 24h, 90m, 1-12:00:00. [default: the partition's]")
    ] = None
    partition: Annotated[
        str | None,
        typer.Option('--partition', '-p', metavar='NAME', show_default=False, help='Partition of the cluster.'),
    ] = None
    account: Annotated[
        str | None,
        typer.Option(
            '--account', '-A', metavar='NAME', show_default=False, help='Account that the time is charged to.'
        ),
    ] = None
    qos: Annotated[
        str | None, typer.Option('--qos', metavar='NAME', show_default=False, help='Quality of service.')
    ] = None
    constraint: Annotated[
        str | None,
        typer.Option(
            '--constraint', '-C', metavar='FEATURE', show_default=False, help='Features that the nodes must have.'
        ),
    ] = None
    sbatch: Annotated[
        tuple[str, ...],
        typer.Option(
            '--sbatch', metavar='OPTION=VALUE', help='Another option of sbatch, such as mem=64G; may be repeated.'
        ),
    ] = ()

    @property
    def minutes(self) -> int | None:
        """The time limit, rounded up; None: that of the partition. Raises UserError."""
        return None if self.time is None else minutes_of(self.time)


def minutes_of(text: str) -> int:
    """A time limit in minutes, rounded up: '24h', '90m', '1d12h', or as Slurm writes it: '1-12:00:00', '30:00', '90'.

    Raises:
        UserError: it is none of these, or zero.
    """
    seconds = 0
    if units := re.fullmatch(r'(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?', text.strip()):
        days, hours, minutes = (int(number or 0) for number in units.groups())
        seconds = 60 * (minutes + 60 * (hours + 24 * days))
    elif clock := re.fullmatch(r'(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?', text.strip()):
        days, *numbers = clock.groups()
        parts = [int(number) for number in numbers if number is not None]
        # Slurm: days-hours[:minutes[:seconds]], else minutes[:seconds] or hours:minutes:seconds
        first = 3600 if days is not None or len(parts) == 3 else 60
        seconds = 86400 * int(days or 0) + sum(part * first // 60**place for place, part in enumerate(parts))
    if not seconds:
        raise UserError(f'--time {text}: expected a time limit such as 24h, 90m, 1d12h or 1-12:00:00')
    return -(-seconds // 60)


def _pairs(option: str, texts: tuple[str, ...], separator: str) -> list[tuple[str, str]]:
    pairs = []
    for text in texts:
        name, found, value = text.partition(separator)
        if not found or not name:
            raise UserError(f'{option} {text}: expected NAME{separator}VALUE')
        pairs.append((name, value))
    return pairs
