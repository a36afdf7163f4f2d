"""Which trackers start, with what, and what a failure to start means.
What they receive is compared in `test_kills.py`.
"""

import builtins
import json
import pathlib
import signal
import struct
import subprocess
import sys
import types
import zlib

import pytest

from pretrax.config import from_values
from pretrax.errors import UserError
from pretrax.observe.metrics import MetricsLog
from pretrax.observe.trackers import check_trackers, open_trackers
from pretrax.observe.trackers.base import Table

DRIVER = pathlib.Path(__file__).parent / 'driver.py'


def start(directory, *, resumed_step=0, say=lambda _: None, **choices):
    config = {'name': 'test', 'model': {'d_model': 64, 'layers': [1, 2]}}
    return open_trackers(choices, directory=directory, name='test', config=config, resumed_step=resumed_step, say=say)


def run(directory, steps, resumed_step=0, **choices):
    trackers = start(directory, resumed_step=resumed_step, **choices)
    with MetricsLog(directory / 'metrics.jsonl', trackers, resumed_step=resumed_step, say=lambda _: None) as log:
        for step in steps:
            log.write({'step': step, 'loss': 1 / step, 'mfu': None})


def test_no_tracker_starts_unless_configured(minimal_values):
    assert from_values(minimal_values).log.trackers() == {}
    off = from_values(minimal_values | {'log': {'mlflow': False, 'wandb': None, 'tensorboard': False}})
    assert off.log.trackers() == {}
    both = from_values(minimal_values | {'log': {'mlflow': True, 'trackio': 'a project'}})
    assert both.log.trackers() == {'mlflow': True, 'trackio': 'a project'}


@pytest.fixture
def minimal_values():
    return {
        'name': 'run',
        'steps': 1,
        'model': {'d_model': 8, 'n_layers': 1, 'attention': {'n_heads': 1}},
        'data': {'name': 'synthetic', 'vocab_size': 16},
        'batch': {'tokens': 64, 'sequence_length': 16},
        'optimizer': {'learning_rate': 0.1},
    }


def tensorboard_events(directory: pathlib.Path):
    """TFRecord by its specification: length, checksum, event, checksum; decoded without tensorboardX's reader."""
    from tensorboardX.proto.event_pb2 import Event

    events = []
    for file in sorted(directory.iterdir()):
        content, at = file.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from('<Q', content, at)
            events.append(Event.FromString(content[at + 12 : at + 12 + length]))
            at += 12 + length + 4
    return events


def loss_steps(directory: pathlib.Path) -> list[int]:
    return [e.step for e in tensorboard_events(directory) for value in e.summary.value if value.tag == 'loss']


def test_tensorboard_has_every_scalar_and_the_configuration(tmp_path):
    run(tmp_path, [1, 2, 3], tensorboard=True)
    events = tensorboard_events(tmp_path / 'tb')
    scalars = {
        (value.tag, event.step): value.simple_value
        for event in events
        for value in event.summary.value
        if value.tag == 'loss'
    }
    assert scalars == {('loss', 1): 1.0, ('loss', 2): 0.5, ('loss', 3): pytest.approx(1 / 3)}
    assert any(
        b'd_model' in value.tensor.string_val[0] for e in events for value in e.summary.value if value.tensor.string_val
    )


def png(width: int, height: int) -> bytes:
    """A black picture, by the specification of PNG."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack('>I', len(content)) + kind + content + struct.pack('>I', zlib.crc32(kind + content))

    rows = zlib.compress(b''.join(b'\0' + bytes(width) for _ in range(height)))
    head = struct.pack('>IIBBBBB', width, height, 8, 0, 0, 0, 0)
    return b'\x89PNG\r\n\x1a\n' + chunk(b'IHDR', head) + chunk(b'IDAT', rows) + chunk(b'IEND', b'')


def test_tensorboard_shows_texts_tables_and_images(tmp_path):
    (tmp_path / 'curves.png').write_bytes(png(30, 20))
    with MetricsLog(tmp_path / 'metrics.jsonl', start(tmp_path, tensorboard=True)) as log:
        log.show(7, 'samples', 'def f(x):')
        log.show(7, 'validation', Table(['source', 'loss'], [['a|b', 2.5]]))
        log.show(7, 'curves', tmp_path / 'curves.png')
        log.file(tmp_path / 'curves.png')  # event files keep none
    values = {v.tag: v for e in tensorboard_events(tmp_path / 'tb') for v in e.summary.value if e.step == 7}
    assert values['samples/text_summary'].tensor.string_val[0] == b'    def f(x):'
    table = values['validation/text_summary'].tensor.string_val[0].decode()
    assert table.splitlines() == ['| source | loss |', '| --- | --- |', '| a&#124;b | 2.5 |']
    image = values['curves'].image
    assert (image.width, image.height, image.encoded_image_string) == (30, 20, png(30, 20))


KILLED = """
import os, pathlib, signal, sys
from pretrax.observe.metrics import MetricsLog
from pretrax.observe.trackers import open_trackers
directory = pathlib.Path(sys.argv[1])
started = open_trackers({'tensorboard': True}, directory=directory, name='test', config={})
log = MetricsLog(directory / 'metrics.jsonl', started)
for step in (1, 2, 3):
    log.write({'step': step, 'loss': 1 / step})
