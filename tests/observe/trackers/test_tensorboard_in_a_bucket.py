"""Event files of a run in a bucket of Cloud Storage, as TensorBoard and Vertex AI TensorBoard read them."""

import collections
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from preloaded import programs
from pretrax import config_from_values, pretrain
from pretrax.observe.metrics import read_metrics
from pretrax.observe.trackers import tensorboard
from pretrax.observe.trackers.base import Line
from pretrax.storage import BucketPath, mirror
from pretrax.storage.staging import download
from runs import At, Quiet, documents, small, values, write_yaml
from tensorboard_events import point, tensorboard_points

__all__ = ['documents', 'small', 'values']  # fixtures

TESTS = Path(__file__).parents[2]
# What TensorBoard has of a directory in the bucket: {tag: [[step, value], ...]}.
READER = """
import json, sys
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
found = EventAccumulator(sys.argv[1], size_guidance={'scalars': 0})
found.Reload()
print(json.dumps({tag: [[one.step, one.value] for one in found.Scalars(tag)] for tag in found.Tags()['scalars']}))
"""


@pytest.fixture
def remote(gs, small, tmp_path, monkeypatch):
    """The configuration of a run in the bucket, on a machine that has nothing yet."""
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'machine'))
    monkeypatch.setattr(mirror, 'EVERY', 0.1)
    return small | {'run_dir': f'{gs.url}/runs/a', 'log': {'every': 1, 'report': False, 'tensorboard': True}}


def points(remote, directory):
    """What a reader of the event files in the bucket shows."""
    (directory / 'tb').mkdir(parents=True, exist_ok=True)
    download(BucketPath(remote['run_dir']) / 'tb', directory / 'tb')
    return tensorboard_points(directory)[0]


def expected(remote):
    lines = read_metrics(BucketPath(remote['run_dir']) / 'metrics.jsonl', pytest.fail)
    return collections.Counter(
        point(line['step'], key, value)
        for line in lines
        for key, value in line.items()
        if isinstance(value, int | float) and key not in ('step', 'time')
    )


def losses(counted):
    return {step: value for step, key, value in counted if key == 'loss'}


def test_events_arrive_while_the_run_goes_on(remote, tmp_path):
    """Nothing else would upload them: there is no checkpoint before the end."""
    seen = {}

    def arrived():
        until = time.monotonic() + 60
        while 2 not in (now := losses(points(remote, tmp_path / 'during'))):
            assert time.monotonic() < until, now
        seen.update(now)

    pretrain(config_from_values(remote | {'checkpoint': {'every': 100}}), progress=At(4, arrived))
    final = losses(points(remote, tmp_path / 'after'))
    assert max(seen) < 6
    assert set(final) == {1, 2, 3, 4, 5, 6}
    assert seen.items() <= final.items()


def test_a_long_run_has_files_that_are_all_uploaded_at_once(tmp_path, monkeypatch):
    """A file above `LARGE` would wait for the next checkpoint."""
    monkeypatch.setattr(tensorboard, 'LARGEST', 20_000)
    writer = tensorboard.TensorBoard(True, tmp_path, 'run', {})
    writer.resume(0)
    writer.log([Line(step, {'loss': float(step)}, 1e9 + step) for step in range(5000)])
    writer.close(True)
    files = sorted((tmp_path / 'tb').iterdir())
    assert len(files) > 5
    assert max(file.stat().st_size for file in files) < 25_000
    found, _ = tensorboard_points(tmp_path)
    assert losses(found) == {step: float(step) for step in range(5000)}
    assert mirror.LARGE > 3 * 2**20, 'so files of the real size are uploaded every few seconds'


def killed_and_resumed(remote, tmp_path, monkeypatch, steps):
    """A run that is killed once events of some step have arrived, and resumed on a machine that has nothing of it."""
    values = remote | {
        'steps': 150, 'schedule': {'name': 'constant'}, 'checkpoint': {'every': 20},
        'plugins': [str(TESTS / 'runs.py')], 'faults': {'lease_seconds': 0.5},
    }  # fmt: skip
    config = write_yaml(values, tmp_path / 'run.yaml')
    environment = dict(os.environ) | {'PYTHONPATH': str(TESTS)}
    fast = f'from pretrax.storage import mirror; mirror.EVERY = 0.1; from pretrax.cli import main; main(["train", {str(config)!r}])'
    output = tmp_path / 'output.txt'
    with output.open('w') as file:
        process = subprocess.Popen([programs() / 'python', '-c', fast], env=environment, stdout=file, stderr=file)
    try:
        until = time.monotonic() + 120
        while max(losses(points(remote, tmp_path / 'before')), default=0) < steps:
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < until
    finally:
        process.kill()
        process.wait()
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'another-machine'))
    result = pretrain(config_from_values(values), progress=Quiet())
    assert int(result.state.step) == 150


# Before and after the first checkpoint.
@pytest.mark.parametrize(
    'steps', [pytest.param(5, marks=pytest.mark.nightly), pytest.param(45, marks=pytest.mark.slow)]
)
def test_events_survive_a_kill_and_another_machine(remote, tmp_path, monkeypatch, steps):
    """Every number of metrics.jsonl is shown once, by a reader that follows TensorBoard's rule,
    and by TensorBoard itself.
    """
    killed_and_resumed(remote, tmp_path, monkeypatch, steps)
    wanted = expected(remote)
    assert points(remote, tmp_path / 'after') == wanted
    command = ['uv', 'run', '--isolated', '--no-project', '--python', sys.executable, '--with', 'tensorboard', '--with',
    'gcsfs',
               '--with', 'setuptools<81', 'python', '-c', READER, f'{remote["run_dir"]}/tb']  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    shown = dict(json.loads(done.stdout.splitlines()[-1])['loss'])
    assert shown == pytest.approx(losses(wanted), rel=1e-6)
    assert list(shown) == list(range(1, 151))
