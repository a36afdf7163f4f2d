"""Starts a run in a Kubernetes cluster, and finds it again, through `kubectl`. The manifests are in `manifests.py`."""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from pretrax.errors import Report, UnavailableError, UserError
from pretrax.launch.engine import Engine
from pretrax.launch.manifests import CONTAINER, INDEX, RUN_DIR, RUN_LABEL, SLICE, Manifest, Pods, as_yaml
from pretrax.launch.record import LaunchRecord
from pretrax.storage import AnyPath, BucketPath
from pretrax.system.children import run_tool

INSTALL_JOBSET = (
    'kubectl apply --server-side -f https://github.com/kubernetes-sigs/jobset/releases/download/v0.10.1/manifests.yaml'
)
_WAIT = 60  # seconds for an answer of the cluster
_GONE = 'it was stopped, or removed after its end'


def check_run_dir(run_dir: AnyPath, paths: Sequence[str]) -> None:
    """Raises UserError unless all pods see the run directory, and it outlives them.

    Args:
        paths: at which volumes are mounted.
    """
    if isinstance(run_dir, BucketPath) or any(run_dir.is_relative_to(path) for path in paths):
        return
    inside = f'{paths[0].rstrip("/")}/{run_dir}' if paths and not run_dir.is_absolute() else '/data/runs/NAME'
    volume = '' if paths else ' with --volume CLAIM:/data'
    raise UserError(
        f'run_dir: {run_dir} is inside each pod, and is lost with it\n'
        f'give a bucket: run_dir=gs://BUCKET/runs/NAME, or a volume of all pods: run_dir={inside}{volume}'
    )


def check_cluster(pods: Pods) -> None:
    """Raises UserError if there is no kubectl, no cluster, or not what the run needs in it."""
    if shutil.which('kubectl') is None:
        raise UserError(
            'there is no kubectl on the PATH\ninstall it: https://kubernetes.io/docs/tasks/tools, '
            'or print the manifests for another machine: --dry-run'
        )
    done = _kubectl('version', '-o', 'json')
    if done.returncode:
        raise UserError(f'kubectl reaches no cluster: {_last(done)}\nlook at: kubectl config get-contexts')
    if pods.kind == 'jobset':
        _check_job_set()
    place = _place(pods.namespace)
    if pods.namespace and _is_missing(_kubectl('get', 'namespace', pods.namespace)):
        raise UserError(f'there is no namespace {pods.namespace}\ncreate it: kubectl create namespace {pods.namespace}')
    for claim in dict.fromkeys(claim for claim, _ in pods.volumes):
        found = _kubectl('get', 'persistentvolumeclaim', claim, '-o', 'json', *place)
        if _is_missing(found):
            raise UserError(
                f'--volume: there is no PersistentVolumeClaim {claim}; there are: {
                    _names("persistentvolumeclaim", place)
                }'
            )
        modes = json.loads(found.stdout or '{}').get('spec', {}).get('accessModes', ['ReadWriteMany'])
        if pods.processes > 1 and 'ReadWriteMany' not in modes:
            raise UserError(
                f'--volume: {claim} is {", ".join(modes)}, so that one node can write to it; there are '
                f'{pods.processes}\n'
                'give a claim that is ReadWriteMany, or a bucket as run_dir'
            )
    for option, kind, names in (
        ('--secret', 'secret', pods.secret),
        ('--service-account', 'serviceaccount', [pods.service_account] if pods.service_account else []),
        ('--queue', 'localqueue', [pods.queue] if pods.queue else []),
    ):
        for name in names:
            if _is_missing(_kubectl('get', kind, name, *place)):
                raise UserError(f'{option}: there is no {kind} {name}; there are: {_names(kind, place)}')


