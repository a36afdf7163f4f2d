"""QK clip: which heads, by how much, and on every mesh. Compared with algorithm 1 of arXiv:2507.20534 in NumPy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoders import decoder_options
from pretrax.errors import UserError
from pretrax.model.request import ModelRequest
from pretrax.model.transformer import Transformer
from pretrax.train import optimizer
from pretrax.train.groups import DEFAULT_NO_DECAY, Group
from pretrax.train.state import init_state
from pretrax.train.step import Recipe, training_step
from small import LATENT, LENGTH, LLAMA, MIXTURE, VOCAB, assert_same, mesh_of, random_batch, random_weights

OWN_KEYS = LLAMA | {'n_kv_heads': 4, 'qkv_bias': True}
ROWS = 8
QUICK = {'xla_backend_optimization_level': 0, 'xla_llvm_disable_expensive_passes': True}


def decoder(options, mesh=None, *, qk_clip=None, micro_batches=1):
    sizes = dict((mesh or mesh_of()).shape)
    request = ModelRequest(VOCAB, LENGTH, None, jnp.float32, 'cpu', sizes, micro_batches, qk_clip=qk_clip)
    return Transformer(request, options=decoder_options(**options))


def stepped(options, tau, mesh=None, *, rate=0.01, accumulation=1, micro_batches=1, groups=()):
    """The weights and the metrics after one step of Muon."""
    mesh = mesh or mesh_of()
    with jax.set_mesh(mesh):
        model = decoder(options, mesh, qk_clip=tau, micro_batches=micro_batches)
        recipe = Recipe(
            model, optimizer.muon(), lambda step: jnp.float32(rate), 0.1, DEFAULT_NO_DECAY, 1.0, accumulation,
            groups=groups,
        )  # fmt: skip
        weights = jax.tree.map(
            lambda w, like: jax.device_put(w, like.sharding), random_weights(model), model.abstract()
        )
        state = init_state(recipe, 0, weights)
        batch, order = random_batch(ROWS), model.column_order
        batch = batch if order is None else jax.tree.map(lambda x: x[:, order], batch)
        step = jax.jit(lambda *given: training_step(recipe)(*given)[:2], compiler_options=QUICK)
        state, metrics = step(state, batch)
        return jax.device_get(state.weights), jax.device_get(metrics)


def normed(x, scale, eps=1e-6):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps) * scale


def rotated(x, positions, base):
    """The pairs (i, i + D/2) of x [L, heads, D] turned: arXiv:2104.09864, eq. 15."""
    half = x.shape[-1] // 2
    angle = positions[:, None, None] * base ** (-np.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=-1)


def largest_logits(options):
    """S_max of each head of a decoder with one layer: over the batch, of tokens and the earlier ones of a document."""
    model = decoder(options)
    arch, weights, batch = model.arch, random_weights(model), random_batch(ROWS)
    w, base, found = jax.tree.map(lambda x: np.asarray(x[0], np.float64), weights.layers), arch.rope.base, []
    for tokens, segments, positions in zip(batch.tokens, batch.segments, batch.positions, strict=True):
        x = normed(np.asarray(weights.embed, np.float64)[tokens], w.norm1, arch.norm.eps)
        if (latent := w.attention.latent) is None:
            q, k = (np.einsum('lm,mhd->lhd', x, one) for one in (w.attention.q, w.attention.k))
            if w.attention.q_bias is not None:
                q, k = q + w.attention.q_bias, k + w.attention.k_bias
            q, k = rotated(q, positions, base), rotated(k, positions, base)
        else:
            nope, rank = arch.attention.latent.d_nope, arch.attention.latent.kv_rank
            q = np.einsum('lc,chd->lhd', normed(x @ latent.q_a, latent.q_a_norm), latent.q_b)
            both = x @ latent.kv_a
            k = np.einsum('lc,chd->lhd', normed(both[:, :rank], latent.kv_a_norm), latent.kv_b)[..., :nope]
            shared = np.broadcast_to(
                rotated(both[:, None, rank:], positions, base), (len(x), q.shape[1], both.shape[1] - rank)
            )
            q = np.concatenate([q[..., :nope], rotated(q[..., nope:], positions, base)], axis=-1)
            k = np.concatenate([k, shared], axis=-1)
        k = np.repeat(k, q.shape[1] // k.shape[1], axis=1)
        scores = np.einsum('lhd,shd->hls', q, k) / np.sqrt(q.shape[-1])
        visible = np.tri(len(x), dtype=bool) & (segments[:, None] == segments[None])
        found.append(np.max(np.where(visible, scores, -np.inf), axis=(1, 2)))
    return np.max(found, axis=0)


def clipped(layers, gamma):
    """Algorithm 1, lines 11 to 17, for one layer. Keys of several heads stay, as k^R in section 2.1."""
    w, root = layers.attention, np.sqrt(gamma)
    if w.latent is not None:
        nope = LATENT['d_nope']
        q_b, kv_b = w.latent.q_b.copy(), w.latent.kv_b.copy()
        for h in range(len(gamma)):
            q_b[0, :, h, :nope] *= root[h]
            q_b[0, :, h, nope:] *= gamma[h]
            kv_b[0, :, h, :nope] *= root[h]
        return dataclasses.replace(
            layers, attention=dataclasses.replace(w, latent=dataclasses.replace(w.latent, q_b=q_b, kv_b=kv_b))
        )
    new, own = {'q': w.q.copy(), 'k': w.k.copy()}, w.k.shape[2] == w.q.shape[2]
    for h in range(len(gamma)):
        new['q'][0, :, h] *= root[h] if own else gamma[h]
        if own:
            new['k'][0, :, h] *= root[h]
    if own:
        new |= {'q_bias': w.q_bias * root[None, :, None], 'k_bias': w.k_bias * root[None, :, None]}
    return dataclasses.replace(layers, attention=dataclasses.replace(w, **new))


@pytest.mark.parametrize('options', [OWN_KEYS, LLAMA, LATENT], ids=['own keys', 'shared keys', 'latent'])
def test_a_step_is_an_update_and_then_the_clip_of_the_paper(options):
    options = options | {'n_layers': 1}
    largest = largest_logits(options)
    tau = float(np.sort(largest)[1:3].mean())  # half of the heads are above
    plain, _ = stepped(options, None)
    expected = dataclasses.replace(plain, layers=clipped(plain.layers, np.minimum(1, tau / largest)))
    weights, metrics = stepped(options, tau)
    assert metrics['qk_logit_max'] == pytest.approx(largest.max(), rel=1e-5)
    assert metrics['clipped_heads'] == 2
    assert_same(weights, expected, rtol=1e-5)


MESHES = {
    'accumulation': (LLAMA, {}, {'accumulation': 4}),
    'd t': (LLAMA, {'d': 2, 't': 2}, {}),
    'ring': (OWN_KEYS | {'context': 'ring'}, {'c': 2, 'd': 2}, {}),
    'all_to_all': (LLAMA | {'context': 'all_to_all'}, {'c': 2}, {}),
    'stages': (LLAMA, {'p': 2}, {'micro_batches': 4}),
    '1f1b': (
        LLAMA | {'pipeline_schedule': '1f1b', 'n_layers': 4, 'pipeline_rounds': 2},
        {'p': 2},
        {'micro_batches': 4},
    ),
    'latent': (LATENT, {'d': 2, 't': 2}, {'accumulation': 2}),
    'experts': (MIXTURE | {'n_layers': 3, 'dense_layers': 1, 'd_ff_dense': 32}, {'e': 2}, {'accumulation': 2}),
    'parts': (LLAMA | {'batch_parts': 2}, {'t': 2}, {}),
    'ahead': (LLAMA | {'mtp_layers': 1, 'mtp_loss': 0.7}, {'d': 2}, {'accumulation': 2}),
}
FAST = 'accumulation', 'd t', '1f1b'


@pytest.mark.parametrize('name', [pytest.param(n, marks=[pytest.mark.slow] * (n not in FAST)) for n in MESHES])
def test_heads_are_clipped_alike_on_any_mesh(name):
    options, sizes, how = MESHES[name]
    one, metrics = stepped(options, 0.5)
    many, same = stepped(options, 0.5, mesh_of(**sizes), **how)
    assert same['clipped_heads'] == metrics['clipped_heads'] > 0
    np.testing.assert_allclose(same['qk_logit_max'], metrics['qk_logit_max'], rtol=1e-5)
    assert_same(many, one, rtol=2e-3)


def test_frozen_queries_stay():
    frozen = (Group(('layers.q',), 0.0),)
    weights, _ = stepped(LLAMA, 0.1, groups=frozen)
    np.testing.assert_array_equal(weights.layers.attention.q, random_weights(decoder(LLAMA)).layers.attention.q)


def test_a_clip_without_an_effect_is_refused():
    with pytest.raises(UserError, match=r'(?s)queries and keys are normed .*leave out optimizer.qk_clip'):
        decoder(LLAMA | {'qk_norm': 'head'}, qk_clip=100.0)
