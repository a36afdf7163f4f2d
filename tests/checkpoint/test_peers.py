"""States in the memory of several hosts: a lost host costs what was trained since the newest copy, and no more.

The hosts are directories, one for each process. What follows a loss equals an undisturbed run, bit for bit.
"""

import shutil
import subprocess
import time

import pytest

from launched import PATIENCE, Training, environment, undisturbed, write_run
from preloaded import programs
from pretrax.checkpoint import peers
from pretrax.checkpoint.peers import rack_of
from side_by_side import free_port

STEPS = 24
IN_MEMORY = {'every': 0, 'memory': {'every': 2}}


class Hosts(Training):
    """Processes 0, 1, ... of a run, each on a host of its own whose memory is a directory."""

    def __init__(self, config, run_dir):
        super().__init__(run_dir)
        self._config, self.processes = config, []

    def memory(self, number):
        return self.run_dir.with_name(f'memory-{number}')

    def start(self, *hosts):
        """Starts an attempt, with a process on each of these hosts."""
        address = f'127.0.0.1:{free_port()}'
        for number, host in enumerate(hosts):
            self.memory(host).mkdir(exist_ok=True)
            identity = {'JAX_PROCESS_ID': str(number), 'JAX_NUM_PROCESSES': str(len(hosts))}
            with self.output(number).open('a') as output:
                self.processes.append(
                    subprocess.Popen(
                        [programs() / 'pretrax', 'train', str(self._config), f'run_dir={self.run_dir}'],
                        env=environment(
                            JAX_COORDINATOR_ADDRESS=address, PRETRAX_MEMORY=str(self.memory(host)),
                            PRETRAX_HOSTS=','.join('abc'[host] for host in hosts), **identity,
                        ),
                        stdout=output, stderr=subprocess.STDOUT,
                    )
                )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()

    def kill(self):
        """Ends all processes as the loss of one of them does."""
        for process in self.processes:
            process.kill()
            process.wait()
        self.processes.clear()

    def lose(self, *numbers):
        """Loses hosts: their memory is empty when they are back."""
        self.kill()
        for number in numbers:
            shutil.rmtree(self.memory(number))

    def output(self, number):
        return self.run_dir.with_name(f'output-{number}')

    def said(self, number=0):
        return self.output(number).read_text()

    def wait(self):
        codes = [process.wait(PATIENCE) for process in self.processes]
        assert not any(codes), self.said() + self.said(1)
        self.processes.clear()

    def until(self, done, what):
        end = time.monotonic() + PATIENCE
        while not (found := done()):
            assert time.monotonic() < end, f'no sign of {what}: {self.said()}'
            assert all(process.poll() is None for process in self.processes), self.said() + self.said(1)
            time.sleep(0.02)
        return found

    def resumed(self):
        """What process 0 has said about each state that it continued from."""
        return [line for line in self.said().splitlines() if 'resuming from' in line]


def losing(tmp_path, count, lost, hosts, **section):
    """Trains a sharded state on some hosts, loses some, and continues on these. Returns the run."""
    config = write_run(tmp_path, checkpoint={**IN_MEMORY, **section}, steps=STEPS, mesh={'r': 1, 'd': 'auto'})
    with Hosts(config, tmp_path / 'run') as run:
        run.start(*range(count))
        run.until_step(1, 8)
        run.lose(*lost)
        run.newest = run.step()
        run.start(*hosts)
        run.wait()
    return run


def assert_resumed_from_memory(run, config, processes, exact=True):
    began = run.events('began')[1]['step']
    assert run.newest - 4 <= began <= run.newest
    reference = undisturbed(config, config.with_name('alone'), processes)
    assert run.losses() == (reference if exact else pytest.approx(reference, rel=1e-5))


@pytest.mark.parametrize('lost', [0, 1])
def test_a_lost_host_is_replaced_by_an_empty_one(tmp_path, lost):
    run = losing(tmp_path, 2, [lost], [0, 1])
    assert 'copies of it: process 0 (a) -> 1 (b), 1 (b) -> 0 (a)' in (run.run_dir / 'startup.txt').read_text()
    kept, empty = f'memory of this machine (process {1 - lost})', f'memory of {"ab"[1 - lost]} (process {lost})'
    assert kept in run.resumed()[0]
    assert empty in run.resumed()[0]
    assert_resumed_from_memory(run, tmp_path / 'run.yaml', 2)


@pytest.mark.slow
def test_fewer_hosts_continue_without_the_lost_one(tmp_path):
    run = losing(tmp_path, 3, [1], [0, 2])
    assert_resumed_from_memory(run, tmp_path / 'run.yaml', 3, exact=False)  # sums in another order


@pytest.mark.slow
@pytest.mark.parametrize(('lost', 'copies'), [([0], 0), ([1, 2], 1)])
def test_more_lost_hosts_than_copies_cost_the_state(tmp_path, lost, copies):
    run = losing(tmp_path, 3, lost, [0, 1, 2], memory={'every': 2, 'copies': copies})
    assert [event['step'] for event in run.events('began')] == [0, 0]
    assert 'WARNING: the checkpoint of step' in run.said()
    assert run.losses() == undisturbed(tmp_path / 'run.yaml', tmp_path / 'alone', 3)


@pytest.mark.slow
def test_two_copies_outlive_two_lost_hosts(tmp_path):
    run = losing(tmp_path, 3, [1, 2], [0, 1, 2], memory={'every': 2, 'copies': 2})
    assert_resumed_from_memory(run, tmp_path / 'run.yaml', 3)


def test_a_host_that_takes_no_copies_is_reported_once_and_stops_nothing(tmp_path):
    config = write_run(tmp_path, checkpoint=IN_MEMORY, steps=STEPS)
    with Hosts(config, tmp_path / 'run') as run:
        run.start(0, 1)
        blocked = run.memory(1) / '0'
        run.until(blocked.is_dir, 'a copy')
        blocked.rename(run.memory(1) / 'elsewhere')
        blocked.write_text('a file in the place of a directory')
        run.until_step(1, 12)
        blocked.unlink()
        run.wait()
    assert run.said().count('WARNING: step') == 1
    assert 'has no copy in the memory of' in run.said()
    kept = sorted(path.name for path in (run.memory(0) / '0').iterdir())
    assert sorted(path.name for path in blocked.iterdir()) == kept, 'the next states are copied again'
    assert run.losses() == undisturbed(config, tmp_path / 'alone', 2)


def test_the_rack_is_that_of_the_user_or_the_switches_of_slurm():
    topology = {'SLURM_TOPOLOGY_ADDR': 'core.leaf3.node17'}
    assert rack_of({}) == rack_of({'SLURM_TOPOLOGY_ADDR': 'node17'}) == ''
    assert rack_of(topology) == 'core.leaf3'
    assert rack_of(topology | {'PRETRAX_RACK': 'b7'}) == 'b7'


def test_a_process_that_others_cannot_reach_trains_without_copies(tmp_path, monkeypatch):
    def no_address(coordinator, index):
        raise OSError(None, 'there is no route')

    monkeypatch.setattr(peers, 'own_address', no_address)
    monkeypatch.setattr(peers, 'gather', lambda about, text: [text, text])
    monkeypatch.setattr(peers, 'scatter', lambda about, texts: texts[0])
    monkeypatch.setattr(peers, 'offer', lambda about, text: lambda: text)
    monkeypatch.setattr('jax.process_count', lambda: 2)
    alone = peers.Peers(tmp_path, None)
    assert (alone.copies, alone.states(), alone.copy('0/3')) == (0, [], '')
    assert alone.description == 'none: there is no route'
    alone.close()
