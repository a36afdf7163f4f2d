"""Context parallelism: attention over sequences that are sharded over the mesh axis c, and the order of their columns.

Letters: B batch, L length, H query heads, K key/value heads, G query heads per key/value head, D head, D_qk query or
key (D, but in latent attention), C chunk.

`all_to_all` (Jacobs et al. 2023, arXiv:2309.14509) gives each device whole sequences of some heads, for any kernel.
`ring` (Liu et al. 2023, arXiv:2310.01889) keeps the queries where they are and sends keys and values around a ring;
each device accumulates its softmax over the keys that arrive (Milakov and Gimelshein 2018, arXiv:1805.02867), in f32.

In a causal ring, the device with the last tokens would work while the others wait. So a sequence is cut into 2c chunks,
and device i of c has chunks i and 2c-1-i: for any keys that arrive, every device multiplies two pairs of chunks.
Batches have their columns in that order (`column_order`), with their positions and segments.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.errors import UserError
from pretrax.model.architecture import Architecture
from pretrax.model.dropout import drop_probabilities, seeds_of_heads
from pretrax.model.scores import Scores
from pretrax.shardlib import axis_index, axis_size, bool_, f32, i32, num, ppermute, save, u32, vary_together

BLOCK = 512  # queries whose scores exist at once
HIDDEN = -1e30  # the score of an invisible key; finite, so that a row without visible keys gives no NaN


def choose_context(wanted: str, arch: Architecture, mesh: dict[str, int], sequence_length: int) -> tuple[str, str]:
    """'ring' or 'all_to_all', and the reason.

    Raises:
        UserError: the mesh does not divide the heads or the sequence.
    """
    c, t = mesh['c'], mesh['t']
    kv_heads = math.gcd(arch.attention.n_kv_heads, arch.attention.global_n_kv_heads)
    if c == 1:
        return 'all_to_all', 'each device has whole sequences'
    if wanted == 'auto':
        wanted = 'ring' if kv_heads % (c * t) else 'all_to_all'
        why = {
            'ring': f'{kv_heads} key/value heads do not divide by {t} x {c} for all_to_all',
            'all_to_all': 'any kernel works, and the heads divide',
        }[wanted]
    else:
        why = 'as configured'
    if wanted == 'all_to_all' and kv_heads % (c * t):
        raise UserError(
            f'model.attention.n_kv_heads = {kv_heads} is not divisible by mesh.t x mesh.c = {t} x '
            f'{c}, as model.attention.context=all_to_all needs\nuse model.attention.context=ring'
        )
    chunks = 2 if wanted == 'ring' and t % 2 else 1
    parts = chunks * t * c
    if sequence_length % parts:
        how = 'ring: 2 chunks for each device along c' if wanted == 'ring' else 'all_to_all'
        fits = max((n for n in range(1, c) if c % n == 0 and sequence_length % (chunks * t * n) == 0), default=1)
        raise UserError(
            f'batch.sequence_length = {sequence_length} is not divisible by {parts} '
            f'(mesh.c = {c}, mesh.t = {t}, {how})\nuse mesh.c={fits}'
        )
    return wanted, why


def kernel_for(context: str, wanted: str) -> str:
    """The kernel to choose from; a ring multiplies blocks itself, in plain XLA.

    Raises:
        UserError: a ring with a fused kernel is wanted.
    """
    if context != 'ring':
        return wanted
    if wanted not in ('auto', 'blockwise'):
        raise UserError(
            f'model.attention.kernel={wanted} does not support model.attention.context=ring\n'
            'use model.attention.kernel=auto'
        )
    return 'blockwise'


def column_order(context: str, length: int, c: int) -> np.ndarray | None:
    """The order in which the columns of a sequence are sharded over c devices, in equal parts; None: unchanged."""
    if context != 'ring':
        return None
    chunks = np.arange(length).reshape(2 * c, -1)
    return np.concatenate([np.concatenate([chunks[i], chunks[2 * c - 1 - i]]) for i in range(c)])


def local_columns(tokens: i32['B/r/d/e L/c'], context: str) -> i32['L/c']:
    """The columns of the whole sequences that this device has."""
    length = tokens.shape[1]
    if context == 'all_to_all':
        return axis_index('c') * length + jnp.arange(length, dtype=jnp.int32)
    first, second = _starts(axis_index('c'), length // 2)
    within = jnp.arange(length // 2, dtype=jnp.int32)
    return jnp.concatenate([first + within, second + within])


def ring_attention(
    q: num['B/r/d/e L/c H/t D_qk'],
    k: num['B/r/d/e L/c K/t D_qk'],
    v: num['B/r/d/e L/c K/t D'],
    segments: i32['B/r/d/e L/c'],
    scores: Scores,
    sinks: f32['H/t'] | None = None,
    seeds: u32['B/r/d/e L/c two'] | None = None,
) -> num['B/r/d/e L/c H/t D']:
    """Attention of sequences whose columns are in `column_order`."""
    of_heads = None if seeds is None else seeds_of_heads(seeds, k.shape[2], q.shape[2], 't')
    if sinks is None:
        return _ring(scores, *vary_together(q, k, v), None, segments, of_heads)
    return _ring(scores, *vary_together(q, k, v, sinks), segments, of_heads)


# Types below are those of one device: H, K and B are its own.
class Keys(NamedTuple):
    """What travels around the ring: keys, values and documents of two chunks."""

    k: num['B C2 K D_qk']
    v: num['B C2 K D']
    segments: i32['B C2']


class Chunk(NamedTuple):
    """Keys, values and documents of one chunk, and its first position in the sequence."""

    k: num['B C K D_qk']
    v: num['B C K D']
    segments: i32['B C']
    start: i32['']


class Queries(NamedTuple):
    """A chunk of queries, their documents, random words for dropout if any, and its first position in the sequence."""

    q: num['B C K G D_qk']
    segments: i32['B C']
    seeds: u32['B C K G two'] | None
    start: i32['']


class Softmax(NamedTuple):
    """The softmax of a chunk of queries over the keys so far: weighted values, largest score, sum of the weights."""

    values: f32['B C K G D']
    largest: f32['B C K G']
    total: f32['B C K G']


class Attended(NamedTuple):
    """A chunk of queries in the backward pass: the gradient of its output, log sum exp of scores, sum_s p_s dp_s."""

    queries: Queries
    d_out: num['B C K G D']
    log_z: f32['B C K G']
    mean: f32['B C K G']


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(
    scores: Scores,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    segments: jax.Array,
    seeds: jax.Array | None,
) -> jax.Array:
    return _ring_forward(scores, q, k, v, sinks, segments, seeds)[0]


def _ring_forward(
    scores: Scores,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    sinks: jax.Array | None,
    segments: jax.Array,
    seeds: jax.Array | None,
) -> tuple[jax.Array, tuple]:
    own = Keys(k, v, segments)
    early, late = _queries(q, k, segments, seeds)
    add_chunk = functools.partial(_chunk_forward, scores)

    next_keys = ppermute('c', own)
    own_early, own_late = _chunks(own, axis_index('c'))
    d_value = v.shape[-1]
    first = add_chunk(_no_keys(early.q, d_value, sinks), early, own_early)
    second = add_chunk(add_chunk(_no_keys(late.q, d_value, sinks), late, own_early), late, own_late)

    def hop(carry: tuple, number: i32['']) -> tuple[tuple, None]:
        keys, first, second = carry
        next_keys = ppermute('c', keys)  # sent while these are multiplied
        before, keys_early, keys_late = _arrived(keys, number)
        second = add_chunk(second, late, keys_early)  # the late chunk sees every early chunk
        either = add_chunk(
            _pick(before, first, second), _pick(before, early, late), _pick(before, keys_early, keys_late)
        )
        return (next_keys, _pick(before, either, first), _pick(before, second, either)), None

    (_, first, second), _ = jax.lax.scan(hop, (next_keys, first, second), _hops())
    values = jnp.concatenate([(sums.values / sums.total[..., None]) for sums in (first, second)], axis=1)
    log_z = jnp.concatenate([sums.largest + jnp.log(sums.total) for sums in (first, second)], axis=1)
    out = values.reshape(*q.shape[:-1], d_value).astype(q.dtype)
    out, log_z = save(out, 'attention'), save(log_z, 'attention')  # the backward pass needs both
    return out, (q, k, v, sinks, segments, seeds, out, log_z)


def _ring_backward(scores: Scores, residuals: tuple, d_out: jax.Array) -> tuple:
    """The gradients of keys and values travel with them, and return to their device at the end of the circle."""
    q, k, v, sinks, segments, seeds, out, log_z = residuals
    own = Keys(k, v, segments)
    early, late = _queries(q, k, segments, seeds)
    shape = early.q.shape[0], 2 * early.q.shape[1], *early.q.shape[2:4], -1
    d_out = d_out.reshape(shape)
    # sum_s p_s dp_s, one number per query (Dao et al. 2022, arXiv:2205.14135, appendix B.2)
    mean = jnp.sum(d_out.astype(jnp.float32) * out.reshape(shape).astype(jnp.float32), axis=-1)
    halves = zip((early, late), *(jnp.split(x, 2, axis=1) for x in (d_out, log_z, mean)), strict=True)
    of_early, of_late = (Attended(*half) for half in halves)
    back = functools.partial(_chunk_backward, scores)

    own_early, own_late = _chunks(own, axis_index('c'))
    d_first, d_k_early, d_v_early = back(of_early, own_early)
    d_second, more_k, more_v = back(of_late, own_early)
    d_third, d_k_late, d_v_late = back(of_late, own_late)
    d_second = d_second + d_third
    d_keys = tuple(
        jnp.concatenate(pair, axis=1) for pair in ((d_k_early + more_k, d_k_late), (d_v_early + more_v, d_v_late))
    )

    def hop(carry: tuple, number: i32['']) -> tuple[tuple, None]:
        keys, (d_k, d_v), d_first, d_second = carry
        next_keys = ppermute('c', keys)
        before, keys_early, keys_late = _arrived(keys, number)
        dq, dk, dv = back(of_late, keys_early)
        either_dq, either_dk, either_dv = back(_pick(before, of_early, of_late), _pick(before, keys_early, keys_late))
        d_k = d_k + jnp.concatenate([dk + jnp.where(before, either_dk, 0), jnp.where(before, 0, either_dk)], axis=1)
        d_v = d_v + jnp.concatenate([dv + jnp.where(before, either_dv, 0), jnp.where(before, 0, either_dv)], axis=1)
        d_first = d_first + jnp.where(before, either_dq, 0)
        d_second = d_second + dq + jnp.where(before, 0, either_dq)
        return (next_keys, ppermute('c', (d_k, d_v)), d_first, d_second), None

    start = ppermute('c', own), ppermute('c', d_keys), d_first, d_second
    (_, (d_k, d_v), d_first, d_second), _ = jax.lax.scan(hop, start, _hops())
    d_q = jnp.concatenate([d_first, d_second], axis=1).reshape(q.shape)
    d_sinks = None
    if sinks is not None:  # a sink is a key whose value is zero
        d_sinks = -jnp.sum(jnp.exp(sinks.reshape(log_z.shape[2:]) - log_z) * mean, axis=(0, 1)).reshape(-1)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), d_sinks, None, None


_ring.defvjp(_ring_forward, _ring_backward)


def _starts(device: i32[''], chunk: int) -> tuple[i32[''], i32['']]:
    """The first positions of a device's two chunks."""
    return device * chunk, (2 * axis_size('c') - 1 - device) * chunk


