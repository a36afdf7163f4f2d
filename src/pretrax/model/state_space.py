"""Mamba 2: a state-space model whose state decays by a number per head and token.

Letters: B batch, L length, C tokens of a chunk, n chunks, G key heads (groups), R heads that share a key, S key (size of the
state), W head. Plain arrays on one device.
"""

import jax
import jax.numpy as jnp

from pretrax.model.chunks import cut, decays
from pretrax.shardlib import f32, i32, num


@jax.checkpoint
def state_space_scan(
    q: num['B L G S'],
    k: num['B L G S'],
    v: f32['B L G R W'],
    decay: f32['B L G R'],
    segments: i32['B L'],
    state: f32['B G R S W'],
) -> tuple[f32['B L G R W'], f32['B G R S W']]:
    """y_t = q_t S_t with S_t = exp(decay_t) S_{t-1} + k_t^T v_t, in chunks. Dao and Gu 2024, arXiv:2405.21060, section 6.

    q, k, v and decay are C, B, dt x and dt A of the paper. The backward pass computes everything again.

    Args:
        q: queries.
        k: keys, which R heads share, as queries.
        v: values.
        decay: logarithm of the decay.
        segments: the number of each token's document; a new document starts with an empty state.
        state: before the first token, for its document.

    Returns:
        y, and the state after the last token.
    """
    length = q.shape[1]
    by = decays(decay, segments)
    q, k, v = (cut(x.astype(jnp.float32)) for x in (q, k, v))
    scores = jnp.einsum('bnigs,bnjgs->bngij', q, k)[:, :, :, None] * by.pairs
    y = jnp.einsum('bngrij,bnjgrw->bnigrw', scores, v)
    new = jnp.einsum('bnjgs,bngrj,bnjgrw->nbgrsw', k, by.end, v)

    def chunk(state: jax.Array, one: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        whole, new = one
        return state * whole[..., None, None] + new, state

    state, before = jax.lax.scan(chunk, state, (jnp.moveaxis(by.whole, 1, 0), new))
    y = y + jnp.einsum('bnigs,bngri,nbgrsw->bnigrw', q, by.start, before)
    return y.reshape(y.shape[0], -1, *y.shape[3:])[:, :length], state
