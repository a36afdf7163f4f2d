"""What a run asks of an engine: options of `pretrax launch ENGINE`, declared once with their help. Imports little."""

import dataclasses
import re
from pathlib import Path

from pretrax.errors import UserError
from pretrax.option import REQUIRED, option


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodOptions:
    """What a run asks of Kubernetes."""

    image: str = option('Container image with pretrax; see the Dockerfile.', default=REQUIRED, metavar='IMAGE')
    nodes: int | None = option('Number of pods. [default: hosts of the TPU slice, or 1]', '-N', min=1)
    gpus: int = option('NVIDIA GPUs of each pod.', '--gpus-per-node', default=0, min=0)
    tpu: str | None = option('A TPU slice in GKE, such as v5p:4x4x4 or v5e-16.', metavar='NAME')
    slices: int = option('Number of TPU slices.', default=1, min=1)
    kind: str = option('jobset, or job, which needs no controller.', default='jobset', metavar='KIND')
    namespace: str | None = option('Namespace of all objects.', '-n')
    volume: tuple[str, ...] = option(
        'Mounts a PersistentVolumeClaim; may be repeated.', default=(), metavar='CLAIM:/PATH'
    )
    secret: tuple[str, ...] = option('Its keys become variables; may be repeated.', default=(), metavar='NAME')
    env: tuple[str, ...] = option('A variable, not secret; may be repeated.', default=(), metavar='NAME=VALUE')
    node_label: tuple[str, ...] = option(
        'Label of the nodes that may be used; may be repeated.', default=(), metavar='KEY=VALUE'
    )
    label: tuple[str, ...] = option('Label of the pods; may be repeated.', default=(), metavar='KEY=VALUE')
    annotation: tuple[str, ...] = option(
        'Annotation of the pods, for example of a second network; may be repeated.', default=(), metavar='KEY=VALUE'
    )
    resource: tuple[str, ...] = option(
        'Another resource of each pod, such as rdma/ib=1 or hugepages-2Mi=4Gi; may be repeated.',
        default=(),
        metavar='NAME=AMOUNT',
    )
    capability: tuple[str, ...] = option(
        'Linux capability of the containers, such as IPC_LOCK for RDMA; may be repeated.', default=(), metavar='NAME'
    )
    host_network: bool = option('Pods use the network of their nodes; one pod of this run on each.', default=False)
    service_account: str | None = option('Service account of the pods, for example to reach a bucket.')
    priority_class: str | None = option('Priority class of the pods.')
    queue: str | None = option('A queue of Kueue, which starts the run.')
    cpu: str | None = option('CPUs that each pod requests.')
    memory: str | None = option('Memory that each pod requests, such as 64Gi.')
    shared_memory: str = option('Size of /dev/shm.', default='16Gi')
    grace: int = option('Seconds for the last checkpoint when a pod has to stop.', default=300, min=1)
    max_restarts: int = option('Restarts because of failures.', default=100, min=0)
    keep: int = option('Seconds until the finished objects are removed.', default=7 * 24 * 3600, min=0)

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
        return _checked_names('--node-label', self.node_label, _LABEL_VALUE)

    @property
    def labels(self) -> dict[str, str]:
        """Labels of the pods."""
        return dict(_checked_names('--label', self.label, _LABEL_VALUE))

    @property
    def annotations(self) -> dict[str, str]:
        """Annotations of the pods."""
        return dict(_checked_names('--annotation', self.annotation))

    @property
    def resources(self) -> dict[str, str]:
        """Other resources of each pod: names and amounts."""
        pairs = _checked_names('--resource', self.resource)
        for name, amount in pairs:
            if own := {
                'cpu': '--cpu',
                'memory': '--memory',
                'nvidia.com/gpu': '--gpus-per-node',
                'google.com/tpu': '--tpu',
            }.get(name):
                raise UserError(f'--resource {name}={amount}: this resource has an option of its own: {own}')
            if '/' not in name and not name.startswith('hugepages-'):
                raise UserError(f'--resource {name}={amount}: expected a name such as rdma/ib or hugepages-2Mi')
            check_quantity(f'--resource {name}', amount)
        return dict(pairs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SliceOptions:
    """What a run asks of Google Cloud."""

    accelerator: str = option('A slice, such as v5p-128 or v5e-16.', default=REQUIRED, metavar='NAME')
    zone: str = option('Zone of Google Cloud, such as us-east5-a.', default=REQUIRED, metavar='ZONE')
    slices: int = option('Number of slices.', default=1, min=1)
    project: str | None = option('Project of Google Cloud. [default: that of gcloud]')
    spot: bool = option('Slices that Google may take back, for less money.', default=False)
    image: str | None = option('A container with pretrax; see the Dockerfile.', metavar='IMAGE')
    setup: str = option(
        'Instead of --image: installs pretrax on a VM.', default='', metavar='COMMAND', show_default=False
    )
    runtime: str | None = option('Software of the VMs. [default: that of the accelerator]', '--runtime-version')
    network: str | None = option('Network of the VMs.')
    service_account: str | None = option('Service account of the VMs, which reaches the bucket.')
    restarts: int = option("Restarts of a VM's process because of failures.", '--max-restarts', default=100, min=0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SshOptions:
    """The hosts of a run, and how its processes run there."""

    hosts: str | None = option('Hosts, such as box1,box2,user@box3:2222. The first host coordinates.', metavar='HOSTS')
    hosts_file: Path | None = option('A file with a host on each line.', metavar='FILE')
    devices: int | None = option('Devices per host. [default: all of them]', '--devices-per-node', min=1)
    spares: int = option('The last N hosts wait for the loss of another host.', default=0, min=0, metavar='N')
    elastic: bool = option('Continue without a host that is lost, until it answers again.', default=False)
    patience: float = option(
        'Minutes to wait for a lost host, which may be booting. Not with --elastic.', default=10, min=0
    )
    directory: str | None = option('Working directory on the hosts. [default: this one]', metavar='PATH')
    python: str | None = option('Python with pretrax on the hosts. [default: the path of this one]', metavar='PATH')
    coordinator: str | None = option(
        'Address of the first host for the others, if they need another one.',
        '--coordinator-address',
        metavar='ADDRESS',
    )
    program: str = option(
        "The ssh client with options, such as 'ssh -F FILE'.", '--ssh', default='ssh', metavar='COMMAND'
    )


@dataclasses.dataclass(frozen=True)
class Resources:
    """What a job asks Slurm for. `sbatch` replaces options of the same name."""

    nodes: int = option('Number of nodes; each runs one process.', '-N', default=1, min=1)
    gpus_per_node: int | None = option('GPUs of each node; 0: train on CPUs.', min=0)
    cpus_per_node: int | None = option('Cores of each node. [default: whole nodes, not shared]', min=1)
    time: str | None = option("Time limit: 24h, 90m, 1-12:00:00. [default: the partition's]", metavar='TIME')
    partition: str | None = option('Partition of the cluster.', '-p', metavar='NAME', show_default=False)
    account: str | None = option('Account that the time is charged to.', '-A', metavar='NAME', show_default=False)
    qos: str | None = option('Quality of service.', metavar='NAME', show_default=False)
    constraint: str | None = option('Features that the nodes must have.', '-C', metavar='FEATURE', show_default=False)
    sbatch: tuple[str, ...] = option(
        'Another option of sbatch, such as mem=64G; may be repeated.', default=(), metavar='OPTION=VALUE'
    )

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


def check_quantity(option: str, text: str | None) -> None:
    """Raises UserError unless the text is a quantity of Kubernetes."""
    if text is not None and not re.fullmatch(r'\d+(\.\d+)?(m|[KMGTPE]i?|k)?', text):
        raise UserError(f'{option} {text}: expected a quantity of Kubernetes, such as 64Gi, 500G or 8')


# kubernetes.io/docs/concepts/overview/working-with-objects/labels: names, and values of labels
_PART = r'[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?'
_KEY, _LABEL_VALUE = rf'([a-z0-9]([a-z0-9.-]{{0,251}}[a-z0-9])?/)?{_PART}', rf'({_PART})?'


def _checked_names(option: str, texts: tuple[str, ...], value: str = '.*') -> list[tuple[str, str]]:
    """Pairs whose names and values Kubernetes accepts, and pretrax does not set itself."""
    pairs = _pairs(option, texts, '=')
    for name, text in pairs:
        if not re.fullmatch(_KEY, name):
            raise UserError(f'{option} {name}={text}: expected a key such as team or example.com/team')
        if not re.fullmatch(value, text, re.DOTALL):
            raise UserError(
                f'{option} {name}={text}: the value of a label has at most 63 letters, digits, "-", "_" and "."'
            )
        if name.startswith(('pretrax/', 'app.kubernetes.io/managed-by')):
            raise UserError(f'{option} {name}={text}: pretrax sets {name} itself')
    return pairs


def _pairs(option: str, texts: tuple[str, ...], separator: str) -> list[tuple[str, str]]:
    pairs = []
    for text in texts:
        name, found, value = text.partition(separator)
        if not found or not name:
            raise UserError(f'{option} {text}: expected NAME{separator}VALUE')
        pairs.append((name, value))
    return pairs
