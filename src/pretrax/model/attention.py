"""Causal attention inside documents: one place chooses the kernel and says why; the model calls `attend`.

Letters: B batch, L length, H query heads, K key/value heads, G query heads per key/value head, D head.
No kernel here materialises an L x L matrix for a long sequence, and none lets a token see another document.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.errors import UserError
from pretrax.model.architecture import Scores
from pretrax.model.softcap import softcap
from pretrax.shardlib import i32, num, save, typechecked

BLOCK = 512  # queries that the blockwise kernel handles at a time, where sequences are longer
SHORT = 128  # and where they are not


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A chosen attention kernel and the reason, for the start-up report."""

    name: str
    reason: str
    documents_per_row: int | None  # at most; None: unknown

    def __str__(self) -> str:
        return f'{self.name} ({self.reason})'


def choose_kernel(
    wanted: str,
    platform: str,
    dtype: Any,
    d_head: int,
    sequence_length: int,
    documents_per_row: int | None,
    capped: float = 0.0,
) -> Kernel:
    """Chooses an attention kernel.

    Args:
        wanted: 'auto', or a kernel by name.
        platform: of the devices: 'cpu', 'cuda' (or 'gpu'), 'tpu', ...
        dtype: compute dtype.
        d_head: width of a head.
        sequence_length: L.
        documents_per_row: at most how many documents a row of the data holds; None if the data does not say.
        capped: the soft cap of the scores, 0 if there is none. Windows are known to every kernel.

    Raises:
        UserError: the wanted kernel cannot run here; the message says why.
    """
    obstacles = {
        'cudnn': _cudnn_obstacle(platform, dtype, d_head, documents_per_row, capped),
        'splash': _splash_obstacle(platform, sequence_length, d_head),
        'blockwise': None,
    }
    if wanted != 'auto':
        if obstacles[wanted]:
            raise UserError(f'model.attention={wanted} cannot run: {obstacles[wanted]}\nuse model.attention=auto')
        return Kernel(wanted, 'as configured', documents_per_row)
    native = {'cuda': 'cudnn', 'gpu': 'cudnn', 'tpu': 'splash'}.get(platform)
    if native is None:
        return Kernel('blockwise', f'no fused kernel for {platform}', documents_per_row)
    if obstacles[native]:
        return Kernel('blockwise', f'SLOW: not {native}, because {obstacles[native]}', documents_per_row)
    return Kernel(native, f'the fused kernel for {platform}', documents_per_row)


def _cudnn_obstacle(platform: str, dtype: Any, d_head: int, documents_per_row: int | None, capped: float) -> str | None:
    if platform not in ('cuda', 'gpu'):
        return f'it needs an NVIDIA GPU, not {platform}'
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f'it computes in bf16 or f16, not {jnp.dtype(dtype).name}'
    if capped:
        return f'it has no soft cap of the scores, and they are capped at {capped:g}'
    if d_head % 8 or d_head > 256:
        return f'it needs d_head to be a multiple of 8 up to 256, not {d_head}'
    if documents_per_row is None or documents_per_row > 128:
        return f'it needs a bound of at most 128 documents in a row, not {documents_per_row or "an unknown number"}'
    return None


def _splash_obstacle(platform: str, sequence_length: int, d_head: int) -> str | None:
    if platform != 'tpu':
        return f'it needs a TPU, not {platform}'
    if sequence_length % 128 or d_head % 64:
        return f'it needs L in multiples of 128 and d_head in multiples of 64, not {sequence_length} and {d_head}'
    return None


@typechecked
def attend(
    q: num['B/r/d/e L H/t/c D'],
    k: num['B/r/d/e L K/t/c D'],
    v: num['B/r/d/e L K/t/c D'],
    segments: i32['B/r/d/e L'],
    kernel: Kernel,
    scores: Scores,
) -> num['B/r/d/e L H/t/c D']:
    """softmax(q k^T / sqrt(D)) v over earlier tokens of a document. Vaswani et al. 2017, arXiv:1706.03762, eq. 1.

    `scores` has what takes the place of sqrt(D), the soft cap before the softmax, and how far back a token sees. The result
    is named 'attention', and so are the sums that the kernel's backward pass needs, where the kernel lets us.
    """
    kernels = {'cudnn': _cudnn, 'splash': _splash, 'blockwise': _blockwise}
    return kernels[kernel.name](q, k, v, segments, kernel, scores)


