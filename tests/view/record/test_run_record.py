"""A run is read as its files say: also a resumed one, a killed one, one with NaN, an empty one and a broken one."""

import json
import math
import os
import socket
import subprocess
import sys

import numpy as np
import pytest

from pretrax.errors import UserError
from pretrax.observe.attempts import note
from pretrax.storage import BucketPath
from pretrax.system.locks import lock_directory
from pretrax.view.record.run_record import read_run

CONFIG = """\
# Every value of this run and where it came from; pretrax 0.1.0.
# mesh.d: 4 devices share the weights
name: "<b>\\"tiny\\"  # not a comment"   # override
steps: 4                             # configs/a.yaml:2
batch:
  tokens: 100                        # configs/a.yaml:3
optimizer:
  learning_rate: 1e-05               # default
  no_decay: ["norm", "bias"]         # default
model:
  name: transformer                  # preset gpt2
"""


@pytest.fixture
def run(tmp_path):
    path = tmp_path / 'runs' / 'tiny'
    path.mkdir(parents=True)
    return path


def write_lines(path, *records, end='\n'):
    path.write_text('\n'.join(json.dumps(record) for record in records) + end)


def test_metrics_become_columns_with_nonfinite_values_restored(run):
    write_lines(
        run / 'metrics.jsonl',
        {'step': 1, 'loss': 2.5, 'mfu': None, 'time': 1000.5},
        {'step': 2, 'loss': None, 'nonfinite': {'loss': 'nan'}, 'time': 1001.0},
        {'step': 2, 'val_loss': 3, 'note': 'x'},
        {'step': 3, 'grad_norm': None, 'loss': 0.1, 'nonfinite': {'grad_norm': '-inf'}},
    )
    metrics = read_run(run).metrics
    assert list(metrics) == ['loss', 'val_loss', 'grad_norm']
    assert metrics['loss'].steps.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(metrics['loss'].values, [2.5, math.nan, 0.1])
    assert metrics['loss'].lines.tolist() == [0, 1, 3]
    assert metrics['grad_norm'].values.tolist() == [-math.inf]
    assert (metrics['val_loss'].steps.tolist(), metrics['val_loss'].values.tolist()) == ([2], [3.0])
    np.testing.assert_array_equal(metrics.times, [1000.5, 1001.0, math.nan, math.nan])


def test_the_axes_are_the_tokens_flops_and_times_of_the_same_lines(run):
    (run / 'config.yaml').write_text(CONFIG)
    (run / 'environment.json').write_text('{"flops_per_token": 7.0}')
    write_lines(
        run / 'metrics.jsonl', {'step': 1, 'loss': 2.5, 'time': 10.0}, {'step': 3, 'val_loss': 2.0, 'time': 12.5}
    )
    record = read_run(run)
    column = record.metrics['val_loss']
    assert [record.axis(name, column).tolist() for name in ('step', 'tokens', 'flops', 'time')] == [
        [3], [300], [2100.0], [12.5],
    ]  # fmt: skip


def test_a_run_without_times_and_flops_has_no_such_axes(run):
    write_lines(run / 'metrics.jsonl', {'step': 10, 'loss': 2.5, 'tokens': 640})
    record = read_run(run)
    column = record.metrics['loss']
    assert record.axis('time', column) is None
    assert record.axis('flops', column) is None
    assert record.axis('tokens', column).tolist() == [640]


def test_broken_lines_are_skipped_and_counted_and_an_incomplete_last_line_is_not(run):
    lines = ['{"step": 1, "loss": 1.0}', 'hello', '', '{"step": "2"}', '[1]', '{"step": 3, "nonfinite": 7}']
    (run / 'metrics.jsonl').write_text('\n'.join([*lines, '{"step": 2, "loss": 2.0}', '{"step": 3, "lo']))
    record = read_run(run)
    assert record.metrics['loss'].values.tolist() == [1.0, 2.0]
    assert record.warnings == [f'{run / "metrics.jsonl"}: 4 lines are not lines of metrics']


