"""Attention when devices share out a sequence, and in which order they do.

Letters: B batch, L length, H query heads, K key/value heads, G query heads per key/value head, D head, C chunk.

`all_to_all` (Jacobs et al. 2023, arXiv:2309.14509) gives each device whole sequences of some heads, and any kernel does
the rest. `ring` (Liu et al. 2023, arXiv:2310.01889) keeps the queries where they are and passes keys and values round;
each device puts its softmax together from what comes by (Milakov and Gimelshein 2018, arXiv:1805.02867), in f32.

In a causal ring the device with the last tokens would work while the others wait. So a sequence is cut into 2c chunks and
device i of c has chunks i and 2c-1-i: whatever keys come by, every device has two pairs of chunks to multiply. The data
brings its columns in that order (`column_order`); positions and segments travel with them.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.errors import UserError
from pretrax.model.architecture import Architecture, Scores
from pretrax.model.loss import Batch
from pretrax.model.softcap import softcap
from pretrax.shardlib import alike, axis_index, axis_size, i32, num, ppermute, save

BLOCK = 512  # queries whose scores exist at once
HIDDEN = -1e30  # the score of what is not seen; finite, so that a row that sees nothing yet makes no NaN


def choose_context(wanted: str, arch: Architecture, mesh: dict[str, int], sequence_length: int) -> tuple[str, str]:
    """'ring' or 'all_to_all', and why.

    Raises:
        UserError: the heads or the sequence cannot be shared out so.
    """
    c, t = mesh['c'], mesh['t']
    if c == 1:
        return 'all_to_all', 'each device has whole sequences'
    if wanted == 'auto':
        wanted = 'ring' if arch.n_kv_heads % (c * t) else 'all_to_all'
        why = {
            'ring': f'{arch.n_kv_heads} key/value heads do not divide by {t} x {c} for all_to_all',
            'all_to_all': 'any kernel works, and the heads divide',
        }[wanted]
    else:
        why = 'as configured'
    if wanted == 'all_to_all' and arch.n_kv_heads % (c * t):
        raise UserError(
            f'model.n_kv_heads = {arch.n_kv_heads} is not divisible by mesh.t x mesh.c = {t} x {c}, '
            'as model.context=all_to_all needs\nuse model.context=ring'
        )
    parts = t * c if wanted == 'all_to_all' else t * c if t % 2 == 0 else 2 * t * c
    if sequence_length % parts:
        how = 'ring: 2 chunks for each device along c' if wanted == 'ring' else 'all_to_all'
        raise UserError(
            f'batch.sequence_length = {sequence_length} is not divisible by {parts} '
            f'(mesh.c = {c}, mesh.t = {t}, {how})\nuse batch.sequence_length={-(-sequence_length // parts) * parts}'
        )
    return wanted, why


def kernel_for(context: str, wanted: str) -> str:
    """The kernel to choose: in a ring none but the plain one, since it multiplies blocks itself, in plain XLA.

    Raises:
        UserError: another kernel is wanted.
    """
    if context != 'ring':
        return wanted
    if wanted not in ('auto', 'blockwise'):
        raise UserError(
            f'model.attention={wanted} cannot multiply what goes round a ring\nuse model.context=all_to_all'
        )
    return 'blockwise'


def column_order(context: str, length: int, c: int) -> np.ndarray | None:
    """The columns of a sequence in the order in which c devices share them out, each an equal part; None: as they come."""
    if context != 'ring':
        return None
    chunks = np.arange(length).reshape(2 * c, -1)
    return np.concatenate([np.concatenate([chunks[i], chunks[2 * c - 1 - i]]) for i in range(c)])


def local_columns(batch: Batch, context: str) -> i32['L/c']:
    """The columns of the whole sequences that this device has."""
    length = batch.tokens.shape[1]
    if context == 'all_to_all':
        return axis_index('c') * length + jnp.arange(length, dtype=jnp.int32)
    first, second = _starts(axis_index('c'), length // 2)
    within = jnp.arange(length // 2, dtype=jnp.int32)
    return jnp.concatenate([first + within, second + within])


def ring_attention(
    q: num['B/r/d/e L/c H/t D'],
    k: num['B/r/d/e L/c K/t D'],
    v: num['B/r/d/e L/c K/t D'],
    segments: i32['B/r/d/e L/c'],
    scores: Scores,
) -> num['B/r/d/e L/c H/t D']:
    """Attention of sequences whose columns are in `column_order`."""
    return _ring(scores, *alike(q, k, v), segments)


class Keys(NamedTuple):
    """What goes round: keys, values [B, 2C, K, D] and the documents [B, 2C] of two chunks."""

    k: Any
    v: Any
    segments: Any


class Queries(NamedTuple):
    """A chunk of queries [B, C, K, G, D], their documents [B, C], and where the chunk begins in the sequence."""

    q: Any
    segments: Any
    start: Any


class Sums(NamedTuple):
    """The softmax of a chunk of queries so far, in f32: values [B, C, K, G, D], largest score, sum [B, C, K, G]."""

    values: Any
    largest: Any
    total: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(scores: Scores, q: Any, k: Any, v: Any, segments: Any) -> Any:
    return _ring_forward(scores, q, k, v, segments)[0]


def _ring_forward(scores: Scores, q: Any, k: Any, v: Any, segments: Any) -> tuple[Any, Any]:
    own = Keys(k, v, segments)
    early, late = _queries(q, k, segments)
    see: Any = functools.partial(_see, scores)

    coming = ppermute('c', own)
    own_early, own_late = _chunks(own, axis_index('c'))
    first = see(_nothing(early.q), early, own_early)
    second = see(see(_nothing(late.q), late, own_early), late, own_late)

    def hop(carry: Any, s: Any) -> tuple[Any, None]:
        keys, first, second = carry
        coming = ppermute('c', keys)  # travels while these are multiplied
        before, keys_early, keys_late = _who_came(keys, s)
        second = see(second, late, keys_early)  # the second half sees every first half
        either = see(_pick(before, first, second), _pick(before, early, late), _pick(before, keys_early, keys_late))
        return (coming, _pick(before, either, first), _pick(before, second, either)), None

    (_, first, second), _ = jax.lax.scan(hop, (coming, first, second), _hops())
    values = jnp.concatenate([(sums.values / sums.total[..., None]) for sums in (first, second)], axis=1)
    log_z = jnp.concatenate([sums.largest + jnp.log(sums.total) for sums in (first, second)], axis=1)
    out = values.reshape(q.shape).astype(q.dtype)
    out, log_z = save(out, 'attention'), save(log_z, 'attention')  # the backward pass starts from both
    return out, (q, k, v, segments, out, log_z)


def _ring_backward(scores: Scores, residuals: Any, d_out: Any) -> tuple[Any, Any, Any, None]:
    """The gradients of keys and values go round with them, and come home after the whole circle."""
    q, k, v, segments, out, log_z = residuals
    own = Keys(k, v, segments)
    early, late = _queries(q, k, segments)
    shape = early.q.shape[0], 2 * early.q.shape[1], *early.q.shape[2:]
    d_out = d_out.reshape(shape)
    # sum_s p_s dp_s, one number for a query (Dao et al. 2022, arXiv:2205.14135, appendix B.2)
    mean = jnp.sum(d_out.astype(jnp.float32) * out.reshape(shape).astype(jnp.float32), axis=-1)
    known = list(zip(*(jnp.split(x, 2, axis=1) for x in (d_out, log_z, mean)), strict=True))
    of_early, of_late = (early, *known[0]), (late, *known[1])
    back: Any = functools.partial(_see_backward, scores)

    own_early, own_late = _chunks(own, axis_index('c'))
    d_first, d_k_early, d_v_early = back(*of_early, own_early)
    d_second, more_k, more_v = back(*of_late, own_early)
    d_third, d_k_late, d_v_late = back(*of_late, own_late)
    d_second = d_second + d_third
    d_keys = tuple(
        jnp.concatenate(pair, axis=1) for pair in ((d_k_early + more_k, d_k_late), (d_v_early + more_v, d_v_late))
    )

    def hop(carry: Any, s: Any) -> tuple[Any, None]:
        keys, (d_k, d_v), d_first, d_second = carry
        coming = ppermute('c', keys)
        before, keys_early, keys_late = _who_came(keys, s)
        dq, dk, dv = back(*of_late, keys_early)
        either_dq, either_dk, either_dv = back(
            *_pick(before, of_early, of_late), _pick(before, keys_early, keys_late)
        )  # fmt: skip
        nothing = jnp.zeros_like(either_dk)
        d_k = d_k + jnp.concatenate([dk + jnp.where(before, either_dk, nothing),
                                     jnp.where(before, nothing, either_dk)], axis=1)  # fmt: skip
        d_v = d_v + jnp.concatenate([dv + jnp.where(before, either_dv, nothing),
                                     jnp.where(before, nothing, either_dv)], axis=1)  # fmt: skip
        d_first = d_first + jnp.where(before, either_dq, 0)
        d_second = d_second + dq + jnp.where(before, 0, either_dq)
        return (coming, ppermute('c', (d_k, d_v)), d_first, d_second), None

    start = ppermute('c', own), ppermute('c', d_keys), d_first, d_second
    (_, (d_k, d_v), d_first, d_second), _ = jax.lax.scan(hop, start, _hops())
    d_q = jnp.concatenate([d_first, d_second], axis=1).reshape(q.shape)
    return d_q.astype(q.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


_ring.defvjp(_ring_forward, _ring_backward)


def _starts(device: Any, chunk: int) -> tuple[Any, Any]:
    """Where a device's two chunks begin."""
    return device * chunk, (2 * axis_size('c') - 1 - device) * chunk


