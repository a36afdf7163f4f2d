"""Searches whose trials run on a real Slurm, a real Ray, hosts with a real sshd, and pods through the real kubectl.

The references are the same searches with processes of this machine.
"""

import contextlib
import csv
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

import boxes
import kubernetes_cluster
import slurm_cluster
from launched import PATIENCE, PLUGIN, PRETRAX, environment, write_run
from pretrax.checkpoint import steps_in
from pretrax.launch.record import read_record
from pretrax.observe.attempts import read_attempts
from pretrax.observe.metrics import read_metrics
from ray_nodes import ray_nodes

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings('ignore::ResourceWarning'),  # Ray leaves its log files open
    pytest.mark.filterwarnings('ignore::DeprecationWarning'),
    pytest.mark.filterwarnings('ignore::FutureWarning'),
]

RATES = {'optimizer.learning_rate': {'low': 0.01, 'high': 1.0, 'log': True}}
STEPS = 60


def searcher(process, file):
    """The id of the process that has this file as an argument. `nsenter` has started it in another namespace."""
    for number in boxes.descendants(process.pid):
        words = Path(f'/proc/{number}/cmdline').read_bytes().split(b'\0')
        if file.encode() in words and not words[0].endswith((b'nsenter', b'env')):
            return number
    raise AssertionError(f'it does not run: {process.args}')


