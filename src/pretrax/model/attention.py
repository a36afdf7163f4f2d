"""Attention: the projections of a layer, and causal attention inside documents.

Letters: B batch, L length, M d_model, H query heads, K key/value heads, G query heads per key/value head, D head, D_qk
query or key (D, but in latent attention), S keys. No token sees another document, and no L x L matrix is materialized
for a long sequence.
"""

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.model.architecture import Architecture, LayerKind
from pretrax.model.attention_kernels import Kernel, cudnn, splash
from pretrax.model.chunked_attention import attention_segments
from pretrax.model.context import ring_attention
from pretrax.model.dropout import drop_probabilities, seeds_of_heads
from pretrax.model.latent_attention import LatentWeights, latent_queries_keys_values
from pretrax.model.layer_spec import LayerSpec, Tokens
from pretrax.model.long_attention import long_attention
from pretrax.model.matmul import add_bias, product
from pretrax.model.norm import qk_norm, v_norm
from pretrax.model.part import Part
from pretrax.model.rope import rotate, tempered
from pretrax.model.scores import Scores
from pretrax.model.xla_cpu import query_key_products, weighted_values
from pretrax.shardlib import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    bool_,
    f32,
    i32,
    num,
    psum_scatter,
    pytree_dataclass,
    save,
    typechecked,
    u32,
    vary_together,
)

BLOCK = 512  # tokens of the longest sequence whose probabilities the blockwise kernel keeps for the backward pass
SHORT = 128  # queries that it then handles at once


def kept_probabilities(kernel: Kernel, length: int) -> float:
    """The probabilities of a head that a token keeps for the backward pass, on average; 0: it computes them again."""
    return (length + SHORT) / 2 if kernel.name == 'blockwise' and length <= BLOCK else 0.0


@pytree_dataclass
class AttentionWeights(Part):
    """The projections of attention. Latent attention has others in the place of q, k and v."""

    q: num['M/d H/t D'] | None
    k: num['M/d K/t D'] | None
    v: num['M/d K/t D'] | None
    o: num['H/t D M/d']
    latent: LatentWeights | None
    q_bias: f32['H/t D'] | None
    k_bias: f32['K/t D'] | None
    v_bias: f32['K/t D'] | None
    o_bias: f32['M'] | None
    sinks: f32['H/t'] | None
    q_norm: f32['D'] | None  # of each head
    k_norm: f32['D'] | None
    q_full_norm: f32['H/t D'] | None  # of all heads together, or of each head with a scale of its own
    k_full_norm: f32['K/t D'] | None
    o_gate: num['M/d H/t D'] | None

    @classmethod
    def optional(cls, arch: Architecture, kind: LayerKind) -> Mapping[str, bool]:
        """As the options of attention say, in every layer with attention."""
        del kind
        options, latent = arch.attention, arch.attention.latent.kv_rank > 0
        return {
            **dict.fromkeys(('q', 'k', 'v'), not latent),
            'latent': latent,
            **dict.fromkeys(('q_bias', 'k_bias', 'v_bias'), options.qkv_bias),
            'o_bias': options.o_bias,
            'sinks': options.sinks,
            **dict.fromkeys(('q_norm', 'k_norm'), options.qk_norm == 'head'),
            **dict.fromkeys(('q_full_norm', 'k_full_norm'), options.qk_norm in ('full', 'each_head')),
            'o_gate': options.gate,
        }


@pytree_dataclass
class OwnHeads(Part):
    """The projections of attention in layers without a window that have heads of their own, with other sizes."""

    q_global: num['M/d H/t D_global']
    k_global: num['M/d K_global/t D_global']
    v_global: num['M/d K_global/t D_global'] | None
    o_global: num['H/t D_global M/d']
    q_norm_global: f32['D_global'] | None
    k_norm_global: f32['D_global'] | None

    @classmethod
    def optional(cls, arch: Architecture, kind: LayerKind) -> Mapping[str, bool]:
        """Values may be the projections that keys are made of."""
        del kind
        normed = arch.attention.qk_norm == 'head'
        return {'v_global': not arch.attention.global_k_as_v, 'q_norm_global': normed, 'k_norm_global': normed}

    def projections(self) -> AttentionWeights:
        """These weights under the names that attention reads."""
        return AttentionWeights.from_named({in_attention(name): w for name, w in self.named().items()})


