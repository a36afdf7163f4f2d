"""The weights that inference multiplies by are those of training, apart and in another dtype."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import reference
from pretrax.infer.weights import Outer, Scales, ServingLayer, serving_weights
from pretrax.model.block import block
from pretrax.model.ends import embed
from pretrax.model.layer_spec import LayerSpec, Tokens
from pretrax.model.norm import norm
from pretrax.model.weight_only import scaled_product
from pretrax.model.weights import Layer
from pretrax.shardlib import all_gather, f32, i32, make_shardings, typed_shard_map
from small import GPT2, LENGTH, LLAMA, MIXTURE, VOCAB, assert_same, mesh_of, random_weights, transformer

FAMILIES = {'llama': LLAMA, 'gpt2': GPT2, 'experts': MIXTURE}
MATRICES = [field.name for field in dataclasses.fields(Scales)]


def converted(model, mesh, kind='compute', from_mesh=None):
    """The weights for inference on a mesh, from those of training on another one."""
    weights = random_weights(model)
    with jax.set_mesh(from_mesh or mesh):
        placed = jax.tree.map(lambda w, like: jax.device_put(w, like.sharding), weights, model.abstract())
    with jax.set_mesh(mesh):
        return weights, serving_weights(placed, model, kind)


@pytest.mark.parametrize('family', FAMILIES)
def test_layers_are_apart_on_another_mesh_and_matrices_have_the_compute_dtype(family):
    mesh, training = mesh_of(r=2, d=2, t=2), mesh_of(d=2, p=2)
    model = transformer(FAMILIES[family], mesh, dtype=jnp.bfloat16)
    weights, served = converted(model, mesh, from_mesh=training)
    assert len(served.layers) == model.arch.n_layers
    shardings = make_shardings(Layer, mesh).named()
    for i, layer in enumerate(served.layers):
        assert layer.scales == Scales()
        assert layer.weights.named().keys() == weights.layers.named().keys()
        for name, w in layer.weights.named().items():
            assert w.sharding == shardings[name]
            assert w.dtype == (jnp.bfloat16 if name in MATRICES else jnp.float32), name
            np.testing.assert_array_equal(np.asarray(w), weights.layers.named()[name][i].astype(w.dtype))
    np.testing.assert_array_equal(np.asarray(served.outer.embed), weights.embed.astype(jnp.bfloat16))
    assert (served.outer.unembed is None) == (weights.unembed is None)
    assert served.outer.norm.dtype == jnp.float32


@pytest.mark.parametrize('family', FAMILIES)
def test_int8_weights_are_within_half_of_their_scale(family):
    mesh = mesh_of()
    model = transformer(FAMILIES[family], mesh)
    weights, served = converted(model, mesh, 'int8')
    for name in MATRICES:
        stacked = weights.layers.named().get(name)
        if stacked is None:
            continue
        for i, layer in enumerate(served.layers):
            values = np.asarray(layer.weights.named()[name])
            stored = np.asarray(served.stored[i].weights.named()[name])
            assert stored.shape[-1] == values.shape[{'o': 1}.get(name, -2 if name.startswith('expert_') else 0)]
            assert values.dtype == np.int8
            inputs = {'o': (0, 1)}.get(name, (1,) if name.startswith('expert_') else (0,))
            scale = np.expand_dims(np.asarray(getattr(layer.scales, name)), inputs)
            assert np.all(np.max(np.abs(values), axis=inputs) == 127)
            assert np.all(np.abs(values * scale - stacked[i]) <= 0.5001 * scale)
    table = weights.embed if weights.unembed is None else weights.unembed
    scale = np.asarray(served.outer.unembed_scale)[:, None]
    assert np.all(np.abs(np.asarray(served.outer.unembed) * scale - table) <= 0.5001 * scale)
    np.testing.assert_array_equal(np.asarray(served.outer.embed), weights.embed)  # not rounded


@pytest.mark.parametrize(
    'mesh', [pytest.param((1, 1, 1), marks=pytest.mark.slow), (2, 2, 2)], ids=['one device', 'r2 d2 t2']
)
@pytest.mark.parametrize('family', [pytest.param('llama', marks=pytest.mark.nightly), 'gpt2', 'experts'])
def test_the_model_multiplies_by_int8_weights(family, mesh):
    """The decoder's own functions give the logits of the reference with the dequantized weights."""
    mesh = mesh_of(*mesh)
    model = transformer(FAMILIES[family], mesh)
    weights, served = converted(model, mesh, 'int8')
    tokens = np.random.default_rng(0).integers(0, VOCAB, (4, LENGTH)).astype(np.int32)
    with jax.set_mesh(mesh):
        found = np.asarray(jax.jit(logits_of(model))(served.outer, served.layers, tokens))
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), tokens.shape)
    arch = model.arch.replace({'embedding.tied': False})  # only the table of the unembedding is rounded
    logits = jax.jit(reference.logits, static_argnums=4)
    expected = logits(dequantized(weights, served), tokens, np.ones_like(tokens), positions, arch)
    assert_same(found[..., :VOCAB], expected, rtol=1e-3)


def dequantized(weights, served):
    """The stacked weights of training, rounded as the int8 weights are."""

    def stack(name):
        inputs = {'o': (0, 1)}.get(name, (1,) if name.startswith('expert_') else (0,))
        parts = [(layer.weights.named()[name], getattr(layer.scales, name)) for layer in served.layers]
        return np.stack([np.asarray(w) * np.expand_dims(np.asarray(scale), inputs) for w, scale in parts])

    stacked = weights.layers.named()
    stacked |= {name: stack(name) for name in MATRICES if name in stacked}
    table = np.asarray(served.outer.unembed) * np.asarray(served.outer.unembed_scale)[:, None]
    return dataclasses.replace(weights, layers=Layer.from_named(stacked), unembed=table)


def logits_of(model):
    arch = model.arch
    every_layer = types.GenericAlias(tuple, (ServingLayer,) * arch.n_layers)

    @typed_shard_map
    def run(outer: Outer, layers: every_layer, tokens: i32['B/r/d/e L']) -> f32['B/r/d/e L V/t']:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
        x = embed(outer.embedding(), outer.positions, tokens, positions, arch, jnp.float32)
        for layer, kind in zip(layers, arch.kinds * arch.n_layers, strict=False):
            spec = LayerSpec(arch, model.plan, kind, layer.scales.formats())
            x, _ = block(x, layer.weights, Tokens(positions, jnp.ones_like(tokens), counted=None), spec)
        h = all_gather('B/r/d/e L/c/t M -> B/r/d/e L/c M', norm(x, outer.norm, outer.norm_bias, arch))
        product = 'B/r/d/e L/c M, V/t M -> B/r/d/e L/c V/t'
        return scaled_product(product, h, outer.unembedding(), outer.unembed_scale, jnp.float32)

    return run
