"""The cache of keys and values: pages of a fixed number of tokens, which sequences use through block tables.

Letters: R rows (a row is a slot), C columns (tokens of a row), H query heads, K key/value heads, G query heads per
key/value head, D head. Block b of a row holds its positions [b * page, (b + 1) * page). Kwon et al. 2023,
arXiv:2309.06180, section 4.

The table of a layer with a window is a ring: block b is its entry b % length. Older blocks are overwritten.
Page 0 belongs to nobody: tokens at position -1, which are padding, are written there.
"""

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pretrax.model.architecture import Architecture, LayerKind
from pretrax.model.scores import Scores
from pretrax.shardlib import f32, i32, make_shardings, num, pytree_dataclass

CacheKind = Literal['compute', 'bf16', 'int8', 'fp8']
BLOCK = 128  # tokens whose scores exist at a time

_HIDDEN = jnp.finfo(jnp.float32).min


@pytree_dataclass
class Pages:
    """Keys and values of one layer. int8 has a scale for each token and head.

    Layers with a window may have heads of other sizes, so the letters of both differ from those of the weights.
    """

    k: num['K_full/t pages/r/d/e page D_full']
    v: num['K_full/t pages/r/d/e page D_full'] | None
    k_scale: f32['K_full/t pages/r/d/e page'] | None
    v_scale: f32['K_full/t pages/r/d/e page'] | None


@pytree_dataclass
class RingPages(Pages):
    """The pages of a layer with a window."""

    k: num['K_ring/t ring_pages/r/d/e page D_ring']
    v: num['K_ring/t ring_pages/r/d/e page D_ring'] | None
    k_scale: f32['K_ring/t ring_pages/r/d/e page'] | None
    v_scale: f32['K_ring/t ring_pages/r/d/e page'] | None


@pytree_dataclass
class LatentPages(Pages):
    """The pages of a layer with latent attention. `k`: results of `latents`, shared by all heads, with the values."""

    k: num['one pages/r/d/e page C_kv']
    v: num['one pages/r/d/e page C_kv'] | None
    k_scale: f32['one pages/r/d/e page'] | None
    v_scale: f32['one pages/r/d/e page'] | None


@pytree_dataclass
class Tables:
    """The pages and the slot of each row, numbered on its own device."""

    full: i32['R/r/d/e blocks']
    ring: i32['R/r/d/e ring']  # of layers with a window
    slot: i32['R/r/d/e']  # for layers with a state


def ring_blocks(window: int, chunk: int, page: int) -> int:
    """The blocks that the queries of a chunk of tokens see through a window."""
    return math.ceil((window + chunk - 1) / page) + 1


def empty_pages(
    arch: Architecture, layer: LayerKind, pages: int, page: int, dtype: DTypeLike, kind: CacheKind
) -> Pages:
    """The cache of one layer on the current mesh.

    Args:
        layer: the kind of the layer.
        pages: on all devices, page 0 of each device included.
        page: tokens in a page.
        dtype: compute dtype.
        kind: what keys and values are stored as.
    """
    stored = {'compute': dtype, 'bf16': jnp.bfloat16, 'int8': jnp.int8, 'fp8': jnp.float8_e4m3fn}[kind]
    if arch.attention.latent.kv_rank:
        like, shape = make_shardings(LatentPages), (1, pages, page, arch.sizes['C_kv'])
        scale = jnp.zeros(shape[:-1], jnp.float32, device=like.k_scale) if kind == 'int8' else None
        return LatentPages(jnp.zeros(shape, stored, device=like.k), None, scale, None)
    heads, pages_type = arch.heads(layer), RingPages if layer.window else Pages
    shape = heads.n_kv, pages, page, heads.d_value
    like = make_shardings(pages_type)
    values = [jnp.zeros(shape, stored, device=like.k) for _ in 'kv']
    scales = [jnp.zeros(shape[:-1], jnp.float32, device=like.k_scale) if kind == 'int8' else None for _ in 'kv']
    return pages_type(*values, *scales)