def _hops() -> i32['hops']:
    return jnp.arange(1, axis_size('c'), dtype=jnp.int32)


def _arrived(keys: Keys, hops: i32['']) -> tuple[bool_[''], Chunk, Chunk]:
    """Whether these keys come from an earlier device than this one, and their two chunks."""
    device = (axis_index('c') - hops) % axis_size('c')
    return device < axis_index('c'), *_chunks(keys, device)


def _chunks(keys: Keys, device: i32['']) -> tuple[Chunk, Chunk]:
    """The two chunks of the keys of a device."""
    halves = zip(*(jnp.split(x, 2, axis=1) for x in keys), strict=True)
    starts = _starts(device, keys.k.shape[1] // 2)
    early, late = (Chunk(k, v, segments, start) for (k, v, segments), start in zip(halves, starts, strict=True))
    return early, late


def _queries(q: jax.Array, k: jax.Array, segments: jax.Array, seeds: jax.Array | None) -> tuple[Queries, Queries]:
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    starts = _starts(axis_index('c'), q.shape[1] // 2)
    words = [None, None] if seeds is None else jnp.split(seeds, 2, axis=1)
    halves = zip(jnp.split(grouped, 2, axis=1), jnp.split(segments, 2, axis=1), words, starts, strict=True)
    early, late = (Queries(*half) for half in halves)
    return early, late


def _pick[T](first: bool_[''], a: T, b: T) -> T:
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), a, b)