def submit(pods: Pods, objects: list[Manifest], say: Report) -> None:
    """Creates the objects of a run, once the cluster has accepted all of them in a dry run.

    Raises:
        UserError: the run exists and has not ended, its objects belong to another run, or the cluster refuses an
            object.
    """
    place = _place(pods.namespace)
    text = as_yaml(objects)
    there = {kind: _own_object(kind, pods, place) for kind in ('jobset', 'job', 'configmap')}
    for kind, found in there.items():
        if found is None or kind == 'configmap':
            continue
        ended = _ended(found)
        if not ended:
            raise UserError(
                f'{kind}/{pods.name} is in the cluster already, and has not ended\n'
                'stop it first: pretrax launch stop RUN, or give this run another name: name=...'
            )
        say(f'launch: removing {kind}/{pods.name}, which has {ended}')
        _delete(pods.name, pods.run_dir, place)
    if pods.kind == 'job':  # only now: the controller of a JobSet that was removed had made one
        _own_object('service', pods, place)
    for dry in (['--dry-run=server'], []):
        done = _kubectl('apply', *dry, '-f', '-', *place, text=text)
        if done.returncode:
            raise UserError('the cluster refuses the run:\n' + '\n'.join(done.stderr.strip().splitlines()[-8:]))


def next_command(pods: Pods) -> str:
    """The command that shows the pods of a run."""
    return ' '.join(['  kubectl get pods -l', f'{RUN_LABEL}={pods.name}', *_place(pods.namespace)])


def record_of(pods: Pods) -> LaunchRecord:
    """What `status`, `logs` and `stop` need, for the run's launch.json."""
    facts = {'kind': pods.kind, 'namespace': pods.namespace, 'slices': pods.slices, 'run_dir': pods.run_dir}
    return LaunchRecord(engine='kubernetes', job=pods.name, nodes=pods.processes, facts=facts)


