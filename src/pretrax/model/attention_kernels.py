"""Fused attention kernels for hardware, and the one place that chooses a kernel and says why."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from pretrax.errors import UserError
from pretrax.jax_compat import cudnn_attention, pallas_results_vary_like
from pretrax.model.chunked_attention import consecutive, most_segments
from pretrax.model.options.attention import AttentionOptions
from pretrax.model.scores import Scores
from pretrax.shardlib import f32, i32, num, save


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The attention kernel, and the reason for the choice."""

    name: str
    reason: str
    documents_per_row: int | None  # an upper bound; None: unknown

    def __str__(self) -> str:
        return f'{self.name} ({self.reason})'


def choose_kernel(
    wanted: str,
    platform: str,
    dtype: DTypeLike,
    d_head: int,
    sequence_length: int,
    documents_per_row: int | None,
    options: AttentionOptions,
    d_value: int | None = None,
) -> Kernel:
    """Chooses an attention kernel.

    Args:
        wanted: 'auto', or a kernel by name.
        platform: 'cpu', 'cuda' (or 'gpu'), 'tpu', ...
        dtype: compute dtype.
        d_head: width of a query or key head.
        sequence_length: L.
        documents_per_row: an upper bound on the documents per row of data; None if unknown.
        options: of attention. Every kernel supports windows.
        d_value: width of a value head; None: d_head.

    Raises:
        UserError: the wanted kernel cannot run here.
    """
    most = documents_per_row
    if options.window and options.window_type == 'chunked' and most is not None:
        most = most_segments(most, sequence_length, options.window)
    obstacles = {
        'cudnn': _cudnn_obstacle(platform, dtype, d_head, most, options)
        or (_cudnn_obstacle(platform, dtype, d_value, most, options) if d_value else None),
        'splash': _splash_obstacle(platform, sequence_length, math.gcd(d_head, d_value or d_head)),
        'blockwise': None,
    }
    if rate := options.dropout:
        why = f'it cannot drop attention probabilities (model.attention.dropout = {rate:g}) as on any other mesh'
        obstacles |= {name: why for name in ('cudnn', 'splash') if not obstacles[name]}
    if wanted != 'auto':
        if obstacles[wanted]:
            raise UserError(
                f'model.attention.kernel={wanted} cannot run: {obstacles[wanted]}\nuse model.attention.kernel=auto'
            )
        return Kernel(wanted, 'as configured', documents_per_row)
    native = {'cuda': 'cudnn', 'gpu': 'cudnn', 'tpu': 'splash'}.get(platform)
    if native is None:
        return Kernel('blockwise', f'no fused kernel for {platform}', documents_per_row)
    if obstacles[native]:
        return Kernel('blockwise', f'SLOW: not {native}, because {obstacles[native]}', documents_per_row)
    return Kernel(native, f'the fused kernel for {platform}', documents_per_row)


def _cudnn_obstacle(
    platform: str, dtype: DTypeLike, d_head: int, documents_per_row: int | None, options: AttentionOptions
) -> str | None:
    if platform not in ('cuda', 'gpu'):
        return f'it needs an NVIDIA GPU, not {platform}'
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f'it computes in bf16 or f16, not {jnp.dtype(dtype).name}'
    if options.softcap:
        return f'it does not support a soft cap of the scores, which is {options.softcap:g}'
    if options.sinks and documents_per_row != 1:
        return 'it supports attention sinks only with one document or chunk per row'
    if d_head % 8 or d_head > 256:
        return f'it needs d_head to be a multiple of 8 up to 256, not {d_head}'
    if documents_per_row is None or documents_per_row > 128:
        return f'it supports at most 128 documents or chunks per row, not {documents_per_row or "an unknown number"}'
    return None


def _splash_obstacle(platform: str, sequence_length: int, d_head: int) -> str | None:
    if platform != 'tpu':
        return f'it needs a TPU, not {platform}'
    if sequence_length % 128 or d_head % 64:
        return (
            f'it needs a sequence length that is a multiple of 128 and a d_head that is a multiple of 64, not '
            f'{sequence_length} and {d_head}'
        )
    if sequence_length**2 // (1024 * 512) * 3 > 2**20:  # 3 bytes for each block of scores in the queries' kernel
        return f'its table of blocks does not fit the scalar memory above 428,079 tokens: there are {sequence_length}'
    return None


