"""The quickstart trains in a bucket, is killed ten times, three times with its machine, and ends bit-equal."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pretrax.checkpoint import steps_in, verify
from pretrax.observe.metrics import read_metrics
from pretrax.storage import BucketPath

QUICKSTART = Path(__file__).parents[2] / 'configs' / 'quickstart.yaml'
CHANGES = ['steps=75', 'schedule.warmup=10', 'batch.tokens=1024', 'eval.every=0', 'sample.every=0', 'log.every=1',
'checkpoint.every=3',
           'checkpoint.keep=2']  # fmt: skip


def started(run_dir, machine):
    """The quickstart in a process of a machine, which is its own cache and working directory."""
    machine.mkdir(exist_ok=True)
    environment = os.environ | {'XDG_CACHE_HOME': str(machine / 'cache'), 'XLA_FLAGS': ''}
    command = [sys.executable, '-m', 'pretrax', 'train', str(QUICKSTART), *CHANGES, f'run_dir={run_dir}']
    with (machine / 'output.txt').open('ab') as output:
        return subprocess.Popen(command, cwd=machine, env=environment, stdout=output, stderr=subprocess.STDOUT)


def losses(run_dir):
    """Step, loss and norms of every line, to the last bit."""
    lines = read_metrics(run_dir / 'metrics.jsonl')
    return [(line['step'], line['loss'], line['grad_norm'], line['weight_norm']) for line in lines if 'loss' in line]


@pytest.mark.nightly
def test_the_quickstart_in_a_bucket_survives_ten_kills(s3, tmp_path):
    run = BucketPath(f'{s3.url}/runs/quickstart')
    machine, moments, kills, newest = tmp_path / 'machine', random.Random(0), 0, 0
    while kills < 10:
        process = started(run, machine)
        target = newest + 3
        while process.poll() is None and max(steps_in(run / 'checkpoints'), default=0) < target:
            time.sleep(0.2)
        time.sleep(moments.uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL, (machine / 'output.txt').read_text()[-3000:]
        kills += 1
        reached = max(steps_in(run / 'checkpoints'), default=0)
        assert reached >= newest  # what was saved stays
        newest = reached
        if kills % 3 == 0:
            shutil.rmtree(machine)  # the machine goes away
    assert started(run, machine).wait(timeout=300) == 0, (machine / 'output.txt').read_text()[-3000:]

    local = tmp_path / 'straight'
    assert started(local, machine).wait(timeout=300) == 0
    assert losses(run) == losses(local)
    assert [step for step, *_ in losses(local)] == list(range(1, 76))
    assert steps_in(run / 'checkpoints') == [72, 75]
    for step in (72, 75):
        verify(run / 'checkpoints', step)
    assert not [key for key in s3.keys('runs/quickstart/checkpoints/') if key.split('/')[3] not in ('72', '75')]
