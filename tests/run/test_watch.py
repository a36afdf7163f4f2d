"""Signals and the time limit that stop or save a run, and steps that hang."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

from preloaded import programs
from pretrax import config_from_values, pretrain
from pretrax.checkpoint import steps_in
from pretrax.run import watch
from runs import At, Quiet


def test_two_signals_at_once_count_as_one(capfd, monkeypatch):
    """`uv run` passes on what its process group got as well; a second one that is meant comes later."""
    ended = []
    monkeypatch.setattr(watch.os, '_exit', ended.append)
    with watch.Requests(None).listening() as requests:
        assert not requests.stop(1)
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert (requests.stop(2), requests.why, ended) == (True, 'signal', [])
        assert capfd.readouterr().err.count('stopping after this step, and saving the state') == 1
        later = time.monotonic() + 1.5
        monkeypatch.setattr(watch.time, 'monotonic', lambda: later)
        signal.raise_signal(signal.SIGINT)
        assert ended == [130]


def test_sigusr1_saves_and_continues(small):
    progress = At(3, lambda: signal.raise_signal(signal.SIGUSR1))
    result = pretrain(config_from_values(small | {'checkpoint': {'every': 100}}), progress=progress)
    assert (result.stopped, int(result.state.step)) == (None, 6)
    assert steps_in(Path(small['run_dir']) / 'checkpoints') == [4, 6]


def test_a_time_limit_saves_and_stops(small):
    result = pretrain(config_from_values(small | {'faults': {'time_limit_minutes': 1e-6}}), progress=Quiet())
    assert (result.stopped, int(result.state.step)) == ('time limit', 1)
    assert steps_in(Path(small['run_dir']) / 'checkpoints') == [1]


HANGING = """
import pathlib, sys, time
sys.path.insert(0, sys.argv[3])
from pretrax import config_from_values, pretrain, register
from pretrax.data.batches.source import Source
from bigram import Bigram
import json

class Stuck(Source):
    vocab_size = 100
    def batch(self, step, rows, batch_rows):
        from small import random_batch
        if step == 3:
            time.sleep(1000)
        batch = random_batch(batch_rows, seed=step)
        arrays = (batch.tokens, batch.targets, batch.segments, batch.positions, batch.mask)
        return type('Rows', (tuple,), {})(x[rows] for x in arrays)

register('data', 'stuck')(lambda request: Stuck())
register('model', 'bigram-that-hangs')(lambda request: Bigram())
pretrain(config_from_values(json.loads(sys.argv[1])))
"""


def test_a_hanging_step_ends_the_process_and_its_stacks_name_the_line(small):
    values = small | {
        'model': {'name': 'bigram-that-hangs'}, 'data': {'name': 'stuck'}, 'faults': {'hang_seconds': 2.0},
        'mesh': {'r': 1, 'd': 1, 't': 1}, 'checkpoint': {'every': 2},
    }  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}
    run = subprocess.run(
        [programs() / 'python', '-c', HANGING, json.dumps(values), '', str(Path(__file__).parents[1])],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 75, run.stderr
    assert 'the process ends; stacks are in' in run.stdout
    stacks = (Path(small['run_dir']) / 'stacks' / 'process-0.txt').read_text()
    assert 'File "<string>", line 14 in batch' in stacks
    assert steps_in(Path(small['run_dir']) / 'checkpoints') == [2]