def in_attention(name: str) -> str:
    """The name by which attention reads a weight of a layer: `q` for `q_global`."""
    return name.removesuffix('_global')


# Gets the queries, the keys, the segments of attention and the scores of a layer
Observer = Callable[[jax.Array, jax.Array, jax.Array, Scores], None]


@typechecked
def attention(
    h: num['B/r/d/e L/c/t M'], w: AttentionWeights, tokens: Tokens, layer: LayerSpec, observe: Observer | None = None
) -> num['B/r/d/e L/c/t M']:
    """Self-attention of a layer, between its projections. Vaswani et al. 2017, arXiv:1706.03762, section 3.2.2."""
    q, k, v = queries_keys_values(h, w, tokens.positions, layer)
    scores, plan = layer.scores, layer.plan
    segments = attention_segments(tokens.segments, tokens.positions, scores)
    if observe is not None:
        observe(q, k, segments, scores)
    seeds = layer.seeds('attention probabilities', tokens, scores.dropout)
    y = context_parallel_attention(q, k, v, segments, plan.kernel_of(layer.kind), scores, plan.context, w.sinks, seeds)
    return output_projection(gate_output(y, h, w, layer), w, layer)


@typechecked
def queries_keys_values(
    h: num['B/r/d/e L/c/t M'], w: AttentionWeights, positions: i32['B/r/d/e L/c'], layer: LayerSpec
) -> tuple[num['B/r/d/e L/c H/t D_qk'], num['B/r/d/e L/c K/t D_qk'], num['B/r/d/e L/c K/t D']]:
    """The projections of h, with norms and rotary positions if the family has them."""
    arch, formats = layer.arch, layer.formats
    if w.latent is not None:
        return latent_queries_keys_values(h, w.latent, positions, layer)
    h = all_gather('B/r/d/e L/c/t M -> B/r/d/e L/c M', h)
    w_q = layer.gather('q', 'M/d H/t D -> M H/t D', w, h)
    q = add_bias(product('B/r/d/e L/c M, M H/t D -> B/r/d/e L/c H/t D', h, w_q, formats['q']), w.q_bias)
    w_k = layer.gather('k', 'M/d K/t D -> M K/t D', w, h)
    k = add_bias(product('B/r/d/e L/c M, M K/t D -> B/r/d/e L/c K/t D', h, w_k, formats['k']), w.k_bias)
    if w.v is None:  # the values are the projections that the keys are made of
        v = k
    else:
        w_v = layer.gather('v', 'M/d K/t D -> M K/t D', w, h)
        v = add_bias(product('B/r/d/e L/c M, M K/t D -> B/r/d/e L/c K/t D', h, w_v, formats['v']), w.v_bias)
    if arch.attention.qk_norm == 'none':
        q, k = save(rotate(q, positions, layer.kind), 'q'), save(rotate(k, positions, layer.kind), 'k')
    elif arch.attention.qk_norm == 'l2':
        q, k = rotate(save(q, 'q'), positions, layer.kind), rotate(save(k, 'k'), positions, layer.kind)
        if layer.kind.rope_base is not None:
            q, k = qk_norm(q, None, None, arch), qk_norm(k, None, None, arch)
    else:  # saved before the norm, because its backward pass needs its input
        q = rotate(qk_norm(save(q, 'q'), w.q_norm, w.q_full_norm, arch), positions, layer.kind)
        k = rotate(qk_norm(save(k, 'k'), w.k_norm, w.k_full_norm, arch), positions, layer.kind)
    return tempered(q, positions, layer.kind, arch), k, v_norm(save(v, 'v'), arch)