def cudnn(
    q: num['B/r/d/e L H/t/c D_qk'],
    k: num['B/r/d/e L K/t/c D_qk'],
    v: num['B/r/d/e L K/t/c D'],
    segments: i32['B/r/d/e L'],
    kernel: Kernel,
    scores: Scores,
    sinks: f32['H/t/c'] | None = None,
) -> num['B/r/d/e L H/t/c D']:
    """NVIDIA's fused kernel. It has no segment mask: documents are packed sequences, described by offsets.

    It has no sinks either. They are added to the sums of its softmax, and the backward kernel computes with these.
    """
    kernels = cudnn_attention()
    documents = kernel.documents_per_row or 1
    if scores.chunked:
        documents, segments = most_segments(documents, q.shape[1], scores.window), consecutive(segments)
    assert sinks is None or documents == 1, 'choose_kernel: the sums of packed documents have another shape'
    mask = kernels.MaskType.CAUSAL if documents == 1 else kernels.MaskType.PADDING_CAUSAL
    window = scores.window if scores.window < q.shape[1] and not scores.chunked else 0

    def fused(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, with_sums: bool) -> Any:
        lengths, offsets = packed_documents(segments, documents) if documents > 1 else (None, None)
        return kernels.dot_product_attention(
            q, k, v, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=offsets, kv_offsets=offsets, mask_type=mask,
            scale=1 / scores.divisor, sliding_window_length=window or None, return_residual=with_sums,
        )  # fmt: skip

    @jax.custom_vjp
    def call(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, sinks: jax.Array | None) -> jax.Array:
        if sinks is None:
            return save(fused(q, k, v, segments, with_sums=False), 'attention')
        out, sums = fused(q, k, v, segments, with_sums=True)
        return save(with_sinks(out, sums, sinks)[0], 'attention')

    def forward(
        q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, sinks: jax.Array | None
    ) -> tuple[jax.Array, Any]:
        run = functools.partial(fused, segments=segments, with_sums=True)
        out, pullback, sums = jax.vjp(run, q, k, v, has_aux=True)
        known = (out, sums) if sinks is None else with_sinks(out, sums, sinks)
        # The backward kernel needs both. The pullback holds them without a name, so they would be computed again.
        named = {id(x): save(y, 'attention') for x, y in zip((out, sums), known, strict=True)}
        held = {id(x) for x in jax.tree.leaves(pullback)}
        assert sinks is None or held >= named.keys(), 'the backward kernel would compute as if there were no sinks'
        pullback = jax.tree.map(lambda x: named.get(id(x), x), pullback)
        return named[id(out)], (pullback, sinks, None if sinks is None else (named[id(out)], named[id(sums)]))

    def backward(residuals: Any, d_out: jax.Array) -> tuple:
        pullback, sinks, known = residuals
        return (*pullback(d_out), None, None if sinks is None else sink_gradient(sinks, known[0], known[1], d_out))

    call.defvjp(forward, backward)
    return call(q, k, v, segments, sinks)


def with_sinks(out: num['B L H D'], sums: f32['B H L'], sinks: f32['H']) -> tuple[num['B L H D'], f32['B H L']]:
    """Attention with one more score of each head, which has no value, from attention without it.

    Args:
        out: softmax(scores) v.
        sums: logsumexp(scores).
        sinks: the scores.

    Returns:
        The output, and the logsumexp of all scores.
    """
    kept = jax.nn.sigmoid(sums - sinks[:, None])  # the weight of all keys together
    more = jnp.logaddexp(sums, sinks[:, None])
    return (out.astype(jnp.float32) * jnp.moveaxis(kept, 1, 2)[..., None]).astype(out.dtype), more


