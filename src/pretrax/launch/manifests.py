"""Kubernetes manifests of a run: a JobSet, or a plain indexed Job with its Service, and a ConfigMap.

A pod is a node: its container runs `pretrax launch node`, one process for all accelerators of the node. Its identity is
in its environment. Nothing in a pod asks the API server, so that no permissions are needed.

References: kubernetes.io/docs/reference/kubernetes-api, jobset.sigs.k8s.io/docs/reference, Kubernetes 1.31, JobSet
0.10.
"""

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import yaml

from pretrax.errors import CONFIGURATION, MISTAKE, UserError
from pretrax.launch.options import PodOptions
from pretrax.launch.shipped import CONFIG, STOPPED

PORT = 8476  # of the coordinator, in process 0
GROUP = 'train'  # the replicated job of a JobSet
CONTAINER = 'train'
RUN_LABEL = 'pretrax/run'
RUN_DIR = 'pretrax/run-dir'  # annotation: the run that an object belongs to
INDEX = 'batch.kubernetes.io/job-completion-index'  # label and annotation of a pod
SLICE = 'jobset.sigs.k8s.io/job-index'
_ATTEMPT = 'jobset.sigs.k8s.io/restart-attempt'
_DIRECTORY = '/etc/pretrax'
_USER = 1000  # of the Dockerfile
# TPU versions -> the label of their nodes in GKE. Source:
# docs.cloud.google.com/kubernetes-engine/docs/concepts/plan-tpus
TPU_NODES = {
    'v4': 'tpu-v4-podslice', 'v5e': 'tpu-v5-lite-podslice', 'v5p': 'tpu-v5p-slice', 'v6e': 'tpu-v6e-slice',
    'tpu7x': 'tpu7x',
}  # fmt: skip

type Manifest = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pods(PodOptions):
    """The pods of a run.

    Attributes:
        name: name of the objects, see `object_name`.
        run_dir: directory of the run; an annotation of every object.
        nodes: pods of one slice; without TPUs there is one slice.
        accelerator: (version, topology such as '4x4x4', chips per node) of the TPU; None: no TPU.
        words: appended to the command of the container.
        launched: the time of the launch, which begins the label of each attempt.
    """

    name: str
    run_dir: str
    nodes: int = 1
    accelerator: tuple[str, str, int] | None = None
    words: tuple[str, ...] = ()
    launched: str = ''

    @property
    def processes(self) -> int:
        return self.nodes * self.slices

    @property
    def coordinator(self) -> str:
        """Host name of process 0 in the headless service."""
        pod = f'{self.name}-{GROUP}-0-0' if self.kind == 'jobset' else f'{self.name}-0'
        return f'{pod}.{self.name}'


def manifests(pods: Pods, files: Mapping[str, str]) -> list[Manifest]:
    """The objects of a run.

    Args:
        files: {name: text} of the configuration and its plugins, from `shipped`.
    """
    data = {'apiVersion': 'v1', 'kind': 'ConfigMap', 'metadata': _metadata(pods), 'data': dict(files)}
    if pods.kind == 'jobset':  # its controller makes the service
        return [data, _job_set(pods, files)]
    return [data, _service(pods), _indexed_job(pods, files)]


def as_yaml(objects: list[Manifest]) -> str:
    """Several documents, for `kubectl apply -f -`."""
    return '---\n'.join(yaml.dump(one, Dumper=_Readable, sort_keys=False, width=120) for one in objects)


def object_name(name: str, processes: int, run_dir: str) -> str:
    """The name of the objects: that of the run, with what DNS allows, short enough for the names of its pods.

    If that is not the whole name, six hexadecimal digits of the run directory's hash keep it apart from similar ones.
    """
    longest = 63 - len(f'-{GROUP}-{processes}-{processes}-abcde')  # DNS labels have at most 63 characters
    plain = re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-')
    plain = plain if plain[:1].isalpha() else f'run-{plain}'
    if plain == name and len(plain) <= longest:
        return plain
    mark = hashlib.sha256(run_dir.encode()).hexdigest()[:6]
    return f'{plain[: longest - len(mark) - 1].strip("-")}-{mark}'


def _metadata(pods: Pods, **more: Any) -> Manifest:
    labels = {'app.kubernetes.io/managed-by': 'pretrax', RUN_LABEL: pods.name}
    place = {'namespace': pods.namespace} if pods.namespace else {}
    annotations = {RUN_DIR: pods.run_dir} | more.pop('annotations', {})
    return {'name': pods.name, **place, 'labels': labels | more.pop('labels', {}), 'annotations': annotations, **more}


