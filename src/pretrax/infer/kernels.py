"""Fused attention to the cache for hardware, and the one place that chooses a kernel and says why.

A kernel runs when every row has one query, that is, when tokens are written without proposals. `cache.paged_attention`,
in plain JAX, reads prompts, checks proposals, and does everything where no kernel can run.

Letters: R rows, H query heads, K key/value heads, D head.
"""

import contextlib
import dataclasses
import warnings

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pretrax.infer.cache import CacheKind, Pages, paged_attention
from pretrax.jax_compat import pallas_results_vary_like
from pretrax.model.options.attention import AttentionOptions
from pretrax.model.scores import Scores
from pretrax.shardlib import f32, i32, num

_TPU_TOKENS = 512  # whose keys and values a kernel holds at a time
_GPU_TOKENS = 128
_GPU_SPLITS = 16  # parts of a sequence that are read in parallel


@dataclasses.dataclass(frozen=True)
class Kernel:
    """The kernel for attention to the cache, and the reason for the choice."""

    name: str  # plain, pallas-tpu, pallas-gpu; none: there is no cache
    reason: str
    interpret: bool = False  # by Pallas' interpreter, on any hardware

    def __str__(self) -> str:
        return f'{self.name} ({self.reason})'


def choose_kernel(
    platform: str, dtype: DTypeLike, d_head: int, page: int, kind: CacheKind, windows: bool, options: AttentionOptions
) -> Kernel:
    """Chooses the kernel that writes tokens.

    Args:
        platform: 'cpu', 'cuda' (or 'gpu'), 'tpu', ...
        dtype: compute dtype.
        d_head: width of a head.
        page: tokens in a page of the cache.
        kind: what keys and values are stored as.
        windows: whether some layers have a window.
        options: of attention.
    """
    native = {'cuda': 'pallas-gpu', 'gpu': 'pallas-gpu', 'tpu': 'pallas-tpu'}.get(platform)
    if native is None:
        return Kernel('plain', f'no kernel for {platform}')
    obstacle = {'pallas-gpu': _gpu_obstacle, 'pallas-tpu': _tpu_obstacle}[native](dtype, d_head, page, kind)
    obstacle = 'it has no attention sinks' if options.sinks else obstacle
    if obstacle:
        return Kernel('plain', f'SLOW: not {native}, because {obstacle}')
    return Kernel(native, f'the kernel for {platform}' + ('; plain in layers with a window' if windows else ''))


def _gpu_obstacle(dtype: DTypeLike, d_head: int, page: int, kind: CacheKind) -> str | None:
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16)):
        return f'it computes in bf16 or f16, not {jnp.dtype(dtype).name}'
    if kind == 'fp8' or (kind == 'bf16' and jnp.dtype(dtype) != jnp.dtype(jnp.bfloat16)):
        return f'it does not read our {kind} cache in {jnp.dtype(dtype).name}'
    if d_head & (d_head - 1) or not 16 <= d_head <= 256:
        return f'it needs d_head to be a power of 2 from 16 to 256, not {d_head}'
    if page & (page - 1) or page > _GPU_TOKENS:
        return f'it needs pages of a power of 2 tokens up to {_GPU_TOKENS}, not {page}'
    return None


def _tpu_obstacle(dtype: DTypeLike, d_head: int, page: int, kind: CacheKind) -> str | None:
    if kind in ('int8', 'fp8'):
        return f'it does not read our {kind} cache'
    if d_head % 128:
        return f'it needs d_head to be a multiple of 128, not {d_head}'
    if kind == 'compute' and jnp.dtype(dtype) != jnp.dtype(jnp.bfloat16):
        return f'it reads the cache in bf16, not in {jnp.dtype(dtype).name}'
    if page % 16:
        return f'it needs pages of a multiple of 16 tokens, not {page}'
    return None


def attention(
    kernel: Kernel,
    q: num['R/r/d/e C H/t D'],
    pages: Pages,
    table: i32['R/r/d/e blocks'],
    positions: i32['R/r/d/e C'],
    scores: Scores,
    sinks: f32['H/t'] | None = None,
) -> num['R/r/d/e C H/t D']:
    """`cache.paged_attention` by a kernel, if it can."""
    if kernel.name == 'plain' or q.shape[1] > 1 or scores.window:
        return paged_attention(q, pages, table, positions, scores, sinks)
    assert sinks is None, 'choose_kernel: kernels have no sinks'
    # A row without a token reads one of page 0, which belongs to nobody.
    lengths = jnp.maximum(positions[:, 0] + 1, 1)
    run = {'pallas-tpu': _tpu, 'pallas-gpu': _gpu}[kernel.name]
    with pallas_results_vary_like(jax.typeof(q).manual_axis_type):
        out = run(kernel, q[:, 0] / scores.divisor, pages, table, lengths, scores.softcap)
    return jnp.where(positions[:, :, None, None] >= 0, out[:, None], 0).astype(q.dtype)


def _tpu(
    kernel: Kernel, q: num['R H D'], pages: Pages, table: i32['R blocks'], lengths: i32['R'], softcap: float
) -> num['R H D']:
    from jax.experimental.pallas import tpu
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention as run

    at_once = min(max(_TPU_TOKENS // pages.k.shape[2], 1), table.shape[1])
    with tpu.force_tpu_interpret_mode() if kernel.interpret else contextlib.nullcontext():
        return run(
            q, pages.k, pages.v, lengths, _padded(table, at_once),
            pages_per_compute_block=at_once, attn_logits_soft_cap=softcap or None,
        )  # fmt: skip


def _gpu(
    kernel: Kernel, q: num['R H D'], pages: Pages, table: i32['R blocks'], lengths: i32['R'], softcap: float
) -> num['R H D']:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', DeprecationWarning)  # JAX names no successor
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention as run

    at_once = _GPU_TOKENS // pages.k.shape[2]
    return run(
        q, pages.k, pages.v, _padded(table, at_once * _GPU_SPLITS), lengths, pages.k_scale, pages.v_scale,
        pages_per_compute_block=at_once, k_splits=_GPU_SPLITS, attn_logits_soft_cap=softcap or None,
        interpret=kernel.interpret,
    )  # fmt: skip


def _padded(table: i32['R blocks'], multiple: int) -> i32['R blocks']:
    """Pads a table with entries for more blocks, which are not read."""
    return jnp.pad(table, ((0, 0), (0, -table.shape[1] % multiple)))
