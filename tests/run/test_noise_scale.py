"""`log.noise_scale`: what a run writes, that training does not change, and what is refused."""

import jax
import numpy as np
import pytest

from pretrax import config_from_values, pretrain
from pretrax.errors import UserError
from pretrax.run.clock import Clock
from pretrax.run.logged_program import NoiseScale
from pretrax.run.setup import prepare
from runs import BIGRAM, Quiet, StoppedAt, lines_of


def trained(values, **changes):
    config = config_from_values(values | changes)
    return pretrain(config, progress=Quiet()).state, lines_of(values | changes, 'noise_trace')


@pytest.mark.slow
def test_a_run_averages_both_estimates_resumes_and_trains_the_same_bits(values, tmp_path):
    values |= {'model': BIGRAM}
    every = {'log': {'noise_scale': 2, 'every': 1}, 'checkpoint': {'every': 3}}
    plain, _ = trained(values, run_dir=str(tmp_path / 'plain'))
    state, lines = trained(values | every)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(state), strict=True):
        assert np.array_equal(a, b)
    assert [line['step'] for line in lines] == [1, 2, 4, 6]
    trace = square = 0.0
    for line in lines:
        trace, square = 0.95 * trace + line['noise_trace'], 0.95 * square + line['noise_square']
        length = values['batch']['sequence_length']
        np.testing.assert_allclose(line['noise_scale'], length * trace / square, rtol=1e-6)
    resumed = values | every | {'run_dir': str(tmp_path / 'resumed')}
    pretrain(config_from_values(resumed), progress=StoppedAt(4))
    _, again = trained(resumed)
    assert [line['noise_scale'] for line in again] == [line['noise_scale'] for line in lines]


def test_a_batch_of_one_sequence_is_refused(values, tmp_path):
    one = values['batch'] | {'tokens': values['batch']['sequence_length']}
    config = config_from_values(values | {'model': BIGRAM, 'batch': one, 'mesh': {'d': 1}, 'log': {'noise_scale': 1}})
    run = prepare(config, lambda text: None, jax.devices()[:1])
    with pytest.raises(UserError, match=r'log\.noise_scale compares two halves of a batch'):
        NoiseScale(run, {}, Clock(tmp_path, False, 0, {}), print)
