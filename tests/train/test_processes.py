"""Two processes that share a run do what one process with the same devices does."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pretrax import config_from_values, pretrain
from pretrax.observe.metrics import read_metrics
from runs import Quiet

PRETRAX = str(Path(sys.executable).with_name('pretrax'))
QUIET = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}


@pytest.mark.slow
def test_two_processes_train_like_one(values, tmp_path):
    values |= {'eval': {'every': 3, 'batches': 2}, 'schedule': {'name': 'constant', 'warmup': 2}}
    pretrain(config_from_values(values | {'run_dir': str(tmp_path / 'one')}), progress=Quiet())

    config = tmp_path / 'run.yaml'
    config.write_text(json.dumps(values | {'mesh': {'r': 1, 'd': 2, 't': 1}}))
    run_together(config, tmp_path / 'two', steps=3)
    run_together(config, tmp_path / 'two', steps=6)  # and resumes
    alone, together = read_metrics(tmp_path / 'one' / 'metrics.jsonl'), read_metrics(tmp_path / 'two' / 'metrics.jsonl')
    assert [line['step'] for line in together] == [line['step'] for line in alone]
    for a, b in zip(alone, together, strict=True):
        for key in {'loss', 'grad_norm', 'weight_norm', 'val_loss'} & a.keys():
            np.testing.assert_allclose(b[key], a[key], rtol=1e-5)


def run_together(config, run_dir, steps):
    with socket.socket() as free:
        free.bind(('localhost', 0))
        address = f'localhost:{free.getsockname()[1]}'
    both = [
        start(
            config, run_dir, steps=steps, JAX_COORDINATOR_ADDRESS=address, JAX_NUM_PROCESSES='2', JAX_PROCESS_ID=str(i),
            JAX_NUM_CPU_DEVICES='1',
        )
        for i in range(2)
    ]  # fmt: skip
    try:
        complaints = [process.communicate(timeout=300)[1] for process in both]
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert [process.returncode for process in both] == [0, 0], '\n'.join(complaints)


def start(config, run_dir, steps, **environment):
    return subprocess.Popen(
        [PRETRAX, 'train', str(config), f'run_dir={run_dir}', f'steps={steps}'], env=QUIET | environment,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
