"""A part of a user in the decoder: the examples train, equally on a mesh and on one device."""

from pathlib import Path

import jax
import numpy as np
import pytest

from pretrax import config_from_values, pretrain
from pretrax.model.transformer import Transformer
from runs import Quiet

EXAMPLES = Path(__file__).parents[2] / 'examples'
PARTS = {'gated-attention': 'gated_attention.py', 'relu2-gate': 'relu2_gate.py', 'focal': 'focal_loss.py'}


def trained(directory, name, mesh):
    plugin = [] if name == 'transformer' else [str(EXAMPLES / PARTS[name])]
    values = {
        'name': 'variant',
        'run_dir': str(directory / f'{name}-{len(mesh)}'),
        'steps': 3,
        'model': {'name': name, 'family': 'llama', 'n_layers': 2, 'd_model': 16, 'attention': {'n_heads': 2}},
        'data': {'name': 'synthetic', 'vocab_size': 128},
        'batch': {'tokens': 256, 'sequence_length': 32},
        'mesh': mesh,
        'optimizer': {'learning_rate': 0.01},
        'precision': {'compute': 'f32'},
        'log': {'report': False, 'every': 1},
        'eval': {'every': 0},
        'plugins': plugin,
    }
    return pretrain(config_from_values(values), progress=Quiet())


@pytest.mark.parametrize('name', PARTS)
def test_an_example_trains_the_same_on_two_meshes_and_not_as_the_decoder(tmp_path, name):
    one, other = trained(tmp_path, name, {'d': 8}), trained(tmp_path, name, {'d': 2, 'c': 2, 't': 2})
    assert one.metrics['loss'] == pytest.approx(other.metrics['loss'], rel=1e-5)
    for a, b in zip(*(jax.tree.leaves(result.state.weights) for result in (one, other)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)
    usual = trained(tmp_path, 'transformer', {'d': 8})
    assert abs(one.metrics['loss'] - usual.metrics['loss']) > 1e-4
    assert not isinstance(one.run.recipe.model, Transformer)  # which would use the cache of attention to write text


@pytest.mark.parametrize('name', PARTS)
def test_the_examples_are_short(name):
    assert len((EXAMPLES / PARTS[name]).read_text().splitlines()) < 30