def _blockwise(q: Any, k: Any, v: Any, segments: Any, kernel: Kernel, scores: Scores) -> Any:
    """Plain XLA: blocks of queries against the keys that they see, so that half of the products are never made.

    Of a sequence longer than a block one block's probabilities exist at a time, and are computed again backward.
    """
    del kernel
    length = q.shape[1]
    is_long = length > BLOCK
    size, one = (BLOCK, jax.checkpoint(_attend_block, static_argnums=(0, 1))) if is_long else (SHORT, _attend_block)
    outputs = []
    for start in range(0, length, size):
        first = max(0, start - scores.window + 1) if scores.window else 0  # the first key that the first query sees
        here, seen = slice(start, start + size), slice(first, start + size)
        queries = q[:, here]
        if is_long and outputs:
            # A block begins when the one before is done, else XLA does them all at once in L^2 memory.
            queries, outputs[-1] = jax.lax.optimization_barrier((queries, outputs[-1]))
        outputs.append(
            one(scores, start - first, queries, k[:, seen], v[:, seen], segments[:, here], segments[:, seen])
        )
    return save(jnp.concatenate(outputs, axis=1), 'attention')


def _attend_block(scores: Scores, start: int, q: Any, k: Any, v: Any, q_segments: Any, k_segments: Any) -> Any:
    """Attention of queries, the first of which stands where the key number `start` does, over the keys given."""
    behind = np.arange(start, start + q.shape[1])[:, None] - np.arange(k.shape[1])[None, :]
    visible = in_sight(behind, scores) & (q_segments[:, :, None] == k_segments[:, None, :])
    return attend_visible(q, k, v, visible, scores)


def in_sight(behind: Any, scores: Scores) -> Any:
    """Whether a token sees the one that stands `behind` places before it."""
    return (behind >= 0) & (behind < scores.window) if scores.window else behind >= 0


