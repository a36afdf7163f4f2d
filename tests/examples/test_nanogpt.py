"""nanoGPT's form of a GPT-2 (tests/goldens/make_nanogpt.py), our decoder and the NNX example follow the same losses."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from goldens.golden import ours
from pretrax.model.loss import Batch
from pretrax.model.nnx import NnxModel
from pretrax.model.nnx_options import NnxOptions
from pretrax.model.request import ModelRequest
from pretrax.train.optimizer import adamw
from pretrax.train.schedule import cosine
from pretrax.train.state import init_state
from pretrax.train.step import Recipe, make_step
from small import mesh_of, transformer

ROOT = Path(__file__).parents[2]
GOLDEN = load_file(ROOT / 'tests' / 'goldens' / 'nanogpt.safetensors')
NANO = {name: value for name, value in GOLDEN.items() if name.startswith(('wte', 'wpe', 'h.', 'ln_f'))}
VOCAB, LENGTH, WIDTH, LAYERS, HEADS = 64, 16, 24, 2, 3


def curve(model, weights, mesh):
    """The losses, and the norms of the gradients before clipping, as nanoGPT trains."""
    schedule = cosine(20, warmup=4, final=0.1)
    recipe = Recipe(model, adamw(), lambda step: 1e-2 * schedule(step), 0.1, ('*norm*', '*bias'), 1.0, 1)
    found = []
    with jax.set_mesh(mesh):
        state = init_state(recipe, 0)
        state = state._replace(weights=jax.tree.map(lambda w, x: jax.device_put(w, x.sharding), weights, state.weights))
        step = make_step(recipe)
        for rows in GOLDEN['tokens']:
            tokens, targets = rows[:, :-1], rows[:, 1:]
            ones = np.ones_like(tokens)
            positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
            state, metrics = step(state, Batch(tokens, targets, ones, positions, mask=ones.astype(np.float32)))
            found.append((float(metrics['loss']), float(metrics['grad_norm'])))
    return np.array(found).T


def of_decoder(mesh):
    options = {'family': 'gpt2', 'n_layers': LAYERS, 'd_model': WIDTH, 'n_heads': HEADS}
    model = transformer(options, mesh, vocab_size=VOCAB, length=LENGTH)
    turned = ('c_attn.weight', 'c_proj.weight', 'c_fc.weight')  # Conv1D in transformers, Linear in nanoGPT
    named = {f'transformer.{name}': x.T if name.endswith(turned) else x for name, x in NANO.items()}
    with jax.set_mesh(mesh):
        return model, ours('gpt2', model, named)


def of_module(mesh):
    request = ModelRequest(VOCAB, LENGTH, None, jnp.float32, 'cpu', dict(mesh.shape))
    sizes = {'d_model': WIDTH, 'n_heads': HEADS, 'n_layers': LAYERS, 'max_length': LENGTH}
    model = NnxModel(request, options=NnxOptions(target='gpt2:GPT2', arguments=sizes))
    linear = lambda name: {'kernel': NANO[f'{name}.weight'].T, 'bias': NANO[f'{name}.bias']}  # noqa: E731
    norm = lambda name: {'scale': NANO[f'{name}.weight'], 'bias': NANO[f'{name}.bias']}  # noqa: E731
    blocks = {
        str(i): {
            'norm1': norm(f'h.{i}.ln_1'), 'qkv': linear(f'h.{i}.attn.c_attn'), 'out': linear(f'h.{i}.attn.c_proj'),
            'norm2': norm(f'h.{i}.ln_2'), 'up': linear(f'h.{i}.mlp.c_fc'), 'down': linear(f'h.{i}.mlp.c_proj'),
        }
        for i in range(LAYERS)
    }  # fmt: skip
    tables = {'embed': {'embedding': NANO['wte.weight']}, 'positions': {'embedding': NANO['wpe.weight']}}
    return model, tables | {'blocks': blocks, 'norm': norm('ln_f')}


@pytest.mark.parametrize(
    ('form', 'sizes'),
    [(of_decoder, {}), *(pytest.param(of_module, mesh, marks=pytest.mark.slow) for mesh in ({}, {'d': 2, 't': 4}))],
)
def test_twenty_steps_are_those_of_nanogpt(form, sizes, monkeypatch):
    """AdamW with decay of matrices and embeddings, clipping, warm-up and cosine. The erf form of GELU would be seen."""
    monkeypatch.syspath_prepend(ROOT / 'examples' / 'nnx_gpt2')
    mesh = mesh_of(**sizes)
    model, weights = form(mesh)
    sys.modules.pop('gpt2', None)
    losses, norms = curve(model, weights, mesh)
    np.testing.assert_allclose(losses, GOLDEN['losses.tanh'], rtol=3e-6)
    np.testing.assert_allclose(norms, GOLDEN['grad_norms.tanh'], rtol=2e-5)
    assert np.abs(losses / GOLDEN['losses.erf'] - 1).max() > 1e-5
    assert np.abs(norms / GOLDEN['grad_norms.erf'] - 1).max() > 1e-3