def sink_gradient(sinks: f32['H'], out: num['B L H D'], sums: f32['B H L'], d_out: num['B L H D']) -> f32['H']:
    """The gradient of the sinks: that of a score whose value is zero."""
    mean = jnp.einsum('blhd,blhd->bhl', out, d_out, preferred_element_type=jnp.float32)
    return -jnp.sum(jnp.exp(sinks[:, None] - sums) * mean, axis=(0, 2))


def packed_documents(segments: i32['B L'], documents: int) -> tuple[i32['B N'], i32['B N_1']]:
    """The length and first position of every document in a row, for cuDNN: -1 if a row has fewer documents.

    Args:
        segments: i32[B, L], 1, 2, ... along each row.
        documents: the largest number of documents per row.

    Returns:
        i32[B, documents] lengths and i32[B, documents + 1] offsets.
    """
    number = jnp.arange(1, documents + 1, dtype=jnp.int32)
    lengths = jnp.sum(segments[:, None, :] == number[None, :, None], axis=-1, dtype=jnp.int32)
    starts = jnp.cumsum(lengths, axis=-1) - lengths
    used = lengths > 0
    offsets = jnp.pad(jnp.where(used, starts, -1), ((0, 0), (0, 1)), constant_values=-1)
    return jnp.where(used, lengths, -1), offsets


def splash_blocks(length: int, window: int) -> tuple[int, ...]:
    """`BlockSizes`. A grid step takes longer to start than to compute 128 x 128 scores; every TPU fits 1,024 x 512."""
    most = min(length // 4, max(256, window) if window else 1024)
    block = max(n for n in (128, 256, 512, 1024) if n == 128 or (length % n == 0 and n <= most))
    return (block, block, min(block, 512)) * 2 + (block, min(block, 512))  # forward; keys and values; queries


def splash(
    q: num['B/r/d/e L H/t/c D_qk'],
    k: num['B/r/d/e L K/t/c D_qk'],
    v: num['B/r/d/e L K/t/c D'],
    segments: i32['B/r/d/e L'],
    kernel: Kernel,
    scores: Scores,
    sinks: f32['H/t/c'] | None = None,
) -> num['B/r/d/e L H/t/c D']:
    """The Pallas kernel for TPUs, with segment ids."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernels
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    del kernel
    length, heads = q.shape[1], q.shape[2]
    square = (length, length)

    class Causal(masks.CausalMask):
        def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
            """A block of the mask; one value, if all have it: JAX reads every block, and there are L^2 / 2^20."""
            queries, keys = index
            full = queries.start >= keys.stop - 1
            return np.full((1, 1), full) if full or queries.stop <= keys.start else super().__getitem__(index)

    seen = masks.LocalMask(square, (scores.window - 1, 0), 0) if scores.window else Causal(square)
    mask = masks.MultiHeadMask([seen] * heads)
    blocks = kernels.BlockSizes(*splash_blocks(length, scores.window))

    def fused(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, sinks: jax.Array | None) -> jax.Array:
        attention = kernels.make_splash_mha_single_device(
            mask, block_sizes=blocks, attn_logits_soft_cap=scores.softcap or None, residual_checkpoint_name='attention'
        )
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        run = jax.vmap(lambda q, k, v, ids: attention(q, k, v, ids, sinks=sinks))
        out = run(q / scores.divisor, k, v, kernels.SegmentIds(segments, segments))
        return jnp.swapaxes(out, 1, 2)

    # The kernel does not declare that its results and gradients vary over the mesh as the queries do.
    kind = jax.typeof(q).manual_axis_type

    @jax.custom_vjp
    def call(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, segments: jax.Array) -> jax.Array:
        return forward(q, k, v, sinks, segments)[0]

    def forward(
        q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None, segments: jax.Array
    ) -> tuple[jax.Array, Any]:
        with pallas_results_vary_like(kind):
            return jax.vjp(lambda q, k, v, sinks: fused(q, k, v, segments, sinks), q, k, v, sinks)

    def backward(pullback: Any, d_out: jax.Array) -> tuple:
        with pallas_results_vary_like(kind):
            return (*pullback(d_out), None)

    call.defvjp(forward, backward)
    return call(q, k, v, sinks, segments)
