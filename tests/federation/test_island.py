"""Runs that share a directory and train one model, against the algorithm written again."""

import json
import shutil

import numpy as np
import pytest

from federation.diloco import diloco, streaming
from pretrax import config_from_values, pretrain
from runs import BIGRAM, Quiet, StoppedAt, lines_of
from small import VOCAB

VALUES = {
    'model': BIGRAM, 'data': {'name': 'synthetic', 'vocab_size': VOCAB}, 'steps': 12, 'schedule': {'name': 'constant'},
    'batch': {'tokens': 64, 'sequence_length': 16}, 'mesh': {'r': 2, 'd': 2, 't': 2},
    'optimizer': {'name': 'sgd', 'learning_rate': 0.5, 'weight_decay': 0.0, 'clip_norm': None},
    'precision': {'compute': 'f32'}, 'log': {'every': 1, 'report': False}, 'eval': {'every': 0},
    'checkpoint': {'every': 3, 'keep': 100},
}  # fmt: skip


class Stopped(StoppedAt):
    def update(self, metrics):
        if 'loss' in metrics:
            super().update(metrics)


def values_of(directory, name='a', islands=1, every=4, **section):
    federation = {'bucket': str(directory / 'bucket'), 'islands': islands, 'every': every, 'encoding': 'f32', **section}
    return VALUES | {'name': name, 'run_dir': str(directory / name), 'federation': federation}


def losses_of(values):
    return [line['loss'] for line in lines_of(values)]


def check_weights(state, theta):
    np.testing.assert_allclose(state.weights.table, theta['table'], rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(state.weights.bias, theta['bias'], rtol=2e-5, atol=2e-6)


def test_one_island_is_a_run_with_the_outer_optimizer_in_it(tmp_path):
    values = values_of(tmp_path) | {'steps': 10}
    result = pretrain(config_from_values(values), progress=Quiet())
    theta, losses = diloco(tmp_path, 1, 10, 4)
    np.testing.assert_allclose(losses_of(values), losses[0], rtol=2e-6)
    check_weights(result.state, theta)


def test_fragments_are_averaged_in_turn_while_the_island_trains(tmp_path):
    values = values_of(tmp_path, fragments=2, delay=1, mixing=0.25) | {'steps': 11}
    result = pretrain(config_from_values(values), progress=Quiet())
    theta, losses = streaming(tmp_path, 1, 11, 4, [['table'], ['bias']], 1, 0.25)
    np.testing.assert_allclose(losses_of(values), losses[0], rtol=2e-6)
    check_weights(result.state, theta)


@pytest.mark.parametrize('section', [{}, {'fragments': 2, 'delay': 1}, {'encoding': 'int4'}])
def test_an_island_that_stops_anywhere_goes_on_as_if_it_had_not(tmp_path, section):
    whole, stopped = values_of(tmp_path / 'whole', **section), values_of(tmp_path / 'stopped', **section)
    pretrain(config_from_values(whole), progress=Quiet())
    for step in (3, 8):
        pretrain(config_from_values(stopped), progress=Stopped(step))
    pretrain(config_from_values(stopped), progress=Quiet())
    assert losses_of(stopped) == losses_of(whole)


def test_an_island_does_not_wait_for_ever_for_a_founder_that_has_gone(tmp_path):
    founder = values_of(tmp_path, islands=2) | {'steps': 4}
    pretrain(config_from_values(founder), progress=Quiet())
    for name in ('anchors', 'rounds'):
        shutil.rmtree(tmp_path / 'bucket' / name)
    values = values_of(tmp_path, 'b', islands=2, patience=0.2) | {'steps': 4}
    pretrain(config_from_values(values), progress=Quiet())
    assert len(losses_of(values)) == 4
    assert json.loads((tmp_path / 'bucket' / 'anchors' / '0' / 'anchor.json').read_bytes())['by'] == 'b'
