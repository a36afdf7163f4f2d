"""`pretrax launch kubernetes` through the real kubectl, with pods that are processes; see
tests/kubernetes_cluster.py.
"""

import json
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from kubernetes_cluster import Cluster, check_object, wait_until, why_not
from launched import BASE, environment, undisturbed, write_run
from preloaded import programs
from pretrax.checkpoint import steps_in
from pretrax.cli import main
from pretrax.cost.topology import check_rentable, parse_topology
from pretrax.launch.record import LaunchRecord, write_record
from pretrax.observe.metrics import read_metrics

needs_cluster = pytest.mark.skipif(bool(why_not()), reason=why_not() or 'here it runs')
BUCKET = 'run_dir=gs://bucket/runs/x'
IMAGE = ('--image', 'registry/pretrax')


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'run.yaml').write_text(json.dumps(BASE | {'name': 'x'}))
    return 'run.yaml'


def call(capsys, *arguments, code=0):
    with pytest.raises(SystemExit) as ended:
        main(['launch', *arguments])
    out, err = capsys.readouterr()
    assert (ended.value.code or 0) == code, out + err
    return out + err if code else out


def dry(capsys, config, *arguments):
    text = call(capsys, 'kubernetes', config, *IMAGE, BUCKET, '--dry-run', *arguments)
    return list(yaml.safe_load_all(text))


def pod_of(objects):
    spec = objects[-1]['spec']
    return (spec['replicatedJobs'][0]['template']['spec'] if objects[-1]['kind'] == 'JobSet' else spec)['template'][
        'spec'
    ]


