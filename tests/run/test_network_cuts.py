"""Two processes on two machines, and the network between them is cut: for a moment, and for longer than the heartbeat.

The machines are network namespaces of Linux on a switch. A pulled cable drops packets silently, as a real one does at
the other end.
"""

import contextlib
import os
import shutil
import subprocess
import time

import pytest

from launched import PATIENCE, Training, environment, undisturbed, write_run
from preloaded import programs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which('ip') is None, reason='needs root and iproute2'),
]
STEPS = 60


def ip(*words):
    subprocess.run(['ip', *words], check=True, stdin=subprocess.DEVNULL)


class TwoMachines(Training):
    """Process 0 and process 1 of a run, each in a network of its own."""

    def __init__(self, config, run_dir, steps):
        super().__init__(run_dir)
        self._own = f'cut{os.getpid()}'
        self._cleanup = contextlib.ExitStack()
        for name in ('switch', '0', '1'):
            ip('netns', 'add', self._own + name)
            self._cleanup.callback(ip, 'netns', 'del', self._own + name)
            ip('-n', self._own + name, 'link', 'set', 'lo', 'up')
        switch = f'{self._own}switch'
        ip('-n', switch, 'link', 'add', 'br0', 'type', 'bridge')
        ip('-n', switch, 'link', 'set', 'br0', 'up')
        for number in '01':
            machine, cable = self._own + number, f'cable{number}'
            ip('-n', switch, 'link', 'add', cable, 'type', 'veth', 'peer', 'name', 'eth0', 'netns', machine)
            ip('-n', switch, 'link', 'set', cable, 'master', 'br0', 'up')
            ip('-n', machine, 'addr', 'add', f'10.77.8.{int(number) + 1}/24', 'dev', 'eth0')
            ip('-n', machine, 'link', 'set', 'eth0', 'up')
        hosts = run_dir.with_name('hosts')  # Gloo listens at the address of the machine's name
        hosts.write_text('127.0.0.1 localhost\n10.77.8.1 machine-0\n10.77.8.2 machine-1\n')
        for number in '01':
            self.memory(number).mkdir()
        self.processes = [
            subprocess.Popen(
                ['ip', 'netns', 'exec', self._own + number, 'unshare', '--uts', 'sh', '-c',
                 f'hostname machine-{number}; mount --bind {hosts} /etc/hosts; exec "$0" "$@"',
                 programs() / 'pretrax', 'train', str(config), f'run_dir={run_dir}', f'steps={steps}'],
                env=environment(
                    JAX_COORDINATOR_ADDRESS='10.77.8.1:8476', JAX_NUM_PROCESSES='2', JAX_PROCESS_ID=number,
                    PRETRAX_HOSTS='machine-a,machine-b', PRETRAX_MEMORY=str(self.memory(number)),
                ),
                stdout=subprocess.DEVNULL,
                stderr=self._cleanup.enter_context(run_dir.with_name(f'said-{number}').open('w')),
            )
            for number in '01'
        ]  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()
        self._cleanup.close()

    def cut(self):
        """Pulls the cable of process 1 at the switch."""
        ip('-n', f'{self._own}switch', 'link', 'set', 'cable1', 'nomaster')

    def mend(self):
        ip('-n', f'{self._own}switch', 'link', 'set', 'cable1', 'master', 'br0')

    def memory(self, number):
        """The directory for states in the memory of a machine."""
        return self.run_dir.with_name(f'memory-{number}')

    def said(self, number):
        return self.run_dir.with_name(f'said-{number}').read_text()

    def until(self, done, what):
        end = time.monotonic() + PATIENCE
        while not (found := done()):
            assert time.monotonic() < end, f'no sign of {what}: {self.said(0)}'
            time.sleep(0.02)
        return found


def test_a_cut_that_is_shorter_than_the_heartbeat_loses_no_step_and_no_copy(tmp_path):
    config = write_run(tmp_path, faults={'heartbeat_seconds': 60}, checkpoint={'every': 0, 'memory': {'every': 1}})
    with TwoMachines(config, tmp_path / 'run', STEPS) as run:
        run.until_step(1, 5)
        run.cut()
        at = run.step()
        with pytest.raises(subprocess.TimeoutExpired):
            run.processes[0].wait(3)
        assert run.step() <= at + 3, 'no step goes on without the other process'
        run.mend()
        assert [process.wait(PATIENCE) for process in run.processes] == [0, 0], run.said(0)
    pieces = {str(path.relative_to(run.memory('0'))) for path in run.memory('0').glob('*/*')}
    assert pieces == {f'{writer}/{step}' for writer in (0, 1) for step in (STEPS - 1, STEPS)}
    assert {str(path.relative_to(run.memory('1'))) for path in run.memory('1').glob('*/*')} == pieces
    assert len(run.events('began')) == 1
    assert run.losses() == undisturbed(config, tmp_path / 'whole', 2, f'steps={STEPS}')


def test_a_cut_that_lasts_ends_both_processes_with_the_code_for_a_restart(tmp_path):
    config = write_run(tmp_path, faults={'heartbeat_seconds': 3})
    with TwoMachines(config, tmp_path / 'run', 100_000) as run:
        run.until_step(1, 5)
        run.cut()
        codes = [process.wait(PATIENCE) for process in run.processes]
    assert codes == [75, 75], run.said(0) + run.said(1)
    assert 'unhealthy (stopped sending heartbeats):\n1\n' in run.said(0)
    for number in (0, 1):
        assert 'the machines: processes 0 (machine-a) and 1 (machine-b)\n' in run.said(number)
