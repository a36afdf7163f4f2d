"""The step: what it skips, clips, decays, counts and reports, by hand on a small model; and where its state lies."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bigram import Bigram, BigramWeights, assert_identical, by_hand, norm_of, recipe
from pretrax.errors import UserError
from pretrax.hlo.parse import collectives
from pretrax.shardlib import psum
from pretrax.train import optimizer, schedule
from pretrax.train.groups import DEFAULT_NO_DECAY, weight_settings
from pretrax.train.state import abstract_state, init_state
from pretrax.train.step import make_gradients, make_step
from small import GPT2, LLAMA, MIXTURE, VOCAB, assert_same, mesh_of, random_batch, transformer

ROWS = 8


def steps_of(recipe, batches, mesh=None):
    """The host's copy of the state and metrics after each step, beginning with the first state and None."""
    with jax.set_mesh(mesh or mesh_of()):
        state, step = init_state(recipe, 0), make_step(recipe)
        history = [(jax.device_get(state), None)]
        for batch in batches:
            state, metrics = step(state, batch)
            history.append(jax.device_get((state, metrics)))
    return history


@pytest.mark.parametrize('poison', [np.nan, np.inf])
@pytest.mark.parametrize(('mesh', 'accumulation'), [((1, 1, 1), 1), ((2, 2, 1), 2)])
def test_a_gradient_that_is_not_finite_changes_nothing_but_the_counters(poison, mesh, accumulation):
    good = random_batch(ROWS)
    bad = dataclasses.replace(good, mask=good.mask.copy())
    bad.mask[3, 5] = poison
    rule = recipe(direction=optimizer.adamw(), decay=0.1, clip=1.0, accumulation=accumulation)
    history = steps_of(rule, [good, bad, bad, good], mesh_of(*mesh))
    states = [state for state, _ in history]
    for before, after in zip(states[1:3], states[2:4], strict=True):
        assert_identical((before.weights, before.optimizer), (after.weights, after.optimizer))
    assert [int(state.step) for state in states] == [0, 1, 2, 3, 4]
    assert [int(state.skipped) for state in states] == [0, 0, 1, 2, 2]
    assert [metrics['skipped_steps'] for _, metrics in history[1:]] == [0, 1, 2, 2]
    assert not np.isfinite(history[2][1]['loss'])
    assert not np.array_equal(states[3].weights.table, states[4].weights.table)
    assert np.isfinite(states[4].weights.table).all()


class SteepBigram(Bigram):
    """Adds sqrt(0) to the loss: the loss is as before, and its gradient is not a number."""

    def loss(self, weights, batch):
        top, bottom = super().loss(weights, batch)['nll']
        return {'nll': (top + jnp.sqrt(0 * psum('t', jnp.sum(weights.bias))), bottom)}


def test_a_finite_loss_with_a_gradient_that_is_not_is_skipped_too():
    (before, _), (after, metrics) = steps_of(recipe(SteepBigram(), clip=1.0), [random_batch(ROWS)])
    assert np.isfinite(metrics['loss'])
    assert not np.isfinite(metrics['grad_norm'])
    assert metrics['skipped_steps'] == 1
    assert_identical(before.weights, after.weights)


def test_the_gradient_is_clipped_by_its_global_norm():
    batch = random_batch(ROWS)
    (before, _), (after, metrics) = steps_of(recipe(clip=0.01), [batch])
    loss, gradient = by_hand(before.weights, batch)
    length = norm_of(gradient)
    assert length > 0.02
    np.testing.assert_allclose(metrics['loss'], loss, rtol=1e-5)
    np.testing.assert_allclose(metrics['grad_norm'], length, rtol=1e-5)
    np.testing.assert_allclose(metrics['clipped_grad_norm'], 0.01, rtol=1e-3)
    moved = jax.tree.map(lambda a, b: b - a, before.weights, after.weights)
    assert_same(moved, jax.tree.map(lambda g: -0.1 * 0.01 / length * g, gradient), rtol=1e-3)


@pytest.mark.parametrize('clip', [None, 100.0])
def test_a_gradient_below_the_limit_is_left_alone(clip):
    batch = random_batch(ROWS)
    (before, _), (after, metrics) = steps_of(recipe(clip=clip), [batch])
    assert metrics['clipped_grad_norm'] == metrics['grad_norm']
    moved = jax.tree.map(lambda a, b: b - a, before.weights, after.weights)
    assert_same(moved, jax.tree.map(lambda g: -0.1 * g, by_hand(before.weights, batch)[1]), rtol=1e-4)


