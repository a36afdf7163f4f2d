"""Curves of runs that went well and of runs that did not."""

import numpy as np
import pytest

from pretrax.view.record.verdict import Losses, verdict

STEPS = np.arange(10, 2010, 10)
NOISE = np.random.default_rng(0).normal(0, 0.05, len(STEPS))
FALLING = 7 * (STEPS / 10) ** -0.15 + NOISE


def said(values, validation=None):
    measured = (
        Losses.from_columns({}, 'val_loss')
        if validation is None
        else Losses(np.arange(1, len(validation) + 1) * 100, validation)
    )
    return verdict(Losses(STEPS[: len(values)], values), measured)


def spiked(values, at, height=100.0):
    values = values.copy()
    values[at] = height
    return values


@pytest.mark.parametrize(
    'values',
    [
        FALLING,
        spiked(FALLING, [50]),  # one outlier
        spiked(FALLING, [-1]),  # and as the last loss
        spiked(FALLING, [80], np.nan),  # a step that was skipped
        FALLING[:9] * np.linspace(1, 3, 9),  # too short to tell
        np.concatenate([FALLING[:100], FALLING[100:] + 0.1]),  # harder data from the middle on
        2.1 + NOISE - np.linspace(0, 0.2, len(STEPS)),  # a start from good weights
    ],
)
def test_nothing_is_wrong(values):
    assert said(values, np.array([5.0, 4.0, 3.9, 3.92])) == ''


@pytest.mark.parametrize(
    ('values', 'words'),
    [
        (np.linspace(6, 58_000, len(STEPS)), 'diverged: the loss rose from 6 (step 10) to '),
        (np.concatenate([FALLING[:150], np.full(50, 6.5)]), 'diverged: the loss rose from '),
        (np.concatenate([[7.6], np.geomspace(5000, 1400, 39)]), 'diverged: the loss rose from 7.6 (step 10) to 1'),
        (spiked(FALLING, slice(150, None), np.nan), 'not finite: the loss is nan since step 1,510'),
        (np.full(len(STEPS), np.inf), 'not finite: the loss is inf since step 10'),
        (7.6 + NOISE, 'not learning: the loss was 7.6'),
    ],
)
def test_what_is_wrong_is_named_with_its_numbers(values, words):
    assert said(values).startswith(words)


def test_a_validation_loss_that_rises_while_the_training_loss_falls_is_overfitting():
    assert (
        said(FALLING, np.array([4.0, 3.2, 3.3, 3.5])) == 'overfit: the validation loss rose from 3.2 (step 200) to 3.5'
    )
    assert said(FALLING, np.array([4.0, 3.2, 3.21])) == ''
