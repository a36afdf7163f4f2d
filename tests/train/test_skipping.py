"""Steps that change no weight: without a target, spikes of the loss,
and in fp16 gradients that overflow, with the scale.
"""

import dataclasses
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrax import config_from_values, pretrain, register
from pretrax.data.batches.source import Source
from pretrax.errors import UserError
from pretrax.observe.metrics import read_metrics
from pretrax.run.devices import choose_compute
from pretrax.train import optimizer
from pretrax.train.noise_scale import make_noise
from pretrax.train.skipping import (
    FEWEST_STEPS,
    LossScale,
    first_scale,
    is_fault,
    is_spike,
    next_scale,
    without_empty_means,
)
from pretrax.train.state import init_state
from pretrax.train.step import Recipe, make_gradients, make_step
from runs import BIGRAM, Quiet, StoppedAt
from small import LLAMA, MIXTURE, VOCAB, assert_same, mesh_of, random_batch, random_weights, transformer
from train.test_step import by_hand, recipe, steps_of

SMALL = LLAMA | {'layers': 'scan', 'd_model': 16, 'd_ff': 32}


def without_targets(batch, rows=slice(None)):
    mask = np.array(batch.mask)
    mask[rows] = 0
    return dataclasses.replace(batch, mask=mask)


def assert_equal(found, expected):
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_step_without_targets_is_as_if_its_batch_had_never_been():
    """Bit for bit the states of a run that never saw it: moments, their counts, decay, the average, the usual loss."""
    rule = recipe(direction=optimizer.adamw(), decay=0.1, clip=1.0)._replace(ema_decay=0.9, spike=6.0)
    first, second = random_batch(8, seed=1), random_batch(8, seed=2)
    seen = steps_of(rule, [first, without_targets(first), second])
    never = steps_of(rule, [first, second])
    assert [bool(metrics['steps_without_targets']) for _, metrics in seen[1:]] == [False, True, False]
    assert [int(state.skipped_in_a_row) for state, _ in seen] == [0] * 4
    last, expected = seen[-1][0], never[-1][0]
    assert_equal(last._replace(step=0, batch=0, skipped=0), expected._replace(step=0, batch=0, skipped=0))
    assert (int(last.step), int(last.batch), int(last.skipped)) == (3, 3, 1)
    metrics = seen[2][1]
    assert np.isnan([metrics['loss'], metrics['nll']]).all()
    assert metrics['targets'] == metrics['grad_norm'] == 0


def test_a_fault_beside_steps_without_targets_is_a_fault():
    """Such a step neither ends a streak of faults nor lengthens it, unless the weights themselves are not finite."""
    good = random_batch(8)
    bad = dataclasses.replace(good, mask=np.full_like(good.mask, np.nan))
    rule = recipe(direction=optimizer.adamw())
    history = steps_of(rule, [bad, without_targets(good), bad, good])
    assert [int(state.skipped_in_a_row) for state, _ in history] == [0, 1, 1, 2, 0]
    assert [metrics['steps_without_targets'] for _, metrics in history[1:]] == [0, 1, 0, 0]
    with jax.set_mesh(mesh_of()):
        state = init_state(rule, 0)
        broken = state._replace(weights=jax.tree.map(lambda w: w * jnp.nan, state.weights))
        after, metrics = make_step(rule)(broken, without_targets(good))
    assert (int(after.skipped_in_a_row), int(metrics['steps_without_targets'])) == (1, 0)


@pytest.mark.parametrize('sizes', [{}, {'d': 2, 'r': 2}], ids=str)
def test_passes_and_devices_without_targets_leave_the_mean_over_the_others(sizes):
    """Of eight rows only the third has targets: all other micro-batches, and most devices, have none."""
    batch = without_targets(random_batch(8), np.arange(8) != 2)
    (before, _), (_, metrics) = steps_of(recipe(accumulation=2), [batch], mesh_of(**sizes))
    loss, gradient = by_hand(before.weights, batch)
    np.testing.assert_allclose(metrics['loss'], loss, rtol=1e-5)
    np.testing.assert_allclose(
        metrics['grad_norm'], np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(gradient))), rtol=1e-5
    )


TERMS = {'z_loss': 0.1, 'balance_loss': 0.1, 'router_z_loss': 0.1, 'router_bias': True, 'mtp_layers': 1}