def test_a_dry_run_prints_manifests_that_kubernetes_accepts_and_touches_nothing(config, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv('PATH', str(tmp_path))  # no kubectl
    objects = dry(capsys, config, '--nodes', '2', '--gpus-per-node', '2', '--secret', 's', '--volume', 'data:/data')
    for one in objects:
        check_object(one)
    assert [one['kind'] for one in objects] == ['ConfigMap', 'JobSet']
    assert pod_of(objects)['containers'][0]['image'] == 'registry/pretrax'
    assert sorted(path.name for path in tmp_path.iterdir()) == ['run.yaml']


# Hosts and chips per host: the tables of docs.cloud.google.com/tpu/docs/v5p, /v5e, /v6e and /v4.
@pytest.mark.parametrize(
    ('name', 'topology', 'hosts', 'chips'),
    [
        ('v5p-128', '4x4x4', 16, 4), ('v5p-8', '2x2x1', 1, 4), ('v5p:4x4x8', '4x4x8', 32, 4), ('v4-16', '2x2x2', 2, 4),
        ('v5e-16', '4x4', 4, 4), ('v5e-8', '2x4', 1, 8), ('v5e-4', '2x2', 1, 4), ('v6e-256', '16x16', 64, 4), ('v6e-1',
        '1x1', 1, 1),
    ],
)  # fmt: skip
def test_a_slice_has_the_hosts_that_google_says(config, capsys, name, topology, hosts, chips):
    objects = dry(capsys, config, '--tpu', name, 'mesh.d=1', 'mesh.r=auto', 'batch.tokens=65536')
    job = objects[-1]['spec']['replicatedJobs'][0]['template']['spec']
    assert job['completions'] == hosts
    pod = job['template']['spec']
    assert pod['nodeSelector']['cloud.google.com/gke-tpu-topology'] == topology
    assert pod['containers'][0]['resources']['limits'] == {'google.com/tpu': chips}


@pytest.mark.parametrize(
    ('arguments', 'expected'),
    [
        (['--tpu', 'v5p-100'], 'no v5p slice has 100 cores'),
        (['--tpu', 'v5p:3x5x7'], 'each side is a multiple of 4'),
        (['--tpu', 'v5e:3x3'], 'near: v5e:2x4, v5e:2x2'),
        (['--tpu', 'h100x8'], 'h100x8 is not a TPU'),
        (['--tpu', 'v9-8'], 'no such hardware'),
        (['--tpu', 'v5p-128', '--nodes', '4'], 'has 16 hosts of 4 chips'),
        (['--tpu', 'v5p-128', '--gpus-per-node', '4'], 'give one of them'),
        (['--tpu', 'v5p-8', '--slices', '2', '--kind', 'job'], 'a plain Job is one slice'),
        (['--slices', '2'], '--slices 2 is for TPUs'),
        (['--nodes', '3', 'mesh.d=2'], '3 nodes with 1 device each'),
        (['--nodes', '2', 'run_dir=runs/x'], 'is inside each pod, and is lost with it'),
        (['run_dir=/scratch/x', '--volume', 'claim:/data'], 'give a bucket'),
        (['--volume', 'claim'], 'expected NAME:VALUE'),
        (['--volume', 'claim:data'], 'an absolute path'),
        (['--kind', 'deployment'], 'expected jobset or job'),
        (['--memory', '64GB'], 'expected a quantity'),
        (['--label', 'team'], '--label team: expected NAME=VALUE'),
        (['--label', 'team=a b'], 'the value of a label has at most 63'),
        (['--label', 'pretrax/run=x'], 'pretrax sets pretrax/run itself'),
        (['--node-label', 'a/b/c=x'], '--node-label a/b/c=x: expected a key'),
        (['--annotation', '-x=1'], '--annotation -x=1: expected a key'),
        (['--resource', 'rdma/ib=all'], '--resource rdma/ib all: expected a quantity'),
        (['--resource', 'gpu=1'], 'expected a name such as rdma/ib'),
        (['--resource', 'nvidia.com/gpu=8'], 'has an option of its own: --gpus-per-node'),
        (['--image', ' '], '--image: expected the name of an image'),
        (['processes.index=1'], 'the launcher sets processes.index'),
        (['--nods', '2'], 'has no option --nods'),
    ],
)
def test_bad_input_is_refused_before_anything_is_asked(config, capsys, arguments, expected):
    place = [] if any(word.startswith('run_dir=') for word in arguments) else [BUCKET]
    text = call(capsys, 'kubernetes', config, *IMAGE, *place, *arguments, code=2)
    assert expected in ' '.join(text.split())
    assert len(text.splitlines()) <= 10


def test_a_missing_image_is_refused(config, capsys):
    assert '--image' in call(capsys, 'kubernetes', config, BUCKET, code=2)


def test_a_missing_kubectl_is_explained(config, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv('PATH', str(tmp_path))
    text = call(capsys, 'kubernetes', config, *IMAGE, BUCKET, code=2)
    assert 'there is no kubectl' in text
    assert '--dry-run' in text


@pytest.mark.skipif('no kubectl' in why_not(), reason='there is no kubectl')
def test_a_cluster_that_does_not_answer_is_explained(config, capsys, monkeypatch, tmp_path):
    monkeypatch.setenv('KUBECONFIG', str(tmp_path / 'absent'))
    text = call(capsys, 'kubernetes', config, *IMAGE, BUCKET, code=2)
    assert 'kubectl reaches no cluster' in text
    assert len(text.splitlines()) <= 10


def test_shapes_that_google_rents():
    for name in ('v5p:4x4x12', 'v4:2x2x4', 'v6e:8x16'):
        check_rentable(parse_topology(name))


@needs_cluster
class TestCluster:
    @pytest.fixture
    def cluster(self, tmp_path, monkeypatch):
        with Cluster(tmp_path / 'cluster') as cluster:
            monkeypatch.setenv('KUBECONFIG', str(cluster.kubeconfig))
            cluster.add('v1', 'PersistentVolumeClaim', 'data', spec={'accessModes': ['ReadWriteMany']})
            cluster.add('v1', 'PersistentVolumeClaim', 'disk', spec={'accessModes': ['ReadWriteOnce']})
            cluster.add('v1', 'Secret', 'wandb')
            yield cluster

    @pytest.mark.usefixtures('cluster')
    @pytest.mark.parametrize(
        ('arguments', 'expected'),
        [
            (['--volume', 'gone:/data'], 'there is no PersistentVolumeClaim gone; there are: data, disk'),
            (['--volume', 'disk:/data'], 'disk is ReadWriteOnce'),
            (['--secret', 'gone'], 'there is no secret gone; there are: wandb'),
            (['--service-account', 'gone'], 'there is no serviceaccount gone; there are: default'),
            (['--namespace', 'gone'], 'kubectl create namespace gone'),
            (['--queue', 'gone'], 'there is no localqueue gone'),
        ],
    )
    def test_what_the_cluster_does_not_have_is_named(self, config, capsys, arguments, expected):
        submit = [config, *IMAGE, 'run_dir=/data/x', '--volume', 'data:/data', '--nodes', '2', 'mesh.d=2']
        text = call(capsys, 'kubernetes', *submit, *arguments, code=2)
        assert expected in text
        assert len(text.splitlines()) <= 10

    def test_a_cluster_without_jobset_gets_the_command_that_installs_it(self, config, capsys, monkeypatch, tmp_path):
        with Cluster(tmp_path / 'old', job_sets=False) as cluster:
            monkeypatch.setenv('KUBECONFIG', str(cluster.kubeconfig))
            text = call(capsys, 'kubernetes', config, *IMAGE, 'run_dir=/data/x', '--volume', 'data:/data', code=2)
        assert 'kubectl apply --server-side -f https://github.com/kubernetes-sigs/jobset/releases' in text
        assert '--kind job' in text
        assert not [path for method, path in cluster.requests if method == 'POST']

    @pytest.mark.parametrize('kind', ['jobset', 'job'])
    def test_a_suspended_run_is_submitted_found_refused_twice_and_stopped(self, config, capsys, cluster, kind):
        """Nothing starts, since no Kueue ends the suspension: what is tested is the life of the objects."""
        submit = ['kubernetes', config, *IMAGE, 'run_dir=/data/x', '--volume', 'data:/data', '--kind', kind]
        cluster.objects['LocalQueue', 'team'] = {}
        objects = {one for one in cluster.objects if one[0] in ('JobSet', 'Job', 'ConfigMap', 'Service')}
        assert not objects
        # The simulated cluster has no Kueue: the check is left out, as for a user who may not read queues.
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr('pretrax.launch.kubernetes.check_cluster', lambda pods: None)
            text = call(capsys, *submit, '--queue', 'team')
            assert 'pretrax launch status runs/x' in text
            record = Path('runs/x/launch.json').read_text()
            assert 'waits in its queue; pods: none' in call(capsys, 'status', 'x')
            assert 'waits in its queue' in call(capsys, *submit, '--queue', 'team', code=2)
            Path('runs/x/launch.json').unlink()  # as on another machine
            assert 'has not ended' in call(capsys, *submit, '--queue', 'team', code=2)
            assert not Path('runs/x/launch.json').exists(), 'a run that was refused has no record'
            Path('runs/x/launch.json').write_text(record)
        assert 'is deleted; no pod was running' in call(capsys, 'stop', 'x')
        assert 'there is no' in call(capsys, 'stop', 'x')
        assert not {one for one in cluster.objects if one[0] in ('JobSet', 'Job', 'ConfigMap', 'Service')}
        assert f'there is no {kind}/x' in call(capsys, 'status', 'x')

    @pytest.mark.parametrize(
        ('kind', 'owner'),
        [
            ('JobSet', '/data/other'), ('Job', None), ('ConfigMap', '/data/other'),
            *(pytest.param(*pair, marks=pytest.mark.slow) for pair in (('JobSet', None), ('Job', '/data/other'),
            ('ConfigMap', None))),
        ],
    )  # fmt: skip
    def test_the_objects_of_another_run_are_left_alone(self, config, capsys, cluster, kind, owner):
        """The other one has ended: it would be removed if it were of this run."""
        marks = {'name': 'x', 'annotations': {'pretrax/run-dir': owner}} if owner else {'name': 'x'}
        cluster.objects[kind, 'x'] = {'apiVersion': 'v1', 'kind': kind, 'metadata': marks, 'spec': {}}
        cluster.status_of = lambda name: {'conditions': [{'type': 'Complete', 'status': 'True'}]}
        submit = ['kubernetes', config, *IMAGE, 'run_dir=/data/x', '--volume', 'data:/data']
        text = call(capsys, *submit, code=2)
        assert (f'belongs to the run in {owner}' if owner else 'is not of pretrax') in text
        assert 'name=' in text
        assert not [path for method, path in cluster.requests if method in ('POST', 'DELETE')]
        kinds = {'job': 'Job', 'jobset': 'JobSet'}
        for name in kinds:
            facts = {'kind': name, 'namespace': None, 'slices': 1, 'run_dir': '/data/x'}
            write_record(Path('runs/x'), LaunchRecord(engine='kubernetes', job='x', nodes=1, facts=facts))
            assert f'there is no {name}/x of this run' in call(capsys, 'stop', 'x')
        assert (kind, 'x') in cluster.objects

    def test_an_ended_run_is_replaced_by_one_of_another_kind(self, config, capsys, cluster):
        marks = {'name': 'x', 'annotations': {'pretrax/run-dir': '/data/x'}}
        for kind in ('Job', 'Service', 'ConfigMap'):
            cluster.objects[kind, 'x'] = {'apiVersion': 'v1', 'kind': kind, 'metadata': marks, 'spec': {}}
        cluster.status_of = lambda name: {'conditions': [{'type': 'Complete', 'status': 'True'}]}
        cluster.create = lambda given: cluster.objects.update({(given['kind'], 'x'): given})
        text = call(capsys, 'kubernetes', config, *IMAGE, 'run_dir=/data/x', '--volume', 'data:/data')
        assert 'removing job/x, which has completed' in text
        assert {kind for kind, name in cluster.objects if name == 'x'} == {'JobSet', 'ConfigMap'}
        assert 'had completed already' in call(capsys, 'stop', 'x')

    def test_stop_does_not_say_that_it_stopped_what_the_cluster_did_not_answer(self, capsys, cluster, config):
        facts = {'kind': 'jobset', 'namespace': None, 'slices': 1, 'run_dir': '/data/x'}
        write_record(Path('runs/x'), LaunchRecord(engine='kubernetes', job='x', nodes=1, facts=facts))
        answer = cluster.answer

        def refuse(method, path, query, body):
            if 'jobsets/' not in path:
                return answer(method, path, query, body)
            message = 'jobsets "x" is forbidden: you cannot get it'
            return 403, {'kind': 'Status', 'status': 'Failure', 'reason': 'Forbidden', 'message': message, 'code': 403}

        cluster.answer = refuse
        text = call(capsys, 'stop', 'x', code=2)
        assert 'Forbidden' in text
        assert 'kubectl auth can-i get' in text
        assert 'deleted' not in text


@pytest.fixture(scope='module')
def expected(tmp_path_factory):
    """Losses of an undisturbed run of two processes."""
    directory = tmp_path_factory.mktemp('undisturbed')
    return undisturbed(write_run(directory, steps=60), directory / 'run', 2, 'mesh.d=2')


def _losses(run_dir):
    lines = read_metrics(run_dir / 'metrics.jsonl')
    assert [line['step'] for line in lines] == list(range(1, len(lines) + 1)), 'each step is there once'
    return {line['step']: line['loss'] for line in lines}


class Submitted:
    """A run of two pods in a cluster, submitted as a user does."""

    def __init__(self, cluster, tmp_path, *options):
        config = write_run(tmp_path, steps=60)
        self.cluster, self.run_dir, self.directory = cluster, tmp_path / 'data' / 'run', tmp_path
        cluster.add('v1', 'PersistentVolumeClaim', 'data', spec={'accessModes': ['ReadWriteMany']})
        self.pretrax('kubernetes', str(config), '--image', 'x', '--nodes', '2', '--volume', f'data:{tmp_path}/data',
                     f'run_dir={self.run_dir}', 'mesh.d=2', '--max-restarts', '3', *options)  # fmt: skip
        self.run = cluster.runs['run']

    def pretrax(self, *arguments):
        done = subprocess.run(
            [programs() / 'pretrax', 'launch', *arguments], cwd=self.directory, capture_output=True, text=True,
            env=environment(KUBECONFIG=str(self.cluster.kubeconfig)),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def pods(self):
        return list(self.run.pods.values())

    def output(self):
        return '\n'.join(path.read_text()[-3000:] for path in sorted(self.cluster.directory.glob('*.log')))

    def until_checkpoint(self, after=0):
        def newest():
            return max(steps_in(self.run_dir / 'checkpoints') if self.run_dir.exists() else [], default=0) > after

        wait_until(newest)

    def end(self):
        wait_until(lambda: self.run.done or self.run.failed)
        return self.run.failed


@pytest.mark.nightly
@needs_cluster
class TestRecovery:
    """Each loss equals that of an undisturbed run, bit for bit."""

    @pytest.fixture
    def cluster(self, tmp_path):
        with Cluster(tmp_path / 'cluster', **environment()) as cluster:
            yield cluster

    def test_a_killed_pod_of_a_jobset_restarts_the_set(self, expected, cluster, tmp_path, capsys):
        run = Submitted(cluster, tmp_path)
        run.until_checkpoint()
        began = time.monotonic()
        step = max(steps_in(run.run_dir / 'checkpoints'))
        run.pods()[1].kill()
        wait_until(lambda: run.run.restarts)
        noticed = time.monotonic() - began
        run.until_checkpoint(after=max(step, max(steps_in(run.run_dir / 'checkpoints'))))
        again = time.monotonic() - began
        assert run.end() is None, run.output()
        assert (run.run.restarts, run.run.counted) == (1, 1)
        assert _losses(run.run_dir) == expected
        assert 'completed; pods: 2 succeeded; restarts: 1' in run.pretrax('status', 'run')
        assert 'Done: 60 steps' in run.pretrax('logs', 'run', '--process', '1')
        with capsys.disabled():
            print(
                f'\nKubernetes, simulated controllers: set ended {noticed:.1f} s, next checkpoint {again:.1f} s after'
            )

    def test_an_evicted_pod_of_a_jobset_does_not_count(self, expected, cluster, tmp_path):
        run = Submitted(cluster, tmp_path, '--max-restarts', '0')
        run.until_checkpoint()
        cluster.evict(run.pods()[1])
        assert run.end() is None, run.output()
        assert (run.run.restarts, run.run.counted) == (1, 0)
        assert _losses(run.run_dir) == expected

    def test_a_mistake_ends_the_set_at_once(self, cluster, tmp_path):
        cluster.environment['FAIL'] = '1:7:UserError'
        run = Submitted(cluster, tmp_path)
        assert 'exit code 2' in run.end()[1], run.output()
        assert run.run.restarts == 0
        assert 'failed: Container train' in run.pretrax('status', 'run')
        assert list((run.run_dir / 'crashes').glob('*-0/process-1.txt'))

    def test_a_failing_set_stops_after_max_restarts(self, cluster, tmp_path):
        cluster.environment['FAIL'] = '1:1:RuntimeError'
        run = Submitted(cluster, tmp_path, '--max-restarts', '1')
        assert run.end() is not None
        assert run.run.restarts == 1

    @pytest.mark.parametrize('index', [0, 1])
    def test_a_killed_pod_of_a_plain_job_is_replaced_and_the_others_follow(self, expected, cluster, tmp_path, index):
        run = Submitted(cluster, tmp_path, '--kind', 'job')
        run.until_checkpoint()
        run.pods()[index].kill()
        assert run.end() is None, run.output()
        assert _losses(run.run_dir) == expected

    def test_stop_saves_and_the_same_command_continues(self, expected, cluster, tmp_path):
        run = Submitted(cluster, tmp_path)
        run.until_checkpoint()
        run.pretrax('stop', 'run')
        assert max(steps_in(run.run_dir / 'checkpoints')) == len(_losses(run.run_dir)), 'the last step is saved'
        run = Submitted(cluster, tmp_path)
        assert run.end() is None, run.output()
        assert _losses(run.run_dir) == expected
