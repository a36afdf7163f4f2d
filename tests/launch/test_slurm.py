"""Runs on a real Slurm of four nodes that lose processes, nodes and allocations: the losses stay as they are.

The references are undisturbed runs of `pretrax launch local` with as many processes.
"""

import contextlib
import functools
import json
import re
import time
from pathlib import Path

import pytest

import slurm_cluster
from launched import BASE, PLUGIN, Training, environment, undisturbed, write_run
from preloaded import programs

pytestmark = pytest.mark.nightly

# From step 30 on, the batches of the first allocation of a job take so long that it does not finish.
IN_FIRST_ALLOCATION = "'SLURM_JOB_ID' in os.environ and not int(os.environ.get('SLURM_RESTART_COUNT') or 0)"
STEPS = 60
ENDED = ('COMPLETED', 'FAILED', 'CANCELLED', 'TIMEOUT', 'NODE_FAIL')


@pytest.fixture(scope='module')
def cluster():
    if reason := slurm_cluster.missing():
        pytest.skip(reason)
    with slurm_cluster.slurm_cluster() as started:
        yield started


@pytest.fixture(scope='module')
def reference(tmp_path_factory):
    """Losses of an undisturbed run in this number of processes."""

    @functools.cache
    def losses(processes):
        directory = tmp_path_factory.mktemp('reference')
        return undisturbed(write_run(directory, steps=STEPS), directory / 'run', processes)

    return losses


def write_slow_run(directory, **changes):
    """The configuration of a run that is interrupted in its first allocation."""
    config = write_run(directory, steps=STEPS, **changes)
    assert 'time.sleep(0.02)' in PLUGIN
    slow = f'time.sleep(2 if step >= 30 and {IN_FIRST_ALLOCATION} else 0.02)'
    (directory / 'plugin.py').write_text(PLUGIN.replace('time.sleep(0.02)', slow))
    return config


def submitted(cluster, config, *options):
    """Submits a run, in the directory of its configuration."""
    run_dir = config.parent / 'run'
    return Submitted(cluster, run_dir, ['launch', 'slurm', config, f'run_dir={run_dir}', *options])


class Submitted(Training):
    """A run under `pretrax launch slurm`."""

    def __init__(self, cluster, run_dir, command):
        super().__init__(run_dir)
        self.cluster = cluster
        self.said = cluster.run(programs() / 'pretrax', *command, env=environment())
        self.job = re.search(r'submitted Slurm job (\d+)', self.said)[1]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.cluster.run('scancel', self.job, check=None)
        self.until(lambda: self.state() in ENDED, 'the end of the job')

    def facts(self):
        return self.cluster.job(self.job)

    def state(self):
        return self.facts()['JobState']

    @property
    def log(self):
        path = self.run_dir / f'slurm-{self.job}.txt'
        return path.read_text() if path.exists() else '(no log)'

    def until(self, done, what):
        return self.cluster.until(done, f'{what}: {self.run_dir}/slurm-{self.job}.txt')

    def finish(self):
        """Waits until it is done. Returns its losses."""
        self.until(lambda: self.state() in ENDED, 'its end')
        assert self.state() == 'COMPLETED', self.log
        return self.losses()

    def print_times(self, capsys, at, what, slurm):
        """Prints when a fault at this time was noticed, and when the run trained again."""
        (line,) = self.recoveries([at])
        with capsys.disabled():
            print(f'\nSlurm, {what}: {line} ({slurm})')


@contextlib.contextmanager
def unplugged(cluster, node):
    """A cluster without a node, which comes back at the end."""
    cluster.unplug(int(node[-1]))
    try:
        yield
    finally:
        cluster.plug_in(int(node[-1]))


def test_four_nodes_train_again_in_their_allocation_when_a_process_is_killed(cluster, reference, tmp_path, capsys):
    with submitted(cluster, write_run(tmp_path, steps=STEPS), '--nodes', '4') as run:
        run.until_checkpoint(1)
        process = min(cluster.processes('node3', 'pretrax train'), key=int)  # its standby is younger
        at = time.time()
        cluster.run('kill', '-KILL', process)
        losses = run.finish()
        assert run.facts()['Restarts'] == '0'
    assert losses == reference(4)
    assert [event['why'] for event in run.events('ended')] == ['killed: process 2 (SIGKILL)', 'done']
    assert run.events('started')[1]['processes'] == ['node1', 'node2', 'node3', 'node4']
    (report,) = (run.run_dir / 'crashes').glob('*/process-2.txt')
    assert 'process 2 on node3\nkilled by SIGKILL' in report.read_text()
    run.print_times(capsys, at, 'a process is killed', 'Slurm alone: the job fails')


