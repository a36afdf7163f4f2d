"""What users' Flax NNX modules may and may not do: their results, their state, their dropout, their sharding."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrax.errors import UserError
from pretrax.model.nnx import NnxModel
from pretrax.model.nnx_options import NnxOptions
from pretrax.model.request import ModelRequest
from pretrax.train.optimizer import adamw
from pretrax.train.state import init_state
from pretrax.train.step import Recipe, make_step
from pretrax.train.validation import make_evaluate
from small import LENGTH, VOCAB, assert_same, mesh_of, random_batch


def module(name, mesh=None, **arguments):
    sizes = dict((mesh or mesh_of()).shape)
    request = ModelRequest(VOCAB, LENGTH, None, jnp.float32, 'cpu', sizes)
    return NnxModel(request, options=NnxOptions(target=f'nnx_modules:{name}', arguments=arguments))


def recipe(model, accumulation=1, seed=0):
    return Recipe(model, adamw(), lambda step: 1e-2, 0.1, (), 1.0, accumulation, seed)


def trained(model, mesh, steps, accumulation=1, seed=0):
    """The losses and the states of a few steps."""
    with jax.set_mesh(mesh):
        how = recipe(model, accumulation, seed)
        state, step, losses, states = init_state(how, 0), make_step(how), [], []
        for number in range(steps):
            state, metrics = step(state, random_batch(8, number))
            losses.append(float(metrics['loss']))
            states.append(jax.device_get(state))
    return losses, states, state


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('WithAuxiliary', r'a tuple of float32\[2, 16, 100\], None .*return only element 0'),
        ('InDict', r"a dict of 'loss': float32\[\], 'logits': .*return only element 'logits'"),
        ('Nothing', 'returns None .*return one array'),
        ('LastToken', r'float32\[2, 100\] .*not those of the last one'),
        ('Flat', r'float32\[32, 100\] .*do not flatten'),
        ('LengthFirst', r'float32\[16, 2, 100\] .*the batch comes first'),
        ('Shifted', r'float32\[2, 15, 100\] .*pretrax shifts the targets itself'),
        ('WithoutHead', r'float32\[2, 16, 16\] .*must have 100 outputs'),
        ('Padded', r'float32\[2, 16, 128\] .*model.arguments.vocab_size=128 or return logits\[..., :100\]'),
        ('Likeliest', r'int32\[2, 16\] .*before any argmax'),
        ('Mistaken', r'called in training .*nnx_modules.py:\d+: return self.hidden\(tokens\) @'),
        ('WantsMore', "missing 1 required positional argument: 'image'.*positions, segments, train"),
        ('Batched', 'changes norm.mean, an nnx.BatchStat.*use nnx.LayerNorm'),
        ('Counts', 'changes calls, an nnx.Variable.*compute it in the call'),
    ],
)
def test_a_module_whose_call_does_not_fit_is_refused_with_the_fix(name, message):
    with pytest.raises(UserError) as refusal:
        module(name)
    text = str(refusal.value)
    assert len(text.split('\n')) <= 10
    assert re.search(message, text, re.DOTALL), text


def test_a_padded_vocabulary_is_accepted_if_the_configuration_says_so():
    request = ModelRequest(90, LENGTH, None, jnp.float32, 'cpu', dict(mesh_of().shape))
    model = NnxModel(request, options=NnxOptions(target='nnx_modules:Plain', arguments={'vocab_size': 96}))
    assert (model.vocab_size, model.target.columns) == (90, 96)


def test_the_report_names_what_is_not_trained():
    assert module('Table').choices['variables that do not train'] == 'table (nnx.Variable)'
    frozen = module('Batched', frozen=True).choices['variables that do not train']
    assert frozen == 'norm.mean (nnx.BatchStat), norm.var (nnx.BatchStat)'
    assert 'variables that do not train' not in module('Keeps').choices


@pytest.mark.parametrize(('accumulation', 'with_mesh'), [(1, True), (2, False)])
def test_a_weight_without_annotation_stays_replicated(accumulation, with_mesh):
    """Beside one that is sharded over t, on d=2, t=2: three steps, as on one device."""
    mesh = mesh_of(d=2, t=2)
    model = module('PartlyAnnotated', mesh, with_mesh=with_mesh)
    losses, states, state = trained(model, mesh, 3, accumulation)
    like = jax.tree.map(lambda w: w.sharding.spec, init_state_of(model, mesh).weights)
    assert jax.tree.map(lambda w: w.sharding.spec, state.weights) == like
    assert state.weights['up']['kernel'].addressable_shards[0].data.shape == (16, 16)
    assert state.weights['up']['bias'].addressable_shards[0].data.shape == (32,)
    expected, alone, _ = trained(module('PartlyAnnotated'), mesh_of(), 3)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same(states[-1].weights, alone[-1].weights, rtol=1e-3)
    assert model.choices['replicated weights'].startswith('6 of 7, 3,860 parameters, are on every device')
    assert 'replicated weights' not in module('PartlyAnnotated').choices  # one device


def init_state_of(model, mesh):
    with jax.set_mesh(mesh):
        return init_state(recipe(model), 0)


def test_dropout_zeroes_its_share_and_scales_the_rest():
    model = module('Masks', rate=0.25)
    assert model.draws
    tokens = jnp.zeros((8, LENGTH), jnp.int32)

    def logits(number):
        return np.asarray(model.target.logits({'one': jnp.ones(())}, tokens, tokens, tokens, jax.random.key(number)))

    values = logits(1)
    np.testing.assert_allclose(np.unique(values), [0, 1 / 0.75], rtol=1e-6)
    n = values.size
    assert abs(np.mean(values == 0) - 0.25) < 4 * (0.25 * 0.75 / n) ** 0.5  # four standard deviations
    first, second = np.split(values, 2, axis=-1)
    assert 0.5 < np.mean(first == second) < 0.75  # independent: 0.625
    assert np.array_equal(values, logits(1))
    assert not np.array_equal(values, logits(2))
    assert np.all(np.asarray(model.logits({'one': jnp.ones(())}, tokens)) == 1)


@pytest.mark.slow
def test_dropout_depends_on_seed_and_step_and_is_off_in_evaluation():
    one, mesh = mesh_of(), mesh_of(r=2, t=2)
    losses, states, _ = trained(module('Plain', rate=0.5), one, 3)
    assert trained(module('Plain', rate=0.5), one, 1, seed=1)[0] != losses[:1]
    np.testing.assert_allclose(trained(module('Plain', mesh, rate=0.5), mesh, 3)[0], losses, rtol=1e-5)

    model, batch = module('Plain', rate=0.5), random_batch(8, 0)
    with jax.set_mesh(one):  # resumed after step 2
        step = make_step(recipe(model))
        after, metrics = step(jax.tree.map(jnp.asarray, states[1]), random_batch(8, 2))
        assert float(metrics['loss']) == losses[2]
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(after), states[2])

        weights = states[0].weights
        top, bottom = make_evaluate(model)(weights, batch)['nll']
        x = weights['embed']['embedding'][batch.tokens]
        x = np.maximum(x @ weights['up']['kernel'] + weights['up']['bias'], 0)
        log_p = jax.nn.log_softmax(x @ weights['unembed']['kernel'] + weights['unembed']['bias'])
        nll = -np.take_along_axis(np.asarray(log_p), batch.targets[..., None], axis=-1)[..., 0]
        assert float(top / bottom) == pytest.approx(np.sum(nll * batch.mask) / np.sum(batch.mask), rel=1e-5)


def test_the_passes_of_a_step_draw_different_numbers():
    """The same rows in both passes; the gradient of a weight behind dropout counts what was kept."""
    model = module('Masks', rate=0.5)
    batch = jax.tree.map(lambda x: np.concatenate([x[:4], x[:4]]), random_batch(8, 0))
    with jax.set_mesh(mesh_of()):
        both = model.make_gradients(2)({'one': jnp.ones(())}, batch, jax.random.key(3))[1]['nll']
        rows = jax.tree.map(lambda x: x[:4], batch)
        single = model.make_gradients(1)({'one': jnp.ones(())}, rows, jax.random.key(3))[1]['nll']
    assert float(both[0] / both[1]) != pytest.approx(float(single[0] / single[1]), rel=1e-5)


def test_a_step_without_targets_changes_no_parameter():
    batch = random_batch(8, 0)
    nothing = dataclasses.replace(batch, mask=np.zeros_like(batch.mask))
    with jax.set_mesh(mesh_of()):
        how = recipe(module('Plain'), accumulation=2)
        state = init_state(how, 0)
        before = jax.device_get((state.weights, state.optimizer))
        after, metrics = make_step(how)(state, nothing)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get((after.weights, after.optimizer)), before)
    assert (int(after.skipped_in_a_row), int(metrics['steps_without_targets'])) == (0, 1)


def test_a_call_is_told_whether_it_trains():
    model = module('TellsMode')
    tokens = jnp.zeros((2, LENGTH), jnp.int32)
    weights = {'weight': jnp.zeros(VOCAB)}
    assert not model.draws
    assert np.all(np.asarray(model.target.logits(weights, tokens, tokens, tokens, jax.random.key(0))) == 1)
    assert np.all(np.asarray(model.logits(weights, tokens)) == 0)