@typechecked
def gate_output(
    y: num['B/r/d/e L/c H/t D'], h: num['B/r/d/e L/c/t M'], w: AttentionWeights, layer: LayerSpec
) -> num['B/r/d/e L/c H/t D']:
    """y * sigmoid(h W), if the family gates its heads. Qiu et al. 2025, arXiv:2505.06708, section 2.2."""
    if w.o_gate is None:
        return y
    h = all_gather('B/r/d/e L/c/t M -> B/r/d/e L/c M', h)
    w_gate = layer.gather('o_gate', 'M/d H/t D -> M H/t D', w, h)
    gate = save(product('B/r/d/e L/c M, M H/t D -> B/r/d/e L/c H/t D', h, w_gate, layer.formats['o_gate']), 'gate')
    return (y.astype(jnp.float32) * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(y.dtype)


@typechecked
def output_projection(y: num['B/r/d/e L/c H/t D'], w: AttentionWeights, layer: LayerSpec) -> num['B/r/d/e L/c/t M']:
    """The heads' outputs, projected into the residual stream."""
    w_o = layer.gather('o', 'H/t D M/d -> H/t D M', w, y)
    out = product('B/r/d/e L/c H/t D, H/t D M -> B/r/d/e L/c M', y, w_o, layer.formats['o'])  # partial over t
    out = save(psum_scatter('B/r/d/e L/c M -> B/r/d/e L/c/t M', out), 'attention_out')
    return add_bias(out, w.o_bias)


@typechecked
def context_parallel_attention(
    q: num['B/r/d/e L/c H/t D_qk'],
    k: num['B/r/d/e L/c K/t D_qk'],
    v: num['B/r/d/e L/c K/t D'],
    segments: i32['B/r/d/e L/c'],
    kernel: Kernel,
    scores: Scores,
    context: str,
    sinks: f32['H/t'] | None = None,
    seeds: u32['B/r/d/e L/c two'] | None = None,
) -> num['B/r/d/e L/c H/t D']:
    """Attention of sequences that are sharded over c. `context` is 'ring' or 'all_to_all'; see context.py.

    `sinks` are scores of each head that every query has beside those of its keys, and that have no value: attention to
    them is attention to nothing. Xiao et al. 2023, arXiv:2309.17453, section 3.3; OpenAI 2025, arXiv:2508.10925,
    section 2.2. `seeds` are random words of each query, for dropout of its probabilities.
    """
    if context == 'ring':
        return ring_attention(q, k, v, segments, scores, sinks, seeds)
    if sinks is not None:  # of the heads that this device gets
        n = sinks.shape[0] // axis_size('c')
        sinks = jax.lax.dynamic_slice_in_dim(vary_together(q, sinks)[1], axis_index('c') * n, n)
    q = all_to_all('B/r/d/e L/c H/t D_qk -> B/r/d/e L H/t/c D_qk', q)
    k = all_to_all('B/r/d/e L/c K/t D_qk -> B/r/d/e L K/t/c D_qk', k)
    v = all_to_all('B/r/d/e L/c K/t D -> B/r/d/e L K/t/c D', v)
    if seeds is not None:
        seeds = all_gather('B/r/d/e L/c two -> B/r/d/e L two', seeds)
    out = attend(q, k, v, all_gather('B/r/d/e L/c -> B/r/d/e L', segments), kernel, scores, sinks, seeds)
    out = all_to_all('B/r/d/e L H/t/c D -> B/r/d/e L/c H/t D', out)
    return save(out, 'attention') if axis_size('c') > 1 else out


@typechecked
def attend(
    q: num['B/r/d/e L H/t/c D_qk'],
    k: num['B/r/d/e L K/t/c D_qk'],
    v: num['B/r/d/e L K/t/c D'],
    segments: i32['B/r/d/e L'],
    kernel: Kernel,
    scores: Scores,
    sinks: f32['H/t/c'] | None = None,
    seeds: u32['B/r/d/e L two'] | None = None,
) -> num['B/r/d/e L H/t/c D']:
    """softmax(q k^T / sqrt(D)) v over earlier tokens of a document, in the chosen kernel.

    The result is saved as 'attention', and so are the sums of the softmax that the kernel's backward pass needs.
    """
    if kernel.name == 'blockwise':
        return _blockwise(q, k, v, segments, scores, sinks, seeds)
    assert seeds is None, 'choose_kernel: fused kernels drop no probabilities'
    return {'cudnn': cudnn, 'splash': splash}[kernel.name](q, k, v, segments, kernel, scores, sinks)


def dot_product_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: bool_['B L S'],
    scores: Scores,
    sinks: f32['H'] | None = None,
    seeds: u32['B K G L two'] | None = None,
    first_key: int = 0,
) -> jax.Array:
    """softmax(q k^T / sqrt(D)) v over the visible keys. Vaswani et al. 2017, arXiv:1706.03762, eq. 1.

    Heads come first, so that neither tokens nor the [L, S] matrices are transposed.

    Args:
        q: queries [B, K, G, L, D] on one device; heads are not shared between devices.
        k: keys [B, K, S, D].
        v: values [B, K, S, D]; their width may differ.
        visible: whether a query sees a key.
        scores: the divisor, sqrt(D) in most families, and the soft cap.
        sinks: one more score of each head, without a value.
        seeds: random words of each query and head, for dropout of the probabilities; None: none are dropped.
        first_key: the place of the first key in the sequence, for dropout.

    Returns:
        [B, K, G, L, D of v] in the dtype of v. The scores and the softmax are f32.
    """
    score = scores.score(query_key_products(q, k))  # [B, K, G, L, S]
    masked = jnp.where(visible[:, None, None], score, jnp.finfo(jnp.float32).min)
    if sinks is None:
        probability = jax.nn.softmax(masked, axis=-1)
    else:
        more = jnp.broadcast_to(sinks.reshape(*q.shape[1:3], 1, 1), (*masked.shape[:-1], 1))
        probability = jax.nn.softmax(jnp.concatenate([masked, more], axis=-1), axis=-1)[..., :-1]
    if seeds is not None:
        probability = drop_probabilities(probability, seeds, first_key, scores.dropout)
    return weighted_values(save(probability.astype(v.dtype), 'probability'), v)