def _no_keys(q: num['B C K G D_qk'], d_value: int, sinks: f32['H'] | None) -> Softmax:
    rows = jnp.zeros_like(q[..., 0], jnp.float32)
    nothing = jnp.broadcast_to(rows[..., None], (*rows.shape, d_value))
    if sinks is None:
        return Softmax(nothing, rows + HIDDEN, rows)
    return Softmax(nothing, rows + sinks.reshape(q.shape[2:4]), rows + 1)


def _chunk_forward(scores: Scores, sums: Softmax, queries: Queries, keys: Chunk) -> Softmax:
    """The softmax with another chunk of keys, one block of queries at a time, so that few scores exist at once."""
    k, v, k_segments, k_start = keys

    def block(_: None, one: tuple) -> tuple[None, Softmax]:
        (q, segments, seeds, within), sums = one
        q, within = jax.lax.optimization_barrier((q, within))  # or all masks exist before the loop over the layers
        score = _scores(q, k, scores)
        visible = _visible(segments, queries.start + within, k_segments, k_start, scores)
        score = jnp.where(visible, score, HIDDEN)
        largest = jnp.maximum(sums.largest, jnp.max(score, axis=-1))
        probability = jnp.where(visible, jnp.exp(score - largest[..., None]), 0.0)
        fade = jnp.exp(sums.largest - largest)
        seen = _dropped(probability, seeds, k_start, scores)
        more = jnp.einsum('blkgs,bskd->blkgd', seen.astype(v.dtype), v, preferred_element_type=jnp.float32)
        total = sums.total * fade + jnp.sum(probability, axis=-1)
        return None, Softmax(sums.values * fade[..., None] + more, largest, total)

    blocks = _blocks((queries.q, queries.segments, queries.seeds), sums)
    return jax.tree.map(_joined, jax.lax.scan(block, None, blocks)[1])


