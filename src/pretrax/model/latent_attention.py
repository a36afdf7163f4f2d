"""Multi-head latent attention, from low-rank latents. DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.

Keys and values of all heads are products with one latent per token. Positions are in a part of their own: of each query
head, and of one key that all heads share. Training multiplies the latents out and attends as usual (attention.py). In
decoding, the cache holds only latents and rotated keys, and products with `kv_b` move to the queries and to the outputs
("absorbed").

Letters: B batch, L length, M d_model, H heads, D head (of a value), D_qk query or key (the part without positions
first), D_kv both that a head makes of the latent (the key's part without positions, then the value), C_q latent of
queries, C_latent latent of keys and values, C_kv the same with the shared key.
"""

import functools
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from pretrax.model.architecture import Architecture, LayerKind
from pretrax.model.layer_spec import LayerSpec
from pretrax.model.matmul import gather, product
from pretrax.model.part import Part
from pretrax.model.rope import rotate
from pretrax.shardlib import all_gather, einsum, f32, i32, num, pytree_dataclass, save, typechecked

NORM_EPS = 1e-6  # of the norms of latents, in all released models, whatever that of the other norms is


@pytree_dataclass
class LatentWeights(Part):
    """The projections into latents and out of them."""

    q_direct: num['M/d H/t D_qk'] | None  # None: queries have a latent
    q_a: num['M/d C_q'] | None
    q_a_norm: f32['C_q'] | None
    q_b: num['C_q/d H/t D_qk'] | None
    kv_a: num['M/d C_kv']
    kv_a_norm: f32['C_latent']
    kv_b: num['C_latent/d H/t D_kv']

    @classmethod
    def optional(cls, arch: Architecture, kind: LayerKind) -> Mapping[str, bool]:
        """Queries are projected directly, or through a latent."""
        del kind
        q_latent = arch.attention.latent.q_rank > 0
        return {'q_direct': not q_latent, **dict.fromkeys(('q_a', 'q_a_norm', 'q_b'), q_latent)}


@typechecked
def latent_queries_keys_values(
    h: num['B/r/d/e L/c/t M'], w: LatentWeights, positions: i32['B/r/d/e L/c'], layer: LayerSpec
) -> tuple[num['B/r/d/e L/c H/t D_qk'], num['B/r/d/e L/c H/t D_qk'], num['B/r/d/e L/c H/t D']]:
    """Queries, keys and values of every head, eq. 9 to 17."""
    q = save(latent_queries(h, w, positions, layer), 'q')
    latent, shared = _parts(latents(h, w, positions, layer), layer)
    w_b = layer.gather('kv_b', 'C_latent/d H/t D_kv -> C_latent H/t D_kv', w, latent)
    spec = 'B/r/d/e L/c C_latent, C_latent H/t D_kv -> B/r/d/e L/c H/t D_kv'
    both = product(spec, latent, w_b, layer.formats['kv_b'])
    keys, v = jnp.split(both, [layer.arch.attention.latent.d_nope], axis=-1)
    shared = jnp.broadcast_to(shared[:, :, None], (*keys.shape[:-1], shared.shape[-1]))
    return q, save(jnp.concatenate([keys, shared], axis=-1), 'k'), save(v, 'v')