def test_a_complete_last_line_without_a_line_break_counts(run):
    write_lines(run / 'metrics.jsonl', {'step': 1, 'loss': 1.0}, end='')
    assert read_run(run).last_step == 1


def test_settings_have_their_values_and_origins(run):
    (run / 'config.yaml').write_text(CONFIG)
    record = read_run(run)
    assert record.name == '<b>"tiny"  # not a comment'
    assert record.notes == ['mesh.d: 4 devices share the weights']
    found = {setting.key: (setting.value, setting.origin) for setting in record.settings}
    assert found == {
        'name': ('<b>"tiny"  # not a comment', 'override'),
        'steps': (4, 'configs/a.yaml:2'),
        'batch.tokens': (100, 'configs/a.yaml:3'),
        'optimizer.learning_rate': (1e-05, 'default'),
        'optimizer.no_decay': (['norm', 'bias'], 'default'),
        'model.name': ('transformer', 'preset gpt2'),
    }


def test_tokens_and_flops_of_batches_that_grow_are_sums_over_their_sizes(run):
    (run / 'config.yaml').write_text(CONFIG.replace('tokens: 100 ', 'tokens: [[0, 100], [3, 200]] '))
    write_lines(run / 'metrics.jsonl', *({'step': step, 'loss': 1.0} for step in (1, 3, 4, 6)))
    sizes = [
        {'step': 0, 'batch_tokens': 100, 'flops_per_token': 7.0},
        {'step': 3, 'batch_tokens': 200, 'flops_per_token': 8.0},
    ]
    (run / 'environment.json').write_text(json.dumps({'batch_tokens': 200, 'flops_per_token': 8.0, 'sizes': sizes}))
    record = read_run(run)
    assert record.axis('tokens', record.metrics['loss']).tolist() == [100, 300, 500, 900]
    assert record.axis('flops', record.metrics['loss']).tolist() == [700, 2100, 3700, 6900]
    assert record.batch_tokens == 200
    (run / 'environment.json').write_text(json.dumps({'sizes': [{'step': 0}, 'x']}))
    assert read_run(run).sizes == []


def test_a_configuration_is_not_executed(run):
    (run / 'config.yaml').write_text('name: !!python/object/apply:os.mkdir ["hacked"]\n')
    write_lines(run / 'metrics.jsonl', {'step': 1, 'loss': 1.0})
    assert read_run(run).name == 'tiny'
    assert not os.path.exists('hacked')


def test_attempts_are_those_of_the_launcher_and_of_the_training(run):
    events = [
        {'time': 1.0, 'event': 'started', 'attempt': 1, 'processes': [7, 8]},
        {'time': 3.0, 'event': 'began', 'step': 0},
        {'time': 5.0, 'event': 'stepped', 'step': 1},
        {'time': 9.0, 'event': 'ended', 'why': 'killed: process 1 (SIGKILL)', 'code': -9, 'step': 2},
        {'time': 9.5, 'event': 'started', 'attempt': 2, 'processes': [9, 10], 'lost': 9.0},
        {'time': 11.0, 'event': 'began', 'step': 2},
        {'time': 20.0, 'event': 'began', 'step': 2},
        {'time': 30.0, 'event': 'stopped', 'step': 3, 'why': 'time limit'},
    ]
    write_lines(run / 'attempts.jsonl', *events)
    first, second, third = read_run(run).attempts
    assert (first.start, first.began, first.stepped, first.ended) == (1.0, 3.0, 5.0, 9.0)
    assert (first.outcome, first.why, first.processes) == ('lost', 'killed: process 1 (SIGKILL)', 2)
    assert (second.outcome, second.ended, second.first_step) == ('lost', None, 2)
    assert (third.outcome, third.why, third.last_step) == ('stopped', 'time limit', 3)
    assert read_run(run).restarts == 2


