"""Layers that run on parts of a device's sequences: the same gradients, and weights that are gathered once."""

from collections import Counter

import jax
import numpy as np
import pytest

from pretrax.config import from_values
from pretrax.errors import UserError
from pretrax.hlo.parse import collectives
from pretrax.model.axes import TOKENS
from pretrax.model.loss import Batch
from pretrax.model.option_names import nest
from pretrax.model.weights import Weights
from pretrax.run.setup import prepare
from pretrax.shardlib import f32, psum, typed_shard_map
from small import assert_same, mesh_of, random_batch, random_weights, transformer

CHOICES = {'n_layers': 2, 'd_model': 16, 'n_heads': 4, 'n_kv_heads': 2, 'd_ff': 32, 'layers': 'scan', 'save': 'none'}
VALUES = {
    'name': 'tiny', 'steps': 3, 'model': nest(CHOICES), 'data': {'name': 'synthetic', 'vocab_size': 101},
    'batch': {'tokens': 512, 'sequence_length': 32}, 'optimizer': {'name': 'adamw', 'learning_rate': 3e-3},
    'mesh': {'d': 2, 't': 2, 'r': 2},
}  # fmt: skip


def program(parts, mesh):
    """The jitted loss and gradients of a decoder, and its arguments."""
    model = transformer(CHOICES | {'batch_parts': parts}, mesh)

    @typed_shard_map
    def loss(weights: Weights, batch: Batch) -> f32['']:
        total, count = model.loss(weights, batch)['nll']
        return psum(TOKENS, total) / psum(TOKENS, count)

    weights = random_weights(model)
    placed = jax.tree.map(lambda w, like: jax.device_put(w, like.sharding), weights, model.abstract())
    return jax.jit(jax.value_and_grad(loss)), placed, random_batch(8)


@pytest.mark.parametrize(
    'parts', [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 3))]
)  # of four sequences per device; 3 does not divide them
def test_parts_have_the_loss_and_gradients_of_the_whole(parts):
    outcomes = []
    for mesh, n in ((mesh_of(), 1), (mesh_of(1, 2, 2), parts)):
        with jax.set_mesh(mesh):
            step, *arguments = program(n, mesh)
            outcomes.append(jax.device_get(step(*arguments)))
    expected, actual = outcomes
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6)
    length = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(expected[1])))
    assert_same(actual[1], expected[1], rtol=2e-5, floor=1e-6 * length)


def test_weights_are_gathered_once_and_activations_once_per_part():
    counts = []
    for parts in (1, 2):
        mesh = mesh_of(1, 2, 2)
        with jax.set_mesh(mesh):
            step, *arguments = program(parts, mesh)
            text = step.lower(*arguments).compile().as_text()
        found = Counter()
        for one in collectives(text, dict(mesh.shape)):
            found[one.kind, one.axes] += one.times * one.bytes
        counts.append(found)
    whole, halves = counts
    assert whole['all-gather', ('d',)] == halves['all-gather', ('d',)] > 0
    assert whole['reduce-scatter', ('d',)] == halves['reduce-scatter', ('d',)] > 0
    assert whole['all-gather', ('t',)] == halves['all-gather', ('t',)] > 0


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        (
            {'model': nest(CHOICES | {'batch_parts': 3})},
            r'batch_parts = 3: the 4 sequences of a device and pass do not divide',
        ),
        (
            {'model': nest(CHOICES | {'batch_parts': 2}), 'precision': {'matmul': 'int8'}},
            r'batch_parts = 2: precision.matmul = int8',
        ),
        (
            {'model': nest({'family': 'mixtral', **CHOICES, 'n_experts': 4, 'batch_parts': 2})},
            r'batch_parts = 2: a mixture of experts runs on the whole batch',
        ),
    ],
)
def test_what_cannot_run_in_parts_is_refused(changes, said):
    with pytest.raises(UserError, match=said):
        prepare(from_values(VALUES | changes), report=lambda line: None)


def test_the_report_says_that_layers_run_in_parts():
    run = prepare(from_values(VALUES | {'model': nest(CHOICES | {'batch_parts': 2})}), report=lambda line: None)
    assert any('in 2 parts of the batch' in str(line) for line in run.startup if line.topic == 'layers')
