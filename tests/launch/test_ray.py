"""`pretrax launch ray` on a real cluster of several nodes: workers that are killed, nodes that go and come."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

import boxes
from launched import BASE, PATIENCE, Launched, environment, undisturbed, write_run
from pretrax.launch.ray_cluster import Cluster
from ray_nodes import ray_nodes, raylet_of

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.filterwarnings('ignore::ResourceWarning'),  # Ray leaves its log files open
    pytest.mark.filterwarnings('ignore::DeprecationWarning'),
    pytest.mark.filterwarnings('ignore::FutureWarning'),
    # Ray forks, and JAX warns about forks if an earlier test has started JAX.
    pytest.mark.filterwarnings(
        'ignore:Exception ignored in. <function _at_fork:pytest.PytestUnraisableExceptionWarning'
    ),
]


@pytest.fixture(scope='module')
def cluster():
    """A cluster with three nodes of one CPU."""
    with ray_nodes(3, environment()) as started:
        yield started


def restore(cluster):
    """Adds nodes until there are three."""
    while len(cluster.nodes) < 3:
        cluster.add()


class OnRay(Launched):
    """A run under `pretrax launch ray`."""

    def __init__(self, cluster, workers, config, run_dir, *options):
        super().__init__(
            config, run_dir, '--workers', str(workers), '--address', cluster.address, *options,
            engine='ray', forked=False,
        )  # fmt: skip


def launch(cluster, *arguments):
    """A command that ends at once."""
    return subprocess.run(
        [sys.executable, '-m', 'pretrax', 'launch', 'ray', '--address', cluster.address, *map(str, arguments)],
        env=environment(), capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip


def node_of(cluster, run_dir, number):
    """The node on which a process of a run trains."""
    raylet = raylet_of(boxes.training(run_dir, number))
    return next(node for node in cluster.nodes if node.all_processes['raylet'][0].process.pid == raylet)


def test_killed_workers_and_removed_nodes_do_not_change_the_losses(cluster, tmp_path, capsys):
    config, run_dir = write_run(tmp_path, steps=200), tmp_path / 'hurt'
    hurt_at = []
    with OnRay(cluster, 3, config, run_dir, '--retries', '0') as hurt:
        hurt.until_checkpoint(1)
        hurt_at.append(time.time())
        os.kill(boxes.training(run_dir, 1), signal.SIGKILL)
        hurt.until_checkpoint(2)
        hurt_at.append(time.time())
        os.kill(boxes.parent(boxes.training(run_dir, 2, 'node')), signal.SIGKILL)  # the actor
        hurt.until_checkpoint(3)
        hurt_at.append(time.time())
        cluster.remove(node_of(cluster, run_dir, 0))
        hurt.until(lambda: 'waiting for resources: 2 of 3 workers have a node' in hurt.said, 'that it waits')
        cluster.add()
        hurt.until_checkpoint(4)
        hurt.process.send_signal(signal.SIGTERM)
        assert hurt.wait() == 0, hurt.said
    assert [event['code'] for event in hurt.events('ended')] == [-9, -9, -9, 0]
    assert hurt.events('ended')[2]['why'].startswith('lost: process 0 on ')
    for process in (1, 2):
        assert 'Stopped at step' in (run_dir / 'output' / f'process-{process}.txt').read_text()
    assert f'Stopped at step {max(hurt.checkpoints())} of 200' in hurt.said
    assert hurt.losses() == undisturbed(config, tmp_path / 'alone', 3, f'steps={max(hurt.checkpoints())}')
    with capsys.disabled():
        print('', *hurt.recoveries(hurt_at), sep='\nRay: ')


def trainings(run_dir):
    """The two processes that train."""
    return [boxes.training(run_dir, number) for number in (0, 1)]


def lose(run, attempt, end):
    """Calls `end` in an attempt with two standbys. Returns whether that costs two steps at most, which of the processes
    a standby replaces, and for each of them whether its own memory has the state; once, if that is the same for both.
    """
    run.until_step(attempt, 10)
    standbys = run.until(lambda: two_and_two(run.run_dir), 'two standbys') - set(trainings(run.run_dir))
    end()
    run.until(lambda: len(run.events('ended')) == attempt, 'that the loss is noticed')
    newest = run.step()
    run.until_step(attempt + 1, 1)
    read = [line for line in run.said.splitlines() if 'resuming from' in line][attempt - 1]
    own = [owner == 'this machine' for owner in re.findall(r'memory of (this machine|\w+)', read)]
    is_cheap = newest - run.events('began')[-1]['step'] <= 2
    return is_cheap, [process in standbys for process in trainings(run.run_dir)], own


def two_and_two(run_dir):
    """Two processes that train and two standbys, once all of them are there."""
    found = set(boxes.running('pretrax', 'train', f'run_dir={run_dir}'))
    return found if len(found) == 4 else None


def test_standbys_and_states_in_memory_outlive_an_attempt(cluster, tmp_path):
    restore(cluster)
    kept, mesh = {'every': 0, 'memory': {'every': 1}}, {'r': 1, 'd': 'auto'}
    config = write_run(tmp_path, steps=100_000, checkpoint=kept, mesh=mesh, faults={'heartbeat_seconds': 20})
    run_dir = tmp_path / 'run'
    with OnRay(cluster, 2, config, run_dir) as run:
        found = lose(run, 1, lambda: os.kill(boxes.training(run_dir, 1), signal.SIGKILL))
        assert found == (True, [True, True], [True])
        places = {boxes.memory_of(process) for process in trainings(run_dir)}
        actor = boxes.parent(boxes.training(run_dir, 1, 'node'))
        assert lose(run, 2, lambda: os.kill(actor, signal.SIGKILL)) == (True, [True, False], [True, False])
        places |= {boxes.memory_of(process) for process in trainings(run_dir)}
        node = node_of(cluster, run_dir, 0)
        assert lose(run, 3, lambda: cluster.remove(node)) == (True, [False, True], [False, True])
        places |= {boxes.memory_of(process) for process in trainings(run_dir)}
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0, run.said
    losses = run.losses()
    assert losses == undisturbed(config, tmp_path / 'alone', 2, f'steps={len(losses)}')
    assert len(places) == 4, 'of two nodes, of the second actor and of the third node'
    assert not any(place.exists() for place in places)


def test_an_elastic_run_continues_without_a_node_until_there_is_another(cluster, tmp_path, capsys):
    restore(cluster)
    config, run_dir = write_run(tmp_path, steps=100_000), tmp_path / 'run'
    with OnRay(cluster, 3, config, run_dir, '--elastic') as run:
        run.until_checkpoint(1)
        lost_at = time.time()
        cluster.remove(node_of(cluster, run_dir, 2))
        run.until_checkpoint(2)
        cluster.add()
        back_at = time.time()
        run.until_checkpoint(3)
        run.process.send_signal(signal.SIGTERM)
        assert run.wait() == 0, run.said
    assert [len(event['processes']) for event in run.events('started')] == [3, 2, 3]
    reference = undisturbed(config, tmp_path / 'alone', 3, f'steps={max(run.checkpoints())}')
    assert run.losses() == pytest.approx(reference, rel=1e-5)
    with capsys.disabled():
        print('', *run.recoveries([lost_at, back_at]), sep='\nRay, elastic: ')


def test_nothing_survives_a_launcher_that_is_killed(cluster, tmp_path):
    restore(cluster)
    run_dir = tmp_path / 'run'
    with OnRay(cluster, 2, write_run(tmp_path, steps=100_000), run_dir) as run:
        run.until_checkpoint(1)
        run.until(lambda: two_and_two(run_dir), 'two standbys')
        run.process.kill()
        run.process.wait()
        until = time.monotonic() + 60
        while left := boxes.running('pretrax', f'run_dir={run_dir}'):
            assert time.monotonic() < until, left
            time.sleep(0.05)


def test_what_does_not_fit_is_refused_before_anything_starts(cluster, tmp_path):
    restore(cluster)
    config, run_dir = write_run(tmp_path), tmp_path / 'run'
    run = [config, f'run_dir={run_dir}', '--workers']

    def problem(*arguments):
        done = launch(cluster, *arguments)
        assert done.returncode == 2, done.stdout + done.stderr
        assert len(done.stderr.splitlines()) <= 10
        assert not boxes.running('pretrax', 'train', f'run_dir={run_dir}')
        return done.stderr

    assert problem(*run, 4).startswith('4 workers with CPU 1 each do not fit on this Ray cluster: there is room for 3')
    assert 'with CPU 1, GPU 8 each do not fit' in problem(*run, 2, '--gpus-per-worker', 8, 'batch.tokens=256')
    assert 'cannot be sharded evenly' in problem(*run, 5)
    assert '--workers N' in problem(config)
    assert 'expected JSON' in problem(*run, 2, '--resources', '{TPU: 4}')
    assert 'no Ray cluster answers at 127.0.0.1:1' in problem(*run, 2, '--address', '127.0.0.1:1')
    assert not run_dir.exists()

    done = launch(cluster, *run, 2, '--directory', '/nowhere')
    assert done.returncode == 2
    assert '/nowhere: No such file or directory' in done.stdout

    done = launch(cluster, *run, 2, '--dry-run')
    assert done.returncode == 0
    assert f'pretrax launch node {config} run_dir={run_dir}' in done.stdout


def test_the_rows_of_a_sweep_are_tasks(cluster, tmp_path):
    restore(cluster)
    (tmp_path / 'base.yaml').write_text(json.dumps(BASE))
    sweep = tmp_path / 'sweep.yaml'
    values = {'base': 'base.yaml', 'grid': {'seed': [1, 2, 3]}, 'steps': 2, 'warmup': 1}
    sweep.write_text(json.dumps(values | {'rows': [{'batch.sequence_length': 32, 'batch.tokens': 96}]}))
    done = launch(cluster, sweep, '--out', tmp_path / 'out')
    assert done.returncode == 0, done.stdout + done.stderr
    assert '4 rows with CPU 1 each, on a Ray cluster of 4 nodes' in done.stdout
    for row in range(1, 5):
        lines = (tmp_path / 'out' / 'rows' / str(row) / 'results.jsonl').read_text().splitlines()
        assert [json.loads(line)['status'] for line in lines] == ['done']
        assert f'[{row}/4] ' in done.stdout
    with (tmp_path / 'out' / 'results.csv').open() as table:
        assert [row['status'] for row in csv.DictReader(table)] == ['done'] * 4


class Nodes:
    """In the place of Ray's module: what its nodes have."""

    def __init__(self, *resources):
        self._nodes = [{'Alive': True, 'Resources': one} for one in resources]

    def nodes(self):
        return self._nodes


@pytest.mark.parametrize(
    ('bundle', 'room', 'strategy'),
    [
        ({'CPU': 1.0, 'GPU': 4.0}, [2, 0, 1], 'SPREAD'),
        ({'CPU': 1.0, 'GPU': 1.0}, [8, 0, 4], 'SPREAD'),
        ({'CPU': 2.0}, [4, 1, 4], 'STRICT_SPREAD'),
        ({'TPU': 1.0}, [0, 0, 0], 'SPREAD'),
    ],
)
def test_workers_get_nodes_of_their_own_if_there_are_enough(bundle, room, strategy):
    nodes = Nodes({'CPU': 8.0, 'GPU': 8.0}, {'CPU': 2.0}, {'CPU': 8.0, 'GPU': 4.0})
    cluster = Cluster(nodes, bundle)
    assert cluster.room() == room
    assert cluster.strategy(3) == strategy
