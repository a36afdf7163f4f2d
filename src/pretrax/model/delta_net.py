"""The gated delta net: a state that decays, and in which a token replaces the value of its key.

Letters: B batch, L length, C tokens of a chunk, n chunks, G key heads, R heads that share a key, S key, W head. Plain arrays
on one device.
"""

import jax
import jax.numpy as jnp

from pretrax.model.chunks import cut, decays
from pretrax.shardlib import f32, i32, num

_EPS = 1e-6  # of the length of queries and keys
_EXACT = jax.lax.Precision.HIGHEST


@jax.checkpoint
def delta_scan(
    q: num['B L G S'],
    k: num['B L G S'],
    v: f32['B L G R W'],
    decay: f32['B L G R'],
    beta: f32['B L G R'],
    segments: i32['B L'],
    state: f32['B G R S W'],
) -> tuple[f32['B L G R W'], f32['B G R S W']]:
    """y_t = q_t S_t with S_t = (I - beta_t k_t^T k_t) exp(decay_t) S_{t-1} + beta_t k_t^T v_t, in chunks.

    Queries and keys have unit length; queries are divided by sqrt(S). Yang et al. 2024, arXiv:2412.06464, section 3.3: the
    updates of a chunk, each of which depends on the ones before it, are the solution of a triangular system (the WY form).
    The backward pass computes everything again.

    Args:
        q: queries.
        k: keys, which R heads share, as queries.
        v: values.
        decay: logarithm of the decay.
        beta: how much of what the state holds under a key is replaced, 0 to 1.
        segments: the number of each token's document; a new document starts with an empty state.
        state: before the first token, for its document.

    Returns:
        y, and the state after the last token.
    """
    length = q.shape[1]
    by = decays(decay, segments)
    q, k = cut(unit(q) * q.shape[-1] ** -0.5), cut(unit(k))  # [B, n, C, G, S]
    beta = jnp.moveaxis(cut(beta), 2, -1)[..., None]  # [B, n, G, R, C, 1]
    values = jnp.einsum('bncgrw->bngrcw', cut(v.astype(jnp.float32)))
    # A TPU would round k to bf16, and the errors grow with the inverse
    overlap = jnp.einsum('bnigs,bnjgs->bngij', k, k, precision=_EXACT)
    overlap = overlap[:, :, :, None] * by.pairs * beta  # [B, n, G, R, C, C]
    keys = jnp.einsum('bncgs,bngrc->bngrcs', k, by.start)
    solved = solve(overlap, beta * jnp.concatenate([values, keys], axis=-1))
    new, read = jnp.split(solved, [values.shape[-1]], axis=-1)
    scores = jnp.einsum('bnigs,bnjgs->bngij', q, k)[:, :, :, None] * by.pairs
    queries = jnp.einsum('bncgs,bngrc->bngrcs', q, by.start)
    writing = jnp.einsum('bncgs,bngrc->bngrcs', k, by.end)

    def chunk(state: jax.Array, one: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        new, read, scores, queries, writing, whole = one
        new = new - jnp.einsum('bgrcs,bgrsw->bgrcw', read, state)
        y = jnp.einsum('bgrcs,bgrsw->bgrcw', queries, state) + jnp.einsum('bgrij,bgrjw->bgriw', scores, new)
        return state * whole[..., None, None] + jnp.einsum('bgrcs,bgrcw->bgrsw', writing, new), y

    chunks = tuple(jnp.moveaxis(x, 1, 0) for x in (new, read, scores, queries, writing, by.whole))
    state, y = jax.lax.scan(chunk, state, chunks)
    y = jnp.einsum('nbgrcw->bncgrw', y)
    return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :length], state


def unit(x: jax.Array) -> jax.Array:
    """x over its length, in f32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _EPS)


def solve(overlap: f32['B n G R C C'], values: f32['B n G R C W']) -> f32['B n G R C W']:
    """x with (I + the part of `overlap` below the diagonal) x = values.

    XLA's solver for CPUs takes one matrix after another; products do not. For TPUs it has a kernel for all matrices.
    """
    return jax.lax.platform_dependent(overlap, values, cpu=by_products, default=by_substitution)


def by_substitution(overlap: f32['B n G R C C'], values: f32['B n G R C W']) -> f32['B n G R C W']:
    """`solve`, by XLA's own solver."""
    return jax.lax.linalg.triangular_solve(overlap, values, left_side=True, lower=True, unit_diagonal=True)


@jax.custom_vjp
def by_products(overlap: f32['B n G R C C'], values: f32['B n G R C W']) -> f32['B n G R C W']:
    """`solve`, by the inverse of blocks on the diagonal that double in size.

    [[P, 0], [Q, R]] has the inverse [[P', 0], [-R' Q P', R']].
    """
    return _forward(overlap, values)[0]


def _forward(overlap: jax.Array, values: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    here = jnp.arange(overlap.shape[-1])
    inverse, size = jnp.broadcast_to(jnp.eye(len(here)), overlap.shape), 1
    while size < len(here):
        block = here // size
        below = (block[:, None] == block + 1) & (block % 2 == 0)
        step = jnp.matmul(jnp.where(below, overlap, 0), inverse, precision=_EXACT)
        inverse, size = inverse - jnp.matmul(inverse, step, precision=_EXACT), 2 * size
    solved = jnp.matmul(inverse, values, precision=_EXACT)
    return solved, (inverse, solved)


def _backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse, solved = kept
    values = jnp.matmul(inverse.mT, gradient, precision=_EXACT)
    return jnp.tril(-jnp.matmul(values, solved.mT, precision=_EXACT), -1), values


by_products.defvjp(_forward, _backward)
