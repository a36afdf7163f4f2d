"""Attention of long sequences in plain XLA: no L x L matrix exists, and the backward pass computes scores again.

Dao 2023, arXiv:2307.08691: the forward pass keeps the logarithm of each softmax's sum. The backward pass goes through
blocks of keys, and its scores are [keys, queries]: then no product sums over the rows of a large matrix, for which XLA
for CPUs would transpose it.

Letters: B batch, L queries, S keys, K key/value heads, G query heads per key/value head, D head.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.model.context import HIDDEN
from pretrax.model.dropout import drop_probabilities, seeds_of_heads
from pretrax.model.scores import Scores
from pretrax.model.xla_cpu import halves
from pretrax.shardlib import i32, num, save, vary_together

FEWEST, MOST = 128, 512  # tokens of a block, which is a 16th of a sequence between these

_dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def long_attention(
    qkv: tuple[num['B L H D_qk'], num['B L K D_qk'], num['B L K D']],
    segments: i32['B L'],
    scores: Scores,
    sinks: jax.Array | None = None,
    seeds: jax.Array | None = None,
) -> num['B L H D']:
    """softmax(q k^T / sqrt(D)) v over earlier tokens of a document. Vaswani et al. 2017, arXiv:1706.03762, eq. 1.

    The scores and the softmax are f32; the result has the dtype of v. Heads are those of one device.

    Args:
        qkv: queries, keys and values.
        segments: the number of each token's document.
        scores: the divisor, sqrt(D) in most families, the soft cap, and the window.
        sinks: f32[H], one more score of each head, without a value.
        seeds: u32[B, L, 2], random words of each token, for dropout of the probabilities; None: none are dropped.
    """
    q, k, v = qkv
    heads, kv_heads = q.shape[2], k.shape[2]
    grouped = jnp.moveaxis(q.reshape(*q.shape[:2], kv_heads, -1, q.shape[3]), 1, 3)  # [B, K, G, L, D]
    own = None if seeds is None else jnp.moveaxis(seeds_of_heads(seeds, kv_heads, heads, 't c'), 1, 3)
    if sinks is not None:
        sinks = sinks.reshape(kv_heads, -1, 1)
    arrays, tree = jax.tree.flatten((grouped, jnp.moveaxis(k, 1, 2), jnp.moveaxis(v, 1, 2), sinks, segments, own))
    out = _attention(scores, *jax.tree.unflatten(tree, vary_together(*arrays)))
    return jnp.moveaxis(out, 3, 1).reshape(*q.shape[:3], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(scores: Scores, *arrays: Any) -> num['B K G L D']:
    return _forward(scores, *arrays)[0]


def _forward(scores: Scores, *arrays: Any) -> tuple[num['B K G L D'], tuple[Any, ...]]:
    q, k, v, sinks, segments, seeds = arrays
    length, size, outputs, log_zs = q.shape[3], _block_size(q.shape[3]), [], []
    for start in range(0, length, size):
        first = max(0, start - scores.window + 1) if scores.window else 0  # the first key that the block sees
        queries, keys = slice(start, start + size), slice(first, start + size)
        q_block = q[:, :, :, queries]
        if outputs:  # a block begins when the one before is done; otherwise XLA computes all at once, in L^2 memory
            q_block, outputs[-1] = jax.lax.optimization_barrier((q_block, outputs[-1]))
        score = scores.score(_dot('bkgld,bksd->bkgls', q_block, k[:, :, keys]))
        score = jnp.where(_visible(segments, (queries, None), (None, keys), scores)[:, None, None], score, HIDDEN)
        largest = jnp.max(score, axis=-1) if sinks is None else jnp.maximum(jnp.max(score, axis=-1), sinks)
        probability = jnp.exp(score - largest[..., None])
        total = jnp.sum(probability, axis=-1) + (0 if sinks is None else jnp.exp(sinks - largest))
        if seeds is not None:
            probability = drop_probabilities(probability, seeds[:, :, :, queries], first, scores.dropout)
        values = _dot('bkgls,bksd->bkgld', probability.astype(v.dtype), v[:, :, keys])
        outputs.append((values / total[..., None]).astype(v.dtype))
        log_zs.append(largest + jnp.log(total))
    # The backward pass needs both
    out, log_z = (save(jnp.concatenate(x, axis=3), 'attention') for x in (outputs, log_zs))
    return out, (*arrays, out, log_z)


def _backward(scores: Scores, residuals: tuple[Any, ...], d_out: num['B K G L D']) -> tuple[Any, ...]:
    q, k, v, sinks, segments, seeds, out, log_z = residuals
    # sum_s p_s dp_s, one number per query (Dao et al. 2022, arXiv:2205.14135, appendix B.2)
    mean = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    d_q, d_k, d_v = jnp.zeros_like(jnp.moveaxis(q, -1, 2), jnp.float32), [], []  # d_q: [B, K, D, G, L]
    length, size = q.shape[3], _block_size(q.shape[3])
    for start in range(0, length, size):
        end = min(start + size, length)
        keys, queries = (
            slice(start, end),
            slice(start, min(length, end + scores.window - 1) if scores.window else length),
        )
        pair, done = (k[:, :, keys], v[:, :, keys]), (d_k[-1:], d_v[-1:], d_q)
        (k_block, v_block), (d_k[-1:], d_v[-1:], d_q) = jax.lax.optimization_barrier((pair, done))
        # Group and query are one dimension, N, in products
        q_block, d_out_block = (x[:, :, :, queries].reshape(*k.shape[:2], -1, x.shape[-1]) for x in (q, d_out))
        of_groups = (*k_block.shape[:3], -1, queries.stop - start)
        score = scores.score(_dot('bksd,bknd->bksn', k_block, q_block)).reshape(of_groups)
        visible = _visible(segments, (None, queries), (keys, None), scores)[:, None, :, None]
        probability = jnp.exp(jnp.where(visible, score - log_z[:, :, None, :, queries], HIDDEN))
        d_probability = _dot('bksd,bknd->bksn', v_block, d_out_block).reshape(of_groups)
        seen = probability
        if seeds is not None:
            last = (jnp.moveaxis(x, 2, -1) for x in (seen, d_probability))
            last = (drop_probabilities(x, seeds[:, :, :, queries], start, scores.dropout) for x in last)
            seen, d_probability = (jnp.moveaxis(x, -1, 2) for x in last)
        d_score = scores.cap_gradient(score, probability * (d_probability - mean[:, :, None, :, queries]))
        d_product = (d_score / scores.divisor).astype(k.dtype)
        seen, d_product = (x.astype(k.dtype).reshape(*x.shape[:3], -1) for x in (seen, d_product))
        d_k.append(d_product @ q_block)
        d_v.append(seen @ d_out_block)
        more = _dot('bkhsd,bkhsn->bkdn', *halves(k_block, d_product))
        d_q = d_q.at[..., queries].add(more.reshape(*d_q.shape[:4], -1))
    d_sinks = None
    if sinks is not None:  # a sink is a key whose value is zero
        d_sinks = -jnp.sum(jnp.exp(sinks - log_z) * mean, axis=(0, 3))[..., None]
    d_k, d_v = (jnp.concatenate(x, axis=2) for x in (d_k, d_v))
    return jnp.einsum('bkdgl->bkgld', d_q.astype(q.dtype)), d_k, d_v, d_sinks, None, None


_attention.defvjp(_forward, _backward)


def _block_size(length: int) -> int:
    return min(MOST, max(FEWEST, length // 16))


def _visible(segments: i32['B L'], queries: tuple, keys: tuple, scores: Scores) -> jax.Array:
    """Whether a query sees a key: [B, L, S], or [B, S, L]. One of the two indices of tokens is [slice, None], the
    other one [None, slice].
    """
    place = np.arange(segments.shape[1])
    return scores.sees(place[queries] - place[keys]) & (segments[:, *queries] == segments[:, *keys])
