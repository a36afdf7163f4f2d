"""What `pretrain` returns and calls: results, history, `on_step`, errors and interrupts in it, and a finished run."""

import dataclasses
import signal
import sys
import time

import numpy as np
import pytest

import pretrax
from pretrax import pretrain
from pretrax.checkpoint import steps_in, verify
from pretrax.run.watch import Requests
from runs import Quiet, documents, lines_of, small, values, without_clock  # noqa: F401  (fixtures)


@pytest.fixture
def evaluated(small):  # noqa: F811
    return small | {
        'eval': {'every': 4, 'batches': 1},
        'log': {'every': 2, 'report': False},
        'checkpoint': {'every': 2},
    }


def test_a_result_has_the_history_and_a_finished_run_gives_it_again(evaluated, tmp_path):
    first = pretrain(evaluated, progress=Quiet())
    lines = lines_of(evaluated)
    assert [line['step'] for line in lines] == [1, 2, 4, 6]
    assert first.metrics == {key: value for key, value in lines[-1].items() if key != 'time'}
    history = first.history
    assert {array.shape for array in history.values()} == {(4,)}
    assert history['step'].dtype == np.int64
    assert history['step'].tolist() == [1, 2, 4, 6]
    assert history['loss'].tolist() == [line['loss'] for line in lines]
    losses = {line['step']: line['val_loss'] for line in lines_of(evaluated, 'val_loss')}
    np.testing.assert_array_equal(history['val_loss'], [np.nan, np.nan, losses[4], losses[6]])
    assert first.validation['val_loss'] == losses[6]

    again = pretrain(evaluated, progress=Quiet())
    assert (again.metrics, again.validation, again.stopped) == (first.metrics, first.validation, None)
    np.testing.assert_equal(again.history, history)
    assert repr(again) == repr(first)
    shown = repr(first).splitlines()
    assert [line.partition(':')[0] for line in (shown[0], shown[1], shown[3], shown[4])] == [
        'run', 'verdict', 'speed', 'next',
    ]  # fmt: skip
    assert shown[0] == f'run: {evaluated["run_dir"]}, done at step 6 of 6'
    assert shown[2].startswith(f'loss {lines[-1]["loss"]:.4f}, validation loss {losses[6]:.4f}, ')

    (tmp_path / 'run' / 'metrics.jsonl').unlink()
    empty = dataclasses.replace(again)
    assert {key: array.tolist() for key, array in empty.history.items()} == {'step': [], 'time': []}
    assert (empty.metrics, empty.validation, empty.verdict) == ({}, {}, '')
    assert repr(empty).count('not measured') == 2


def test_on_step_gets_the_metrics_of_every_step_and_changes_none(evaluated, tmp_path):
    seen = {}
    pretrain(evaluated, progress=Quiet(), on_step=seen.__setitem__)
    assert list(seen) == [1, 2, 3, 4, 5, 6]
    plain = evaluated | {'run_dir': str(tmp_path / 'plain'), 'log': {'every': 1, 'report': False}}
    pretrain(plain, progress=Quiet())
    expected = {line['step']: without_clock(line) for line in lines_of(plain)}
    assert seen == expected
    assert [without_clock(line) for line in lines_of(evaluated)] == [
        without_clock(line) for line in lines_of(plain) if line['step'] in (1, 2, 4, 6)
    ]


def test_an_error_in_on_step_reaches_the_caller_and_the_run_continues(evaluated, tmp_path):
    def fail(number, metrics):
        if number == 5:
            raise LookupError('mine')

    with pytest.raises(LookupError, match=r'^mine$'):
        pretrain(evaluated, progress=Quiet(), on_step=fail)
    checkpoints = tmp_path / 'run' / 'checkpoints'
    assert steps_in(checkpoints)[-1] == 4
    verify(checkpoints, 4)
    numbers = []
    result = pretrain(evaluated, progress=Quiet(), on_step=lambda number, metrics: numbers.append(number))
    assert numbers == [5, 6]
    assert result.history['step'].tolist() == [1, 2, 4, 6]


def test_an_interrupt_saves_the_state_and_the_same_call_continues(evaluated, tmp_path):
    def interrupt(number, metrics):
        if number == 2:
            signal.raise_signal(signal.SIGINT)

    result = pretrain(evaluated, progress=Quiet(), on_step=interrupt)
    assert (result.stopped, int(result.state.step)) == ('signal', 3)
    assert repr(result).splitlines()[0].endswith('/run, signal at step 3 of 6')
    assert steps_in(tmp_path / 'run' / 'checkpoints')[-1] == 3
    assert int(pretrain(evaluated, progress=Quiet()).state.step) == 6


def test_a_second_interrupt_does_not_end_the_process_of_a_notebook(monkeypatch):
    monkeypatch.setattr(sys, 'ps1', '>>> ', raising=False)
    with Requests(None).listening() as requests:
        requests.begin()
        signal.raise_signal(signal.SIGINT)
        assert requests.why == 'signal'
        signal.raise_signal(signal.SIGINT)  # a copy of the first
        requests._signalled = time.monotonic() - 2
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_overrides_change_values_and_no_loaded_configuration(small):  # noqa: F811
    config = pretrax.config_from_values(small)
    with pytest.raises(pretrax.UserError, match='overrides change a file or values'):
        pretrain(config, ['steps=1'])
    with pytest.raises(pretrax.UserError, match=r'steps is 0; expected at least 1'):
        pretrain(small, ['steps=0'])
