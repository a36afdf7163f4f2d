"""Kubernetes manifests of a run: a JobSet, or a plain indexed Job with its Service, and a ConfigMap.

A pod is a node: its container runs `pretrax launch node`, one process for all accelerators of the node. Its identity is
in its environment. Nothing in a pod asks the API server, so that no permissions are needed. The objects are in
`templates/kubernetes.yaml`.
"""

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pretrax.errors import CONFIGURATION, MISTAKE
from pretrax.launch.options import PodOptions
from pretrax.launch.shipped import CONFIG, STOPPED, fill_template
from pretrax.tables import read_table

GROUP = 'train'  # the replicated job of a JobSet
CONTAINER = 'train'
RUN_LABEL = 'pretrax/run'
RUN_DIR = 'pretrax/run-dir'  # annotation: the run that an object belongs to
INDEX = 'batch.kubernetes.io/job-completion-index'  # label and annotation of a pod
SLICE = 'jobset.sigs.k8s.io/job-index'
_EXCLUSIVE = 'alpha.jobset.sigs.k8s.io/exclusive-topology'
_DIRECTORY = '/etc/pretrax'
TPUS: dict[str, dict[str, str]] = read_table(Path(__file__).with_name('tpus.yaml'))

type Manifest = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pods(PodOptions):
    """The pods of a run."""

    name: str  # name of the objects, see `object_name`
    run_dir: str  # directory of the run; an annotation of every object
    nodes: int = 1  # pods of one slice; without TPUs there is one slice
    # (version, topology such as '4x4x4', chips per node) of the TPU; None: no TPU
    accelerator: tuple[str, str, int] | None = None
    words: tuple[str, ...] = ()  # appended to the command of the container
    launched: str = ''  # the time of the launch, which begins the label of each attempt

    @property
    def processes(self) -> int:
        return self.nodes * self.slices

    @property
    def coordinator(self) -> str:
        """Host name of process 0 in the headless service."""
        pod = f'{self.name}-{GROUP}-0-0' if self.kind == 'jobset' else f'{self.name}-0'
        return f'{pod}.{self.name}'


def manifests(pods: Pods, files: Mapping[str, str]) -> list[Manifest]:
    """The objects of a run. `files`: {name: text} of the configuration and its plugins, from `shipped`."""
    selector = dict(pods.node_labels)
    devices = {'nvidia.com/gpu': pods.gpus} if pods.gpus else {}
    if pods.accelerator:
        version, topology, chips = pods.accelerator
        selector['cloud.google.com/gke-tpu-accelerator'] = TPUS[version]['node']
        selector['cloud.google.com/gke-tpu-topology'] = topology
        devices = {'google.com/tpu': chips}
    requests = {key: value for key, value in (('cpu', pods.cpu), ('memory', pods.memory)) if value}
    amounts: dict[str, int | str] = {**devices, **pods.resources}
    resources = {key: value for key, value in (('requests', requests | amounts), ('limits', amounts)) if value}
    text = fill_template(
        'kubernetes.yaml',
        pods=pods,
        files=dict(files),
        node_selector=selector,
        devices=devices,
        resources=resources,
        command=_command(pods),
        claims=list(dict.fromkeys(claim for claim, _ in pods.volumes)),
        exclusive={_EXCLUSIVE: 'cloud.google.com/gke-nodepool'} if pods.accelerator else {},
        directory=_DIRECTORY,
        mistakes=[MISTAKE, CONFIGURATION],
        stopped=STOPPED,
    )
    return list(yaml.safe_load_all(text))


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


def _command(pods: Pods) -> list[str]:
    words = ['pretrax', 'launch', 'node', f'{_DIRECTORY}/{CONFIG}', '--until-done', *pods.words]
    if pods.kind == 'jobset':
        words += ['--attempt', f'{pods.launched}-$(ATTEMPT)']  # Kubernetes replaces $(ATTEMPT)
    if pods.slices == 1:
        return words
    index = f'export JAX_PROCESS_ID=$((MEGASCALE_SLICE_ID * {pods.nodes} + TPU_WORKER_ID))'
    return ['/bin/sh', '-c', f'{index}; exec "$@"', 'sh', *words]


class _Readable(yaml.SafeDumper):
    """Lists are indented, texts of several lines are blocks, and nothing is an alias of something else."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar('tag:yaml.org,2002:str', text, style='|' if '\n' in text else None)


_Readable.add_representer(str, _text)