def test_decay_is_decoupled_and_by_group():
    """Decay subtracts rate * decay * weight, whatever the gradient, from the weights that no pattern names."""
    batch = random_batch(ROWS)

    def moved_by_decay(no_decay):
        _, (without, _) = steps_of(recipe(direction=optimizer.adamw(), decay=0.0, clip=0.01), [batch])
        (before, _), (after, _) = steps_of(
            recipe(direction=optimizer.adamw(), decay=0.5, no_decay=no_decay, clip=0.01), [batch]
        )
        return before.weights, jax.tree.map(lambda a, b: b - a, without.weights, after.weights)

    before, moved = moved_by_decay(DEFAULT_NO_DECAY)
    np.testing.assert_allclose(moved.table, -0.1 * 0.5 * before.table, atol=1e-6)
    assert not moved.bias.any()
    before, moved = moved_by_decay(('tab*',))
    np.testing.assert_allclose(moved.bias, -0.1 * 0.5 * before.bias, atol=1e-6)
    assert not moved.table.any()


def test_cautious_decay_shrinks_only_what_the_gradient_shrinks():
    """SGD by hand: w - rate (g + decay w), the decay only where g and w have the same sign."""
    batch = random_batch(ROWS)
    (before, _), (after, _) = steps_of(recipe(decay=0.5)._replace(cautious_decay=True), [batch])
    w, g = np.asarray(before.weights.table), by_hand(before.weights, batch)[1].table
    assert 0.2 < np.mean(w * g > 0) < 0.8
    np.testing.assert_allclose(after.weights.table, w - 0.1 * (g + 0.5 * w * (w * g >= 0)), atol=1e-6)


def test_which_weights_of_a_decoder_decay():
    with jax.set_mesh(mesh_of()):
        weights = transformer(GPT2).abstract()

    def decays(no_decay):
        settings = weight_settings(weights, 0.3, no_decay, arch=None)
        return jax.tree.map(lambda _, one: one.decay, weights, settings)

    named = {path[-1].name: by for path, by in jax.tree_util.tree_leaves_with_path(decays(DEFAULT_NO_DECAY))}
    matrices = {'embed', 'positions', 'q', 'k', 'v', 'o', 'up', 'down'}
    assert {name for name, by in named.items() if by == 0.3} == matrices
    assert {by for name, by in named.items() if name not in matrices} == {0.0}
    decay = decays(('layers.q', 'embed'))
    assert (decay.embed, decay.layers.attention.q, decay.layers.attention.q_bias, decay.norm) == (0.0, 0.0, 0.3, 0.3)


def test_a_pattern_that_names_no_weight_is_refused():
    rule = recipe(no_decay=('*norm*', 'emdeb'))
    with pytest.raises(UserError, match=r"'emdeb' matches no weight\nthe weights are: table, bias"):
        steps_of(rule, [random_batch(ROWS)])


def test_adamw_by_hand():
    """Three steps, written out: Loshchilov and Hutter 2019, algorithm 2, with the schedule on rate and decay."""
    batches = [random_batch(ROWS, seed) for seed in range(3)]
    rates = schedule.linear(10, warmup=2)
    rule = recipe(
        direction=optimizer.adamw(b1=0.8, b2=0.9, eps=1e-3), rate=lambda step: 0.3 * rates(step), decay=0.2, clip=0.05
    )
    history = steps_of(rule, batches)
    weights = jax.tree.map(lambda w: np.asarray(w, np.float64), history[0][0].weights)
    m = v = jax.tree.map(np.zeros_like, weights)
    for t, (batch, (state, metrics)) in enumerate(zip(batches, history[1:], strict=True), start=1):
        loss, gradient = by_hand(weights, batch)
        gradient = jax.tree.map(lambda g, by=min(1, 0.05 / norm_of(gradient)): g * by, gradient)
        m = jax.tree.map(lambda m, g: 0.8 * m + 0.2 * g, m, gradient)
        v = jax.tree.map(lambda v, g: 0.9 * v + 0.1 * g**2, v, gradient)
        rate = 0.3 * (0.5, 1, 1)[t - 1]
        direction = jax.tree.map(lambda m, v, t=t: (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3), m, v)
        weights = BigramWeights(
            weights.table - rate * (direction.table + 0.2 * weights.table), weights.bias - rate * direction.bias
        )
        np.testing.assert_allclose(metrics['loss'], loss, rtol=1e-5)
        np.testing.assert_allclose(metrics['learning_rate'], rate, rtol=1e-6)
        np.testing.assert_allclose(metrics['weight_norm'], norm_of(weights), rtol=1e-4)
        assert_same(state.weights, weights, rtol=1e-4)


def test_the_state_is_donated():
    """The compiled step writes every new array of the state into the memory of the old one."""
    mesh = mesh_of(2, 2, 2)
    with jax.set_mesh(mesh):
        rule = recipe(transformer(LLAMA, mesh), optimizer.adamw(), decay=0.1, clip=1.0)
        like = abstract_state(rule)
        analysis = make_step(rule).lower(like, random_batch(ROWS)).compile().memory_analysis()
    on_a_device = sum(np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(like))
    assert analysis.alias_size_in_bytes == on_a_device