log.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_kill_after_a_flush_loses_no_step_of_tensorboard(tmp_path):
    command = [sys.executable, '-c', KILLED, str(tmp_path)]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == -signal.SIGKILL
    assert loss_steps(tmp_path / 'tb') == [1, 2, 3]


def test_tensorboard_drops_steps_that_are_trained_again(tmp_path):
    run(tmp_path, [1, 2, 3], tensorboard=True)
    run(tmp_path, [3, 4], resumed_step=2, tensorboard=True)
    restarts = [event.step for event in tensorboard_events(tmp_path / 'tb') if event.HasField('session_log')]
    assert restarts == [0, 3]  # TensorBoard drops what earlier files say of this step and later ones


def test_a_tracker_that_is_switched_on_later_receives_the_lines_from_before(tmp_path):
    run(tmp_path, [1, 2, 3])
    run(tmp_path, [4], resumed_step=3, tensorboard=True)
    assert loss_steps(tmp_path / 'tb') == [1, 2, 3, 4]
    run(tmp_path, [5], resumed_step=4)
    run(tmp_path, [6], resumed_step=5, tensorboard=True)
    assert loss_steps(tmp_path / 'tb') == [1, 2, 3, 4, 5, 6]


class FakeWandb(types.ModuleType):
    """Records the calls. The real package is tried in `test_kills.py`."""

    def __init__(self, starting_step=0):
        super().__init__('wandb')
        self.inits, self.logged, self.finished, self.starting_step = [], [], [], starting_step

    def Settings(self, **settings):  # noqa: N802 (the name in wandb)
        return settings

    def init(self, **arguments):
        self.inits.append(arguments)
        return types.SimpleNamespace(
            offline=False,
            url='https://wandb.example/run',
            starting_step=self.starting_step,
            log=lambda m, step: self.logged.append((step, m)),
            finish=lambda exit_code: self.finished.append(exit_code),
        )


def test_wandb_receives_the_run_and_continues_the_same_one(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, 'wandb', fake)
    run(tmp_path, [1, 2], wandb='project')
    fake.starting_step = 2  # the server has only step 1: the process was killed before it had sent step 2
    run(tmp_path, [3], resumed_step=2, wandb='project')
    assert fake.logged == [(1, {'loss': 1.0}), (2, {'loss': 0.5}), (2, {'loss': 0.5}), (3, {'loss': 1 / 3})]
    first, second = fake.inits
    assert first['project'] == 'project'
    assert first['config']['model']['d_model'] == 64
    assert first['id'] == second['id'] == (tmp_path / 'wandb-run-id').read_text()
    assert second['resume'] == 'allow'
    assert fake.finished == [0, 0]


class FakeMlflow(types.ModuleType):
    """Records the calls of one run, and answers with its points as a server does."""

    def __init__(self):
        super().__init__('mlflow')
        self.uri, self.runs, self.params, self.points, self.statuses = None, [], {}, [], []
        self.entities = types.ModuleType('mlflow.entities')
        self.entities.Metric = lambda key, value, timestamp, step: types.SimpleNamespace(
            key=key, value=value, timestamp=timestamp, step=step
        )
        self.entities.Param = lambda key, value: (key, value)

    def MlflowClient(self, uri):  # noqa: N802 (the name in mlflow)
        self.uri = uri
        return self

    def get_experiment_by_name(self, name):
        assert name == 'pretrax'

    def create_experiment(self, name, artifacts):
        return 'an experiment'

    def create_run(self, experiment, run_name):
        self.runs.append(run_name)
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id='abc'))

    def get_run(self, identity):
        assert identity == 'abc'
        return types.SimpleNamespace(data=types.SimpleNamespace(_metric_objs=self.points))

    def update_run(self, identity, status):
        self.statuses.append(status)

    def log_batch(self, identity, metrics=(), params=()):
        self.params |= dict(params)
        self.points += metrics

    def set_terminated(self, identity, status):
        self.statuses.append(status)