def test_a_lost_node_is_replaced(cluster, reference, tmp_path, capsys):
    config = write_slow_run(tmp_path)
    with submitted(cluster, config, '--nodes', '2') as run:
        run.until_checkpoint(1)
        lost = run.events('started')[0]['processes'][1]
        at = time.time()
        with unplugged(cluster, lost):
            losses = run.finish()
        assert run.facts()['Restarts'] == '1'
    assert losses == reference(2)
    assert lost not in run.events('started')[1]['processes'], 'on another node'
    assert 'exiting with 75, to be started again on other machines' in run.log
    run.print_times(
        capsys, at, 'a node is lost', f'with SlurmdTimeout={slurm_cluster.SLURMD_TIMEOUT}; it is 300 by default'
    )


def test_an_elastic_run_goes_on_with_the_nodes_that_are_left(cluster, reference, tmp_path, capsys):
    config = write_slow_run(tmp_path)
    cluster.until(lambda: cluster.states() == ['idle'] * 4, 'idle nodes')
    with submitted(cluster, config, '--nodes', '3', '--elastic') as run:
        run.until_checkpoint(1)
        first, second, lost = run.events('started')[0]['processes']
        at = time.time()
        with unplugged(cluster, lost):
            run.until(lambda: run.events('stepped')[1:], 'a second attempt')
            assert run.facts()['Restarts'] == '0'
            losses = run.finish()
    assert [event['processes'] for event in run.events('started')] == [
        [first, second, lost], [first, second],
    ]  # fmt: skip
    assert len(run.events('allocated')) == 1
    assert losses == pytest.approx(reference(2), rel=1e-5)
    run.print_times(capsys, at, 'elastic, a node is lost', 'without --no-kill, Slurm ends the job')


def test_the_nodes_that_are_left_go_on_from_a_copy_of_the_state_in_memory(cluster, tmp_path):
    config = write_slow_run(tmp_path, checkpoint={'every': 0, 'memory': {'every': 1}}, mesh={'r': 1, 'd': 'auto'})
    cluster.until(lambda: cluster.states() == ['idle'] * 4, 'idle nodes')
    with submitted(cluster, config, '--nodes', '3', '--elastic') as run:
        run.until_step(1, 30)
        newest = run.step()
        with unplugged(cluster, run.events('started')[0]['processes'][1]):
            run.until(lambda: run.events('stepped')[1:], 'a second attempt')
            assert newest - 2 <= run.events('began')[1]['step'] <= newest + 2
            losses = run.finish()
    assert 'memory of node' in run.log
    assert losses == pytest.approx(undisturbed(config, tmp_path / 'alone', 3), rel=1e-5)


def test_an_elastic_run_that_loses_its_first_node_is_requeued(cluster, reference, tmp_path):
    config = write_slow_run(tmp_path)
    cluster.until(lambda: cluster.states() == ['idle'] * 4, 'idle nodes')
    with submitted(cluster, config, '--nodes', '2', '--elastic') as run:
        run.until_checkpoint(1)
        lost = run.events('started')[0]['processes'][0]
        with unplugged(cluster, lost):
            losses = run.finish()
        assert run.facts()['Restarts'] == '1'
    assert losses == reference(2)
    assert lost not in run.events('started')[1]['processes'], 'on another node'


def test_a_run_continues_after_its_time_limit(cluster, reference, tmp_path):
    config = write_slow_run(tmp_path)
    options = ('--nodes', '2', '--time', '1m', '--sbatch', 'signal=B:TERM@20')
    with submitted(cluster, config, *options) as run:
        run.until(lambda: run.facts()['Restarts'] == '1', 'the end of the first allocation')
        saved = run.step()
        losses = run.finish()
    assert losses == reference(2)
    assert [event['step'] for event in run.events('began')] == [0, saved], 'from the step that was saved at the limit'
    assert [event['code'] for event in run.events('released')] == [75, 0]


def test_a_preempted_run_continues(cluster, reference, tmp_path):
    config = write_slow_run(tmp_path)
    with submitted(cluster, config, '--nodes', '2') as run:
        run.until_checkpoint(1)
        cluster.run('sbatch', '--partition=urgent', '--nodes=4', '--exclusive', '--output=/dev/null', '--wrap=sleep 1')
        run.until(lambda: run.facts()['Restarts'] == '1', 'the preemption')
        saved = run.step()
        losses = run.finish()
    assert losses == reference(2)
    assert [event['step'] for event in run.events('began')] == [0, saved], 'from the step that was saved'
    assert [event['preempted'] for event in run.events('released')] == [True, False]


def page_commands():
    """The commands of docs/clusters.md that need a Slurm."""
    page = (Path(__file__).parents[2] / 'docs' / 'clusters.md').read_text()
    blocks = re.findall(r'<!-- not run: needs a Slurm.*? -->\n```sh\n(.*?)```', page, re.DOTALL)
    return [line.removeprefix('uv run pretrax ').split() for block in blocks for line in block.splitlines()]


