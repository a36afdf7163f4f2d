"""Stages of layers over the mesh axis p: one device's loss, gradients, weights and runs;
what is sent; what is refused.
"""

import functools
import re

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import reference
from pretrax import config_from_values, pretrain
from pretrax.checkpoint import Checkpoints, restore
from pretrax.errors import UserError
from pretrax.run.setup import prepare
from pretrax.train import optimizer, schedule
from pretrax.train.groups import DEFAULT_NO_DECAY
from pretrax.train.state import abstract_state
from pretrax.train.step import Recipe, make_step
from pretrax.train.validation import make_evaluate
from pretrax.weights.warm_start import _place
from run.test_equivalence import ADAM, fresh_state
from runs import BIGRAM, Quiet
from small import GPT2, LLAMA, MIXTURE, assert_same, mesh_of, random_batch, random_weights, transformer

slow, nightly = (functools.partial(pytest.param, marks=mark) for mark in (pytest.mark.slow, pytest.mark.nightly))

ROWS = 16
BALANCED = {'balance_loss': 0.3, 'router_z_loss': 0.02, 'z_loss': 0.02}
FAMILIES = {
    'llama': LLAMA | {'n_layers': 4, 'z_loss': 0.02},
    'gpt2': GPT2,  # tied, with biases and learned positions
    'experts': MIXTURE | BALANCED | {'n_layers': 4},
    'mixed': MIXTURE | BALANCED | {'n_layers': 4, 'expert_every': 2, 'd_ff_dense': 32},
    'states': {
        'family': 'mamba2',
        'n_layers': 4,
        'd_model': 32,
        'linear_heads': 4,
        'linear_key_heads': 2,
        'linear_d_head': 8,
        'linear_d_key': 6,
        'layer_types': ('mamba', 'delta'),
    },
    'experts by batch': MIXTURE | BALANCED | {'balance_over': 'batch', 'capacity': 0.75},
}
# Of gradients and weights. The reference of `states` in f32 is itself up to 1.9e-5 from the same reference in f64, and
# the decoder on one device 1.6e-5: products of many decays. (The stages are 0.7e-5 from it.)
ROUNDING = {'states': 3e-5}


@functools.cache
def ground_truth(family):
    """The loss terms, the gradient of the first batch and the weights after one step, in plain JAX."""
    model = transformer(FAMILIES[family])
    before = random_weights(model)
    gradient, terms = reference.gradient_of(model.arch)(before, random_batch(ROWS))
    after = reference.AdamW(before, [0.05], weight_decay=0.1, clip_norm=0.5, **ADAM).step(before, gradient)
    return jax.device_get((terms, gradient, after))


def recipe_of(model):
    rate = schedule.constant(100)
    return Recipe(model, optimizer.adamw(**ADAM), lambda step: 0.05 * rate(step), 0.1, DEFAULT_NO_DECAY, 0.5, 1)


def staged(family, mesh, micro_batches, **more):
    return transformer(FAMILIES[family] | more, mesh, micro_batches=micro_batches)


def one_step(model, mesh):
    """The terms, the gradient and the weights after a step, and the compiled program."""
    with jax.set_mesh(mesh):
        recipe = recipe_of(model)
        state, batch = fresh_state(recipe, random_weights(model)), random_batch(ROWS)
        step = make_step(recipe).lower(state, batch).compile()
        state, metrics = step(state, batch)
        metrics = jax.device_get(metrics)
        scale = metrics['grad_norm'] / metrics['clipped_grad_norm'] / (1 - ADAM['b1'])
        gradient = jax.tree.map(lambda m: np.asarray(m) * scale, state.optimizer.mu)
        return metrics, gradient, jax.device_get(state.weights), step.as_text()


@pytest.mark.parametrize(
    ('family', 'mesh', 'micro_batches', 'choices'),
    [
        ('llama', {'p': 2}, 4, {'save': {'q': 'keep', 'attention': 'keep'}}),
        nightly('llama', {'r': 2, 'p': 4}, 8, {'save': 'none', 'pipeline_schedule': 'interleaved'}),
        nightly('gpt2', {'d': 2, 'p': 2}, 2, {'layers': 'unroll'}),
        nightly('mixed', {'p': 2}, 4, {}),
        slow('states', {'p': 2, 't': 2}, 4, {}),
        nightly(
            'experts',
            {'d': 2, 't': 2, 'p': 2},
            4,
            {'pipeline_rounds': 2, 'save': 'none', 'pipeline_schedule': 'interleaved'},
        ),
        nightly('experts by batch', {'t': 2, 'p': 2}, 2, {}),
    ],
)
def test_equals_the_reference_and_sends_what_the_schedule_says(family, mesh, micro_batches, choices):
    terms, gradient, after = ground_truth(family)
    mesh = mesh_of(**mesh)
    model = staged(family, mesh, micro_batches, **choices)
    metrics, own_gradient, weights, program = one_step(model, mesh)
    for name, value in terms.items():
        np.testing.assert_allclose(metrics[name], value, rtol=2e-6, err_msg=name)
    length = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradient)))
    rounding = ROUNDING.get(family, 1e-5)
    assert_same(own_gradient, gradient, rtol=rounding, floor=1e-6 * length)
    assert_same(weights, after, rtol=rounding)
    # One in the loop of the ticks, one in that of the backward pass; and with rounds, for each weight of a layer,
    # one a turn there and one back.
    rounds, weights_of_a_layer = model.plan.pipeline.rounds, len(jax.tree.leaves(gradient.layers))
    sent = 2 + (2 * rounds * weights_of_a_layer if rounds > 1 else 0)
    assert len(re.findall(r' collective-permute(?:-start)?\(', program)) == sent
    assert program.count(f'"known_trip_count":{{"n":"{model.plan.pipeline.ticks}"}}') >= 2


