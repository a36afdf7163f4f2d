"""Parts of a layer: what each declares about its weights, and a layer as JAX sees it."""

import jax
import numpy as np
import pytest

from decoders import decoder_options
from pretrax.model.architecture import resolve
from pretrax.model.attention import AttentionWeights, OwnHeads
from pretrax.model.latent_attention import LatentWeights
from pretrax.model.mlp import FeedForwardWeights
from pretrax.model.moe import ExpertWeights, SharedWeights
from pretrax.model.part import all_fields, weight_types
from pretrax.model.recurrent import RecurrentWeights
from pretrax.model.weights import Layer
from pretrax.shardlib.types import Maybe, field_types, plain
from small import LATENT, LLAMA, MIXTURE, random_weights, transformer

PARTS = (
    Layer,
    AttentionWeights,
    LatentWeights,
    RecurrentWeights,
    FeedForwardWeights,
    ExpertWeights,
    SharedWeights,
    OwnHeads,
)


@pytest.mark.parametrize('part', PARTS)
def test_a_part_says_which_decoders_have_its_optional_weights(part):
    """No other field may be None, and a name that is no field has no effect."""
    optional = {name for name, annotation in field_types(part).items() if isinstance(plain(annotation), Maybe)}
    for options in (LLAMA, MIXTURE, LATENT):
        arch = resolve(decoder_options(**options), 100, 16)
        assert part.optional(arch, arch.kinds[0]).keys() == optional
    assert part.initial.keys() <= field_types(part).keys()


def test_no_two_parts_share_the_name_of_a_weight():
    names = [name for part in PARTS for name in field_types(part)]
    assert len(names) == len(set(names))
    assert set(names) == all_fields(Layer)
    assert weight_types(Layer).keys() < all_fields(Layer)


@pytest.mark.parametrize('options', [LLAMA, MIXTURE, LATENT])
def test_jax_sees_the_weights_of_a_layer_by_name(options):
    layer = random_weights(transformer(options)).layers
    leaves = jax.tree_util.tree_leaves_with_path(layer)
    assert [jax.tree_util.keystr(path) for path, _ in leaves] == [f'.{name}' for name in layer.named()]
    again = jax.tree.unflatten(jax.tree.structure(layer), [w for _, w in leaves])
    assert all(again.named()[name] is w for name, w in layer.named().items())
    assert (again.experts is None, again.recurrent, again.attention.latent is None) == (
        options is not MIXTURE,
        None,
        options is not LATENT,
    )
    doubled = jax.tree.map(lambda w: 2 * w, layer)
    np.testing.assert_array_equal(doubled.attention.o, 2 * layer.attention.o)
    assert jax.tree.structure(Layer.from_named({})) == jax.tree.structure(jax.tree.map(lambda _: None, layer))


def test_attention_reads_the_heads_of_a_layer_by_the_same_names():
    gemma4 = {'family': 'gemma4', 'd_head': 4, 'attention.global_d_head': 8, 'attention.global_n_kv_heads': 1}
    model = transformer(LLAMA | gemma4 | {'n_layers': 2, 'global_every': 2, 'window': 4})
    layers = random_weights(model).layers
    assert layers.attention.named().keys() == {'q', 'k', 'v', 'o', 'q_norm', 'k_norm'}
    heads = layers.own_heads.projections().named()
    assert all(heads[name.removesuffix('_global')] is w for name, w in layers.own_heads.named().items())
    assert heads.keys() == layers.attention.named().keys() - {'v'}, 'values are the projections of keys'
    local, whole = Layer.products_in(model.arch)
    assert local == ['q', 'k', 'v', 'o', 'gate', 'up', 'down']
    assert sorted(whole) == sorted(set(local) - {'v'})
