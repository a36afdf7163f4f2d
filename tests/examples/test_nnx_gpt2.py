"""The GPT-2 of examples/nnx_gpt2, a Flax NNX module: its size, and that it trains as our own GPT-2 does."""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrax.config import load
from pretrax.config.registry import build
from pretrax.errors import UserError
from pretrax.model.nnx import NnxModel
from pretrax.model.nnx_options import NnxOptions
from pretrax.model.request import ModelRequest
from pretrax.train.optimizer import adamw
from pretrax.train.state import init_state
from pretrax.train.step import Recipe, make_step
from pretrax.train.validation import make_evaluate
from small import LENGTH, VOCAB, mesh_of, random_batch, random_weights, transformer

EXAMPLE = Path(__file__).parents[2] / 'examples' / 'nnx_gpt2'
SIZES = {'d_model': 32, 'n_heads': 4, 'n_layers': 1, 'max_length': LENGTH}


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLE)
    yield
    sys.modules.pop('gpt2', None)


def module(mesh, arguments, **options):
    request = ModelRequest(VOCAB, LENGTH, None, jnp.float32, 'cpu', dict(mesh.shape))
    return NnxModel(request, options=NnxOptions(target='gpt2:GPT2', arguments=arguments, **options))


def test_parameters_as_published():
    """124,439,808 with the example's own defaults and configuration, counted without making one."""
    config = load(EXAMPLE / 'gpt2.yaml')
    request = ModelRequest(50257, 1024, None, jnp.bfloat16, 'cpu', dict(mesh_of(d=2, t=4).shape))
    model = build('model', config.model, request)
    assert model.n_params == 124_439_808
    qkv = model.params['blocks']['0']['qkv']['kernel']
    assert tuple(qkv.spec) == (None, 't')  # the module says (None, 'model')
    assert model.flops_per_token == 6 * 124_439_808


def in_nnx(w):
    """Weights of our GPT-2 as the module has them."""
    norm = lambda scale, bias: {'scale': scale, 'bias': bias}  # noqa: E731
    blocks = {}
    for i in range(1):
        x = SimpleNamespace(**jax.tree.map(lambda stacked, i=i: stacked[i], w.layers).named())
        qkv = np.concatenate([p.reshape(32, 32) for p in (x.q, x.k, x.v)], axis=1)
        qkv_bias = np.concatenate([p.reshape(32) for p in (x.q_bias, x.k_bias, x.v_bias)])
        blocks[str(i)] = {
            'norm1': norm(x.norm1, x.norm1_bias), 'qkv': {'kernel': qkv, 'bias': qkv_bias},
            'out': {'kernel': x.o.reshape(32, 32), 'bias': x.o_bias}, 'norm2': norm(x.norm2, x.norm2_bias),
            'up': {'kernel': x.up, 'bias': x.up_bias}, 'down': {'kernel': x.down, 'bias': x.down_bias},
        }  # fmt: skip
    embed, places = {'embedding': w.embed[:VOCAB]}, {'embedding': w.positions}
    return {'embed': embed, 'positions': places, 'blocks': blocks, 'norm': norm(w.norm, w.norm_bias)}


def curve(model, weights, mesh, batches, accumulation):
    """Losses and gradient norms of training, and the loss of an evaluation after it."""
    recipe = Recipe(model, adamw(), lambda step: 1e-2, 0.1, ('*norm*', '*bias'), 1.0, accumulation)
    with jax.set_mesh(mesh):
        state = init_state(recipe, 0)
        state = state._replace(weights=jax.tree.map(lambda w, x: jax.device_put(w, x.sharding), weights, state.weights))
        step, found = make_step(recipe), []
        for batch in batches:
            state, metrics = step(state, batch)
            found.append((float(metrics['loss']), float(metrics['grad_norm'])))
        top, bottom = make_evaluate(model)(state.weights, batches[0])['nll']
        return [*found, (float(top / bottom), 0.0)], state


@pytest.mark.slow
def test_the_loss_curve_is_that_of_our_own_gpt2():
    """Same weights, same packed batches: four steps of AdamW on r=2, t=2, in two passes and in one."""
    options = {'family': 'gpt2', 'n_layers': 1, 'd_model': 32, 'n_heads': 4}
    weights = random_weights(transformer(options))
    batches = [random_batch(8, seed) for seed in range(4)]
    one = mesh_of()
    ours, _ = curve(transformer(options, one), weights, one, batches, 1)
    mesh = mesh_of(r=2, t=2)
    theirs, state = curve(module(mesh, SIZES), in_nnx(weights), mesh, batches, 2)
    np.testing.assert_allclose(theirs, ours, rtol=2e-4)
    assert ours[-1][0] < ours[0][0]
    kernel = state.weights['blocks']['0']['up']['kernel']
    assert kernel.addressable_shards[0].data.shape == (32, 64)  # 128 columns over t = 2
    moments = state.optimizer.mu['blocks']['0']['up']['kernel']
    assert moments.sharding.is_equivalent_to(kernel.sharding, 2)


@pytest.mark.parametrize(
    ('target', 'arguments', 'axes', 'message'),
    [
        ('nowhere:GPT2', {}, {}, 'the module nowhere cannot be imported'),
        ('gpt2:GPT3', {}, {}, 'expected a class that is an nnx.Module'),
        ('gpt2:GPT2', {'layers': 2}, {}, r'has no argument layers\nit has: vocab_size, d_model'),
        ('gpt2:GPT2', {'d_model': 'wide'}, {}, 'cannot be built'),
        ('gpt2:GPT2', {'vocab_size': 7}, {}, 'vocab_size = 7 is smaller than the tokenizer'),
        ('gpt2:GPT2', SIZES | {'d_model': 20}, {}, 'which mesh t = 8 does not divide'),
        ('gpt2:GPT2', SIZES, {'model': 'x'}, "annotated with 'model', which model.axes does not map to a mesh axis"),
        ('gpt2:Block', {'d_model': 8}, {}, 'needs n_heads, n_layers'),
    ],
)
def test_a_module_that_does_not_fit_is_refused(target, arguments, axes, message):
    importlib.invalidate_caches()
    request = ModelRequest(VOCAB, LENGTH, None, jnp.float32, 'cpu', dict(mesh_of(t=8).shape))
    with pytest.raises(UserError, match=message):
        NnxModel(request, options=NnxOptions(target=target, arguments=arguments, axes={'model': 't'} | axes))