class Search:
    """`pretrax search` of trials of 60 steps, which take minutes after the first 10 until `hurry` is called.

    Args:
        place: directory of its files.
        launch: words after `pretrax launch`; none: processes of this machine.
        prefix: the command that runs another one where the engine is.
        values: of the file.
    """

    def __init__(self, place, launch=(), prefix=(), **values):
        self.place, self.out, self.prefix = place, place / 'out', list(prefix)
        self.process = None
        place.mkdir(exist_ok=True)
        eval_ = {'every': 5, 'batches': 1}
        write_run(place, steps=STEPS, eval=eval_, data={'name': 'slow', 'vocab_size': 32})
        assert 'time.sleep(0.02)' in PLUGIN
        waits = f'time.sleep(3 if step > 10 and not os.path.exists({str(place / "hurry")!r}) else 0.02)'
        slow = PLUGIN.replace('time.sleep(0.02)', waits)
        (place / 'plugin.py').write_text(slow)
        self.write(
            launch=list(launch), **({'base': 'run.yaml', 'parameters': RATES, 'trials': 2, 'at_once': 2} | values)
        )

    def write(self, **values):
        file = self.place / 'search.yaml'
        before = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(before | values))

    def start(self):
        with (self.place / 'said.txt').open('w') as said:
            self.process = subprocess.Popen(
                [*self.prefix, PRETRAX, 'search', 'search.yaml', '--out', self.out], cwd=self.place, env=environment(),
                stdout=said, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def hurry(self, now=True):
        (self.place / 'hurry').touch() if now else (self.place / 'hurry').unlink()

    @property
    def said(self):
        outputs = sorted(self.out.glob('output/*'))
        return (self.place / 'said.txt').read_text() + ''.join(f'{path.name}:\n{path.read_text()}' for path in outputs)

    def kill(self):
        """Ends the searcher without notice."""
        if self.process.poll() is None:
            os.kill(searcher(self.process, 'search.yaml'), signal.SIGKILL)
        self.process.wait()

    def interrupt(self):
        """Presses Ctrl-C. Returns the exit code."""
        os.kill(searcher(self.process, 'search.yaml'), signal.SIGINT)
        return self.process.wait(PATIENCE)

    def end(self, code=0):
        assert self.process.wait(PATIENCE) == code, self.said

    def until(self, done, what):
        until = time.monotonic() + PATIENCE
        while not (found := done()):
            assert self.process.poll() is None, f'it ended before {what}:\n{self.said}'
            assert time.monotonic() < until, f'no sign of {what}:\n{self.said}'
            time.sleep(0.05)
        return found

    def run_dir(self, number):
        return self.out / 'runs' / str(number)

    def until_step(self, number, step):
        """Waits until a trial has done a step, and has a checkpoint of an earlier one."""
        self.until(lambda: self.step(number) >= step and self.checkpoints(number), f'step {step} of trial {number}')

    def step(self, number):
        lines = self.run_dir(number) / 'metrics.jsonl'
        return max((line['step'] for line in read_metrics(lines, lambda _: None)), default=0) if lines.exists() else 0

    def checkpoints(self, number):
        place = self.run_dir(number) / 'checkpoints'
        return steps_in(place) if place.is_dir() else []

    def events(self, number, name):
        return [event for event in read_attempts(self.run_dir(number)) if event['event'] == name]

    def trials(self):
        """{number: row of the table}."""
        with (self.out / 'trials.csv').open() as table:
            return {int(row['trial']): row for row in csv.DictReader(table)}

    def losses(self, number):
        lines = read_metrics(self.run_dir(number) / 'metrics.jsonl')
        steps = [line['step'] for line in lines if 'loss' in line]
        assert steps == list(range(1, STEPS + 1)), 'each step is there once'
        return [line['loss'] for line in lines if 'loss' in line]


@pytest.fixture(scope='module')
def undisturbed(tmp_path_factory):
    """The same search, with processes of this machine and without a fault."""
    with Search(tmp_path_factory.mktemp('undisturbed')) as search:
        search.hurry()
        search.start()
        search.end()
        yield search


def compare(search, undisturbed):
    """The same trials with the same values and losses, each of them once."""
    assert sorted(path.name for path in (search.out / 'runs').iterdir()) == ['0', '1']
    assert search.trials() == undisturbed.trials()
    for number in range(2):
        assert search.losses(number) == undisturbed.losses(number)


@pytest.fixture(scope='module')
def slurm():
    if reason := slurm_cluster.missing():
        pytest.skip(reason)
    with slurm_cluster.slurm_cluster(2) as started:
        yield started


SLURM = ['slurm', '--cpus-per-node', '1']


@contextlib.contextmanager
def on_slurm(cluster, place, launch=SLURM, **values):
    with Search(place, launch, cluster.command('env', '-C', str(place)), **values) as search:
        yield search
    cluster.run('scancel', '--user=root', check=None)
    cluster.until(lambda: not queue(cluster), 'an empty queue')


def queue(cluster):
    """{name of a job: its number and state} of those that run or wait."""
    lines = cluster.run('squeue', '--noheader', '--format=%j %i %T').splitlines()
    return {line.split()[0]: line.split()[1:] for line in lines}


def test_on_slurm_kills_and_ctrl_c_lose_and_repeat_nothing(slurm, undisturbed, tmp_path):
    with on_slurm(slurm, tmp_path) as search:
        search.start()
        search.until_step(0, 12)
        search.until_step(1, 12)
        (job,) = [read_record(search.run_dir(0)).job]
        slurm.run('scancel', job)
        search.until(lambda: read_record(search.run_dir(0)).job != job, 'another job of trial 0')
        search.kill()
        jobs = {name: number for name, (number, _) in queue(slurm).items()}
        assert set(jobs) == {'search-0', 'search-1'}, 'jobs do not end with the searcher'

        search.start()
        search.until(lambda: 'trial 1 continues after step' in search.said, 'trial 1')
        assert search.interrupt() == 130, search.said
        assert {name: number for name, (number, _) in queue(slurm).items()} == jobs, 'they are not submitted again'

        search.hurry()
        search.start()
        search.end()
        assert not queue(slurm)
        assert [len(search.events(number, 'allocated')) for number in range(2)] == [2, 1]
        assert search.events(0, 'began')[1]['step'] > 1, 'from its checkpoint'
        compare(search, undisturbed)


def test_asha_cancels_a_job_that_an_earlier_searcher_has_started(slurm, tmp_path):
    values = {'parameters': {'optimizer.learning_rate': [0.1, 1e-6]}, 'sampler': 'grid', 'trials': None, 'seed': 1}
    with on_slurm(slurm, tmp_path, at_once=1, asha={'first': 5, 'reduction': 2}, **values) as search:
        search.hurry()
        search.start()
        search.until(lambda: (search.run_dir(1) / 'launch.json').exists(), 'trial 1')
        search.kill()
        search.hurry(now=False)
        assert list(queue(slurm)) == ['search-1']
        search.start()
        search.end()
        assert not queue(slurm)
        poor = search.trials()[1]
        assert (search.trials()[0]['state'], poor['state']) == ('done', 'pruned')
        assert search.checkpoints(1)[-1] == search.step(1) < STEPS, 'it saved before it ended'
        (stopped,), (ended,) = search.events(1, 'stopped'), search.events(1, 'ended')
        assert (stopped['why'], ended['why'], ended['code']) == ('signal', 'stopped on request', 0), 'not killed'
        assert len(search.events(1, 'allocated')) == 1


def test_what_slurm_refuses_ends_the_search_and_no_trial(slurm, tmp_path):
    with on_slurm(slurm, tmp_path, [*SLURM, '--partition', 'smal'], trials=1) as search:
        search.start()
        search.end(2)
        assert 'did you mean: --partition small' in search.said
        search.write(launch=[*SLURM, '--partition', 'small'])
        search.hurry()
        search.start()
        search.end()
        assert search.trials()[0]['state'] == 'done'


def test_a_grid_of_scaling_laws_on_slurm_finds_its_jobs_again(slurm, tmp_path):
    write_run(tmp_path, eval={'every': 5, 'batches': 1}, data={'name': 'slow', 'vocab_size': 32})
    fit = {'base': 'run.yaml', 'sizes': [{'data.vocab_size': size} for size in (32, 48, 64)], 'budgets': [5e7, 1e8],
           'approaches': [2], 'bootstrap': 0, 'at_once': 4, 'launch': SLURM}  # fmt: skip
    (tmp_path / 'fit.yaml').write_text(json.dumps(fit))
    command = slurm.command('env', '-C', str(tmp_path), str(PRETRAX), 'scaling', 'fit.yaml', '--out', 'out')
    first = subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    until = time.monotonic() + PATIENCE  # it counts the parameters of each size first
    while not list(tmp_path.glob('out/runs/*/launch.json')):
        assert first.poll() is None, first.communicate()[0]
        assert time.monotonic() < until
        time.sleep(0.1)
    os.kill(searcher(first, 'fit.yaml'), signal.SIGKILL)
    first.communicate()
    # The losses of such small models need not have a minimum, so the fit may fail.
    said = slurm.run(*command[command.index('env') :], env=environment(), check=None)
    assert len(re.findall(r'^fit-\S+: \d+ steps$', said, re.M)) == 6, said
    events = [read_attempts(run) for run in tmp_path.glob('out/runs/*')]
    assert [sum(event['event'] == 'allocated' for event in one) for one in events] == [1] * 6
    assert not queue(slurm)


def survive(search, undisturbed):
    """A search whose launchers end with it: a launcher is killed, then the searcher, then Ctrl-C is pressed."""

    def running():
        return [*boxes.running('pretrax', str(search.out / 'configs' / 'search-0.yaml')),
                *boxes.running('pretrax', str(search.out / 'configs' / 'search-1.yaml'))]  # fmt: skip

    search.start()
    search.until_step(0, 12)
    search.until_step(1, 12)
    os.kill(int(read_record(search.run_dir(0)).job), signal.SIGKILL)
    search.until(lambda: len(search.events(0, 'began')) == 2, 'another attempt of trial 0')
    search.kill()

    search.start()
    search.until(lambda: len(search.events(0, 'began')) == 3 and len(search.events(1, 'began')) == 2, 'both trials')
    assert search.interrupt() == 130, search.said
    assert not running()
    assert search.events(0, 'stopped')[-1]['step'] == search.checkpoints(0)[-1] == search.step(0), 'it has saved'

    search.hurry()
    search.start()
    search.end()
    assert not running()
    assert [event['step'] > 1 for event in search.events(0, 'began')] == [False, True, True, True]
    compare(search, undisturbed)


@pytest.fixture(scope='module')
def ray():
    with ray_nodes(2, environment()) as started:
        yield started


def test_on_ray_kills_and_ctrl_c_lose_and_repeat_nothing(ray, undisturbed, tmp_path):
    with Search(tmp_path, ['ray', '--workers', '1', '--address', ray.address]) as search:
        survive(search, undisturbed)


def test_on_ray_what_does_not_fit_ends_the_search_and_no_trial(ray, tmp_path):
    words = ['ray', '--workers', '1', '--address']
    with Search(tmp_path, [*words, '127.0.0.1:1'], trials=1) as search:
        search.start()
        search.end(2)
        assert 'trial 0 cannot be launched: no Ray cluster answers at 127.0.0.1:1' in search.said
        search.write(launch=[*words, ray.address, '--cpus-per-worker', '3'])
        search.start()
        search.end(2)
        assert 'trial 0 cannot be launched: 1 workers with CPU 3 each do not fit' in search.said
        assert not (search.run_dir(0) / 'attempts.jsonl').exists()


@pytest.fixture(scope='module')
def hosts(tmp_path_factory):
    if boxes.MISSING:
        pytest.skip(boxes.MISSING)
    kept = {name: environment()[name] for name in ('PYTHONPATH', 'JAX_PLATFORMS', 'XLA_FLAGS')}
    with boxes.boxes(tmp_path_factory.mktemp('boxes'), 2, kept) as started:
        yield started


def ssh(hosts, names):
    return ['ssh', '--hosts', names, '--ssh', f'ssh -F {hosts.config}']


def test_over_ssh_kills_and_ctrl_c_lose_and_repeat_nothing(hosts, undisturbed, tmp_path):
    with Search(tmp_path, ssh(hosts, 'box1')) as search:
        survive(search, undisturbed)


@pytest.mark.skipif(os.getuid() != 0, reason='a host that does not see the directory is in a namespace')
def test_over_ssh_a_run_directory_that_is_not_shared_ends_the_search_and_no_trial(hosts, tmp_path):
    with Search(tmp_path, ssh(hosts, 'box2'), trials=1) as search:
        (search.out / 'runs').mkdir(parents=True)
        hosts.cut_power('box2')
        hosts.start('box2', search.out / 'runs')
        search.start()
        search.end(2)
        assert f'run_dir: {search.run_dir(0)} is not the directory of that name' in search.said
        hosts.cut_power('box2')
        hosts.start('box2')
        search.hurry()
        search.start()
        search.end()
        assert search.trials()[0]['state'] == 'done'


@pytest.mark.skipif(bool(kubernetes_cluster.why_not()), reason=kubernetes_cluster.why_not())
def test_on_kubernetes_kills_and_ctrl_c_lose_and_repeat_nothing(undisturbed, tmp_path, monkeypatch):
    with kubernetes_cluster.Cluster(tmp_path / 'cluster', **environment()) as cluster:
        cluster.add('v1', 'PersistentVolumeClaim', 'data', spec={'accessModes': ['ReadWriteMany']})
        monkeypatch.setenv('KUBECONFIG', str(cluster.kubeconfig))
        words = ['kubernetes', '--image', 'x', '--kind', 'job', '--volume', f'data:{tmp_path}/search']
        with Search(tmp_path / 'search', words) as search:
            search.start()
            search.until_step(0, 12)
            search.until_step(1, 12)
            search.kill()
            search.start()
            search.until(lambda: 'trial 1 continues after step' in search.said, 'trial 1')
            assert search.interrupt() == 130, search.said
            assert len(cluster.runs) == 2, 'jobs do not end with the searcher'
            search.hurry()
            search.start()
            search.end()
            assert [len(search.events(number, 'began')) for number in range(2)] == [1, 1]
            compare(search, undisturbed)