def attend_visible(q: Any, k: Any, v: Any, visible: Any, scores: Scores) -> Any:
    """Attention of queries q [B, L, H, D] over the keys and values k, v [B, S, K, D] that are visible [B, L, S]."""
    batch, length, heads, width = q.shape
    kv_heads = k.shape[2]
    # Heads outside, so that what the products make is in the order of `masked`: [L, S] matrices are not transposed.
    grouped = jnp.moveaxis(q.reshape(batch, length, kv_heads, heads // kv_heads, width), 1, 3)
    capped = softcap(_scores(grouped, k) / scores.divisor, scores.softcap)
    masked = jnp.where(visible[:, None, None], capped, jnp.finfo(jnp.float32).min)
    probability = save(jax.nn.softmax(masked, axis=-1).astype(v.dtype), 'probability')
    return jnp.moveaxis(_weighed(probability, v), 3, 1).reshape(q.shape)


@jax.custom_vjp
def _scores(q: Any, k: Any) -> Any:
    """The products of queries [B, K, G, L, D] with keys [B, S, K, D], f32[B, K, G, L, S]. Backward in the keys' dtype."""
    return jnp.einsum('bkgld,bskd->bkgls', q, k, preferred_element_type=jnp.float32)


def _scores_forward(q: Any, k: Any) -> tuple[Any, Any]:
    return _scores(q, k), (q, k)


def _scores_backward(residuals: Any, d_scores: Any) -> tuple[Any, Any]:
    q, k = residuals
    d_scores = d_scores.astype(k.dtype)
    return jnp.einsum('bkgls,bskd->bkgld', d_scores, k), _over_queries(d_scores, q)


_scores.defvjp(_scores_forward, _scores_backward)


@jax.custom_vjp
def _weighed(probability: Any, v: Any) -> Any:
    """Values [B, S, K, D] weighed by probabilities [B, K, G, L, S], [B, K, G, L, D]."""
    return jnp.einsum('bkgls,bskd->bkgld', probability, v)


def _weighed_forward(probability: Any, v: Any) -> tuple[Any, Any]:
    return _weighed(probability, v), (probability, v)


def _weighed_backward(residuals: Any, d_out: Any) -> tuple[Any, Any]:
    probability, v = residuals
    return jnp.einsum('bkgld,bskd->bkgls', d_out, v), _over_queries(probability, d_out)


_weighed.defvjp(_weighed_forward, _weighed_backward)


def _over_queries(a: Any, x: Any) -> Any:
    """The sum over queries of a [B, K, G, L, S] times x [B, K, G, L, D], [B, S, K, D].

    The sum goes over L in two dimensions where L is even: XLA for CPUs transposes `a` for such a product and multiplies in
    bf16, where it would convert both to f32 and take three times as long (docs/lab-notes.md).
    """
    halves = 2 - a.shape[3] % 2
    a, x = (z.reshape(*z.shape[:3], halves, -1, z.shape[-1]) for z in (a, x))
    return jnp.einsum('bkghls,bkghld->bskd', a, x)


def _cudnn(q: Any, k: Any, v: Any, segments: Any, kernel: Kernel, scores: Scores) -> Any:
    """NVIDIA's fused kernel. Documents are packed sequences to it, told by offsets; it has no segment mask."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn  # the offsets exist only behind this private name

    window = scores.window if scores.window < q.shape[1] else 0
    common = {'scale': 1 / scores.divisor, 'sliding_window_length': window or None}
    documents = kernel.documents_per_row or 1
    if documents == 1:
        return save(cudnn.dot_product_attention(q, k, v, mask_type=cudnn.MaskType.CAUSAL, **common), 'attention')
    lengths, offsets = packed_documents(segments, documents)
    out = cudnn.dot_product_attention(
        q, k, v, q_seqlen=lengths, kv_seqlen=lengths, q_offsets=offsets, kv_offsets=offsets,
        mask_type=cudnn.MaskType.PADDING_CAUSAL, **common,
    )  # fmt: skip
    return save(out, 'attention')


def packed_documents(segments: Any, documents: int) -> tuple[Any, Any]:
    """Length and first position of every document in a row, as cuDNN wants them: -1 where a row has fewer.

    Args:
        segments: i32[B, L], 1, 2, ... along each row.
        documents: the most that a row may have.

    Returns:
        i32[B, documents] lengths and i32[B, documents + 1] offsets.
    """
    number = jnp.arange(1, documents + 1, dtype=jnp.int32)
    lengths = jnp.sum(segments[:, None, :] == number[None, :, None], axis=-1, dtype=jnp.int32)
    starts = jnp.cumsum(lengths, axis=-1) - lengths
    used = lengths > 0
    offsets = jnp.pad(jnp.where(used, starts, -1), ((0, 0), (0, 1)), constant_values=-1)
    return jnp.where(used, lengths, -1), offsets


def _splash(q: Any, k: Any, v: Any, segments: Any, kernel: Kernel, scores: Scores) -> Any:
    """The Pallas kernel for TPUs, with segment ids."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    del kernel
    length, heads = q.shape[1], q.shape[2]
    square = (length, length)
    seen = masks.LocalMask(square, (scores.window - 1, 0), 0) if scores.window else masks.CausalMask(square)
    mask = masks.MultiHeadMask([seen] * heads)

    def fused(q: Any, k: Any, v: Any, segments: Any) -> Any:
        attention = splash.make_splash_mha_single_device(
            mask, attn_logits_soft_cap=scores.softcap or None, residual_checkpoint_name='attention'
        )
        q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
        out: Any = jax.vmap(attention)(q / scores.divisor, k, v, splash.SegmentIds(segments, segments))
        return jnp.swapaxes(out, 1, 2)

    # The kernel's results vary over the mesh as the queries do; the kernel does not say so, in either direction.
    kind = jax.typeof(q).manual_axis_type

    @jax.custom_vjp
    def call(q: Any, k: Any, v: Any, segments: Any) -> Any:
        return forward(q, k, v, segments)[0]

    def forward(q: Any, k: Any, v: Any, segments: Any) -> Any:
        with _pallas_results_are(kind):
            return jax.vjp(lambda q, k, v: fused(q, k, v, segments), q, k, v)

    def backward(pullback: Any, d_out: Any) -> Any:
        with _pallas_results_are(kind):
            return (*pullback(d_out), None)

    call.defvjp(forward, backward)
    return call(q, k, v, segments)


@contextlib.contextmanager
def _pallas_results_are(kind: Any) -> Iterator[None]:
    """Pallas calls made inside have results that vary over the mesh like `kind`, unless they say otherwise.

    Pallas asks for this in each result's declaration (jax.ShapeDtypeStruct), where JAX's own TPU kernels leave it out.
    There is no public way to give it from outside, so the function that reads the declarations is wrapped.
    """
    from jax._src.pallas import core

    read = core._convert_out_shape_to_aval

    def read_with_kind(declared: Any) -> Any:
        if isinstance(declared, jax.ShapeDtypeStruct) and declared.manual_axis_type is None:
            declared = declared.update(manual_axis_type=kind)
        return read(declared)

    core._convert_out_shape_to_aval = read_with_kind
    try:
        yield
    finally:
        core._convert_out_shape_to_aval = read
