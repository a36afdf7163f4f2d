"""A small Kubernetes for tests: an API server that the real kubectl talks to, and pods that are processes of this
machine.

What is real: kubectl, the schemas of all objects, the commands and variables of the containers, their processes, their
host names, and the paths of their files (in namespaces of Linux of their own). What is simulated, as the documentation
says it: the controllers of Job (kubernetes.io/docs/concepts/workloads/controllers/job) and of JobSet
(jobset.sigs.k8s.io/docs/concepts), of which nothing outside a cluster exists.
"""

import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import kubernetes_validate
import yaml

CORE = ('configmaps ConfigMap', 'services Service', 'pods Pod', 'secrets Secret', 'namespaces Namespace',
        'serviceaccounts ServiceAccount', 'persistentvolumeclaims PersistentVolumeClaim')  # fmt: skip
JOBSET = 'jobset.x-k8s.io/v1alpha2'
TYPES = {'v1': CORE, 'batch/v1': ('jobs Job',), JOBSET: ('jobsets JobSet',)}
INDEX = 'batch.kubernetes.io/job-completion-index'
PATH = re.compile(r'/(?:api|apis)/(v1|[^/]+/[^/]+)(?:/namespaces/([^/]+))?(?:/([a-z]+)(?:/([^/]+)(/log)?)?)?')


def why_not() -> str:
    """Why no cluster can run here; '' if one can."""
    if shutil.which('kubectl') is None:
        return 'there is no kubectl'
    probe = ['unshare', '--net', '--mount', '--uts', '--pid', '--fork', 'ip', 'link', 'set', 'lo', 'up']
    if not (shutil.which('unshare') and shutil.which('ip')) or subprocess.run(probe, capture_output=True).returncode:
        return 'namespaces of Linux need root, and ip'
    return ''


def check_object(given: dict) -> None:
    """Raises an exception unless an object has exactly the fields of its schema."""
    if given['kind'] != 'JobSet':
        kubernetes_validate.validate(given, '1.31', strict=True)
        return
    from kubeflow_trainer_api.models import JobsetV1alpha2JobSet

    read = JobsetV1alpha2JobSet.from_dict(json.loads(json.dumps(given)))
    assert read is not None
    _check_kept(given['spec'], read.to_dict()['spec'], 'spec')  # the model drops fields that it does not know
    for group in given['spec']['replicatedJobs']:
        job = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': {'name': 'x'}, 'spec': group['template']['spec']}
        kubernetes_validate.validate(job, '1.31', strict=True)


def _check_kept(given, kept, place):
    if isinstance(given, dict):
        assert set(given) <= set(kept), f'{place} has unknown fields: {set(given) - set(kept)}'
        for key in given:
            _check_kept(given[key], kept[key], f'{place}.{key}')
    elif isinstance(given, list):
        for number, (one, other) in enumerate(zip(given, kept, strict=True)):
            _check_kept(one, other, f'{place}[{number}]')


