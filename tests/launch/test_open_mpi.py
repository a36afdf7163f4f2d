"""The commands for Open MPI in docs/clusters.md: a killed process ends all of them, and the loop goes on."""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from launched import PATIENCE, PLUGIN, Launched, Training, environment, undisturbed, write_run
from preloaded import programs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which('mpirun') is None, reason='needs Open MPI: apt-get install openmpi-bin'),
]
PAGE = Path(__file__).parents[2] / 'docs' / 'clusters.md'
COMMAND = 'mpirun -n 2 uv run pretrax train configs/quickstart.yaml name=mpi steps=100'
LOOP = f'until {COMMAND}; do sleep 10; done'
STEPS = 60


class UnderMpi(Training):
    """A run under the loop of the page, with a small configuration."""

    def __init__(self, config, run_dir):
        super().__init__(run_dir)
        self.output = run_dir.with_suffix('.txt')
        line = LOOP.replace('uv run pretrax', str(programs() / 'pretrax')).replace('sleep 10', 'sleep 0.1')
        line = line.replace('configs/quickstart.yaml name=mpi steps=100', f'{config} run_dir={run_dir}')
        as_root = {'OMPI_ALLOW_RUN_AS_ROOT': '1', 'OMPI_ALLOW_RUN_AS_ROOT_CONFIRM': '1'}
        with self.output.open('w') as output:
            self.process = subprocess.Popen(
                ['bash', '-c', line], stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
                env=environment(OMPI_MCA_rmaps_base_oversubscribe='1', **as_root),
            )  # fmt: skip

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    until = Launched.until

    @property
    def said(self):
        return self.output.read_text()

    def ranks(self):
        """Process ids by rank."""
        (mpirun,) = children(self.process.pid)
        found = children(mpirun)
        variables = {pid: Path(f'/proc/{pid}/environ').read_bytes().split(b'\0') for pid in found}
        return {rank: pid for pid in found for rank in (0, 1) if b'OMPI_COMM_WORLD_RANK=%d' % rank in variables[pid]}


def children(process):
    return [*map(int, Path(f'/proc/{process}/task/{process}/children').read_text().split())]


def test_the_loop_continues_after_a_process_was_killed(tmp_path):
    lines = PAGE.read_text().splitlines()
    assert {COMMAND, LOOP} <= set(lines)
    config = write_run(tmp_path, steps=STEPS)
    (tmp_path / 'plugin.py').write_text(
        PLUGIN.replace("os.environ['JAX_PROCESS_ID']", "os.environ.get('JAX_PROCESS_ID')")
    )
    reference = undisturbed(config, tmp_path / 'alone', 2)
    with UnderMpi(config, tmp_path / 'run') as run:
        run.until_checkpoint(1)
        os.kill(run.ranks()[1], signal.SIGKILL)
        assert run.process.wait(PATIENCE) == 0, run.said
    assert 'exited on signal 9' in run.said, 'which mpirun reports'
    assert [event['step'] > 0 for event in run.events('began')] == [False, True]
    assert run.losses() == reference
    assert len(reference) == STEPS
