"""Each tracker gets what the run logs. TensorBoard for real; W&B and MLflow for real where they are installed."""

import builtins
import pathlib
import struct
import sys
import types

import pytest

from pretrax.errors import UserError
from pretrax.observe.metrics import MetricsLog
from pretrax.observe.trackers import open_trackers

OFF = {'tensorboard': False, 'wandb': None, 'mlflow': None}


def start(directory, *, resumed_step=0, say=lambda _: None, **which):
    config = {'name': 'test', 'model': {'d_model': 64, 'layers': [1, 2]}}
    return open_trackers(
        **(OFF | which), directory=directory, name='test', config=config, resumed_step=resumed_step, say=say
    )


def run(directory, steps, resumed_step=0, **which):
    trackers = start(directory, resumed_step=resumed_step, **which)
    with MetricsLog(directory / 'metrics.jsonl', trackers, resumed_step=resumed_step, say=lambda _: None) as log:
        for step in steps:
            log.write({'step': step, 'loss': 1 / step, 'mfu': None})


def test_no_tracker_starts_unless_configured(tmp_path):
    assert start(tmp_path) == []
    assert start(tmp_path, mlflow=False) == []
    assert list(tmp_path.iterdir()) == []


def tensorboard_events(directory: pathlib.Path):
    """TFRecord by its specification: length, checksum, event, checksum; decoded without tensorboardX's reader."""
    from tensorboardX.proto.event_pb2 import Event

    events = []
    for file in sorted(directory.iterdir(), key=lambda file: file.stat().st_mtime_ns):
        content, at = file.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from('<Q', content, at)
            events.append(Event.FromString(content[at + 12 : at + 12 + length]))
            at += 12 + length + 4
    return events


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


def test_tensorboard_drops_steps_that_are_trained_again(tmp_path):
    run(tmp_path, [1, 2, 3], tensorboard=True)
    run(tmp_path, [3, 4], resumed_step=2, tensorboard=True)
    restarts = [event.step for event in tensorboard_events(tmp_path / 'tb') if event.HasField('session_log')]
    assert restarts == [3]  # TensorBoard drops what earlier files say of this step and later ones


class FakeWandb(types.ModuleType):
    """Records the calls. The real package is tried below, where there is one."""

    def __init__(self):
        super().__init__('wandb')
        self.inits, self.logged, self.finished = [], [], 0

    def Settings(self, **settings):  # noqa: N802 (the name in wandb)
        return settings

    def init(self, **arguments):
        self.inits.append(arguments)
        return types.SimpleNamespace(
            offline=False,
            url='https://wandb.example/run',
            log=lambda m, step: self.logged.append((step, m)),
            finish=self.finish,
        )

    def finish(self):
        self.finished += 1


def test_wandb_receives_the_run_and_continues_the_same_one(tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, 'wandb', fake)
    run(tmp_path, [1, 2], wandb='project')
    run(tmp_path, [3], resumed_step=2, wandb='project')
    assert fake.logged == [(1, {'loss': 1.0}), (2, {'loss': 0.5}), (3, {'loss': 1 / 3})]
    first, second = fake.inits
    assert first['project'] == 'project'
    assert first['config']['model']['d_model'] == 64
    assert first['id'] == second['id'] == (tmp_path / 'wandb-run-id').read_text()
    assert second['resume'] == 'allow'
    assert fake.finished == 2


class FakeMlflow(types.ModuleType):
    def __init__(self):
        super().__init__('mlflow')
        self.uri, self.started, self.params, self.logged, self.calls = None, [], {}, [], []

    def set_tracking_uri(self, uri):
        self.uri = uri

    def set_experiment(self, name):
        self.calls.append(('experiment', name))

    def start_run(self, run_id=None, run_name=None):
        self.started.append((run_id, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or 'abc'))

    def log_params(self, params):
        self.params |= params

    def log_metrics(self, metrics, step, synchronous):
        self.logged.append((step, metrics, synchronous))

    def flush_async_logging(self):
        self.calls.append('flush')

    def end_run(self):
        self.calls.append('end')


def test_mlflow_receives_the_run_and_continues_the_same_one(tmp_path, monkeypatch):
    fake = FakeMlflow()
    monkeypatch.setitem(sys.modules, 'mlflow', fake)
    run(tmp_path, [1], mlflow='http://tracking.example')
    run(tmp_path, [2], resumed_step=1, mlflow='http://tracking.example')
    assert fake.uri == 'http://tracking.example'
    assert fake.started == [(None, 'test'), ('abc', None)]
    assert fake.params == {'name': 'test', 'model.d_model': '64', 'model.layers': '[1, 2]'}
    assert fake.logged == [(1, {'loss': 1.0}, False), (2, {'loss': 0.5}, False)]  # never waiting for the server
    assert fake.calls[-2:] == ['flush', 'end']


@pytest.mark.parametrize(
    ('key', 'value', 'module', 'off'),
    [
        ('tensorboard', True, 'tensorboardX', 'log.tensorboard=false'),
        ('wandb', 'project', 'wandb', 'log.wandb=null'),
        ('mlflow', True, 'mlflow', 'log.mlflow=null'),
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
    with pytest.raises(UserError) as caught:
        start(tmp_path, **{key: value})
    for part in (f'uv sync --inexact --extra {key}', f"pip install -e '.[{key}]'", off):
        assert part in str(caught.value)


def test_a_tracker_that_does_not_start_stops_a_new_run_but_not_a_resumed_one(tmp_path, monkeypatch):
    fake = FakeWandb()
    sound = FakeMlflow()
    monkeypatch.setitem(sys.modules, 'wandb', fake)
    monkeypatch.setitem(sys.modules, 'mlflow', sound)
    monkeypatch.setattr(sound, 'start_run', lambda **_: (_ for _ in ()).throw(ConnectionError('no route to host')))
    with pytest.raises(UserError, match=r'log\.mlflow did not start: ConnectionError: no route to host') as caught:
        start(tmp_path, wandb='project', mlflow='http://tracking.example')
    assert 'log.mlflow=null' in str(caught.value)
    assert fake.finished == 1  # the one that had started is not left behind
    said = []
    (tracker,) = start(tmp_path, wandb='project', mlflow='http://tracking.example', resumed_step=5, say=said.append)
    assert tracker.name == 'W&B'
    assert said[0] == 'W&B: https://wandb.example/run'
    assert said[1].startswith('WARNING: log.mlflow did not start (ConnectionError: no route to host)')


@pytest.mark.filterwarnings('ignore')  # of other people's packages
def test_real_wandb_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip('wandb')
    monkeypatch.setenv('WANDB_MODE', 'offline')
    run(tmp_path, [1, 2, 3], wandb='project')
    wandb.teardown()  # its process may still be writing when `finish` returns
    (file,) = (tmp_path / 'wandb').glob('offline-run-*/run-*.wandb')
    assert b'd_model' in file.read_bytes()


@pytest.mark.filterwarnings('ignore')
def test_real_mlflow_in_a_local_database(tmp_path, monkeypatch):
    mlflow = pytest.importorskip('mlflow')
    pytest.importorskip('sqlalchemy')
    monkeypatch.chdir(tmp_path)
    run(tmp_path, [1, 2], mlflow=True)
    run(tmp_path, [3], resumed_step=2, mlflow=True)
    history = mlflow.MlflowClient().get_metric_history((tmp_path / 'mlflow-run-id').read_text(), 'loss')
    assert [(point.step, point.value) for point in history] == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
