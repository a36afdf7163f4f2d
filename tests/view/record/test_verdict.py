"""Curves of runs that went well and of runs that did not, as metrics.jsonl has them."""

import json

import numpy as np
import pytest

from pretrax.view.record.columns import parse_columns
from pretrax.view.record.verdict import verdict_of

STEPS = np.arange(10, 2010, 10)
NOISE = np.random.default_rng(0).normal(0, 0.05, len(STEPS))
FALLING = 7 * (STEPS / 10) ** -0.15 + NOISE
DECAY = 3 + 2 * (1 + np.cos(np.pi * np.minimum(STEPS / 1500, 1)))  # flat for the last quarter
COSINE = DECAY + NOISE
FINE_TUNED = 2.1 - np.linspace(0, 0.01, len(STEPS)) + NOISE / 20


def said(loss=(), val=(), every=100, **more):
    """The verdict on a file with these losses every 10 steps, and a validation loss every 100."""
    lines = [{'step': 10 * (i + 1), 'loss': float(value)} for i, value in enumerate(loss)]
    for key, values in more.items():
        lines += [{'step': 10 * (i + 1), key: float(value)} for i, value in enumerate(values)]
    lines += [{'step': every * (i + 1), 'val_loss': float(value)} for i, value in enumerate(val)]
    lines.sort(key=lambda line: line['step'])
    for line in lines:
        key = next(key for key in line if key != 'step')
        if not np.isfinite(line[key]):
            line |= {'nonfinite': {key: str(line[key])}, key: None}
    return verdict_of(parse_columns(''.join(json.dumps(line) + '\n' for line in lines).encode()))


def spiked(values, at, height=100.0):
    values = values.copy()
    values[at] = height
    return values


GOOD = np.array([5.0, 4.0, 3.9, 3.92])


@pytest.mark.parametrize(
    'metrics',
    {
        'falls': {'loss': FALLING, 'val': GOOD},
        'one outlier': {'loss': spiked(FALLING, [50])},
        'an outlier as the last loss': {'loss': spiked(FALLING, [-1])},
        'a spike that recovers': {'loss': FALLING + 4 * np.exp(-(((STEPS - 1200) / 80) ** 2)), 'val': GOOD},
        'a skipped step': {'loss': spiked(FALLING, [80], np.nan)},
        'harder data from the middle on': {'loss': np.concatenate([FALLING[:100], FALLING[100:] + 0.1])},
        'a plateau at the end of a decay': {'loss': COSINE, 'val': [5, 4, 3.2, 3.0, 3.01, 3.0, 3.01]},
        'a start from good weights': {'loss': 2.1 + NOISE - np.linspace(0, 0.2, len(STEPS))},
        'a fine-tune with tiny changes': {'loss': FINE_TUNED, 'val': [2.1, 2.095, 2.09, 2.091]},
        'a short and noisy fine-tune': {'loss': spiked(2.1 + 4 * NOISE[:12], [0], 1.7)},
        'five steps': {'loss': FALLING[:5] * [1, 1, 2, 3, 9]},
        'too short to tell': {'loss': FALLING[:9] * np.linspace(1, 3, 9)},
        'a large constant term': {'loss': 1000 + FALLING, 'nll': FALLING},
        'many terms': {'loss': FALLING + 0.5, 'nll': FALLING, 'z_loss': NOISE**2, 'load_balance': 1 + NOISE},
        'a loss of its own with a likelihood that stays': {'loss': FALLING, 'nll': 7 + NOISE},
        'a negative loss': {'loss': FALLING - 9},
        'distillation down to nothing': {'loss': 5 * np.exp(-STEPS / 200) + np.abs(NOISE) / 50},
        'distillation of the same model': {'loss': 1e-6 * np.abs(NOISE)},
        'no validation': {'loss': FALLING},
        'one validation': {'loss': FALLING, 'val': [5.0]},
        'resumed after a rollback with a jump': {'loss': np.concatenate([FALLING[:100], FALLING[60:160]])},
        'only perplexity': {'perplexity': np.exp(FALLING)},
        'perplexity beside the loss': {'loss': FALLING, 'perplexity': np.exp(9 - FALLING)},
        'a noisy validation loss': {'loss': COSINE, 'val': DECAY[9::10] + np.tile([0.1, 0, 0.1, 0.1], 5)},
        'nothing': {},
    }.items(),
    ids=lambda row: row[0],
)
def test_nothing_is_wrong(metrics):
    assert said(**metrics[1]) == ''


@pytest.mark.parametrize(
    ('metrics', 'words'),
    [
        ({'loss': np.linspace(6, 58_000, len(STEPS))}, 'diverged: the loss rose from 6 (step 10) to '),
        ({'loss': np.concatenate([FALLING[:150], np.full(50, 6.5)])}, 'diverged: the loss rose from '),
        (
            {'loss': np.concatenate([[7.6], np.geomspace(5000, 1400, 39)])},
            'diverged: the loss rose from 7.6 (step 10) to 1',
        ),
        ({'loss': FINE_TUNED + np.linspace(0, 1, len(STEPS))}, 'diverged: the loss rose from '),
        ({'loss': spiked(FALLING, slice(150, None), np.nan)}, 'not finite: the loss is nan since step 1,510'),
        ({'loss': np.full(len(STEPS), np.inf)}, 'not finite: the loss is inf since step 10'),
        ({'loss': 7.6 + NOISE}, 'not learning: the loss was 7.6'),
        ({'loss': 7.6 + NOISE, 'nll': 7.5 + NOISE}, 'not learning: the loss was 7.6'),
        (
            {'loss': FALLING, 'val': [4.0, 3.2, 3.3, 3.5]},
            'overfit: the validation loss rose from 3.2 (step 200) to 3.5',
        ),
        ({'loss': FALLING, 'val': 3.2 + np.abs(np.linspace(-1, 1, 20))}, 'overfit: the validation loss rose from '),
    ],
)
def test_what_is_wrong_is_named_with_its_numbers(metrics, words):
    assert said(**metrics).startswith(words)


def test_a_validation_loss_that_rises_once_or_by_little_is_no_overfitting():
    assert said(FALLING, [4.0, 3.2, 3.21]) == said(FALLING, [4.0, 3.2, 3.3]) == ''
