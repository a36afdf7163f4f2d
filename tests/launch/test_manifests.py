"""Manifests for Kubernetes: the real schemas accept them, and they say what the run needs."""

import copy
import dataclasses
import os
import subprocess

import pytest
import yaml

from kubernetes_cluster import check_object
from launched import BASE
from pretrax.config import load
from pretrax.errors import UserError
from pretrax.launch.manifests import Pods, as_yaml, manifests, object_name
from pretrax.launch.options import check_quantity
from pretrax.launch.shipped import CONFIG, check_variables, shipped

PLAIN = Pods(
    name='base', run_dir='gs://bucket/runs/base', image='registry/pretrax', nodes=4, gpus=8, launched='20261123T120000'
)
FULL = dataclasses.replace(
    PLAIN, namespace='team', volume=('data:/data', 'data:/more', 'cache:/cache'), secret=('wandb',),
    env=('NCCL_DEBUG=WARN', 'EMPTY='), node_label=('pool=h100',), service_account='trainer',
    priority_class='high', queue='team-queue', cpu='8', memory='64Gi', words=('--check',),
    label=('team=a.b', 'example.com/empty='), annotation=('k8s.v1.cni.cncf.io/networks=[{"name": "ib"}]',),
    resource=('rdma/ib=1', 'hugepages-2Mi=4Gi'), capability=('IPC_LOCK',), host_network=True,
)  # fmt: skip
TPU = dataclasses.replace(PLAIN, gpus=0, nodes=16, slices=2, accelerator=('v5p', '4x4x4', 4))
ALL = {
    'plain': PLAIN, 'full': FULL, 'tpu': TPU, 'one slice': dataclasses.replace(TPU, slices=1),
    'job': dataclasses.replace(PLAIN, kind='job'), 'full job': dataclasses.replace(FULL, kind='job'),
    'CPU': dataclasses.replace(PLAIN, gpus=0, nodes=1),
}  # fmt: skip
FILES = {CONFIG: 'name: base  # "quotes": and colons\n\n  steps: 3\n', 'plugin.py': 'import os\n'}


def the(kind, pods):
    return next(one for one in manifests(pods, FILES) if one['kind'] == kind)


def template(pods):
    spec = the('Job', pods)['spec'] if pods.kind == 'job' else the('JobSet', pods)['spec']
    return (spec if pods.kind == 'job' else spec['replicatedJobs'][0]['template']['spec'])['template']['spec']


@pytest.mark.parametrize('name', ALL)
def test_the_schemas_of_kubernetes_and_jobset_accept_every_object(name):
    objects = manifests(ALL[name], FILES)
    for one in objects:
        check_object(one)
    assert list(yaml.safe_load_all(as_yaml(objects))) == objects  # what is printed is what is checked


@pytest.mark.parametrize('kind', ['jobset', 'job'])
def test_pods_that_use_rdma_need_no_edits(kind):
    pods = dataclasses.replace(FULL, kind=kind)
    job = (
        the('Job', pods)['spec']
        if kind == 'job'
        else the('JobSet', pods)['spec']['replicatedJobs'][0]['template']['spec']
    )
    metadata, spec = job['template']['metadata'], job['template']['spec']
    assert metadata['annotations'] == {'k8s.v1.cni.cncf.io/networks': '[{"name": "ib"}]'}
    assert metadata['labels'].items() >= {'team': 'a.b', 'example.com/empty': '', 'pretrax/run': 'base'}.items()
    assert (spec['hostNetwork'], spec['dnsPolicy']) == (True, 'ClusterFirstWithHostNet')
    [container] = spec['containers']
    more = {'rdma/ib': '1', 'hugepages-2Mi': '4Gi', 'nvidia.com/gpu': 8}
    assert container['resources'] == {'limits': more, 'requests': more | {'cpu': '8', 'memory': '64Gi'}}
    assert container['securityContext']['capabilities'] == {'add': ['IPC_LOCK']}
    plain = template(dataclasses.replace(PLAIN, kind=kind))
    assert not {'hostNetwork', 'dnsPolicy'} & set(plain)
    assert 'capabilities' not in plain['containers'][0]['securityContext']