def _blockwise(
    q: num['B/r/d/e L H/t/c D_qk'],
    k: num['B/r/d/e L K/t/c D_qk'],
    v: num['B/r/d/e L K/t/c D'],
    segments: i32['B/r/d/e L'],
    scores: Scores,
    sinks: f32['H/t/c'] | None,
    seeds: u32['B/r/d/e L two'] | None,
) -> num['B/r/d/e L H/t/c D']:
    """Plain XLA: blocks of queries, each with the keys that it may see, which is about half of them."""
    B, length, H, _ = q.shape
    K = k.shape[2]
    if length > BLOCK:
        return long_attention((q, k, v), segments, scores, sinks, seeds)
    of_heads = None if seeds is None else jnp.moveaxis(seeds_of_heads(seeds, K, H, 't c'), 1, 3)
    starts = range(0, length, SHORT)
    sizes = [min(SHORT, length - start) for start in starts]
    # Split, not sliced: the gradient of slices is a sum of padded arrays
    q_blocks = jax.lax.split(jnp.moveaxis(q.reshape(B, length, K, H // K, -1), 1, 3), sizes, axis=3)
    k_blocks, v_blocks = (jax.lax.split(jnp.moveaxis(x, 1, 2), sizes, axis=2) for x in (k, v))
    outputs = []
    for i, start in enumerate(starts):
        # The first block of keys that the queries see
        j = max(0, start - scores.window + 1) // SHORT if scores.window else 0
        queries, keys = slice(start, start + SHORT), slice(j * SHORT, start + SHORT)
        distance = np.arange(length)[queries, None] - np.arange(length)[None, keys]
        visible = scores.sees(distance) & (segments[:, queries, None] == segments[:, None, keys])
        own = None if of_heads is None else of_heads[:, :, :, queries]
        k_block, v_block = (jnp.concatenate(x[j : i + 1], axis=2) for x in (k_blocks, v_blocks))
        out = dot_product_attention(q_blocks[i], k_block, v_block, visible, scores, sinks, own, j * SHORT)
        outputs.append(out)
    return save(jnp.moveaxis(jnp.concatenate(outputs, axis=3), 3, 1).reshape(B, length, H, -1), 'attention')
