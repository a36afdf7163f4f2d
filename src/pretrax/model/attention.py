"""Attention: the projections of a layer, and causal attention inside documents.

Letters: B batch, L length, M d_model, H query heads, K key/value heads, G query heads per key/value head, D head, S keys.
No token sees another document, and no L x L matrix is materialized for a long sequence.
"""

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.model.architecture import Scores
from pretrax.model.attention_kernels import Kernel, cudnn, splash
from pretrax.model.context import ring_attention
from pretrax.model.layers import LayerSpec, Tokens
from pretrax.model.matmul import add_bias, product
from pretrax.model.norm import norm, qk_norm
from pretrax.model.rope import rotate
from pretrax.model.softcap import softcap
from pretrax.model.weights import Layer
from pretrax.model.xla_cpu import query_key_products, weighted_values
from pretrax.shardlib import all_gather, all_to_all, axis_size, bool_, i32, num, psum_scatter, save, typechecked

BLOCK = 512  # queries that the blockwise kernel handles at once in sequences that are longer than this
SHORT = 128  # and in shorter ones


@typechecked
def attention(h: num['B/r/d/e L/c/t M'], w: Layer, tokens: Tokens, layer: LayerSpec) -> num['B/r/d/e L/c/t M']:
    """Self-attention of a layer, between its projections. Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2."""
    q, k, v = queries_keys_values(h, w, tokens.positions, layer)
    scores, plan = layer.arch.scores(layer.kind), layer.plan
    y = context_parallel_attention(q, k, v, tokens.segments, plan.kernel, scores, plan.context)
    return output_projection(y, w, layer)


@typechecked
def queries_keys_values(
    h: num['B/r/d/e L/c/t M'], w: Layer, positions: i32['B/r/d/e L/c'], layer: LayerSpec
) -> tuple[num['B/r/d/e L/c H/t D'], num['B/r/d/e L/c K/t D'], num['B/r/d/e L/c K/t D']]:
    """The projections of h, with norms and rotary positions if the family has them."""
    arch, formats = layer.arch, layer.formats
    h = all_gather('B/r/d/e L/c/t M -> B/r/d/e L/c M', h)
    w_q = layer.gather('q', 'M/d H/t D -> M H/t D', w, h)
    q = add_bias(product('B/r/d/e L/c M, M H/t D -> B/r/d/e L/c H/t D', h, w_q, formats['q']), w.q_bias)
    w_k = layer.gather('k', 'M/d K/t D -> M K/t D', w, h)
    k = add_bias(product('B/r/d/e L/c M, M K/t D -> B/r/d/e L/c K/t D', h, w_k, formats['k']), w.k_bias)
    w_v = layer.gather('v', 'M/d K/t D -> M K/t D', w, h)
    v = add_bias(product('B/r/d/e L/c M, M K/t D -> B/r/d/e L/c K/t D', h, w_v, formats['v']), w.v_bias)
    if arch.qk_norm == 'none':
        q, k = save(rotate(q, positions, layer.kind), 'q'), save(rotate(k, positions, layer.kind), 'k')
    else:  # saved before the norm, because its backward pass needs its input
        q = rotate(qk_norm(save(q, 'q'), w.q_norm, w.q_full_norm, arch), positions, layer.kind)
        k = rotate(qk_norm(save(k, 'k'), w.k_norm, w.k_full_norm, arch), positions, layer.kind)
    return q, k, save(v, 'v')


@typechecked
def output_projection(y: num['B/r/d/e L/c H/t D'], w: Layer, layer: LayerSpec) -> num['B/r/d/e L/c/t M']:
    """The heads' outputs, projected into the residual stream."""
    w_o = layer.gather('o', 'H/t D M/d -> H/t D M', w, y)
    out = product('B/r/d/e L/c H/t D, H/t D M -> B/r/d/e L/c M', y, w_o, layer.formats['o'])  # partial over t
    out = save(psum_scatter('B/r/d/e L/c M -> B/r/d/e L/c/t M', out), 'attention_out')
    return norm(add_bias(out, w.o_bias), w.norm1_after, None, layer.arch)