@pytest.mark.parametrize('kind', ['jobset', 'job'])
@pytest.mark.parametrize('place', ['spec', 'container', 'policy'])
def test_a_wrong_field_is_seen(kind, place):
    one = copy.deepcopy(manifests(dataclasses.replace(PLAIN, kind=kind), FILES)[-1])
    job = one['spec'] if kind == 'job' else one['spec']['replicatedJobs'][0]['template']['spec']
    where = {
        'spec': one['spec'], 'container': job['template']['spec']['containers'][0],
        'policy': one['spec'].get('failurePolicy', job['podFailurePolicy']),
    }[place]  # fmt: skip
    where['surprise'] = 1
    with pytest.raises(Exception, match='surprise'):
        check_object(one)


def test_the_configuration_in_the_manifest_is_that_of_the_run(tmp_path, monkeypatch):
    """With its plugins beside it; a secret stays a reference."""
    (tmp_path / 'plugin.py').write_text("from pretrax.config import register\nNAME = 'x'\n")
    (tmp_path / 'run.yaml').write_text(
        yaml.safe_dump(BASE | {'plugins': ['plugin.py', 'json'], 'log': {'notify': {'url': '${oc.env:HOOK}'}}})
    )
    monkeypatch.setenv('HOOK', 'https://example.com/the-secret')
    config = load(tmp_path / 'run.yaml', ['steps=7'])
    files = shipped(config)
    text = as_yaml(manifests(PLAIN, files))
    assert 'the-secret' not in text
    there = tmp_path / 'there'
    there.mkdir()
    for name, content in next(yaml.safe_load_all(text))['data'].items():
        (there / name).write_text(content)
    again = load(there / CONFIG)
    assert again.plugins == (str(there / 'plugin.py'), 'json')
    assert again.model_copy(update={'plugins': config.plugins}) == config
    with pytest.raises(UserError, match='HOOK'):
        check_variables(files, ['OTHER'], 'give it')
    check_variables(files, ['HOOK'], 'give it')


@pytest.mark.parametrize('slices', [1, 3])
def test_every_pod_has_its_number(slices):
    """The shell and the variables of the container, as the controllers of JobSet and Job number the pods."""
    pods = dataclasses.replace(TPU, nodes=4, slices=slices)
    container = template(pods)['containers'][0]
    assert container['command'][-4:] == [
        '/etc/pretrax/config.yaml',
        '--until-done',
        '--attempt',
        '20261123T120000-$(ATTEMPT)',
    ]
    numbers = []
    for number in range(slices):
        for index in range(4):
            given = {'batch.kubernetes.io/job-completion-index': index, 'jobset.sigs.k8s.io/job-index': number}
            environment = {'PATH': os.environ['PATH']}
            for one in container['env']:
                path = one.get('valueFrom', {}).get('fieldRef', {}).get('fieldPath', '')
                if path.startswith('metadata.annotations'):
                    environment[one['name']] = str(given[path.split("'")[1]])
                elif 'value' in one:
                    environment[one['name']] = one['value']
            words = ['sh', '-c', 'echo $JAX_PROCESS_ID $JAX_NUM_PROCESSES']
            command = [*container['command'][:4], *words] if slices > 1 else words
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            numbers.append(tuple(map(int, done.stdout.split())))
    assert numbers == [(n, 4 * slices) for n in range(4 * slices)]


def test_the_address_of_the_first_process_is_a_name_of_the_headless_service():
    """JobSet: <jobSet.name>-<replicatedJob.name>-<job-index>-<pod-index>.<subdomain>; Job:
    <job>-<index>.<subdomain>.
    """
    spec = the('JobSet', TPU)['spec']
    address = f'base-{spec["replicatedJobs"][0]["name"]}-0-0.{spec["network"]["subdomain"]}'
    variables = {one['name']: one.get('value') for one in template(TPU)['containers'][0]['env']}
    assert variables['JAX_COORDINATOR_ADDRESS'] == f'{address}:8476'
    assert variables['MEGASCALE_COORDINATOR_ADDRESS'] == address
    job = ALL['job']
    service = the('Service', job)
    assert template(job)['subdomain'] == service['metadata']['name']
    assert service['spec']['selector'] == {'batch.kubernetes.io/job-name': the('Job', job)['metadata']['name']}
    assert {'name': 'JAX_COORDINATOR_ADDRESS', 'value': f'base-0.{service["metadata"]["name"]}:8476'} in template(job)[
        'containers'
    ][0]['env']