def _job_set(pods: Pods, files: Mapping[str, str]) -> Manifest:
    """Any failure restarts all pods, as `launch.restarts` does; a mistake ends the set.

    A pod that Kubernetes itself evicts does not count as a failure. The rules of a JobSet see the reason and the
    message of a failed Job, and not the exit code: the message names the rule of the podFailurePolicy.
    """
    annotations = {}
    if pods.accelerator:
        annotations = {'annotations': {'alpha.jobset.sigs.k8s.io/exclusive-topology': 'cloud.google.com/gke-nodepool'}}
    job = {
        **_counts(pods),
        'backoffLimit': 0,
        'podReplacementPolicy': 'Failed',
        'podFailurePolicy': {'rules': [_MISTAKE, *_stopped('FailJob')]},
        'template': _pod(pods, files),
    }
    rules = [
        {
            'name': 'mistake', 'action': 'FailJobSet', 'onJobFailureReasons': ['PodFailurePolicy'],
            'onJobFailureMessagePatterns': ['matching FailJob rule at index 0$'],
        },
        {
            'name': 'evicted', 'action': 'RestartJobSetAndIgnoreMaxRestarts',
            'onJobFailureReasons': ['PodFailurePolicy'],
            'onJobFailureMessagePatterns': ['matching FailJob rule at index [12]$'],
        },
    ]  # fmt: skip
    return {
        'apiVersion': 'jobset.x-k8s.io/v1alpha2',
        'kind': 'JobSet',
        'metadata': _metadata(pods, labels=_queue(pods), **annotations),
        'spec': {
            **_suspended(pods),
            'network': {'enableDNSHostnames': True, 'publishNotReadyAddresses': True, 'subdomain': pods.name},
            'failurePolicy': {'maxRestarts': pods.max_restarts, 'restartStrategy': 'BlockingRecreate', 'rules': rules},
            'ttlSecondsAfterFinished': pods.keep,
            'replicatedJobs': [{'name': GROUP, 'replicas': pods.slices, 'template': {'spec': job}}],
        },
    }


def _indexed_job(pods: Pods, files: Mapping[str, str]) -> Manifest:
    """Each pod that ends is replaced. The others lose their connection to it, exit with 75, and are replaced too."""
    return {
        'apiVersion': 'batch/v1',
        'kind': 'Job',
        'metadata': _metadata(pods, labels=_queue(pods)),
        'spec': {
            **_suspended(pods),
            **_counts(pods),
            'backoffLimit': pods.max_restarts * pods.nodes,
            'podReplacementPolicy': 'Failed',
            'podFailurePolicy': {'rules': [_MISTAKE, *_stopped('Ignore')]},
            'ttlSecondsAfterFinished': pods.keep,
            'template': _pod(pods, files),
        },
    }


_MISTAKE = {
    'action': 'FailJob',
    'onExitCodes': {'containerName': CONTAINER, 'operator': 'In', 'values': [MISTAKE, CONFIGURATION]},
}


def _stopped(action: str) -> list[Manifest]:
    """Rules for pods that Kubernetes stops, and for the other pods, which save the same step and may end earlier."""
    codes = {'containerName': CONTAINER, 'operator': 'In', 'values': [STOPPED]}
    evicted = [{'type': 'DisruptionTarget', 'status': 'True'}]
    return [{'action': action, 'onExitCodes': codes}, {'action': action, 'onPodConditions': evicted}]


def _counts(pods: Pods) -> Manifest:
    return {'completionMode': 'Indexed', 'completions': pods.nodes, 'parallelism': pods.nodes}


def _queue(pods: Pods) -> dict[str, str]:
    return {'kueue.x-k8s.io/queue-name': pods.queue} if pods.queue else {}


def _suspended(pods: Pods) -> Manifest:
    return {'suspend': True} if pods.queue else {}  # Kueue ends the suspension


def _service(pods: Pods) -> Manifest:
    spec = {
        'clusterIP': 'None',
        'publishNotReadyAddresses': True,
        'selector': {'batch.kubernetes.io/job-name': pods.name},
    }
    return {'apiVersion': 'v1', 'kind': 'Service', 'metadata': _metadata(pods), 'spec': spec}