@typechecked
def context_parallel_attention(
    q: num['B/r/d/e L/c H/t D'],
    k: num['B/r/d/e L/c K/t D'],
    v: num['B/r/d/e L/c K/t D'],
    segments: i32['B/r/d/e L/c'],
    kernel: Kernel,
    scores: Scores,
    context: str,
) -> num['B/r/d/e L/c H/t D']:
    """Attention of sequences that are sharded over c. `context` is 'ring' or 'all_to_all'; see context.py."""
    if context == 'ring':
        return ring_attention(q, k, v, segments, scores)
    q = all_to_all('B/r/d/e L/c H/t D -> B/r/d/e L H/t/c D', q)
    k = all_to_all('B/r/d/e L/c K/t D -> B/r/d/e L K/t/c D', k)
    v = all_to_all('B/r/d/e L/c K/t D -> B/r/d/e L K/t/c D', v)
    out = attend(q, k, v, all_gather('B/r/d/e L/c -> B/r/d/e L', segments), kernel, scores)
    out = all_to_all('B/r/d/e L H/t/c D -> B/r/d/e L/c H/t D', out)
    return save(out, 'attention') if axis_size('c') > 1 else out


@typechecked
def attend(
    q: num['B/r/d/e L H/t/c D'],
    k: num['B/r/d/e L K/t/c D'],
    v: num['B/r/d/e L K/t/c D'],
    segments: i32['B/r/d/e L'],
    kernel: Kernel,
    scores: Scores,
) -> num['B/r/d/e L H/t/c D']:
    """softmax(q k^T / sqrt(D)) v over earlier tokens of a document, in the chosen kernel.

    The result is saved as 'attention', and so are the sums of the softmax that the kernel's backward pass needs.
    """
    kernels = {'cudnn': cudnn, 'splash': splash, 'blockwise': _blockwise}
    return kernels[kernel.name](q, k, v, segments, kernel, scores)


def dot_product_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, visible: bool_['B L S'], scores: Scores
) -> jax.Array:
    """softmax(q k^T / sqrt(D)) v over the visible keys. Vaswani et al. 2017, arXiv:1706.03762, eq. 1.

    Args:
        q: queries [B, L, H, D] on one device; heads are not shared between devices.
        k: keys [B, S, K, D].
        v: values [B, S, K, D].
        visible: whether a query sees a key.
        scores: the divisor, sqrt(D) in most families, and the soft cap.

    Returns:
        [B, L, H, D] in the dtype of q. The scores and the softmax are f32.
    """
    B, L, H, D = q.shape
    K = k.shape[2]
    # Heads come first, so that the [L, S] matrices are not transposed.
    grouped = jnp.moveaxis(q.reshape(B, L, K, H // K, D), 1, 3)  # [B, K, G, L, D]
    score = softcap(query_key_products(grouped, k) / scores.divisor, scores.softcap)  # [B, K, G, L, S]
    masked = jnp.where(visible[:, None, None], score, jnp.finfo(jnp.float32).min)
    probability = save(jax.nn.softmax(masked, axis=-1).astype(v.dtype), 'probability')
    return jnp.moveaxis(weighted_values(probability, v), 3, 1).reshape(q.shape)


def _blockwise(
    q: num['B/r/d/e L H/t/c D'],
    k: num['B/r/d/e L K/t/c D'],
    v: num['B/r/d/e L K/t/c D'],
    segments: i32['B/r/d/e L'],
    kernel: Kernel,
    scores: Scores,
) -> num['B/r/d/e L H/t/c D']:
    """Plain XLA: blocks of queries, each with the keys that it may see, which is about half of them.

    In a long sequence, the probabilities of one block exist at a time, and the backward pass computes them again.
    """
    del kernel
    length = q.shape[1]
    is_long = length > BLOCK
    size, attend_block = (BLOCK, jax.checkpoint(_block, static_argnums=(0, 1))) if is_long else (SHORT, _block)
    outputs = []
    for start in range(0, length, size):
        first = max(0, start - scores.window + 1) if scores.window else 0  # the first key that the block sees
        queries, keys = slice(start, start + size), slice(first, start + size)
        q_block = q[:, queries]
        if is_long and outputs:
            # A block begins when the one before is done; otherwise XLA computes all at once, in L^2 memory.
            q_block, outputs[-1] = jax.lax.optimization_barrier((q_block, outputs[-1]))
        arrays = q_block, k[:, keys], v[:, keys], segments[:, queries], segments[:, keys]
        outputs.append(attend_block(scores, start - first, *arrays))
    return save(jnp.concatenate(outputs, axis=1), 'attention')


def _block(
    scores: Scores,
    start: int,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    q_segments: i32['B L'],
    k_segments: i32['B S'],
) -> jax.Array:
    """Attention of a block of queries, the first of which is at the position of key number `start`."""
    distance = np.arange(start, start + q.shape[1])[:, None] - np.arange(k.shape[1])[None, :]
    visible = scores.sees(distance) & (q_segments[:, :, None] == k_segments[:, None, :])
    return dot_product_attention(q, k, v, visible, scores)