def test_what_is_asked_is_in_the_pod():
    spec, container = template(FULL), template(FULL)['containers'][0]
    assert spec['serviceAccountName'] == 'trainer'
    assert spec['priorityClassName'] == 'high'
    assert spec['nodeSelector'] == {'pool': 'h100'}
    assert container['envFrom'] == [{'secretRef': {'name': 'wandb'}}]
    assert container['resources']['limits'] == {'nvidia.com/gpu': 8, 'rdma/ib': '1', 'hugepages-2Mi': '4Gi'}
    assert container['resources']['requests'].items() >= {'nvidia.com/gpu': 8, 'cpu': '8', 'memory': '64Gi'}.items()
    mounted = {one['mountPath']: one['name'] for one in container['volumeMounts']}
    claims = {
        one['name']: one['persistentVolumeClaim']['claimName']
        for one in spec['volumes']
        if 'persistentVolumeClaim' in one
    }
    assert [claims[mounted[path]] for path in ('/data', '/more', '/cache')] == ['data', 'data', 'cache']
    assert the('JobSet', FULL)['spec']['suspend'] is True
    assert the('JobSet', FULL)['metadata']['labels']['kueue.x-k8s.io/queue-name'] == 'team-queue'
    assert 'suspend' not in the('JobSet', PLAIN)['spec']
    tpu = template(TPU)
    assert tpu['nodeSelector'] == {
        'cloud.google.com/gke-tpu-accelerator': 'tpu-v5p-slice',
        'cloud.google.com/gke-tpu-topology': '4x4x4',
    }
    assert tpu['containers'][0]['resources']['limits'] == {'google.com/tpu': 4}


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('base', 'base'),
        ('x' * 45, 'x' * 45),
        ('Base_v1.2', 'base-v1-2-5eb89d'),  # printf %s gs://bucket/runs/x | sha256sum
        ('8b', 'run-8b-5eb89d'),
        ('x' * 100, 'x' * 38 + '-5eb89d'),
        ('a' * 37 + '.b', 'a' * 37 + '-5eb89d'),
        ('a' * 45 + '.b', 'a' * 38 + '-5eb89d'),
    ],
)
def test_names_are_names_in_dns(name, expected):
    found = object_name(name, 16, 'gs://bucket/runs/x')
    assert found == expected
    assert len(f'{found}-train-16-16-abcde') <= 63


@pytest.mark.parametrize(
    'names', [('my_run', 'my-run', 'My.Run'), ('x' * 60 + '1', 'x' * 60 + '2'), ('sweep/a', 'sweep-a')]
)
def test_names_of_different_runs_differ(names):
    assert len({object_name(name, 16, f'runs/{name}') for name in names}) == len(names)


@pytest.mark.parametrize('kind', ['jobset', 'job'])
def test_every_object_says_which_run_it_belongs_to(kind):
    """Beside the annotation for TPUs."""
    for one in manifests(dataclasses.replace(TPU, slices=1, kind=kind), FILES):
        assert one['metadata']['annotations']['pretrax/run-dir'] == 'gs://bucket/runs/base'
    annotations = the('JobSet', TPU)['metadata']['annotations']
    assert annotations['alpha.jobset.sigs.k8s.io/exclusive-topology'] == 'cloud.google.com/gke-nodepool'


def test_quantities():
    for good in (None, '64Gi', '500G', '8', '0.5', '250m'):
        check_quantity('--memory', good)
    for bad in ('64GB', 'lots', '', '-1Gi'):
        with pytest.raises(UserError, match='expected a quantity'):
            check_quantity('--memory', bad)