class Kubernetes(Engine):
    """Runs in a cluster, through kubectl."""

    def status(self, record: LaunchRecord) -> str:
        name, kind, place = record.job, record.facts['kind'], _place(record.facts['namespace'])
        job = _recorded(record)
        if job is None:
            return f'kubernetes: there is no {kind}/{name} of this run: {_GONE}'
        phases = _phases(name, place)
        counts = ', '.join(f'{phases.count(phase)} {phase}' for phase in dict.fromkeys(phases)) or 'none'
        waits = 'waits in its queue' if job['spec'].get('suspend') else 'has not ended'
        numbers = job.get('status', {})
        again = f'restarts: {numbers.get("restarts", 0)}' if kind == 'jobset' else f'failed: {numbers.get("failed", 0)}'
        return f'kubernetes: {kind}/{name} {_ended(job) or waits}; pods: {counts}; {again}'

    def is_running(self, record: LaunchRecord) -> bool:
        if shutil.which('kubectl') is None:  # then it is not certain
            return False
        try:
            job = _recorded(record)
        except UserError as error:
            raise UnavailableError(str(error)) from None
        return job is not None and not _ended(job)

    def log_command(
        self, record: LaunchRecord, run_dir: AnyPath, process: int | None, lines: int, follow: bool
    ) -> list[str]:
        slices = record.facts['slices']
        labels = {RUN_LABEL: record.job}
        if process is not None:
            labels |= {INDEX: process % (record.nodes // slices)}
            labels |= {SLICE: process // (record.nodes // slices)} if slices > 1 else {}
        selector = ','.join(f'{key}={value}' for key, value in labels.items())
        every = ['--prefix', f'--max-log-requests={record.nodes}'] if process is None else []
        options = [*every, *(['--follow'] if follow else []), *_place(record.facts['namespace'])]
        return ['kubectl', 'logs', '-l', selector, '-c', CONTAINER, f'--tail={lines}', *options]

    def stop(self, record: LaunchRecord) -> str:
        what, place = f'{record.facts["kind"]}/{record.job}', _place(record.facts['namespace'])
        job = _recorded(record)
        if job is None:
            return f'kubernetes: there is no {what} of this run: {_GONE}'
        running = _phases(record.job, place).count('running')
        _delete(record.job, record.facts['run_dir'], place)
        if ended := _ended(job):
            return f'kubernetes: {what} had {ended} already; it is deleted'
        pods = f'{running} pod{"" if running == 1 else "s"} had to save, and ended' if running else 'no pod was running'
        return f'kubernetes: {what} is deleted; {pods}'


ENGINE = Kubernetes()


def _find(kind: str, name: str, place: Sequence[str]) -> Manifest | None:
    """An object of the cluster; None: there is none. Raises UserError if the cluster does not say."""
    found = _kubectl('get', _kind(kind), name, '-o', 'json', *place)
    if _is_missing(found):
        return None
    _check(found)
    return json.loads(found.stdout)


def _run_dir(found: Manifest) -> str:
    """The run to which an object belongs; '': to none."""
    return (found['metadata'].get('annotations') or {}).get(RUN_DIR, '')


def _own_object(kind: str, pods: Pods, place: Sequence[str]) -> Manifest | None:
    """An object of this run, if there is one. Raises UserError if something else has its name."""
    found = _find(kind, pods.name, place)
    if found is not None and _run_dir(found) != pods.run_dir:
        whose = f'belongs to the run in {_run_dir(found)}' if _run_dir(found) else 'is not of pretrax'
        raise UserError(
            f'{kind}/{pods.name} is in the cluster already, and {whose}\n'
            'give this run another name: name=..., or another namespace: --namespace NAME'
        )
    return found


def _recorded(record: LaunchRecord) -> Manifest | None:
    """The Job or JobSet of a record; None: there is none, or it belongs to another run."""
    found = _find(record.facts['kind'], record.job, _place(record.facts['namespace']))
    return found if found is not None and _run_dir(found) == record.facts['run_dir'] else None


def _phases(name: str, place: Sequence[str]) -> list[str]:
    pods = _kubectl('get', 'pods', '-l', f'{RUN_LABEL}={name}', '-o', 'json', *place)
    _check(pods)
    return [pod['status'].get('phase', 'Unknown').lower() for pod in json.loads(pods.stdout)['items']]


def _delete(name: str, run_dir: str, place: Sequence[str]) -> None:
    """Deletes the objects of a run, once its pods have ended. Raises UserError."""
    # Names, not the label: a cluster without JobSet has no such kind to select from.
    for kind in ('jobset', 'job', 'service', 'configmap'):
        found = _find(kind, name, place)
        if found is not None and _run_dir(found) == run_dir:
            _check(
                _kubectl('delete', _kind(kind), name, '--ignore-not-found', '--cascade=foreground', *place, wait=900)
            )


def _ended(job: Mapping[str, Any]) -> str:
    """'completed', 'failed: REASON', or '' for a Job or JobSet that has not ended."""
    for condition in job.get('status', {}).get('conditions', []):
        if condition['status'] == 'True' and condition['type'] in ('Complete', 'Completed'):
            return 'completed'
        if condition['status'] == 'True' and condition['type'] == 'Failed':
            return f'failed: {condition.get("message") or condition.get("reason")}'
    return ''


def _check_job_set() -> None:
    field = 'jobset.spec.failurePolicy.rules.onJobFailureMessagePatterns'
    if not _kubectl('explain', field, '--api-version=jobset.x-k8s.io/v1alpha2').returncode:
        return
    old = _kubectl('explain', 'jobset', '--api-version=jobset.x-k8s.io/v1alpha2').returncode == 0
    what = 'has a JobSet controller older than 0.10' if old else 'has no JobSet controller'
    raise UserError(f'the cluster {what}\ninstall it: {INSTALL_JOBSET}\nor use what every cluster has: --kind job')


def _kind(kind: str) -> str:
    return {'jobset': 'jobset.jobset.x-k8s.io', 'job': 'job.batch'}.get(kind, kind)


def _place(namespace: str | None) -> list[str]:
    return ['-n', namespace] if namespace else []


def _kubectl(*words: str, text: str = '', wait: int = _WAIT) -> subprocess.CompletedProcess[str]:
    return run_tool(['kubectl', *words], wait, text)


def _is_missing(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether the object does not exist. A user who may not read it gets False."""
    return done.returncode != 0 and ('NotFound' in done.stderr or "doesn't have a resource type" in done.stderr)


def _check(done: subprocess.CompletedProcess[str]) -> None:
    if done.returncode:
        verb, kind = done.args[1:3]
        raise UserError(
            f'{" ".join(done.args[:4])}: {_last(done)}\n'
            f'type the command again when the cluster answers; may you do that? kubectl auth can-i {verb} {kind}'
        )


def _names(kind: str, place: Sequence[str]) -> str:
    found = _kubectl('get', kind, '-o', 'name', *place).stdout.split()
    return ', '.join(name.partition('/')[2] for name in found) or 'none'


def _last(done: subprocess.CompletedProcess[str]) -> str:
    return next(iter(reversed(done.stderr.strip().splitlines())), f'exit code {done.returncode}')[:300]