@pytest.mark.parametrize(
    ('last_step', 'event', 'expected'),
    [
        (4, None, 'finished'),
        (3, None, 'lost'),
        (3, ('stopped', {'why': 'signal'}), 'stopped'),
        (3, ('failed', {'why': 'no space'}), 'failed'),
        (4, ('finished', {}), 'finished'),
        (3, ('ended', {'code': 0, 'why': 'done'}), 'stopped'),
        (3, ('ended', {'code': 75, 'why': 'hung'}), 'lost'),
    ],
)  # fmt: skip
def test_the_state_is_what_the_files_say(run, last_step, event, expected):
    (run / 'config.yaml').write_text(CONFIG)
    write_lines(run / 'metrics.jsonl', {'step': last_step, 'loss': 1.0})
    note(run, 'began', step=0)
    if event:
        note(run, event[0], **event[1])
    assert read_run(run).state.name == expected


def test_a_run_whose_lock_is_held_is_running(run):
    (run / 'config.yaml').write_text(CONFIG)
    with lock_directory(run, pytest.fail):
        state = read_run(run).state
    assert state == ('running', f'process {os.getpid()} on {socket.gethostname()}')
    assert read_run(run).state.name == 'lost'


def test_checkpoints_have_their_sizes(run):
    for step, sizes in ((20, [5]), (3, [10, 20])):
        place = run / 'checkpoints' / str(step)
        place.mkdir(parents=True)
        files = {f'file{number}': {'size': size, 'xxh3': ''} for number, size in enumerate(sizes)}
        description = {'val_loss': 1.5, 'finite_state': True}
        (place / 'manifest.json').write_text(json.dumps({'files': files, 'description': description}))
    (run / 'checkpoints' / '30').mkdir()
    write_lines(run / 'metrics.jsonl', {'step': 20, 'loss': 1.0})
    record = read_run(run)
    found = [(one.step, one.size, one.files, one.val_loss, one.finite) for one in record.checkpoints]
    assert found == [(3, 30, 2, 1.5, True), (20, 5, 1, 1.5, True)]
    assert record.warnings == [f'{run / "checkpoints" / "30"} has no readable manifest']


def test_a_run_that_is_not_there_is_a_mistake_that_names_what_is(run, monkeypatch):
    write_lines(run / 'metrics.jsonl', {'step': 1, 'loss': 1.0})
    monkeypatch.chdir(run.parents[1])
    with pytest.raises(UserError, match=r'no run at runs/tyni, did you mean runs/tiny\?'):
        read_run('runs/tyni')
    with pytest.raises(UserError, match=r'runs is not a run: it has no metrics.jsonl\nruns: runs/tiny'):
        read_run('runs')
    with pytest.raises(UserError, match='lock is a file; expected a run directory'):
        (run / 'lock').write_text('')
        read_run('runs/tiny/lock')
    assert read_run('runs/tiny/metrics.jsonl').last_step == 1


def test_a_run_that_has_only_begun_is_read_with_a_warning(run):
    note(run, 'began', step=0)
    record = read_run(run)
    assert record.warnings == [f'{run} has no metrics yet']
    assert (record.last_step, record.steps, dict(record.metrics)) == (0, None, {})


def test_a_run_in_a_bucket_is_read_from_its_parts(s3):
    run = BucketPath(f'{s3.url}/runs/a')
    (run / 'config.yaml').write_text(CONFIG)
    (run / 'metrics.jsonl' / '000000').write_bytes(b'{"step": 1, "loss": 3.0}\n{"step": 2, ')
    (run / 'metrics.jsonl' / '000001').write_bytes(b'"loss": 2.0}\n')
    (run / 'attempts.jsonl' / '000000').write_bytes(b'{"time": 5.0, "event": "began", "step": 0}\n')
    record = read_run(f'{s3.url}/runs/a')
    assert record.metrics['loss'].values.tolist() == [3.0, 2.0]
    assert record.attempts[0].began == 5.0
    assert record.state.name == 'lost'


def test_reading_a_run_costs_no_jax():
    program = 'import sys, pretrax.view.record.run_record; print("jax" in sys.modules)'
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ['False']
