"""What may go wrong around the steps: another process, a full disk, no time left, a step that never ends."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pretrax import config_from_values, pretrain
from pretrax.checkpoint import read_description, steps_in
from pretrax.errors import UserError
from pretrax.observe.attempts import read_attempts
from pretrax.observe.metrics import read_metrics
from pretrax.run.resume import lock_run
from runs import BIGRAM, Quiet


@pytest.fixture
def small(values):
    return values | {'model': BIGRAM}


class At(Quiet):
    """Does something when the metrics of a step are reported."""

    def __init__(self, step, what):
        super().__init__()
        self.step, self.what = step, what

    def update(self, metrics):
        if metrics['step'] == self.step:
            self.what()


def test_a_run_is_trained_by_one_process_at_a_time(small):
    directory = Path(small['run_dir'])
    holder = subprocess.Popen(
        [sys.executable, '-c', 'import pathlib, sys; from pretrax.run.resume import lock_run\n'
         'with lock_run(pathlib.Path(sys.argv[1])): print("held", flush=True); sys.stdin.read()', str(directory)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    with holder:
        assert holder.stdout.readline() == b'held\n'
        with pytest.raises(UserError, match=f'is being trained by process {holder.pid} on ') as refusal:
            pretrain(config_from_values(small), progress=Quiet())
        assert 'use another name=' in str(refusal.value)
        assert sorted(path.name for path in directory.iterdir()) == ['lock']
        holder.kill()
    assert 'process' in (directory / 'lock').read_text()  # left by the dead process, and no obstacle
    with lock_run(directory):
        pass


def test_a_file_system_without_locks_is_no_run_that_is_being_trained(tmp_path, monkeypatch):
    """As some cluster file systems say it; there is none here to mount."""

    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, 'flock', no_locks)
    said = []
    with lock_run(tmp_path / 'run', said.append):
        assert (tmp_path / 'run' / 'lock').read_text().startswith(f'process {os.getpid()} on ')
    [warning] = said
    assert 'cannot be locked (No locks available), so nothing prevents a second process' in warning


def test_a_checkpoint_that_cannot_be_written_is_told_and_tried_again(small):
    """A file lies where the directory of checkpoints should be; at step 3 it is gone."""
    run = Path(small['run_dir'])
    run.mkdir()
    obstacle = run / 'checkpoints'
    progress = At(3, obstacle.unlink)
    values = small | {'checkpoint': {'every': 2}}
    obstacle.write_text('')
    result = pretrain(config_from_values(values), progress=progress)
    [warning] = [line for line in progress.said if 'no checkpoint could be written' in line]
    assert 'Training continues' in warning
    assert int(result.state.step) == 6
    assert steps_in(run / 'checkpoints') == [4, 6]


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(small):
    run = Path(small['run_dir'])
    run.mkdir()
    (run / 'checkpoints').write_text('')
    progress = Quiet()
    with pytest.raises(UserError, match='the state of step 2 is not saved'):
        pretrain(config_from_values(small | {'steps': 2, 'schedule': {}}), progress=progress)


def test_sigusr1_saves_and_goes_on(small):
    progress = At(3, lambda: signal.raise_signal(signal.SIGUSR1))
    result = pretrain(config_from_values(small | {'checkpoint': {'every': 100}}), progress=progress)
    assert (result.stopped, int(result.state.step)) == (None, 6)
    assert steps_in(Path(small['run_dir']) / 'checkpoints') == [4, 6]


def test_the_clock_asks_for_checkpoints_too(small):
    values = small | {'checkpoint': {'every': 100, 'minutes': 1e-9, 'keep': 9}}
    pretrain(config_from_values(values), progress=Quiet())
    assert steps_in(Path(small['run_dir']) / 'checkpoints') == [1, 2, 3, 4, 5, 6]


def test_a_time_limit_saves_and_tells(small):
    result = pretrain(config_from_values(small | {'faults': {'time_limit_minutes': 1e-6}}), progress=Quiet())
    assert (result.stopped, int(result.state.step)) == ('time limit', 1)
    assert steps_in(Path(small['run_dir']) / 'checkpoints') == [1]


def test_an_unreadable_checkpoint_is_told_and_the_one_before_taken(small):
    values = small | {'checkpoint': {'every': 2}}
    pretrain(config_from_values(values), progress=Quiet())
    directory = Path(small['run_dir']) / 'checkpoints'
    before = read_metrics(directory.parent / 'metrics.jsonl')
    [array] = (directory / '6' / 'state').glob('weights.bias/0')
    array.write_bytes(array.read_bytes()[:-1])
    progress = Quiet()
    pretrain(config_from_values(values), progress=progress)
    assert any(line.startswith(f'WARNING: the checkpoint {directory / "6"} is damaged') for line in progress.said)
    assert any('resuming from step 4' in line for line in progress.said)
    after = read_metrics(directory.parent / 'metrics.jsonl')
    assert [line['loss'] for line in after] == [line['loss'] for line in before]

    for step in steps_in(directory):
        (directory / str(step) / 'manifest.json').unlink()
    with pytest.raises(UserError, match=r'none of the 3 checkpoints in .* is readable'):
        pretrain(config_from_values(values), progress=Quiet())


def test_goodput_counts_kept_steps_over_all_time(small):
    values = small | {'checkpoint': {'every': 2}}
    pretrain(config_from_values(values | {'steps': 4, 'schedule': {}}), progress=Quiet())
    run = Path(small['run_dir'])
    kept = read_description(run / 'checkpoints', 4)['productive_seconds']
    attempts = [json.loads(line) for line in (run / 'attempts.jsonl').read_text().splitlines()]
    attempts[0]['time'] -= 1000  # as if it had begun long before
    (run / 'attempts.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in attempts))
    pretrain(config_from_values(values | {'steps': 6, 'schedule': {}}), progress=Quiet())
    last = read_metrics(run / 'metrics.jsonl')[-1]
    assert kept / 1100 < last['goodput'] < (kept + 100) / 1000
    events = [(event['event'], event['step']) for event in read_attempts(run)]
    assert events == [('began', 0), ('stepped', 1), ('began', 4), ('stepped', 5)]


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


def test_a_step_that_never_ends_ends_the_process_and_names_the_line(small):
    values = small | {
        'model': {'name': 'bigram-that-hangs'}, 'data': {'name': 'stuck'}, 'faults': {'hang_seconds': 2.0},
        'mesh': {'r': 1, 'd': 1, 't': 1}, 'checkpoint': {'every': 2},
    }  # fmt: skip
    environment = {key: value for key, value in os.environ.items() if key != 'XLA_FLAGS'}
    run = subprocess.run(
        [sys.executable, '-c', HANGING, json.dumps(values), '', str(Path(__file__).parents[1])],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert run.returncode == 75, run.stderr
    assert 'the process ends; stacks are in' in run.stdout
    stacks = (Path(small['run_dir']) / 'stacks' / 'process-0.txt').read_text()
    assert 'File "<string>", line 14 in batch' in stacks
    assert steps_in(Path(small['run_dir']) / 'checkpoints') == [2]