class Pod:
    """A process in the namespaces of the cluster."""

    def __init__(self, cluster, name, template, labels, annotations, job):
        self.name, self.job, self.index = name, job, annotations[INDEX]
        self.labels, self.annotations = {**template['metadata'].get('labels', {}), **labels}, annotations
        self.conditions, self.spec = [], template['spec']
        container = self.spec['containers'][0]
        variables = {one['name']: self._value(one) for one in container['env']}
        expand = re.compile(r'\$\(([A-Za-z_]\w*)\)')
        command = [expand.sub(lambda match: variables.get(match[1], match[0]), word) for word in container['command']]
        self.host = f'{job}-{self.index}'
        self.log = cluster.directory / f'{name}.log'
        inner = ['unshare', '--uts', '--pid', '--fork', '--kill-child', '--mount-proc']
        inner += ['sh', '-c', f'hostname {self.host}; exec "$@"', 'sh', *command]
        with self.log.open('wb') as output:
            self.process = subprocess.Popen(
                ['nsenter', f'--net=/proc/{cluster.holder.pid}/ns/net', f'--mount=/proc/{cluster.holder.pid}/ns/mnt',
                *inner],
                env=cluster.environment | variables, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                cwd=cluster.directory, start_new_session=True,
            )  # fmt: skip

    def _value(self, variable):
        if 'value' in variable:
            return variable['value']
        field = re.fullmatch(
            r"metadata\.(labels|annotations)\['(.*)'\]", variable['valueFrom']['fieldRef']['fieldPath']
        )
        assert field, variable
        return (self.labels if field[1] == 'labels' else self.annotations)[field[2]]

    @property
    def code(self):
        """Exit code as Kubernetes shows it; None: it runs."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def phase(self):
        return 'Running' if self.code is None else 'Failed' if self.code else 'Succeeded'

    def send(self, number):
        """Sends a signal to the first process of the container."""
        children = Path(f'/proc/{self.process.pid}/task/{self.process.pid}/children')
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            for child in children.read_text().split():
                os.kill(int(child), number)

    def kill(self):
        """Kills all processes of the container, as when memory runs out or a node is lost."""
        self.send(signal.SIGKILL)
        self.process.wait()

    def end(self):
        """As the kubelet ends a pod: SIGTERM, the grace period, SIGKILL."""
        self.send(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(self.spec['terminationGracePeriodSeconds'])
        self.kill()

    def as_object(self):
        return {
            'apiVersion': 'v1', 'kind': 'Pod',
            'metadata': {'name': self.name, 'namespace': 'default', 'labels': self.labels,
            'annotations': self.annotations},
            'spec': self.spec, 'status': {'phase': self.phase, 'conditions': self.conditions},
        }  # fmt: skip


class JobRun:
    """What the controller of Job does with one Job. `failed` is its reason and message once it has failed."""

    def __init__(self, cluster, name, spec, labels, annotations):
        self.cluster, self.name, self.spec, self.labels, self.annotations = cluster, name, spec, labels, annotations
        self.pods, self.old, self.failures, self.failed = {}, [], 0, None
        for index in range(spec['completions']):
            self._start(index)

    def _start(self, index):
        number = str(index)
        self.pods[index] = Pod(
            self.cluster, f'{self.name}-{index}-{next(self.cluster.numbers):05}', self.spec['template'],
            self.labels | {INDEX: number}, self.annotations | {INDEX: number}, self.name,
        )  # fmt: skip

    @property
    def done(self):
        return all(pod.code == 0 for pod in self.pods.values())

    def look(self):
        """Applies the podFailurePolicy to pods that have ended."""
        if self.failed:
            return
        ended = {index: pod for index, pod in self.pods.items() if pod.code}
        matches = {index: self._rule(pod) for index, pod in ended.items()}
        for index, (number, rule, about) in matches.items():
            if rule and rule['action'] == 'FailJob':
                self.failed = ('PodFailurePolicy', f'{about} matching FailJob rule at index {number}')
                break
            self.failures += not (rule and rule['action'] == 'Ignore')
            self.old.append(self.pods.pop(index))
            if self.failures <= self.spec['backoffLimit']:
                self._start(index)
        else:
            if self.failures > self.spec['backoffLimit']:
                self.failed = ('BackoffLimitExceeded', 'Job has reached the specified backoff limit')
        if self.failed:
            self.end()

    def _rule(self, pod):
        for number, rule in enumerate(self.spec['podFailurePolicy']['rules']):
            wanted = {one['type'] for one in rule.get('onPodConditions', [])}
            if pod.code in rule.get('onExitCodes', {}).get('values', []):
                return number, rule, f'Container train for pod default/{pod.name} failed with exit code {pod.code}'
            if wanted & {one['type'] for one in pod.conditions}:
                return number, rule, f'Pod default/{pod.name} has condition DisruptionTarget'
        return 0, None, ''

    def end(self):
        ending = [threading.Thread(target=pod.end) for pod in self.pods.values()]
        for thread in ending:
            thread.start()
        for thread in ending:
            thread.join()
        self.old += self.pods.values()


class JobSetRun:
    """What the controller of JobSet does with one JobSet, with the strategy BlockingRecreate."""

    def __init__(self, cluster, name, spec):
        self.cluster, self.name, self.spec = cluster, name, spec
        self.restarts, self.counted, self.failed, self.jobs, self.old = 0, 0, None, [], []
        self._start()

    def _start(self):
        group = self.spec['replicatedJobs'][0]
        for number in range(group['replicas']):
            marks = {
                'jobset.sigs.k8s.io/jobset-name': self.name, 'jobset.sigs.k8s.io/job-index': str(number),
                'jobset.sigs.k8s.io/restart-attempt': str(self.restarts),
            }  # fmt: skip
            name = f'{self.name}-{group["name"]}-{number}'
            self.jobs.append(JobRun(self.cluster, name, group['template']['spec'], marks, marks))

    @property
    def pods(self):
        return {(number, index): pod for number, job in enumerate(self.jobs) for index, pod in job.pods.items()}

    @property
    def done(self):
        return all(job.done for job in self.jobs)

    def look(self):
        for job in self.jobs:
            job.look()
        failed = next((job.failed for job in self.jobs if job.failed), None)
        if failed is None or self.failed:
            return
        policy = self.spec['failurePolicy']
        rule = next(
            (rule['action'] for rule in policy['rules'] if failed[0] in rule['onJobFailureReasons']
             and any(re.search(pattern, failed[1]) for pattern in rule['onJobFailureMessagePatterns'])),
            'RestartJobSet',
        )  # fmt: skip
        self.counted += rule == 'RestartJobSet'
        self.end()
        if rule == 'FailJobSet' or self.counted > policy['maxRestarts']:
            self.failed = ('FailedJobs', failed[1])
        else:
            self.restarts += 1
            self.jobs = []
            self._start()

    def end(self):
        for job in self.jobs:
            job.end()
            self.old += job.old


class Cluster:
    """The API server, its objects, and the controllers. Use it with `with`."""

    def __init__(self, directory: Path, job_sets: bool = True, **variables: str):
        self.directory, self.job_sets = directory, job_sets
        directory.mkdir(parents=True, exist_ok=True)
        self.objects, self.runs, self.requests, self._lock = {}, {}, [], threading.RLock()
        self.numbers = itertools.count()
        self.environment = {**os.environ, 'KUBERNETES_SERVICE_HOST': '10.0.0.1', **variables}
        self.environment['PATH'] = f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}'
        self._stop = threading.Event()
        self.add('v1', 'Namespace', 'default')
        self.add('v1', 'ServiceAccount', 'default')

    def add(self, version, kind, name, **more):
        self.objects[kind, name] = {'apiVersion': version, 'kind': kind, 'metadata': {'name': name}, **more}

    def __enter__(self):
        # /etc of the pods: their host names, and the mounted files.
        script = (
            'ip link set lo up; mount -t tmpfs none "$1"; mkdir "$1/upper" "$1/work";'
            'mount -t overlay overlay -o lowerdir=/etc,upperdir="$1/upper",workdir="$1/work" /etc;'
            'mkdir -p /etc/pretrax; echo ready; exec sleep 1000000'
        )
        etc = self.directory / 'etc'
        etc.mkdir()
        self.holder = subprocess.Popen(
            ['unshare', '--net', '--mount', 'bash', '-euc', script.replace(';', '\n'), 'sh', str(etc)],
            stdout=subprocess.PIPE, text=True
        )  # fmt: skip
        assert self.holder.stdout is not None
        assert self.holder.stdout.readline() == 'ready\n', 'no namespaces'
        self._server = ThreadingHTTPServer(('127.0.0.1', 0), _handler(self))
        self._threads = [threading.Thread(target=self._server.serve_forever), threading.Thread(target=self._control)]
        for thread in self._threads:
            thread.start()
        address = f'http://127.0.0.1:{self._server.server_address[1]}'
        self.kubeconfig = self.directory / 'kubeconfig'
        self.kubeconfig.write_text(
            yaml.safe_dump({
                'apiVersion': 'v1', 'kind': 'Config', 'current-context': 'test',
                'clusters': [{'name': 'test', 'cluster': {'server': address}}], 'users': [{'name': 'test', 'user': {}}],
                'contexts': [{'name': 'test', 'context': {'cluster': 'test', 'user': 'test'}}],
            })
        )  # fmt: skip
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._server.shutdown()
        for thread in self._threads:
            thread.join()
        self._server.server_close()
        for run in self.runs.values():
            for job in getattr(run, 'jobs', [run]):
                for pod in job.pods.values():
                    pod.kill()
        self.holder.kill()
        self.holder.communicate()

    def run_of(self, name):
        return self.runs[name]

    def create(self, given):
        """Starts what a new object asks for."""
        kind, name = given['kind'], given['metadata']['name']
        self.objects[kind, name] = given
        if kind == 'ConfigMap':
            for file, text in given['data'].items():
                self._in_etc(f'pretrax/{file}', text)
        if kind in ('Job', 'JobSet') and not given['spec'].get('suspend'):
            hosts = '127.0.0.1 localhost\n'
            for job, count in self._jobs(given):
                hosts += ''.join(f'127.0.0.1 {job}-{n}.{name} {job}-{n}\n' for n in range(count))
            self._in_etc('hosts', hosts)
            spec = given['spec']
            marks = {'batch.kubernetes.io/job-name': name}
            self.runs[name] = JobSetRun(self, name, spec) if kind == 'JobSet' else JobRun(self, name, spec, marks, {})

    @staticmethod
    def _jobs(given):
        name, spec = given['metadata']['name'], given['spec']
        if given['kind'] == 'Job':
            return [(name, spec['completions'])]
        group = spec['replicatedJobs'][0]
        count = group['template']['spec']['completions']
        return [(f'{name}-{group["name"]}-{number}', count) for number in range(group['replicas'])]

    def _in_etc(self, path, text):
        target = ['nsenter', f'--mount=/proc/{self.holder.pid}/ns/mnt', 'tee', f'/etc/{path}']
        subprocess.run(target, input=text, text=True, check=True, stdout=subprocess.DEVNULL)

    def remove(self, kind, name):
        given = self.objects.pop((kind, name))
        if kind in ('Job', 'JobSet') and name in self.runs:
            self.runs.pop(name).end()
        return given

    def evict(self, pod):
        """As a drain of its node, or a preemption."""
        pod.conditions.append({'type': 'DisruptionTarget', 'status': 'True', 'reason': 'EvictionByEvictionAPI'})
        threading.Thread(target=pod.end).start()

    def status_of(self, name):
        run = self.runs.get(name)
        if run is None:
            return {}
        ended = [('Complete' if isinstance(run, JobRun) else 'Completed', run.done), ('Failed', bool(run.failed))]
        message = run.failed[1] if run.failed else ''
        conditions = [{'type': kind, 'status': 'True', 'message': message} for kind, is_so in ended if is_so]
        return {
            'conditions': conditions,
            'restarts': getattr(run, 'restarts', 0),
            'failed': getattr(run, 'failures', 0),
        }

    def _control(self):
        while not self._stop.wait(0.2):
            with self._lock:
                for run in list(self.runs.values()):
                    run.look()

    def answer(self, method, path, query, body):
        """Status and object for a request of kubectl."""
        with self._lock:
            return self._answer(method, path, query, body)

    def _answer(self, method, path, query, body):
        groups = [name for name in TYPES if name != 'v1' and (self.job_sets or name != JOBSET)]
        if path == '/version':
            return 200, {'major': '1', 'minor': '31', 'gitVersion': 'v1.31.0'}
        if path == '/api':
            return 200, {'kind': 'APIVersions', 'versions': ['v1']}
        if path == '/apis':
            versions = [{'groupVersion': name, 'version': name.split('/')[1]} for name in groups]
            found = [
                {'name': v['groupVersion'].split('/')[0], 'versions': [v], 'preferredVersion': v} for v in versions
            ]
            return 200, {'kind': 'APIGroupList', 'apiVersion': 'v1', 'groups': found}
        if path == '/openapi/v3':
            return 200, {
                'paths': {_api(name): {'serverRelativeURL': f'/openapi/v3/{_api(name)}'} for name in ['v1', *groups]}
            }
        if path.startswith('/openapi/v3/'):
            return 200, _openapi(path.removeprefix('/openapi/v3/'))
        match = PATH.fullmatch(path)
        if match is None or (match[1] == JOBSET and not self.job_sets):
            return _missing(path)
        version, _, plural, name, log = match.groups()
        if match[2] and plural is None:
            plural, name = 'namespaces', match[2]
        if plural is None:
            resources = [
                {'name': one.split()[0], 'kind': one.split()[1], 'namespaced': one.split()[1] != 'Namespace',
                'singularName': '',
                 'verbs': ['create', 'delete', 'get', 'list', 'patch', 'watch']}
                for one in TYPES[version]
            ]  # fmt: skip
            return 200, {'kind': 'APIResourceList', 'groupVersion': version, 'resources': resources}
        kind = next(one.split()[1] for one in TYPES[version] if one.split()[0] == plural)
        objects = {key: value for key, value in self.objects.items() if key[0] == kind}
        if kind == 'Pod':
            objects = {('Pod', pod.name): pod.as_object() for run in self.runs.values() for pod in run.pods.values()}
        if log:
            pods = {pod.name: pod for run in self.runs.values() for pod in run.pods.values()}
            lines = pods[name].log.read_text().splitlines(keepends=True)
            return 200, ''.join(lines[-int(query['tailLines'][0]) :] if 'tailLines' in query else lines)
        if method == 'POST':
            try:
                check_object(body)
            except Exception as error:
                text = f'{kind} "{body["metadata"]["name"]}" is invalid: {error}'
                return 422, {'kind': 'Status', 'status': 'Failure', 'reason': 'Invalid', 'message': text, 'code': 422}
            if 'dryRun' not in query:
                self.create(body)
            return 201, body
        if name is None:
            wanted = dict(one.split('=') for one in query.get('labelSelector', [''])[0].split(',') if one)
            items = [one for one in objects.values() if wanted.items() <= one['metadata'].get('labels', {}).items()]
            return 200, {'kind': f'{kind}List', 'apiVersion': version, 'metadata': {}, 'items': items}
        if (kind, name) not in objects:
            return _missing(name, plural if version == 'v1' else f'{plural}.{version.split("/")[0]}')
        if method == 'DELETE':
            self.remove(kind, name)
            return 200, {'kind': 'Status', 'apiVersion': 'v1', 'status': 'Success', 'details': {'name': name}}
        return 200, objects[kind, name] | ({'status': self.status_of(name)} if kind in ('Job', 'JobSet') else {})


def _missing(name, plural='resources'):
    text = f'{plural} "{name}" not found'
    return 404, {
        'kind': 'Status',
        'apiVersion': 'v1',
        'status': 'Failure',
        'reason': 'NotFound',
        'message': text,
        'code': 404,
    }


def _api(version):
    return f'api/{version}' if version == 'v1' else f'apis/{version}'


def _openapi(api):
    """What kubectl looks for: that the server checks unknown fields, and the field of a JobSet that `explain` shows."""
    version = api.partition('/')[2]
    group, _, number = version.rpartition('/')
    paths, schemas = {}, {}
    for one in TYPES[version]:
        plural, kind = one.split()
        named = [{'group': group, 'version': number, 'kind': kind}]
        patch = {
            'parameters': [{'name': 'fieldValidation', 'in': 'query'}],
            'x-kubernetes-group-version-kind': named[0],
        }
        paths[f'/{api}/namespaces/{{namespace}}/{plural}/{{name}}'] = {'patch': patch}
        schemas[kind] = {'type': 'object', 'x-kubernetes-group-version-kind': named, 'properties': {}}
        patterns = {'onJobFailureMessagePatterns': {'type': 'array', 'items': {'type': 'string'}}}
        rules = {'rules': {'type': 'array', 'items': {'type': 'object', 'properties': patterns}}}
        if kind == 'JobSet':
            policy = {'failurePolicy': {'type': 'object', 'properties': rules}}
            schemas[kind]['properties'] = {'spec': {'type': 'object', 'properties': policy}}
    return {
        'openapi': '3.0.0',
        'info': {'title': 'test', 'version': '1'},
        'paths': paths,
        'components': {'schemas': schemas},
    }


def _handler(cluster):
    class Handler(BaseHTTPRequestHandler):
        def _do(self):
            url = urlsplit(self.path)
            length = int(self.headers.get('Content-Length') or 0)
            raw = self.rfile.read(length)
            body = json.loads(raw) if raw else None
            cluster.requests.append((self.command, self.path))
            status, found = cluster.answer(self.command, url.path, parse_qs(url.query), body)
            content = found.encode() if isinstance(found, str) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header('Content-Type', 'text/plain' if isinstance(found, str) else 'application/json')
            self.send_header('Content-Length', str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = do_PATCH = _do  # noqa: N815

        def log_message(self, *_):
            pass

    return Handler


def wait_until(done, seconds=240):
    """Waits for something, and returns it."""
    until = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < until, 'it did not happen'
        time.sleep(0.1)
    return found