@pytest.mark.parametrize(
    ('options', 'sizes', 'accumulation'),
    [
        pytest.param(MIXTURE | TERMS | {'balance_over': 'batch', 'capacity': 1.5}, {}, 2, marks=pytest.mark.nightly),
        pytest.param(MIXTURE | TERMS, {'e': 2, 't': 2}, 1, marks=pytest.mark.nightly),
        pytest.param(SMALL | {'z_loss': 0.1, 'pipeline_schedule': '1f1b'}, {'p': 2, 'd': 2}, 1, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_no_term_of_a_decoder_moves_a_weight_without_targets(options, sizes, accumulation):
    mesh = mesh_of(**sizes)
    model = transformer(SMALL | options, mesh, micro_batches=4 if 'p' in sizes else 1)
    rule = recipe(model, optimizer.adamw(), decay=0.1, accumulation=accumulation)
    (before, _), (after, metrics) = steps_of(rule, [without_targets(random_batch(8))], mesh)
    assert_equal((after.weights, after.optimizer), (before.weights, before.optimizer))
    assert (int(after.skipped_in_a_row), int(metrics['steps_without_targets'])) == (0, 1)
    shown = without_empty_means({name: float(value) for name, value in metrics.items()})
    assert np.isfinite(list(shown.values())).all()
    assert not shown.keys() & {'loss', 'nll', 'z_loss', 'balance_loss', 'mtp_nll/1', 'expert_load_max'}


@pytest.mark.slow
def test_a_term_without_targets_is_left_out_of_the_others():
    """Documents of two tokens have nothing to predict two tokens ahead: the gradient is that without such a module."""
    batch = random_batch(4)
    columns = np.arange(16)
    pairs = dataclasses.replace(
        batch, segments=np.tile(columns // 2 + 1, (4, 1)).astype(np.int32),
        positions=np.tile(columns % 2, (4, 1)).astype(np.int32), mask=np.tile(1.0 - columns % 2, (4,
        1)).astype(np.float32),
    )  # fmt: skip
    model, plain = transformer(SMALL | {'mtp_layers': 1}), transformer(SMALL)
    with jax.set_mesh(mesh_of()):
        weights, nothing = random_weights(model), plain.abstract().multi_token
        found, terms, tables = jax.jit(make_gradients(model, 1))(weights, pairs)
        expected, _, _ = jax.jit(make_gradients(plain, 1))(dataclasses.replace(weights, multi_token=nothing), pairs)
    assert terms['mtp_loss/1'] == (0, 0)
    assert np.isnan(model.summarize(tables)['mtp_nll/1'])
    assert not any(np.any(g) for g in jax.tree.leaves(found.multi_token))
    assert_same(dataclasses.replace(found, multi_token=nothing), expected, rtol=1e-6)


def test_half_a_batch_without_targets_gives_no_noise():
    rule = recipe()
    with jax.set_mesh(mesh_of()):
        noise = make_noise(rule)(init_state(rule, 0), without_targets(random_batch(8), slice(0, 8, 2)))
    assert np.isnan(noise).all()


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
        'steps': 62, 'model': BIGRAM, 'data': {'name': 'one-odd-batch'}, 'faults': {'spike': 6.0},
        'optimizer': {'learning_rate': 1e-4},
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


def test_the_scale_of_the_loss_changes_as_in_torch():
    """Scales after each step of torch.amp.GradScaler('cpu', init_scale=16.0, growth_interval=3), torch 2.13.0.

    Its loss was `w.sum()`, times infinity in the steps that overflow.
    """
    good = [1, 1, 1, 1, 1, 0, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1, 0]
    of_torch = [16.0, 16.0, 32.0, 32.0, 32.0, 16.0, 16.0, 16.0, 8.0, 4.0, 4.0, 4.0, 8.0, 8.0, 8.0, 16.0, 8.0]
    rule = LossScale(first=16.0, interval=3)
    scale, found = first_scale(rule), []
    for is_good in good:
        scale = next_scale(scale, jnp.bool_(is_good), rule)
        found.append(float(scale[0]))
    assert found == of_torch


@pytest.mark.parametrize(
    ('sizes', 'accumulation', 'options'),
    [
        pytest.param({'d': 2, 't': 2}, 1, {}, marks=pytest.mark.slow),
        pytest.param({'r': 2}, 2, {}, marks=pytest.mark.nightly),
        pytest.param({'p': 2}, 1, {}, marks=pytest.mark.nightly),
        pytest.param({'p': 2, 'd': 2}, 1, {'pipeline_schedule': '1f1b'}, marks=pytest.mark.nightly),
        pytest.param(
            {'e': 2}, 2, {'n_experts': 4, 'experts_per_token': 2, 'balance_loss': 0.1}, marks=pytest.mark.slow
        ),
    ],
    ids=str,
)
def test_a_scaled_loss_has_the_same_gradient(sizes, accumulation, options):
    """In f32 a power of two changes no digit, whatever sums the gradient: passes, stages or devices."""
    mesh = mesh_of(**sizes)
    with jax.set_mesh(mesh):
        model = transformer(SMALL | options, mesh, micro_batches=sizes.get('p', 1))
        weights = jax.tree.map(lambda w, at: jax.device_put(w, at.sharding), random_weights(model), model.abstract())
        gradients = jax.jit(make_gradients(model, accumulation))
        plain, terms, _ = gradients(weights, random_batch(8))
        scaled, same, _ = gradients(weights, random_batch(8), loss_scale=jnp.float32(1024.0))
    assert terms == same
    assert_same(scaled, plain, rtol=1e-6)


def fp16(first=2.0**16, interval=2000, **options):
    model = transformer(SMALL | options, mesh_of(), dtype=jnp.float16)
    rates = lambda step: jnp.float32(1e-2)  # noqa: E731
    return Recipe(model, optimizer.adamw(), rates, 0.0, (), 1.0, 1, loss_scale=LossScale(first, interval))


def test_a_gradient_that_overflows_halves_the_scale_and_changes_no_weight():
    with jax.set_mesh(mesh_of()):
        state, step, batch = init_state(fp16(first=2.0**34), 0), make_step(fp16(first=2.0**34)), random_batch(8)
        before, scales = jax.device_get((state.weights, state.optimizer)), []
        state, metrics = step(state, without_targets(batch))
        assert (int(metrics['skipped_steps']), state.loss_scale.tolist()) == (1, [2.0**34, 0.0])
        for _ in range(40):
            state, metrics = step(state, batch)
            scales.append(float(metrics['loss_scale']))
            assert metrics['skipped_in_a_row'] == 0  # no reason for a rollback
            if not np.isfinite(metrics['grad_norm']):
                same = jax.tree.map(np.array_equal, before, jax.device_get((state.weights, state.optimizer)))
                assert all(jax.tree.leaves(same))
    skipped = int(state.skipped)
    assert 5 < skipped - 1 < 34
    assert scales == [2.0 ** (34 - min(n, skipped - 1)) for n in range(40)]
    assert np.isfinite(metrics['loss'])
    assert not np.array_equal(before[0].layers.attention.q, state.weights.layers.attention.q)


def test_a_gradient_that_stays_infinite_counts_towards_a_rollback():
    nothing = jnp.bool_(False)
    assert [bool(is_fault(nothing, 1.0, jnp.array([scale, 0.0]))) for scale in (4.0, 2.0, 1.0, 0.5)] == [0, 0, 1, 1]
    assert is_fault(nothing, 1.0, None)
    assert is_fault(jnp.bool_(True), 1.0, jnp.array([4.0, 0.0]))  # a spike
    assert is_fault(nothing, jnp.inf, jnp.array([4.0, 0.0]))  # logits that overflow, which no scale changes


@pytest.mark.slow
def test_the_scale_saves_small_gradients_in_fp16():
    """Gradients far below the smallest number of fp16, 6e-8, compared with those of f32."""
    batch = random_batch(8, length=16)
    with jax.set_mesh(mesh_of()):
        exact, half = (transformer(SMALL, mesh_of(), dtype=dtype) for dtype in (jnp.float32, jnp.float16))
        weights = random_weights(exact)
        small = dataclasses.replace(weights, norm=weights.norm * 1e-5)  # all gradients before it are small
        expected = jax.jit(make_gradients(exact, 1))(small, batch)[0].layers.attention.q
        of_half = jax.jit(make_gradients(half, 1))
        plain, scaled = (
            of_half(small, batch, **scale)[0].layers.attention.q for scale in ({}, {'loss_scale': jnp.float32(2.0**16)})
        )
    error = lambda found: np.linalg.norm(found - expected) / np.linalg.norm(expected)  # noqa: E731
    assert error(scaled) < 0.02
    assert error(plain) > 0.1


@pytest.mark.slow
def test_a_run_in_fp16_learns_and_resumes_with_its_scale(values, tmp_path):
    settings = values | {
        'steps': 24, 'precision': {'compute': 'fp16', 'loss_scale': 2.0**26, 'loss_scale_steps': 3}, 'mesh': {'r': 2,
        'd': 2, 't': 2},
        'schedule': {'name': 'constant'}, 'faults': {'rollback_after': 2},
    }  # fmt: skip
    whole = pretrain(config_from_values(settings), progress=Quiet())
    lines = read_metrics(Path(values['run_dir']) / 'metrics.jsonl')
    scales = [line['loss_scale'] for line in lines]
    assert scales[0] == 2.0**26
    assert min(scales) < 2.0**26  # an overflow
    assert any(b == 2 * a for a, b in pairwise(scales))  # and three good steps
    assert lines[-1]['loss'] < lines[0]['loss']
    resumed = settings | {'run_dir': str(tmp_path / 'resumed')}
    pretrain(config_from_values(resumed), progress=StoppedAt(13))
    again = pretrain(config_from_values(resumed), progress=Quiet())
    for a, b in zip(jax.tree.leaves(whole.state), jax.tree.leaves(again.state), strict=True):
        assert np.array_equal(a, b)


def test_what_does_not_work_in_fp16_is_refused(values):
    for section, message in [
        ({'compute': 'fp16', 'matmul': 'int8'}, 'precision.matmul is int8'),
        ({'compute': 'bf16', 'loss_scale': 2.0}, 'precision.loss_scale is given, but only the loss of fp16'),
    ]:
        with pytest.raises(UserError, match=message):
            config_from_values(values | {'precision': section})
    with pytest.raises(UserError, match='TPUs multiply bf16'):
        choose_compute('fp16', 'tpu')


def test_a_gpu_without_bf16_products_computes_in_f32():
    assert choose_compute('auto', 'gpu', '7.5') == (
        jnp.float32, 'a GPU of compute capability 7.5 has no bf16 products',
    )  # fmt: skip
    for capability in ('8.0', '9.0', '10.0', 'gfx90a', ''):
        assert choose_compute('auto', 'gpu', capability)[0] == jnp.bfloat16
    assert choose_compute('bf16', 'gpu', '7.5')[0] == jnp.bfloat16