def _hops() -> Any:
    return jnp.arange(1, axis_size('c'), dtype=jnp.int32)


def _who_came(keys: Keys, hops: Any) -> tuple[Any, Queries, Queries]:
    """Whether these keys come from a device before this one, and their two chunks."""
    device = (axis_index('c') - hops) % axis_size('c')
    return device < axis_index('c'), *_chunks(keys, device)


def _chunks(keys: Keys, device: Any) -> tuple[Any, Any]:
    """((k, v, segments, start), the same of the second chunk) of the keys of a device."""
    halves = zip(*(jnp.split(x, 2, axis=1) for x in keys), strict=True)
    starts = _starts(device, keys.k.shape[1] // 2)
    early, late = ((*half, start) for half, start in zip(halves, starts, strict=True))
    return early, late


def _queries(q: Any, k: Any, segments: Any) -> tuple[Queries, Queries]:
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    starts = _starts(axis_index('c'), q.shape[1] // 2)
    halves = zip(jnp.split(grouped, 2, axis=1), jnp.split(segments, 2, axis=1), starts, strict=True)
    early, late = (Queries(*half) for half in halves)
    return early, late


def _pick(first: Any, a: Any, b: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), a, b)


def _nothing(q: Any) -> Sums:
    rows = jnp.zeros_like(q[..., 0], jnp.float32)
    return Sums(jnp.zeros_like(q, jnp.float32), rows + HIDDEN, rows)


def _see(scores: Scores, sums: Sums, queries: Queries, keys: Any) -> Sums:
    """The sums after a chunk of keys more. A block of queries at a time, so that few scores exist at once."""
    k, v, k_segments, k_start = keys

    def block(_: None, one: Any) -> tuple[None, Sums]:
        (q, segments, within), sums = one
        score = _scores(q, k, scores)
        visible = _visible(segments, queries.start + within, k_segments, k_start, scores)
        score = jnp.where(visible, score, HIDDEN)
        largest = jnp.maximum(sums.largest, jnp.max(score, axis=-1))
        probability = jnp.where(visible, jnp.exp(score - largest[..., None]), 0.0)
        fade = jnp.exp(sums.largest - largest)
        more = jnp.einsum('blkgs,bskd->blkgd', probability.astype(v.dtype), v, preferred_element_type=jnp.float32)
        total = sums.total * fade + jnp.sum(probability, axis=-1)
        return None, Sums(sums.values * fade[..., None] + more, largest, total)

    blocks = _blocks((queries.q, queries.segments), sums)
    return jax.tree.map(_together, jax.lax.scan(block, None, blocks)[1])


def _see_backward(scores: Scores, queries: Queries, d_out: Any, log_z: Any, mean: Any, keys: Any) -> tuple:
    """The gradients of queries (f32, [B, C, K, G, D]), keys and values (f32, [B, C, K, D]) of one pair of chunks."""
    k, v, k_segments, k_start = keys

    def block(carry: Any, one: Any) -> tuple[Any, Any]:
        d_k, d_v = carry
        (q, segments, within), (d_out, log_z, mean) = one
        score = _scores(q, k, scores)
        visible = _visible(segments, queries.start + within, k_segments, k_start, scores)
        probability = jnp.where(visible, jnp.exp(score - log_z[..., None]), 0.0)
        exact = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
        d_v = d_v + exact('blkgs,blkgd->bskd', probability.astype(v.dtype), d_out)
        d_score = probability * (exact('blkgd,bskd->blkgs', d_out, v) - mean[..., None])
        if scores.softcap:
            d_score = d_score * (1 - jnp.square(score / scores.softcap))
        d_product = (d_score / scores.divisor).astype(q.dtype)
        d_k = d_k + exact('blkgs,blkgd->bskd', d_product, q)
        return (d_k, d_v), exact('blkgs,bskd->blkgd', d_product, k)

    blocks = _blocks((queries.q, queries.segments), (d_out, log_z, mean))
    zero = tuple(jnp.zeros_like(x, jnp.float32) for x in (k, v))
    (d_k, d_v), d_q = jax.lax.scan(block, zero, blocks)
    return _together(d_q), d_k, d_v


def _scores(q: Any, k: Any, scores: Scores) -> Any:
    products = jnp.einsum('blkgd,bskd->blkgs', q, k, preferred_element_type=jnp.float32)
    return softcap(products / scores.divisor, scores.softcap)


def _visible(segments: Any, q_places: Any, k_segments: Any, k_start: Any, scores: Scores) -> Any:
    """bool[B, L, 1, 1, S]: same document, not after, not out of the window."""
    k_places = k_start + jnp.arange(k_segments.shape[1], dtype=jnp.int32)
    seen = scores.sees(q_places[:, None] - k_places[None, :])
    return (seen & (segments[:, :, None] == k_segments[:, None, :]))[:, :, None, None, :]


def _blocks(queries: tuple[Any, Any], more: Any) -> tuple[Any, Any]:
    """Arrays [B, C, ...] as [blocks, B, block, ...], and the place of each query in its chunk."""
    chunk = queries[0].shape[1]
    block = max(n for n in range(1, min(BLOCK, chunk) + 1) if chunk % n == 0)

    def cut(x: Any) -> Any:
        return jnp.moveaxis(x.reshape(x.shape[0], chunk // block, block, *x.shape[2:]), 1, 0)

    within = jnp.arange(chunk, dtype=jnp.int32).reshape(-1, block)
    return (*jax.tree.map(cut, queries), within), jax.tree.map(cut, more)


def _together(x: Any) -> Any:
    """[blocks, B, block, ...] -> [B, C, ...]"""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])