@pytest.fixture
def fake_mlflow(monkeypatch):
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, 'mlflow', fake)
    return fake


def test_mlflow_receives_the_run_and_continues_the_same_one(tmp_path, fake_mlflow):
    run(tmp_path, [1, 2, 3], mlflow='http://tracking.example')
    run(tmp_path, [3, 4], resumed_step=2, mlflow='http://tracking.example')  # step 3 is trained again
    assert fake_mlflow.uri == 'http://tracking.example'
    assert fake_mlflow.runs == ['test']
    assert fake_mlflow.params == {'name': 'test', 'model.d_model': '64', 'model.layers': '[1, 2]'}
    assert [(each.step, each.key, each.value) for each in fake_mlflow.points] == [
        (step, 'loss', 1 / step) for step in (1, 2, 3, 4)
    ]
    assert fake_mlflow.statuses == ['FINISHED', 'RUNNING', 'FINISHED']


def test_a_run_that_fails_has_failed_in_mlflow(tmp_path, fake_mlflow):
    log = MetricsLog(tmp_path / 'metrics.jsonl', start(tmp_path, mlflow='http://tracking.example'))
    with pytest.raises(ZeroDivisionError), log:
        log.write({'step': 1 // 0})
    assert fake_mlflow.statuses == ['FAILED']


@pytest.mark.parametrize(
    ('key', 'value', 'module', 'off'),
    [
        ('tensorboard', True, 'tensorboardX', 'log.tensorboard=false'),
        ('wandb', 'project', 'wandb', 'log.wandb=null'),
        ('mlflow', True, 'mlflow', 'log.mlflow=null'),
        ('trackio', 'project', 'trackio', 'log.trackio=null'),
    ],
)
def test_a_missing_package_is_an_error_with_the_install_command(tmp_path, monkeypatch, key, value, module, off):
    real = builtins.__import__

    def without(name, *arguments, **keywords):
        if name == module:
            raise ModuleNotFoundError(f'No module named {name!r}', name=name)
        return real(name, *arguments, **keywords)

    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(builtins, '__import__', without)
    for attempt in (lambda: start(tmp_path, **{key: value}), lambda: check_trackers({key: value})):
        with pytest.raises(UserError) as caught:
            attempt()
        for part in (f'uv sync --inexact --extra {key}', f"pip install -e '.[{key}]'", off):
            assert part in str(caught.value)


def test_a_tracker_that_does_not_start_stops_a_new_run_but_not_a_resumed_one(tmp_path, monkeypatch, fake_mlflow):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, 'wandb', fake)
    monkeypatch.setattr(
        fake_mlflow, 'create_run', lambda *_, **__: (_ for _ in ()).throw(ConnectionError('no route to host'))
    )
    with pytest.raises(UserError, match=r'log\.mlflow did not start: ConnectionError: no route to host') as caught:
        start(tmp_path, wandb='project', mlflow='http://tracking.example')
    assert 'log.mlflow=null' in str(caught.value)
    assert fake.finished == [1]  # the one that had started is not left behind
    said = []
    (tracker,) = start(tmp_path, wandb='project', mlflow='http://tracking.example', resumed_step=5, say=said.append)
    assert tracker.name == 'W&B'
    assert said[0] == 'W&B: https://wandb.example/run'
    assert said[1].startswith('WARNING: log.mlflow did not start (ConnectionError: no route to host)')


@pytest.mark.nightly
def test_the_real_trackers_equal_the_metrics_after_kills():
    """Installs W&B, MLflow and Trackio in an environment that is thrown away."""
    extras = [word for name in ('tensorboard', 'wandb', 'mlflow', 'trackio') for word in ('--extra', name)]
    repository = pathlib.Path(__file__).parents[3]
    test = DRIVER.with_name('test_kills.py')
    command = ['uv', 'run', '--isolated', *extras, 'pytest', '-n', '0', '-rs', str(test)]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert 'skipped' not in done.stdout, done.stdout[-3000:]
    assert json.dumps(done.stdout).count('passed') == 1