def with_reduction(reduction, mesh, options):
    model = transformer(options, mesh, micro_batches=2 * mesh.shape['p'] if mesh.shape['p'] > 1 else 1)
    model.plan = dataclasses.replace(model.plan, reduction=reduction)
    return model


@pytest.mark.parametrize(
    ('options', 'sizes', 'accumulation'),
    [
        (LLAMA | {'layers': 'scan'}, {'r': 2, 'd': 2}, 2),
        pytest.param(MIXTURE, {'d': 2, 'e': 2}, 1, marks=pytest.mark.slow),
        pytest.param(LLAMA | {'pipeline_schedule': '1f1b'}, {'d': 2, 'p': 2}, 1, marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_sums_over_d_are_in_bf16_if_asked(options, sizes, accumulation):
    """All that is scattered over d is bf16 then, but for a router.
    Before XLA's optimizations: for CPUs it sums in f32.
    """
    mesh, scattered = mesh_of(**sizes), {}
    for reduction in ('f32', 'bf16', 'bf16_r_d'):
        with jax.set_mesh(mesh):
            model = with_reduction(reduction, mesh, options)
            program = jax.jit(make_gradients(model, accumulation)).lower(model.abstract(), random_batch(ROWS))
        text = program.compiler_ir('hlo').as_hlo_text()
        found = [one for one in collectives(text, dict(mesh.shape)) if one.axes == ('d',) and 'scatter' in one.kind]
        scattered[reduction] = sum(one.times * one.bytes for one in found)
    assert scattered['bf16'] == scattered['f32'] > 0
    routers = 4 * model.arch.n_layers * model.arch.d_model * (model.arch.experts.n_experts or 0)
    assert 2 * (scattered['bf16_r_d'] - routers) == scattered['f32'] - routers


def ring_scatter(x, names, *, scatter_dimension, tiled):
    """`jax.lax.psum_scatter` as a ring computes it: a sum passes each device, which adds its part in x's dtype."""
    (axis,), n = names, jax.lax.axis_size(names[0])
    assert tiled
    parts = jnp.stack(jnp.split(x, n, axis=scatter_dimension))
    me = jax.lax.axis_index(axis)
    total = parts[(me - 1) % n]
    for hop in range(n - 1):
        total = jax.lax.ppermute(total, axis, [(i, (i + 1) % n) for i in range(n)]) + parts[(me - 2 - hop) % n]
        total = jax.lax.reduce_precision(total, *((8, 7) if x.dtype == jnp.bfloat16 else (8, 23)))
    return total


@pytest.mark.slow
def test_training_with_sums_over_d_in_bf16_converges_as_in_f32(monkeypatch):
    """Eight devices in a ring that rounds at each hop,
    against sums in f32 on them and on one device: text that can be learned.
    """
    monkeypatch.setattr(jax.lax, 'psum_scatter', ring_scatter)
    followers = np.random.default_rng(3).integers(0, VOCAB, (VOCAB, 4))

    def text(step):
        rng, tokens = np.random.default_rng([7, step]), np.zeros((16, 17), np.int32)
        tokens[:, 0] = rng.integers(0, VOCAB, 16)
        for i in range(16):
            tokens[:, i + 1] = followers[tokens[:, i], rng.integers(0, 4, 16)]
        like = random_batch(16)
        whole = {'segments': np.ones_like(like.segments), 'mask': np.ones_like(like.mask)}
        positions = np.tile(np.arange(16, dtype=np.int32), (16, 1))
        return dataclasses.replace(like, tokens=tokens[:, :-1], targets=tokens[:, 1:], positions=positions, **whole)

    def losses(reduction, mesh):
        model = with_reduction(reduction, mesh, LLAMA | {'layers': 'scan'})
        rule = recipe(model, optimizer.adamw(), rate=0.01, decay=0.1, clip=1.0)
        return np.array([float(metrics['loss']) for _, metrics in steps_of(rule, map(text, range(150)), mesh)[1:]])

    one, exact, rounded = losses('f32', mesh_of()), losses('f32', mesh_of(d=8)), losses('bf16_r_d', mesh_of(d=8))
    end = slice(-20, None)
    assert one[end].mean() < 0.6 * one[0]
    assert abs(exact[end].mean() - one[end].mean()) < 2e-3
    assert abs(rounded[end].mean() - one[end].mean()) < 0.01
    assert np.abs(rounded[:20] / exact[:20] - 1).max() < 5e-3
    assert not np.array_equal(rounded, exact)