def _chunk_backward(
    scores: Scores, attended: Attended, keys: Chunk
) -> tuple[f32['B C K G D_qk'], f32['B C K D_qk'], f32['B C K D']]:
    """The gradients of queries, keys and values of one pair of chunks."""
    queries, d_out, log_z, mean = attended
    k, v, k_segments, k_start = keys

    def block(carry: tuple, one: tuple) -> tuple[tuple, jax.Array]:
        d_k, d_v = carry
        (q, segments, seeds, within), (d_out, log_z, mean) = one
        q, within = jax.lax.optimization_barrier((q, within))  # or all masks exist before the loop over the layers
        score = _scores(q, k, scores)
        visible = _visible(segments, queries.start + within, k_segments, k_start, scores)
        probability = jnp.where(visible, jnp.exp(score - log_z[..., None]), 0.0)
        exact = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        d_v = d_v + exact('blkgs,blkgd->bskd', _dropped(probability, seeds, k_start, scores).astype(v.dtype), d_out)
        d_probability = _dropped(exact('blkgd,bskd->blkgs', d_out, v), seeds, k_start, scores)
        d_score = probability * (d_probability - mean[..., None])
        d_product = (scores.cap_gradient(score, d_score) / scores.divisor).astype(q.dtype)
        d_k = d_k + exact('blkgs,blkgd->bskd', d_product, q)
        return (d_k, d_v), exact('blkgs,bskd->blkgd', d_product, k)

    blocks = _blocks((queries.q, queries.segments, queries.seeds), (d_out, log_z, mean))
    zero = tuple(jnp.zeros_like(x, jnp.float32) for x in (k, v))
    (d_k, d_v), d_q = jax.lax.scan(block, zero, blocks)
    return _joined(d_q), d_k, d_v


def _scores(q: num['B L K G D_qk'], k: num['B S K D_qk'], scores: Scores) -> f32['B L K G S']:
    products = jnp.einsum('blkgd,bskd->blkgs', q, k, preferred_element_type=jnp.float32)
    return scores.score(products)


def _visible(
    segments: i32['B L'], q_positions: i32['L'], k_segments: i32['B S'], k_start: i32[''], scores: Scores
) -> bool_['B L 1 1 S']:
    """Whether a key is in the same document, not after the query, and in its window."""
    k_positions = k_start + jnp.arange(k_segments.shape[1], dtype=jnp.int32)
    seen = scores.sees(q_positions[:, None] - k_positions[None, :])
    return (seen & (segments[:, :, None] == k_segments[:, None, :]))[:, :, None, None, :]


def _dropped(
    p: f32['B L K G S'], seeds: u32['B L K G two'] | None, k_start: i32[''], scores: Scores
) -> f32['B L K G S']:
    """Probabilities with dropout, or their gradients: the mask is the same."""
    return p if seeds is None else drop_probabilities(p, seeds, k_start, scores.dropout)


def _blocks[T](queries: tuple[jax.Array | None, ...], more: T) -> tuple[tuple[Any, ...], T]:
    """Arrays [B, C, ...] as [blocks, B, block, ...], and the index of each query in its chunk."""
    chunk = jax.tree.leaves(queries)[0].shape[1]
    block = max(n for n in range(1, min(BLOCK, chunk) + 1) if chunk % n == 0)

    def cut(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(x.shape[0], chunk // block, block, *x.shape[2:]), 1, 0)

    within = jnp.arange(chunk, dtype=jnp.int32).reshape(-1, block)
    return (*jax.tree.map(cut, queries), within), jax.tree.map(cut, more)


def _joined(x: jax.Array) -> jax.Array:
    """[blocks, B, block, ...] -> [B, C, ...]"""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])
