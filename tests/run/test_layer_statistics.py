"""`log.layers` in whole runs: training is the same with and without, and the file follows resumes and rollbacks."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

from pretrax.config import from_values
from pretrax.observe.layer_statistics import read_layer_statistics
from pretrax.observe.metrics import read_metrics
from pretrax.run import loop
from pretrax.run.loop import train
from pretrax.run.seen_batch import seen_batch
from runs import Quiet, StoppedAt, lines_of, without_clock


def trained(values, progress=None, **log):
    return train(from_values(values | {'log': values['log'] | log}), progress=progress or Quiet())


def same(one, other):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert np.array_equal(jax.device_get(a), jax.device_get(b))


@pytest.mark.parametrize('name', ['small', pytest.param('values', marks=pytest.mark.slow)])
def test_training_is_the_same_to_the_last_bit(name, request, tmp_path):
    values = request.getfixturevalue(name) | {'checkpoint': {'every': 3}}
    without = trained(values)
    with_ = trained(values | {'run_dir': str(tmp_path / 'with')}, layers=2)
    same(without.state, with_.state)
    losses = [[without_clock(line) for line in lines_of(v)] for v in (values, values | {'run_dir': tmp_path / 'with'})]
    assert losses[0] == losses[1]
    assert not (Path(values['run_dir']) / 'layer_statistics.jsonl').exists()
    lines = read_layer_statistics(tmp_path / 'with')
    assert [line['step'] for line in lines] == [1, 2, 4, 6]
    if name == 'values':
        extra = [line for line in read_metrics(tmp_path / 'with' / 'metrics.jsonl') if 'logit_max' in line]
        assert [line['step'] for line in extra] == [1, 2, 4, 6]
        assert [line['attention_logit_max'] for line in extra] == [
            pytest.approx(np.max(line['attention_logit_max'])) for line in lines
        ]


def test_a_resumed_run_has_every_step_once(small):
    values = small | {'steps': 8, 'checkpoint': {'every': 3}, 'log': {'every': 1, 'layers': 1}}
    trained(values, StoppedAt(4))
    path = Path(values['run_dir']) / 'layer_statistics.jsonl'
    ended = len(path.read_text().splitlines())
    with path.open('a') as file:  # steps after the checkpoint, and a line that a kill cut
        file.write(json.dumps({'step': 7, 'gradient_norm/table': 1.0}) + '\n{"step": 8, "gra')
    progress = Quiet()
    trained(values, progress)
    assert [line['step'] for line in read_layer_statistics(path.parent)] == list(range(1, 9))
    assert 4 <= ended < 8
    assert any('layer_statistics.jsonl: removed 1 line after step' in text for text in progress.said)


def test_after_a_rollback_lines_have_the_batch_of_each_step_and_no_step_is_there_twice(small):
    """Batches 4 and 5 spoil the state: the run returns to step 3 and goes on with the batch after them."""
    values = small | {
        'steps': 9, 'checkpoint': {'every': 3}, 'faults': {'rollback_after': 2}, 'log': {'every': 8, 'layers': 1},
    }  # fmt: skip
    before, taken = loop.compile_step, {}

    def poisoned(run, state, load):
        program = before(run, state, load)

        def call(state, batch):
            taken[int(state.step) + 1] = int(state.batch), np.asarray(batch.tokens)
            skipped = max(0, int(state.batch) - 3) if int(state.batch) in (4, 5) else 0
            after, metrics = program.call(state, batch)
            return after, metrics | {'skipped_in_a_row': np.int32(skipped)}

        return dataclasses.replace(program, call=call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, 'compile_step', poisoned)
        trained(values)
    assert [line['step'] for line in read_layer_statistics(Path(values['run_dir']))] == list(range(1, 10))
    batches = {line['step']: line['batch'] for line in lines_of(values)}
    assert batches == {step: taken[step][0] for step in (1, 4, 8, 9)}
    assert batches[1] == 0
    assert batches[4] > 5, 'the step after the rollback has a line'
    for step, (index, tokens) in taken.items():
        seen = seen_batch(values['run_dir'], step, None, print)
        assert seen.index == index
        assert np.array_equal(seen.rows(99).tokens, tokens)