def write(
    pages: Pages, k: num['N K/t D'], v: num['N K/t D'] | None, table: i32['R/r/d/e blocks'], positions: i32['R/r/d/e C']
) -> Pages:
    """Stores the keys and values of N = R * C tokens, or latents, which are both, at their positions."""
    page = pages.k.shape[2]
    block = jnp.maximum(positions, 0) // page % table.shape[1]
    at = jnp.where(positions >= 0, jnp.take_along_axis(table, block, axis=1), 0).reshape(-1)
    within = jnp.maximum(positions, 0).reshape(-1) % page

    def put(into: jax.Array, x: jax.Array) -> jax.Array:
        # Whole rows of one matrix: for a scatter over heads XLA would copy the cache on TPUs, to change its layout.
        K, n_pages = into.shape[:2]
        row = (jnp.arange(K)[:, None] * n_pages + at) * page + within
        return into.reshape(-1, *into.shape[3:]).at[row].set(x).reshape(into.shape)

    def stored(into: jax.Array, scales: jax.Array | None, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        x = jnp.moveaxis(x, 1, 0)  # [K, N, D]
        if scales is not None:
            x32 = x.astype(jnp.float32)
            scale = jnp.max(jnp.abs(x32), axis=-1) / 127
            scales = put(scales, scale)
            x = jnp.round(x32 / jnp.where(scale > 0, scale, 1)[..., None])
        elif into.dtype == jnp.float8_e4m3fn:
            largest = float(jnp.finfo(into.dtype).max)
            x = jnp.clip(x.astype(jnp.float32), -largest, largest)
        return put(into, x.astype(into.dtype)), scales

    k, k_scale = stored(pages.k, pages.k_scale, k)
    v, v_scale = (None, None) if v is None or pages.v is None else stored(pages.v, pages.v_scale, v)
    return type(pages)(k, v, k_scale, v_scale)


def paged_attention(
    q: num['R/r/d/e C H/t D'],
    pages: Pages,
    table: i32['R/r/d/e blocks'],
    positions: i32['R/r/d/e C'],
    scores: Scores,
    sinks: f32['H/t'] | None = None,
) -> num['R/r/d/e C H/t D']:
    """Attention of queries to the cached keys up to their own positions; zeros for padding (position -1).

    Latents are keys and values, so the result of them is a sum of latents.

    Goes through the blocks that any row on this device needs. Softmax in one pass: Milakov and Gimelshein 2018,
    arXiv:1805.02867. A block that a row does not see leaves its sums as they are, bit for bit, so a row's result does
    not depend on the other rows.
    """
    R, C, H, D = q.shape
    K, _, page, _ = pages.k.shape
    at_once = min(max(1, BLOCK // page), table.shape[1])
    grouped = jnp.moveaxis(q.reshape(R, C, K, H // K, D), 1, 3)  # [R, K, G, C, D]
    last = jnp.max(positions) // page
    first = 0
    if scores.window:
        oldest = jnp.min(jnp.where(positions >= 0, positions, jnp.iinfo(jnp.int32).max))
        first = jnp.maximum(oldest - scores.window + 1, 0) // page

    def add_blocks(step: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        largest, total, values = sums
        blocks = first + step * at_once + jnp.arange(at_once)
        at = table[:, blocks % table.shape[1]]
        k = _blocks(pages.k, pages.k_scale, at, q.dtype)
        v = k if pages.v is None else _blocks(pages.v, pages.v_scale, at, q.dtype)
        key_positions = (blocks[:, None] * page + jnp.arange(page)).reshape(-1)
        # Past the end of its table, a row has no keys. A ring has no end.
        within = jnp.repeat((blocks < table.shape[1]) | bool(scores.window), page)
        visible = scores.sees(positions[:, :, None] - key_positions) & (positions >= 0)[:, :, None] & within
        visible &= scores.same_chunk(positions[:, :, None], key_positions)
        score = jnp.einsum('rkgcd,rksd->rkgcs', grouped, k, preferred_element_type=jnp.float32)
        score = scores.score(score)
        # Pages without a user keep what was there, which may be NaN: 0 times it is not 0.
        v = jnp.where(jnp.any(visible, axis=1)[:, None, :, None], v, 0)
        visible = visible[:, None, None]
        score = jnp.where(visible, score, _HIDDEN)
        new_largest = jnp.maximum(largest, jnp.max(score, axis=-1))
        probability = jnp.where(visible, jnp.exp(score - new_largest[..., None]), 0.0)
        fade = jnp.exp(largest - new_largest)
        more = jnp.einsum('rkgcs,rksd->rkgcd', probability.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return new_largest, total * fade + jnp.sum(probability, axis=-1), values * fade[..., None] + more

    zero = jnp.zeros_like(grouped, jnp.float32)  # varies over the mesh as q does
    start = zero[..., 0] + _HIDDEN, zero[..., 0], zero
    if sinks is not None:  # a key that every query sees, and whose value is zero
        start = zero[..., 0] + sinks.reshape(K, H // K, 1), zero[..., 0] + 1, zero
    _, total, values = jax.lax.fori_loop(0, (last - first) // at_once + 1, add_blocks, start)
    out = values / jnp.where(total > 0, total, 1)[..., None]
    return jnp.moveaxis(out, 3, 1).reshape(q.shape).astype(q.dtype)


def _blocks(x: jax.Array, scales: jax.Array | None, at: i32['R n'], dtype: DTypeLike) -> jax.Array:
    """The pages `at` of each row, [R, K, n * page, D], in the compute dtype."""
    K, _, page, D = x.shape
    R, n = at.shape
    found = jnp.moveaxis(x[:, at], 0, 1).reshape(R, K, n * page, D)
    if scales is None:
        return found.astype(dtype)
    scale = jnp.moveaxis(scales[:, at], 0, 1).reshape(R, K, n * page)
    return (found.astype(jnp.float32) * scale[..., None]).astype(dtype)
