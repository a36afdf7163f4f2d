"""Runs whose batches grow: each step is that of a run with constant batches, and a resumed run has the same losses."""

import jax
import numpy as np
import pytest

from pretrax import config_from_values, pretrain, register
from pretrax.checkpoint import read_description
from pretrax.data.batches.source import Source, pack_rows
from pretrax.errors import UserError
from pretrax.plan.saved import opened
from pretrax.run.clock import Clock
from pretrax.run.dry_run import dry_run
from pretrax.run.seen_batch import seen_batch
from pretrax.run.setup import prepare
from pretrax.run.validation import Evaluation
from pretrax.train.state import init_state
from pretrax.train.step import make_step
from runs import Quiet, StoppedAt, lines_of, small_values, without_clock

GROWING = {'tokens': [[0, 128], [3, 256]], 'sequence_length': [[0, 8], [2, 16], [5, 32]]}
SIZES = [(128, 8)] * 2 + [(128, 16)] + [(256, 16)] * 2 + [(256, 32)] * 3  # of the eight batches


@pytest.fixture
def growing(small):
    return small | {'steps': 8, 'batch': GROWING}


@pytest.mark.slow
def test_each_step_is_that_of_a_run_with_constant_batches(documents, tmp_path):
    values = small_values(documents, tmp_path) | {'steps': 8, 'batch': GROWING | {'micro': 1}}
    run = prepare(config_from_values(values), lambda text: None)
    store = run.source.train.tokens
    rows = run.source._order(np.arange(100)) * 32
    read = [store.read([(first, min(first + 33, store.n_tokens))])[0] for first in rows.tolist()]
    stream = np.stack([np.pad(row, (0, 33 - len(row)), constant_values=1) for row in read])
    is_text = np.stack([np.arange(33) < len(row) for row in read])
    used = 0
    with jax.set_mesh(run.mesh):
        state = init_state(run.recipe, 0)
    for number, (tokens, length) in enumerate(SIZES):
        if number not in (1, 2, 4, 5):  # a compilation each
            used += tokens // 32
            continue
        constant = values | {'batch': {'tokens': tokens, 'sequence_length': length, 'micro': 2}}
        plain = prepare(config_from_values(constant), lambda text: None)
        starts = (np.arange(used, used + tokens // 32)[:, None], np.arange(0, 32, length))
        used += tokens // 32

        def batch(rows, starts=starts, length=length):
            windows = [(row, slice(first, first + length + 1)) for row in starts[0][:, 0] for first in starts[1]]
            encoded, counts = (np.stack([of[window] for window in windows])[rows] for of in (stream, is_text))
            return pack_rows(encoded >> 1, (encoded & 1).astype(bool), counts)

        with jax.set_mesh(run.mesh):
            expected, by_plain = make_step(plain.recipe)(jax.tree.map(np.copy, state), plain.place(batch))
            after, by_growing = make_step(run.at(number).recipe)(state, run.batch(number))
        assert float(by_growing['loss']) == pytest.approx(float(by_plain['loss']), rel=1e-6)
        assert float(by_growing['grad_norm']) == pytest.approx(float(by_plain['grad_norm']), rel=1e-5)
        for a, b in zip(jax.tree.leaves(after.weights), jax.tree.leaves(expected.weights), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        state = after


def test_a_run_resumed_before_at_and_after_every_change_has_the_same_losses(growing, tmp_path):
    straight = {**growing, 'run_dir': str(tmp_path / 'straight')}
    progress = Quiet()
    whole = pretrain(config_from_values(straight), progress=progress)
    compiled = [line.partition(' for ')[2].partition(' in ')[0] for line in progress.said if ' for batches of ' in line]
    assert compiled == [
        'batches of 128 tokens = 16 sequences x 8', 'batches of 128 tokens = 8 sequences x 16',
        'batches of 256 tokens = 16 sequences x 16', 'batches of 256 tokens = 8 sequences x 32',
    ]  # fmt: skip
    for step in (1, 2, 3, 4, 5, 6):  # resumed from the step after it
        pretrain(config_from_values(growing), progress=StoppedAt(step))
    rest = pretrain(config_from_values(growing), progress=Quiet())
    lines = lines_of(growing)
    assert [without_clock(a) for a in lines] == [without_clock(b) for b in lines_of(straight)]
    same = jax.tree.map(np.array_equal, jax.device_get(rest.state), jax.device_get(whole.state))
    assert all(jax.tree.leaves(same)), same
    assert [line['tokens'] for line in lines] == np.cumsum([tokens for tokens, _ in SIZES]).tolist()
    assert all(line['tokens_per_second'] > 0 for line in lines_of(straight))


def test_a_speed_is_that_of_steps_with_batches_of_one_size(growing, monkeypatch):
    laps, lap = [], Clock.lap
    monkeypatch.setattr(Clock, 'lap', lambda clock: laps.append(clock.done) or lap(clock))
    pretrain(config_from_values(growing | {'log': {'every': 100, 'report': False}}), progress=Quiet())
    assert laps[0] in (1, 2)  # the first step is logged, perhaps after the second has ended
    assert laps[1:] == [2, 3, 5, 8]  # and the last step


def test_validation_is_that_of_the_longest_sequences_at_every_step(growing, tmp_path):
    growing['eval'] = {'every': 1, 'batches': 2}
    whole = pretrain(config_from_values(growing | {'optimizer': {'learning_rate': 1e-30}}), progress=Quiet())
    losses = {line['val_loss'] for line in lines_of(growing, 'val_loss')}
    plain = prepare(config_from_values(growing | {'batch': {'tokens': 256, 'sequence_length': 32}}), lambda text: None)
    with jax.set_mesh(plain.mesh):
        assert losses == {Evaluation(plain).losses(whole.state.weights)['val_loss']}


def test_later_sizes_may_change_and_earlier_ones_may_not(growing, tmp_path):
    pretrain(config_from_values(growing), progress=StoppedAt(3))
    checkpoints = tmp_path / 'run' / 'checkpoints'
    assert {key: read_description(checkpoints, 4)[key] for key in ('batch', 'tokens')} == {'batch': 4, 'tokens': 640}
    for batch in (
        GROWING | {'tokens': [[0, 128], [2, 256]]},
        GROWING | {'sequence_length': [[0, 8], [2, 16], [5, 64]]},
        {'tokens': 128, 'sequence_length': 16},
    ):
        with pytest.raises(
            UserError, match=r'batches may change from batch 4 on, counted from 0; the longest sequence, .* may not'
        ) as refused:
            pretrain(config_from_values(growing | {'batch': batch}), progress=Quiet())
        assert len(str(refused.value).splitlines()) <= 10
    progress = Quiet()
    later = growing | {'batch': GROWING | {'tokens': [[0, 128], [3, 256], [6, 512]]}}
    pretrain(config_from_values(later), progress=progress)
    assert any('changed since the run began: batch.tokens: [[0, 128], [3, 256]] -> ' in line for line in progress.said)
    assert [line['tokens'] for line in lines_of(growing)] == np.cumsum([128] * 3 + [256] * 3 + [512] * 2).tolist()


def test_sizes_may_not_change_if_the_weights_of_a_mixture_do(growing, documents):
    sources = [
        {'name': name, 'weight': weight, 'text': str(documents)} for name, weight in (('a', 1), ('b', [[0, 1], [6, 4]]))
    ]
    growing |= {'data': {'tokenizer': 'bytes', 'validation': 0, 'mixture': sources}, 'mesh': {'d': 1, 'r': 8}}
    pretrain(config_from_values(growing), progress=StoppedAt(3))
    later = growing | {'batch': GROWING | {'tokens': [[0, 128], [3, 256], [6, 512]]}}
    with pytest.raises(
        UserError, match=r'batch.tokens: .*\nsizes of batches may not change, because the weights of the mix'
    ):
        pretrain(config_from_values(later), progress=Quiet())


def test_after_a_rollback_the_sizes_are_those_of_the_batches_that_follow(growing, tmp_path, monkeypatch):
    """Batches 2 to 4 are not finite, so step 2 goes on with batch 5; tokens count the steps that were kept."""
    growing['faults'], growing['checkpoint'] = {'rollback_after': 2, 'rollbacks': 1}, {'every': 2}
    place = 'pretrax.run.setup.read_sequences'
    from pretrax.run.setup import read_sequences

    def damaged(source, first, *rest):
        batch = read_sequences(source, first, *rest)
        return batch._replace(mask=batch.mask * np.float32(np.nan)) if 8 <= first < 24 else batch

    monkeypatch.setattr(place, damaged)
    pretrain(config_from_values(growing), progress=Quiet())
    lines = {line['step']: line for line in lines_of(growing)}
    assert [lines[step]['batch'] for step in range(1, 9)] == [0, 1, 5, 6, 7, 8, 9, 10]
    assert [lines[step]['tokens'] for step in range(1, 9)] == np.cumsum([128, 128] + [256] * 6).tolist()


def test_a_dry_run_compiles_the_largest_and_shown_batches_are_those_of_the_run(growing, tmp_path):
    said = []
    dry_run(config_from_values(growing), report=said.append)
    assert any('batch 0: 16 sequences x 8, read in' in line for line in said)
    assert any('for batches of 256 tokens = 8 sequences x 32 in' in line for line in said)
    pretrain(config_from_values(growing), progress=Quiet())
    run = prepare(config_from_values(growing), lambda text: None)
    for step in (1, 3, 4, 6):
        seen = seen_batch(growing['run_dir'], step, None, lambda text: None)
        with jax.set_mesh(run.mesh):
            batch = run.batch(step - 1)
        assert seen.rows(1000).tokens.tolist() == np.asarray(batch.tokens).tolist()


def test_a_saved_step_is_refused_in_words(growing, tmp_path):
    with pytest.raises(UserError, match=r'--compiled .*: the batches of this run grow at step 2, and a file has'):
        opened(str(tmp_path / 'step'), config_from_values(growing))


def test_learned_positions_are_those_of_the_longest_sequence(documents, tmp_path):
    values = small_values(documents, tmp_path) | {'steps': 8, 'batch': GROWING}
    values['model'] = {'family': 'gpt2', 'n_layers': 1, 'd_model': 16, 'attention': {'n_heads': 2}}
    run = prepare(config_from_values(values), lambda text: None)
    shapes = [jax.tree.map(lambda x: x.shape, run.at(number).like) for number in range(8)]
    assert all(one == shapes[-1] for one in shapes)
    assert run.like.weights.positions.shape[0] == 32


@register('data', 'by-batch')
class ByBatch(Source):
    """Batches whose rows do not follow one another: the rows of a batch depend on its number and its size."""

    vocab_size = 96

    def __init__(self, request):
        self.length = request.sequence_length

    def batch(self, step, rows, batch_rows):
        tokens = np.random.default_rng(step).integers(self.vocab_size, size=(batch_rows, self.length + 1))[rows]
        return pack_rows(tokens, np.zeros(tokens.shape, bool))


def test_data_whose_rows_would_repeat_are_refused_before_training(growing):
    sizes = {'tokens': [[0, 128], [4, 256]], 'sequence_length': 16}
    growing |= {'data': {'name': 'by-batch'}, 'eval': {'every': 0}, 'batch': sizes}
    repeated = (
        r'data\.name=by-batch: batches grow, but ByBatch numbers the rows of batches of 8 and of 16 rows differently'
    )
    with pytest.raises(UserError, match=repeated):
        pretrain(config_from_values(growing), progress=Quiet())
    with pytest.raises(UserError, match=repeated):
        dry_run(config_from_values(growing), report=lambda text: None)
    pretrain(config_from_values(growing | {'steps': 3, 'batch': sizes | {'tokens': 128}}), progress=Quiet())
