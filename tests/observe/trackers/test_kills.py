"""Runs that are killed at random moments: every tracker has every number of metrics.jsonl once.

The numbers are read with the reader of each tracker, not with pretrax. Trackers that are not installed are skipped
here; the slow test of `test_real.py` installs them.
"""

import collections
import json
import os
import pathlib
import random
import signal
import sqlite3
import subprocess
import sys
import time

import pytest

from pretrax.observe.metrics import read_metrics
from tensorboard_events import OTHERS, Points, point, tensorboard_points

DRIVER = pathlib.Path(__file__).parent / 'driver.py'
STEPS = 120
CHOICES = {'tensorboard': 'true', 'trackio': 'project', 'mlflow': 'true', 'wandb': 'project'}
MODULES = {'tensorboard': 'tensorboardX', 'trackio': 'trackio', 'mlflow': 'mlflow', 'wandb': 'wandb'}
# These cannot remove a point: a step before a rollback keeps its first value.
KEEPS = ('mlflow', 'wandb')


def trackio_points(directory: pathlib.Path) -> tuple[Points, list[int]]:
    """Read with SQLite: Trackio writes a value that is not finite as a text."""
    points, samples = [], []
    with sqlite3.connect(directory / 'trackio' / 'project.db') as connection:
        for identity, step, metrics in connection.execute('SELECT run_id, step, metrics FROM metrics'):
            assert identity == (directory / 'trackio-run-id').read_text()
            for key, value in json.loads(metrics).items():
                if key == 'samples':
                    samples.append(step)
                elif not key.startswith(OTHERS):
                    points.append(point(step, key, float(value)))
    return collections.Counter(points), samples


def mlflow_points(directory: pathlib.Path) -> tuple[Points, list[int]]:
    import mlflow

    client = mlflow.MlflowClient(f'sqlite:///{directory}/mlflow.db')
    identity = (directory / 'mlflow-run-id').read_text()
    (experiment,) = client.search_experiments(filter_string="name = 'pretrax'")
    assert [run.info.run_id for run in client.search_runs([experiment.experiment_id])] == [identity]
    points = [
        point(each.step, key, each.value)
        for key in client.get_run(identity).data.metrics
        for each in client.get_metric_history(identity, key)
    ]
    names = [file.path for file in client.list_artifacts(identity, 'samples')]
    return collections.Counter(points), [int(name[-13:-4]) for name in names]


def wandb_points(directory: pathlib.Path) -> tuple[Points, list[int]]:
    """The files that `wandb sync` sends: logs as LevelDB writes them, of W&B's protocol buffers."""
    from wandb.proto.wandb_internal_pb2 import Record

    from pretrax.observe.trackers.wandb import _records

    points, samples = [], []
    for file in sorted((directory / 'wandb').glob('offline-run-*/run-*.wandb')):
        assert file.stem == f'run-{(directory / "wandb-run-id").read_text()}'
        for content in _records(file.read_bytes()):
            record = Record.FromString(content)
            if not record.HasField('history'):
                continue
            for item in record.history.item:
                key = item.key or '.'.join(item.nested_key)
                if key == 'samples' or key.startswith('samples.'):
                    samples.append(record.history.step.num)
                elif not key.startswith(OTHERS):
                    points.append(point(record.history.step.num, key, float(json.loads(item.value_json))))
    return collections.Counter(points), sorted(set(samples))


READERS = {
    'tensorboard': tensorboard_points,
    'trackio': trackio_points,
    'mlflow': mlflow_points,
    'wandb': wandb_points,
}


# Whether the table, the picture and the report, as far as a tracker keeps them, are there.
FILES = {
    'tensorboard': lambda directory: True,  # see test_trackers.py
    'trackio': lambda directory: (
        len([*directory.glob('trackio/media/**/*.png')]) == 1 and len([*directory.glob('trackio/media/**/*.html')]) == 1
    ),
    'mlflow': lambda directory: (
        {path.name for path in directory.glob('mlartifacts/**/*') if path.is_file()}
        >= {'curves.png', 'report.html', f'step-{STEPS:09d}.md'}
    ),
    'wandb': lambda directory: {path.suffix for path in directory.glob('wandb/*/files/**/*')} >= {'.png', '.html'},
}


def drive(directory: pathlib.Path, key: str, steps: int = STEPS, seconds: float = 0.002) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(DRIVER), str(directory), key, CHOICES[key], str(steps), str(seconds)]
    environment = os.environ | {'TRACKIO_DIR': str(directory / 'trackio'), 'WANDB_MODE': 'offline'}
    with (directory / 'output.txt').open('ab') as output:
        return subprocess.Popen(command, cwd=directory, env=environment, stdout=output, stderr=output)


def killed_and_finished(directory: pathlib.Path, key: str, kills: int, seed: int) -> None:
    """Kills the run at random moments after its first lines, and lets the last process finish."""
    chance = random.Random(seed)
    file = directory / 'metrics.jsonl'
    for _ in range(kills):
        process = drive(directory, key)
        before = file.stat().st_mtime_ns if file.exists() else 0
        while process.poll() is None and (not file.exists() or file.stat().st_mtime_ns == before):
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert drive(directory, key).wait() == 0, (directory / 'output.txt').read_text()


def expected(directory: pathlib.Path) -> Points:
    return collections.Counter(
        point(line['step'], key, value)
        for line in read_metrics(str(directory / 'metrics.jsonl'))
        for key, value in line.items()
        if key != 'step' and value is not None
    )


@pytest.mark.filterwarnings('ignore')  # of other people's packages
@pytest.mark.parametrize('key', [*CHOICES])
def test_a_tracker_equals_the_metrics_after_kills(tmp_path, key):
    pytest.importorskip(MODULES[key])
    killed_and_finished(tmp_path, key, kills=1 if key == 'tensorboard' else 3, seed=0)
    assert 'WARNING' not in (tmp_path / 'output.txt').read_text().replace('wandb: WARNING', '')
    assert FILES[key](tmp_path)
    found, samples = READERS[key](tmp_path)
    wanted = expected(tmp_path)
    assert {point[:2] for point in wanted} == {(step, key) for step in range(1, STEPS + 1) for key in ('loss',
    'grad_norm', 'tokens')} | {(step, 'val_loss') for step in range(10, STEPS + 1, 10)}  # fmt: skip
    assert sorted(samples) == list(range(10, STEPS + 1, 10))
    if key in KEEPS:  # a rollback trains steps 51 to 63 again
        assert collections.Counter(each[:2] for each in found) == collections.Counter(each[:2] for each in wanted)
        assert {each[0] for each in found - wanted} <= set(range(51, 64))
    else:
        assert found == wanted
