"""`pretrax train --dry-run`: it reports what `train` would do, fails if `train` would fail,
and leaves nothing behind.
"""

import importlib.util
import json
import pathlib
import sys
import types

import pytest

from pretrax import config_from_values, pretrain, register
from pretrax.cli import main
from pretrax.data.batches.synthetic import SyntheticSource
from pretrax.errors import UserError
from pretrax.run.dry_run import dry_run
from pretrax.run.resume import lock_run
from runs import BIGRAM, Quiet


@pytest.fixture
def small(values):
    return values | {'model': BIGRAM, 'log': {'every': 1, 'tensorboard': True}}


def files(directory: pathlib.Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in directory.rglob('*') if p.is_file()}


def said_by(values, **options):
    said = []
    dry_run(config_from_values(values), report=said.append, **options)
    return said


def test_dry_run_of_a_new_run(small, tmp_path, capsys):
    before = files(tmp_path)
    (tmp_path / 'small.yaml').write_text(json.dumps(small))
    with pytest.raises(SystemExit) as ended:
        main(['train', str(tmp_path / 'small.yaml'), 'log.tensorboard=false', '--dry-run'])
    assert ended.value.code in (0, None)
    said = capsys.readouterr().out.splitlines()
    assert not (tmp_path / 'run').exists()
    assert files(tmp_path).keys() - before.keys() == {str(tmp_path / 'small.yaml')}
    beginnings = [
        'mesh: r=2',
        'batch: 128 tokens',
        'tokens: train',
        'batch 0: 8 sequences x 16, read in',
    ]
    for beginning in [*beginnings, 'memory: ', f'checkpoints: {tmp_path}/run/checkpoints, ']:
        assert [line for line in said if line.startswith(beginning)], beginning
    compiled = ('compiled the step', 'loaded the compiled step from')  # tests share compiled programs
    assert [line for line in said if line.startswith(compiled)]
    assert (
        said[-1] == f'dry run: no problem found; the run would start at step 0. Nothing was written in {tmp_path}/run'
    )


def test_dry_run_of_a_run_with_checkpoints(small, tmp_path):
    """It reads the tokens that the run has prepared, and the checkpoint that the run would resume from."""
    pretrain(
        config_from_values(small | {'log': {'every': 1}, 'steps': 4, 'checkpoint': {'every': 2}}), progress=Quiet()
    )
    before = files(tmp_path)
    said = said_by(small)
    assert files(tmp_path) == before
    assert [line for line in said if line.startswith('tokens: reused from ')]
    assert 'trackers: tensorboard would be started' in said
    assert f'; the run would resume from step 4, checkpoint {tmp_path}/run/checkpoints/4. ' in said[-1]
    assert '; all 4 steps are done, so the run would not train. ' in said_by(small | {'steps': 4})[-1]

    with pytest.raises(UserError, match=r'optimizer.learning_rate: 0.01 -> 0.5'):
        said_by(small | {'optimizer': {'learning_rate': 0.5, 'weight_decay': 0.1}})
    chunk = next(path for path in (tmp_path / 'run' / 'checkpoints' / '4').rglob('0.0') if path.is_file())
    chunk.write_bytes(chunk.read_bytes()[:-1])
    said = said_by(small)
    assert [line for line in said if line.startswith('WARNING') and 'checkpoints/4' in line]
    assert 'would resume from step 2' in said[-1]


def test_dry_run_fails_if_train_would(small, tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(UserError, match=r'file/run cannot be used: .*/file is a file'):
        said_by(small | {'run_dir': str(tmp_path / 'file' / 'run')})
    with lock_run(tmp_path / 'run'), pytest.raises(UserError, match='is being trained by process'):
        said_by(small)
    with pytest.raises(UserError, match='cannot be sharded evenly over mesh'):
        said_by(small | {'mesh': {'r': 8}, 'batch': {'tokens': 48, 'sequence_length': 16}})


# In the way of a training: what is there, and what `train` and the dry run both say of it.
OBSTACLES = {
    'a file where stacks are written': (lambda run: (run / 'stacks').write_text(''), {}),
    'a directory for stacks that cannot be made': (
        lambda run: None,
        {'faults': {'stack_trace_interval_seconds': 9.0, 'stack_trace_to': '/dev/null/stacks'}},
    ),
    'a file where checkpoints are written': (lambda run: (run / 'checkpoints').write_text(''), {}),
    'a file where events are written': (lambda run: (run / 'tb').write_text(''), {'log': {'tensorboard': True}}),
    'a directory called metrics.jsonl': (lambda run: (run / 'metrics.jsonl').mkdir(), {}),
    'a directory called attempts.jsonl': (lambda run: (run / 'attempts.jsonl').mkdir(), {}),
    'a directory called config.yaml': (lambda run: (run / 'config.yaml').mkdir(), {}),
    'a tracker whose package is missing': (lambda run: None, {'log': {'wandb': 'a-project'}}),
    'a tracker whose server is missing': (lambda run: None, {'log': {'mlflow': 'http://127.0.0.1:9'}}),
    'held-out text that cannot be read': (lambda run: None, {'data': {'name': 'not-held-out'}, 'eval': {'every': 1}}),
}


class NotHeldOut(SyntheticSource):
    """Its training batches can be read."""

    @property
    def validation_parts(self):
        def unreadable(*_):
            raise UserError('the held-out text cannot be read')

        return {'': (1.0, unreadable)}


@register('data', 'not-held-out')
def not_held_out(request):
    return NotHeldOut(request, 96, 20)


@pytest.mark.parametrize('obstacle', OBSTACLES)
def test_dry_run_sees_what_is_in_the_way_of_a_training(values, tmp_path, monkeypatch, obstacle):
    if 'server' in obstacle:
        monkeypatch.setitem(sys.modules, 'mlflow', types.ModuleType('mlflow'))
    elif importlib.util.find_spec('wandb'):
        monkeypatch.setitem(sys.modules, 'wandb', None)
    (tmp_path / 'run').mkdir()
    make, changes = OBSTACLES[obstacle]
    make(tmp_path / 'run')
    values |= {'model': BIGRAM, **changes}
    with pytest.raises(UserError):
        said_by(values)
    with pytest.raises((UserError, OSError)):
        pretrain(config_from_values(values), progress=Quiet())


def test_dry_run_sees_a_disk_without_room_for_a_checkpoint(values, monkeypatch):
    usage = types.SimpleNamespace(free=1000)
    monkeypatch.setattr('pretrax.run.dry_run.shutil.disk_usage', lambda path: usage)
    with pytest.raises(UserError, match=r'has room for .*, and one checkpoint has'):
        said_by(values | {'model': BIGRAM})
