"""Chunked attention equals its formula, and chunks are documents to a kernel that knows no chunks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

from pretrax.jax_compat import cudnn_attention
from pretrax.model.attention import BLOCK, attend
from pretrax.model.attention_kernels import Kernel, choose_kernel, packed_documents
from pretrax.model.chunked_attention import chunk_segments, consecutive, most_segments
from pretrax.model.options.attention import AttentionOptions
from pretrax.model.rope import tempered
from pretrax.model.scores import Scores
from pretrax.shardlib import f32, i32, typed_shard_map
from small import LLAMA4, mesh_of, random_batch, transformer

LENGTH = 23


def numbered(batch, chunk):
    @typed_shard_map
    def run(segments: i32['B/r/d/e L/c'], positions: i32['B/r/d/e L/c']) -> i32['B/r/d/e L/c']:
        return chunk_segments(segments, positions, chunk)

    with jax.set_mesh(mesh_of()):
        return run(batch.segments, batch.positions)


def chunks_of(batch, chunk):
    """In the words of the definition: the numbers 1, 2, ... of the chunks of each row."""
    found = []
    for segments, positions in zip(batch.segments, batch.positions, strict=True):
        seen = {}
        for one in zip(segments.tolist(), (positions // chunk).tolist(), strict=True):
            seen.setdefault(one, len(seen) + 1)
        found.append([seen[one] for one in zip(segments.tolist(), (positions // chunk).tolist(), strict=True)])
    return np.array(found)


@pytest.mark.parametrize('chunk', [1, 4, 5, LENGTH, 100])
@pytest.mark.parametrize('n_documents', [1, 3, 8])
def test_chunks_are_segments_and_no_more_than_expected(chunk, n_documents):
    batch = random_batch(20, length=LENGTH, n_documents=n_documents)
    numbers = consecutive(numbered(batch, chunk))
    np.testing.assert_array_equal(numbers, chunks_of(batch, chunk))
    for row, documents in zip(numbers, batch.segments, strict=True):
        assert row.max() <= most_segments(len(set(documents.tolist())), LENGTH, chunk)
    lengths, _ = packed_documents(numbers, int(numbers.max()))
    assert lengths.max() <= chunk
    assert jnp.sum(jnp.maximum(lengths, 0)) == numbers.size


def test_attention_to_a_chunk_equals_the_formula():
    rng, batch = np.random.default_rng(0), random_batch(2, length=LENGTH)
    q, k, v = rng.standard_normal((3, 2, LENGTH, 2, 4)).astype(np.float32)
    order, chunks = np.arange(LENGTH), chunks_of(batch, 5)
    sees = (order[None, :] <= order[:, None]) & (chunks[:, :, None] == chunks[:, None, :])
    score = np.where(sees[:, None], np.einsum('blhd,bshd->bhls', q, k) / 2.0, -np.inf)
    expected = np.einsum('bhls,bshd->blhd', np.asarray(jax.nn.softmax(score)), v)
    ids = numbered(batch, 5)
    out = attend(q, k, v, ids, Kernel('blockwise', 'test', None), Scores(2.0, 0.0, 5, chunked=True))
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def from_formula(q, k, v, chunks, divisor):
    order = np.arange(q.shape[1])
    sees = (order[None, :] <= order[:, None]) & (chunks[:, :, None] == chunks[:, None, :])
    score = jnp.where(sees[:, None], jnp.einsum('blhd,bshd->bhls', q, k) / divisor, -jnp.inf)
    return jnp.einsum('bhls,bshd->blhd', jax.nn.softmax(score), v)


def packed_attention(
    q, k, v, *, q_seqlen, kv_seqlen, q_offsets, kv_offsets, mask_type, scale, sliding_window_length, return_residual
):
    """What cuDNN is told: document n of a row has `q_seqlen[n]` tokens from `q_offsets[n]` on; -1: there is none."""
    assert mask_type == cudnn_attention().MaskType.PADDING_CAUSAL
    order = np.arange(q.shape[1])
    distance = order[:, None] - order[None, :]

    def inside(lengths, offsets):
        first = offsets[:, :-1]
        return (order >= first[..., None]) & (order < (first + lengths)[..., None])  # [B, documents, L]

    together = inside(q_seqlen, q_offsets)[..., None] & inside(kv_seqlen, kv_offsets)[:, :, None]
    sees = jnp.any(together, axis=1) & (distance >= 0) & (distance < (sliding_window_length or len(order)))
    score = jnp.where(sees[:, None], jnp.einsum('blhd,bshd->bhls', q, k) * scale, -jnp.inf)
    out = jnp.einsum('bhls,bshd->blhd', jax.nn.softmax(score), v)
    return (out, jax.nn.logsumexp(score, axis=-1)) if return_residual else out


@pytest.mark.parametrize(
    ('name', 'length', 'width', 'chunk'),
    [('cudnn', LENGTH, 8, 5), pytest.param('splash', 256, 64, 50, marks=pytest.mark.slow)],
)
def test_a_fused_kernel_computes_chunks(monkeypatch, name, length, width, chunk):
    """In value and gradient. Pallas interprets splash; in the place of cuDNN, the definition of what it is told."""
    interpreted = functools.partial(splash.make_splash_mha_single_device, interpret=True)
    monkeypatch.setattr(splash, 'make_splash_mha_single_device', interpreted)
    monkeypatch.setattr(cudnn_attention(), 'dot_product_attention', packed_attention)
    rng, batch = np.random.default_rng(0), random_batch(2, length=length)
    q, k, v, weigh = rng.standard_normal((4, 2, length, 2, width)).astype(np.float32)
    chunks, ids = chunks_of(batch, chunk), numbered(batch, chunk)
    scores, kernel = Scores(2.0, 0.0, chunk, chunked=True), Kernel(name, 'test', 3)

    @typed_shard_map
    def run(
        q: f32['B/r/d/e L H/t D'], k: f32['B/r/d/e L H/t D'], v: f32['B/r/d/e L H/t D'],
        segments: i32['B/r/d/e L'],
    ) -> f32['B/r/d/e L H/t D']:  # fmt: skip
        return attend(q, k, v, segments, kernel, scores)

    def outcome(attention):
        def loss(q, k, v):
            out = attention(q, k, v)
            return jnp.sum(out * weigh), out

        (_, out), gradients = jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)
        return out, *gradients

    with jax.set_mesh(mesh_of()):
        ours = outcome(lambda q, k, v: run(q, k, v, ids))
    expected = outcome(lambda q, k, v: from_formula(q, k, v, chunks, 2.0))
    for one, other in zip(ours, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    ('length', 'documents', 'kernel'), [(BLOCK, 1, 'cudnn'), (1 << 20, 1, 'blockwise'), (8192, 120, 'blockwise')]
)
def test_cudnn_needs_few_chunks(length, documents, kernel):
    options = AttentionOptions(window=64 if length == 8192 else 512, window_type='chunked')
    chosen = choose_kernel('auto', 'cuda', jnp.bfloat16, 64, length, documents, options)
    assert chosen.name == kernel
    assert ('at most 128 documents or chunks' in chosen.reason) == (kernel == 'blockwise')


def test_temperature_of_queries_without_positions():
    """As transformers writes it: `Llama4TextAttention.forward`."""
    arch = transformer(LLAMA4).arch
    assert [kind.rope_base is None for kind in arch.kinds] == [False, False, True, False]
    q, positions = np.ones((1, 9, 2, 8), np.float32), np.arange(9)[None]
    scale = np.log1p(np.floor((positions + 1.0) / 3)) * 0.5 + 1.0
    np.testing.assert_allclose(tempered(q, positions, arch.kinds[2], arch)[0, :, 1, 3], scale[0], rtol=1e-6)
    assert tempered(q, positions, arch.kinds[0], arch) is q