@pytest.fixture
def pretrax(cluster, tmp_path, monkeypatch):
    """Runs pretrax on the login node, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'configs' / 'sweeps').mkdir(parents=True)
    return functools.partial(cluster.run, programs() / 'pretrax', env=environment())


def test_a_run_that_is_stopped_or_canceled_stays_so(cluster, pretrax, tmp_path):
    launch, status, logs, stop, *_ = page_commands()
    write_slow_run(tmp_path / 'configs').rename(tmp_path / 'configs' / 'quickstart.yaml')
    with Submitted(cluster, tmp_path / 'runs' / 'base', launch) as run:
        run.until_checkpoint(1)
        assert re.match(rf'Slurm job {run.job}: RUNNING on node\S+, ', pretrax(*status))
        assert 'step ' in pretrax(*logs)
        assert pretrax(*logs, '--process', '1')
        assert 'to save and to end' in pretrax(*stop)
        run.until(lambda: run.state() in ENDED, 'its end')
        assert run.state() == 'COMPLETED', run.log
    saved = run.step()
    assert max(run.checkpoints()) == saved < STEPS
    assert f'Slurm job {run.job}: COMPLETED' in pretrax(*status)

    with Submitted(cluster, run.run_dir, launch) as again:
        again.until(lambda: again.events('stepped')[1:], 'a step')
        assert again.events('began')[1]['step'] == saved
        cluster.run('scancel', again.job)
        again.until(lambda: again.state() in ENDED, 'its end')
        again.until(lambda: cluster.states() == ['idle'] * 4, 'idle nodes')
        assert again.state() == 'CANCELLED'
        assert 'has ended already' in pretrax(*stop)


def test_the_rows_of_a_sweep_are_an_array_of_jobs(cluster, pretrax, tmp_path):
    *_, launch, show = page_commands()
    (tmp_path / 'configs' / 'quickstart.yaml').write_text(json.dumps(BASE))
    sweep = {'base': '../quickstart.yaml', 'grid': {'batch.tokens': [32, 64, 128]}, 'steps': 2}
    (tmp_path / 'configs' / 'sweeps' / 'quick.yaml').write_text(json.dumps(sweep))
    said = pretrax(*launch)
    job = re.search(r'submitted Slurm job (\d+)', said)[1]
    cluster.until(lambda: not cluster.run('squeue', '-h', '-j', job, check=None).strip(), 'the end of the array', said)
    rows = [line.split() for line in pretrax(*show).splitlines() if line.rstrip().endswith('done')]
    assert [row[0] for row in rows] == ['32', '64', '128']
    assert pretrax('bench', 'configs/sweeps/quick.yaml').count('(earlier)') == 3
    assert pretrax('launch', 'status', 'sweeps/quick').startswith(f'Slurm array {job} of 3 rows: ')
    assert 'row 2 of 3 rows on' in pretrax('launch', 'logs', 'sweeps/quick', '--process', '2')


def test_a_run_waits_for_a_node_that_is_down(cluster, reference, tmp_path):
    cluster.until(lambda: cluster.states() == ['idle'] * 4, 'idle nodes')
    with unplugged(cluster, 'node4'):
        cluster.until(lambda: cluster.states()[3].startswith('down'), 'a node that is down')
        run = submitted(cluster, write_run(tmp_path, steps=STEPS), '--nodes', '4')
        assert '; it may wait: Slurm cannot start it with the nodes that are up now\n' in run.said
        assert run.state() == 'PENDING'
    with run:
        assert run.finish() == reference(4)


@pytest.mark.parametrize(
    ('options', 'said'),
    [
        (('--partition', 'mian'), "there is no partition 'mian' in this Slurm\n  did you mean: --partition main\n"),
        (('--partition', 'small', '--nodes', '2'), '--nodes 2: a job in partition small can have 1'),
        (('--nodes', '5', 'batch.tokens=320'), '--nodes 5: a job in partition main can have 4'),
        (('--time', '3d'), 'the limit of partition main is 2-00:00:00'),
        (('--gpus-per-node', '3'), '--gpus-per-node 3: the nodes of partition main have 2'),
        (('--constraint', 'h100'), 'Slurm refuses the job:\nallocation failure: Invalid feature specification'),
    ],
)
def test_what_slurm_cannot_give_is_refused_before_anything_waits(cluster, tmp_path, options, said):
    config = write_run(tmp_path)
    told = cluster.run(
        programs() / 'pretrax', 'launch', 'slurm', config, f'run_dir={tmp_path / "run"}', *options, check=2,
        env=environment(),
    )  # fmt: skip
    errors = [line for line in told.splitlines() if not line.startswith('WARNING')]
    assert said in '\n'.join(errors) + '\n'
    assert len(errors) <= 10
    assert cluster.run('squeue', '-h') == ''