def test_evaluation_and_a_round_trip_to_other_stages(tmp_path):
    """What p shared out is restored whole, and shared out again, bit by bit; and it means the same."""
    told, states = [], []
    for p, restored in ((2, None), (1, 1), (4, 2)):
        mesh = mesh_of(d=2, p=p)
        model = staged('llama', mesh, 4 if p > 1 else 1)
        with jax.set_mesh(mesh):
            recipe, checkpoints = recipe_of(model), Checkpoints(tmp_path, 10)
            if restored is None:
                state = fresh_state(recipe, random_weights(model))
            else:
                state = restore(tmp_path, restored, abstract_state(recipe))
            assert (
                state.weights.layers.attention.q.sharding.shard_shape(state.weights.layers.attention.q.shape)[0]
                == 4 // p
            )
            checkpoints.save(len(states) + 1, state, {})
            checkpoints.close()
            told.append(jax.device_get(make_evaluate(model)(state.weights, random_batch(ROWS)))['nll'])
            states.append(jax.device_get(state))
    for state in states[1:]:
        assert all(jax.tree.leaves(jax.tree.map(np.array_equal, state, states[0])))
    np.testing.assert_allclose(told, [told[0]] * 3, rtol=1e-6)


@pytest.mark.slow
def test_a_run_in_stages_evaluates_writes_and_goes_on_without_them(values):
    # 32 sequences: 8 for each of r x d = 4, taken one by one so that the bubble is below a fifth
    values |= {'steps': 2, 'batch': {'tokens': 512, 'sequence_length': 16}, 'mesh': {'r': 2, 'd': 2, 'p': 2},
               'eval': {'every': 2, 'batches': 1}, 'sample': {'every': 2, 'tokens': 4}}  # fmt: skip
    values['model'] |= {'n_layers': 2}
    run = pretrain(config_from_values(values), progress=(progress := Quiet()))
    report = '\n'.join(map(str, run.run.startup))
    assert '8 per device, 8 micro-batches of 1' in report
    assert 'pipeline: 2 stages, 8 micro-batches, 1 round: bubble 11.1 % = (2 - 1) / (1 x 8 + 2 - 1)' in report
    assert np.isfinite(list(run.validation.values())).all()
    assert any(text.startswith('sample at step 2: ') for text in progress.said)
    on = pretrain(
        config_from_values(values | {'steps': 3, 'mesh': {'r': 2, 'd': 4}}), allow_changes=True, progress=Quiet()
    )
    assert on.metrics['step'] == 3
    assert on.metrics['loss'] < 1.01 * run.metrics['loss']


def test_weights_given_a_layer_at_a_time_go_to_their_stages():
    """As those of Hugging Face come (`init_from`)."""
    whole = np.arange(4 * 6 * 2, dtype=np.float32).reshape(4, 6, 2)
    sharding = NamedSharding(mesh_of(d=2, p=2), PartitionSpec('p', 'd'))
    placed = _place((((i,), layer) for i, layer in enumerate(whole)), jax.ShapeDtypeStruct(whole.shape, whole.dtype,
    sharding=sharding))  # fmt: skip
    np.testing.assert_array_equal(placed, whole)
    assert {shard.data.shape for shard in placed.addressable_shards} == {(2, 3, 2)}


REFUSED = {
    'layers': ({'n_layers': 6}, {'p': 4}, r'n_layers = 6: mesh.p = 4 does not divide them\nuse mesh.p=2'),
    'rounds': (
        {'n_layers': 8, 'pipeline_rounds': 3}, {'p': 2},
        r'mesh.p = 2 x model.pipeline.rounds = 3 does not divide them\nuse model.pipeline.rounds=2',
    ),
    'layers that take turns': (
        {'n_layers': 6, 'window': 4, 'global_every': 2}, {'p': 2},
        r'leaves 3 per chunk, and the chunks would have different kinds of layers\nuse mesh.p=1',
    ),
}  # fmt: skip


@pytest.mark.parametrize('case', REFUSED)
def test_layers_that_make_no_stages_are_refused_with_what_does(case):
    options, mesh, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        transformer(LLAMA | options, mesh_of(**mesh), micro_batches=4)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'batch': {'tokens': 192}}, r'3 sequences per device do not fill mesh.p = 2 stages.*\n.*batch.tokens=256'),
        ({'batch': {'micro': 4}},
        r'batch.micro = 4 makes 1 micro-batches per device, not a multiple of mesh.p = 2 .*\nuse batch.micro=2'),
        ({'batch': {'micro': 3}}, r'batch.micro = 3 does not divide the 4 sequences per device\nuse batch.micro=2'),
        ({'model': BIGRAM}, r'mesh.p = 2: model.name = bigram-of-tests does not support pipeline parallelism\n'
        'use mesh.p=1'),
    ],
)  # fmt: skip
def test_what_does_not_fill_the_stages_is_refused_with_what_does(values, changes, message):
    values |= {'mesh': {'r': 2, 'd': 2, 'p': 2}, 'batch': {'tokens': 256, 'sequence_length': 16}}
    values['model'] |= {'n_layers': 2}
    for name, change in changes.items():
        values[name] = change if name == 'model' else values[name] | change
    with pytest.raises(UserError, match=message):
        prepare(config_from_values(values), lambda text: None)


def test_micro_batches_are_so_many_that_the_bubble_is_below_a_fifth():
    mesh = mesh_of(p=2)
    assert staged('llama', mesh, 8).plan.pipeline.bubble < 0.2
    said = staged('llama', mesh, 2).choices['pipeline']
    assert '; model.pipeline.rounds=2 would make it 20.0 %; ' in said
