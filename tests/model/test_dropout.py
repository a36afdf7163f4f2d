"""Dropout of the decoder, against a plain decoder that is given the masks, and the rules that masks follow."""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
from decoders import decoder_options
from parallel.cases import DENSE, DROPOUT, gradients, largest
from pretrax.errors import UserError
from pretrax.model import attention, long_attention
from pretrax.model.architecture import resolve
from pretrax.model.attention_kernels import choose_kernel
from pretrax.model.dropout import kept
from pretrax.model.loss import means
from pretrax.model.options.attention import AttentionOptions
from pretrax.train.optimizer import sgd
from pretrax.train.state import init_state
from pretrax.train.step import Recipe, make_gradients, training_step
from pretrax.train.validation import make_evaluate
from small import assert_same, mesh_of, random_batch, random_weights, transformer

ROWS = 8
GPT2 = {'family': 'gpt2', 'n_layers': 2, 'd_model': 32, 'n_heads': 4}


def mix(x):
    """lowbias32 of github.com/skeeto/hash-prospector, of u32."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def masks_of(key, arch, rows, length):
    """The masks as docs/models.md describes them, in numpy and of a whole batch:
    place -> (bool[rows, length, n], rate).
    """
    words = jax.random.bits(jax.random.fold_in(key, zlib.crc32(b'dropout')), (rows, length, 2), jnp.uint32)
    first, second = np.moveaxis(np.asarray(words), -1, 0)

    def mask(first, second, n, rate):
        numbers = np.arange(n, dtype=np.uint32) * np.uint32(0x9E3779B9)
        bits = mix((first[..., None] + numbers) ^ second[..., None])
        return bits >= rate * 2**32, np.full(rows, rate)

    found = {('embedding',): mask(first, second, arch.d_model, arch.embedding.dropout)}
    for i in range(arch.n_layers):
        for j, part in enumerate(('probabilities', 'attention', 'feed-forward')):
            a = mix(first ^ mix(np.uint32(3 * i + j + 1)))
            b = mix(second + a)
            if part != 'probabilities':
                found[part, i] = mask(a, b, arch.d_model, arch.block.dropout)
            for head in range(arch.attention.n_heads) if part == 'probabilities' else ():
                of_head = mix(a ^ mix(np.uint32(head + 1)))
                found[part, i, head] = mask(of_head, b, length, arch.attention.dropout)
    return found


@pytest.mark.parametrize(
    'options',
    [GPT2 | DROPOUT, pytest.param(DENSE | DROPOUT | {'window': 0, 'z_loss': 0.0}, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize('longest', [512, 8])  # that keeps its probabilities
def test_the_gradient_is_that_of_a_plain_decoder_with_the_same_masks(options, longest, monkeypatch):
    monkeypatch.setattr(attention, 'BLOCK', longest)
    monkeypatch.setattr(long_attention, 'MOST', longest)
    with np.errstate(over='ignore'):
        model, key, batch = transformer(options), jax.random.key(3), random_batch(ROWS)
        weights, masks = random_weights(model), masks_of(key, model.arch, *batch.tokens.shape)
    expected = jax.jit(jax.value_and_grad(lambda w: reference.nll(w, batch, model.arch, masks)))(weights)
    with jax.set_mesh(mesh_of()):
        gradient, terms, _ = jax.jit(make_gradients(model, 1))(weights, batch, key)
    np.testing.assert_allclose(means(terms)['nll'], expected[0], rtol=2e-6)
    assert_same(gradient, expected[1], rtol=2e-5, floor=1e-6)


@pytest.mark.parametrize('rate', [0.1, 0.5])
def test_masks_have_their_rate_and_are_independent(rate):
    seeds = jax.random.bits(jax.random.key(0), (200, 50, 2), jnp.uint32)
    mask = np.asarray(kept(seeds, jnp.uint32(0), 100, rate), float)  # 10^6 numbers
    deviation = np.sqrt(rate * (1 - rate) / mask.size)
    assert abs(mask.mean() - (1 - rate)) < 4 * deviation
    for axis in (1, 2):  # neighbors in the sequence, and in a token
        one, other = mask.take(range(mask.shape[axis] - 1), axis), mask.take(range(1, mask.shape[axis]), axis)
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 4e-3
    np.testing.assert_array_equal(kept(seeds, jnp.uint32(30), 5, rate), mask[..., 30:35])  # of a part of the keys


@functools.cache
def alone():
    return gradients(DENSE | DROPOUT, {})


def loss_of(told):
    return told['0.nll.0'] / told['0.nll.1']


@pytest.mark.parametrize(
    ('mesh', 'more', 'accumulation'),
    [
        pytest.param({'d': 2}, {'save': 'none'}, 2, marks=pytest.mark.slow),
        pytest.param({'c': 2, 't': 2}, {'context': 'ring'}, 1, marks=pytest.mark.slow),
        pytest.param({'c': 2, 't': 2}, {'context': 'all_to_all'}, 1, marks=pytest.mark.nightly),
        pytest.param({'p': 2}, {'pipeline_schedule': '1f1b'}, 1, marks=pytest.mark.slow),
    ],
)
def test_masks_depend_on_no_mesh_accumulation_or_recomputation(mesh, more, accumulation):
    gradient, told = gradients(DENSE | DROPOUT | more, mesh, accumulation)
    assert largest(gradient, alone()[0]) < 3e-5
    assert largest({'loss': loss_of(told)}, {'loss': loss_of(alone()[1])}) < 3e-6


def test_masks_change_with_the_step_and_evaluation_has_none():
    model, batch = transformer(DENSE | DROPOUT), random_batch(2)
    weights = random_weights(model)
    with jax.set_mesh(mesh_of()):
        run = jax.jit(make_gradients(model, 1))
        one, other = (run(weights, batch, jax.random.key(i))[1]['nll'] for i in (1, 2))
        evaluated = make_evaluate(model)(weights, batch)['nll']
        without = make_evaluate(transformer(DENSE))(weights, batch)['nll']
    assert one != other
    np.testing.assert_array_equal(evaluated, without)


@pytest.mark.slow
def test_a_training_step_draws_its_masks_from_its_number():
    """The rate is 0, so the weights stay the same; only the masks can change the loss."""
    recipe = Recipe(transformer(GPT2 | DROPOUT | {'n_layers': 1}), sgd(), lambda step: jnp.float32(0), 0.0, (), None, 1)
    with jax.set_mesh(mesh_of()):
        state, step = init_state(recipe, 0), jax.jit(training_step(recipe))
        losses = [step(state._replace(step=jnp.int32(n)), random_batch(2))[1]['loss'] for n in (0, 1, 0)]
    assert losses[0] != losses[1]
    assert losses[0] == losses[2]


def test_dropout_sets_the_three_rates_and_each_may_differ():
    def rates(**options):
        arch = resolve(decoder_options(**GPT2, **options), 100, 32)
        return arch.attention.dropout, arch.block.dropout, arch.embedding.dropout

    assert rates() == (0, 0, 0)
    assert rates(dropout=0.1) == (0.1, 0.1, 0.1)
    assert rates(dropout=0.1, attention_dropout=0.0) == (0, 0.1, 0.1)


def test_fused_kernels_are_refused_or_left_with_the_reason():
    kernel = choose_kernel('auto', 'cuda', jnp.bfloat16, 64, 1024, 1, AttentionOptions(dropout=0.1))
    assert kernel.name == 'blockwise'
    assert 'SLOW: not cudnn' in str(kernel)
    assert 'model.attention.dropout = 0.1' in str(kernel)
    with pytest.raises(UserError, match='cannot drop attention probabilities'):
        choose_kernel('splash', 'tpu', jnp.bfloat16, 128, 1024, 1, AttentionOptions(dropout=0.1))