@typechecked
def latent_queries(
    h: num['B/r/d/e L/c/t M'], w: LatentWeights, positions: i32['B/r/d/e L/c'], layer: LayerSpec
) -> num['B/r/d/e L/c H/t D_qk']:
    """Queries, from a latent of their own or from h, with rotary positions in their last part."""
    formats = layer.formats
    if w.q_direct is not None:
        h = all_gather('B/r/d/e L/c/t M -> B/r/d/e L/c M', h)
        w_q = layer.gather('q_direct', 'M/d H/t D_qk -> M H/t D_qk', w, h)
        q = product('B/r/d/e L/c M, M H/t D_qk -> B/r/d/e L/c H/t D_qk', h, w_q, formats['q_direct'])
    else:
        w_a = layer.gather('q_a', 'M/d C_q -> M C_q', w, h)
        c = _norm(product('B/r/d/e L/c/t M, M C_q -> B/r/d/e L/c/t C_q', h, w_a, formats['q_a']), w.q_a_norm)
        c = all_gather('B/r/d/e L/c/t C_q -> B/r/d/e L/c C_q', c)
        w_b = layer.gather('q_b', 'C_q/d H/t D_qk -> C_q H/t D_qk', w, c)
        q = product('B/r/d/e L/c C_q, C_q H/t D_qk -> B/r/d/e L/c H/t D_qk', c, w_b, formats['q_b'])
    fixed, turned = jnp.split(q, [layer.arch.attention.latent.d_nope], axis=-1)
    return jnp.concatenate([fixed, rotate(turned, positions, layer.kind)], axis=-1)


@typechecked
def latents(
    h: num['B/r/d/e L/c/t M'], w: LatentWeights, positions: i32['B/r/d/e L/c'], layer: LayerSpec
) -> num['B/r/d/e L/c C_kv']:
    """The normed latent of keys and values, and the rotated key that all heads share: what a cache keeps of a token."""
    w_a = layer.gather('kv_a', 'M/d C_kv -> M C_kv', w, h)
    both = product('B/r/d/e L/c/t M, M C_kv -> B/r/d/e L/c/t C_kv', h, w_a, layer.formats['kv_a'])
    latent, shared = _parts(both, layer)
    both = jnp.concatenate([_norm(latent, w.kv_a_norm), shared], axis=-1)
    both = all_gather('B/r/d/e L/c/t C_kv -> B/r/d/e L/c C_kv', both)
    latent, shared = _parts(both, layer)
    return jnp.concatenate([latent, rotate(shared[:, :, None], positions, layer.kind)[:, :, 0]], axis=-1)


@typechecked
def absorbed_queries(q: num['B/r/d/e L/c H/t D_qk'], w: LatentWeights, layer: LayerSpec) -> num['B/r/d/e L/c H/t C_kv']:
    """Queries whose products with what `latents` gives are those with the keys."""
    fixed, turned = jnp.split(q, [layer.arch.attention.latent.d_nope], axis=-1)
    w_k = gather('C_latent/d H/t D_kv -> C_latent H/t D_kv', w.kv_b, q)[..., : layer.arch.attention.latent.d_nope]
    spec = 'B/r/d/e L/c H/t D_nope, C_latent H/t D_nope -> B/r/d/e L/c H/t C_latent'
    return jnp.concatenate([einsum(spec, fixed, w_k, dot=_dot(q)), turned], axis=-1)


@typechecked
def values_of_latents(y: num['B/r/d/e L/c H/t C_kv'], w: LatentWeights, layer: LayerSpec) -> num['B/r/d/e L/c H/t D']:
    """The outputs of the heads, from weighted sums of what `latents` gives."""
    latent, _ = _parts(y, layer)
    w_v = gather('C_latent/d H/t D_kv -> C_latent H/t D_kv', w.kv_b, y)[..., layer.arch.attention.latent.d_nope :]
    spec = 'B/r/d/e L/c H/t C_latent, C_latent H/t D -> B/r/d/e L/c H/t D'
    return einsum(spec, latent, w_v, dot=_dot(y))


def _parts(both: jax.Array, layer: LayerSpec) -> tuple[jax.Array, jax.Array]:
    latent, shared = jnp.split(both, [layer.arch.attention.latent.kv_rank], axis=-1)
    return latent, shared


def _norm(x: jax.Array, scale: f32['C']) -> jax.Array:
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + NORM_EPS) * scale).astype(x.dtype)


def _dot(x: jax.Array) -> functools.partial:
    return functools.partial(jnp.einsum, preferred_element_type=x.dtype)