def _pod(pods: Pods, files: Mapping[str, str]) -> Manifest:
    labels = {'app.kubernetes.io/managed-by': 'pretrax', RUN_LABEL: pods.name}
    selector = dict(pods.node_labels)
    if pods.accelerator:
        version, topology, _ = pods.accelerator
        selector |= {
            'cloud.google.com/gke-tpu-accelerator': TPU_NODES[version],
            'cloud.google.com/gke-tpu-topology': topology,
        }
    claims = dict.fromkeys(claim for claim, _ in pods.volumes)
    # A path of its own for each file: with the links of a whole ConfigMap, the plugins would have another path each
    # time.
    mounts = [{'name': 'config', 'mountPath': f'{_DIRECTORY}/{name}', 'subPath': name} for name in files]
    mounts.append({'name': 'shared-memory', 'mountPath': '/dev/shm'})
    mounts += [{'name': f'volume-{list(claims).index(claim)}', 'mountPath': path} for claim, path in pods.volumes]
    volumes: list[Manifest] = [
        {'name': 'config', 'configMap': {'name': pods.name}},
        {'name': 'shared-memory', 'emptyDir': {'medium': 'Memory', 'sizeLimit': pods.shared_memory}},
    ]
    volumes += [
        {'name': f'volume-{number}', 'persistentVolumeClaim': {'claimName': claim}}
        for number, claim in enumerate(claims)
    ]
    devices = _devices(pods)
    requests = {key: value for key, value in (('cpu', pods.cpu), ('memory', pods.memory)) if value}
    resources = {key: value for key, value in (('requests', requests | devices), ('limits', devices)) if value}
    container = {
        'name': CONTAINER,
        'image': pods.image,
        **_command(pods),
        'env': [*_identity(pods), *({'name': name, 'value': value} for name, value in pods.variables)],
        **({'envFrom': [{'secretRef': {'name': name}} for name in pods.secret]} if pods.secret else {}),
        'ports': [{'name': 'coordinator', 'containerPort': PORT}],
        **({'resources': resources} if resources else {}),
        'securityContext': {'allowPrivilegeEscalation': False},
        'volumeMounts': mounts,
    }
    spec = {
        'restartPolicy': 'Never',  # a container that restarts by itself would not restart the others
        **({'subdomain': pods.name} if pods.kind == 'job' else {}),
        **({'serviceAccountName': pods.service_account} if pods.service_account else {}),
        **({'priorityClassName': pods.priority_class} if pods.priority_class else {}),
        **({'nodeSelector': selector} if selector else {}),
        **({'tolerations': [{'key': key, 'operator': 'Exists',
        'effect': 'NoSchedule'} for key in devices]} if devices else {}),
        'terminationGracePeriodSeconds': pods.grace,
        'securityContext': {'fsGroup': _USER, 'fsGroupChangePolicy': 'OnRootMismatch'},
        'containers': [container],
        'volumes': volumes,
    }  # fmt: skip
    return {'metadata': {'labels': labels}, 'spec': spec}


def _devices(pods: Pods) -> dict[str, int]:
    if pods.accelerator:
        return {'google.com/tpu': pods.accelerator[2]}
    return {'nvidia.com/gpu': pods.gpus} if pods.gpus else {}


def _command(pods: Pods) -> Manifest:
    words = ['pretrax', 'launch', 'node', f'{_DIRECTORY}/{CONFIG}', '--until-done', *pods.words]
    if pods.kind == 'jobset':
        words += ['--attempt', f'{pods.launched}-$(ATTEMPT)']  # Kubernetes replaces $(ATTEMPT)
    if pods.slices == 1:
        return {'command': words}
    index = f'export JAX_PROCESS_ID=$((MEGASCALE_SLICE_ID * {pods.nodes} + TPU_WORKER_ID))'
    return {'command': ['/bin/sh', '-c', f'{index}; exec "$@"', 'sh', *words]}


def _identity(pods: Pods) -> list[Manifest]:
    """Variables from which JAX and libtpu know the process. Processes are numbered by slice, then by node."""
    found: list[Manifest] = [
        {'name': 'JAX_COORDINATOR_ADDRESS', 'value': f'{pods.coordinator}:{PORT}'},
        {'name': 'JAX_NUM_PROCESSES', 'value': str(pods.processes)},
    ]
    if pods.slices == 1:
        found.append(_from_pod('JAX_PROCESS_ID', f"metadata.annotations['{INDEX}']"))
    else:
        found += [
            {'name': 'MEGASCALE_COORDINATOR_ADDRESS', 'value': pods.coordinator},
            {'name': 'MEGASCALE_NUM_SLICES', 'value': str(pods.slices)},
            _from_pod('MEGASCALE_SLICE_ID', f"metadata.annotations['{SLICE}']"),
            _from_pod('TPU_WORKER_ID', f"metadata.annotations['{INDEX}']"),
        ]
    if pods.kind == 'jobset':
        found.append(_from_pod('ATTEMPT', f"metadata.labels['{_ATTEMPT}']"))
    return found


def _from_pod(name: str, path: str) -> Manifest:
    return {'name': name, 'valueFrom': {'fieldRef': {'fieldPath': path}}}


def check_quantity(option: str, text: str | None) -> None:
    """Raises UserError unless the text is a quantity of Kubernetes."""
    if text is not None and not re.fullmatch(r'\d+(\.\d+)?(m|[KMGTPE]i?|k)?', text):
        raise UserError(f'{option} {text}: expected a quantity of Kubernetes, such as 64Gi, 500G or 8')


class _Readable(yaml.SafeDumper):
    """Lists are indented, texts of several lines are blocks, and nothing is an alias of something else."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar('tag:yaml.org,2002:str', text, style='|' if '\n' in text else None)


_Readable.add_representer(str, _text)
