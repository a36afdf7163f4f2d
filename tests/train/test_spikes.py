"""Spikes of the loss: several deviations above the usual loss, and their steps are skipped."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from pretrax import config_from_values, pretrain, register
from pretrax.data.batches.source import Source
from pretrax.observe.metrics import read_metrics
from pretrax.train.spikes import FEWEST_STEPS, is_spike
from runs import BIGRAM, Quiet
from small import VOCAB, random_batch


@pytest.mark.parametrize(
    ('loss', 'skipped'), [(2.0 + 3.9 * 0.5, False), (2.0 + 4.1 * 0.5, True), (-9.0, False), (np.inf, True)]
)
def test_a_spike_is_several_deviations_above_the_usual_loss(loss, skipped):
    """A usual loss of 2 with a standard deviation of 0.5."""
    count = 40.0
    usual = jnp.array([count, 2.0 * count, (4.0 + 0.25) * count])
    assert bool(is_spike(jnp.float32(loss), usual, 4.0)) == skipped
    assert not is_spike(jnp.float32(loss), usual, None)
    assert not is_spike(jnp.float32(loss), usual * (FEWEST_STEPS - 1) / count, 4.0)


def test_a_spike_changes_no_weight(values):
    """After 60 usual batches comes one with unlikely targets; with faults.spike the step is counted as skipped."""
    settings = values | {
        'steps': 62, 'model': BIGRAM, 'data': {'name': 'one-odd-batch'}, 'faults': {'spike': 6.0}, 'optimizer': {'learning_rate': 1e-4},
        'schedule': {'name': 'constant'}, 'log': {'every': 1},
    }  # fmt: skip
    result = pretrain(config_from_values(settings), progress=Quiet())
    lines = read_metrics(Path(values['run_dir']) / 'metrics.jsonl')
    assert [line['step'] for line in lines if line['skipped_in_a_row']] == [61]
    assert lines[60]['weight_norm'] == lines[59]['weight_norm'] != lines[61]['weight_norm']
    assert int(result.state.skipped) == 1


@register('data', 'one-odd-batch')
class OneOdd(Source):
    """The same batch always, but for number 60, whose targets are others."""

    vocab_size = VOCAB

    def __init__(self, request):
        del request

    def batch(self, step, rows, batch_rows):
        batch = random_batch(batch_rows, seed=0)
        targets = batch.targets if step != 60 else batch.targets * 0  # which the biases make the least likely
        arrays = (batch.tokens, targets, batch.segments, batch.positions, batch.mask)
        return type('Rows', (tuple,), {})(x[rows] for x in arrays)
