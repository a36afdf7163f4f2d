"""What XLA for CPUs needs to be fast: the same mathematics, with derivatives written so that it multiplies well.

On other hardware these cost nothing. benchmarks/lab-notes.md has the measurements.

Letters: B batch, L queries, S keys, K key/value heads, G query heads per key/value head, D head.
"""

import jax
import jax.numpy as jnp


@jax.custom_vjp
def query_key_products(q: jax.Array, k: jax.Array) -> jax.Array:
    """Queries [B, K, G, L, D] times keys [B, K, S, D]: f32[B, K, G, L, S]. The backward pass is in the keys' dtype."""
    return jnp.einsum('bkgld,bksd->bkgls', q, k, preferred_element_type=jnp.float32)


def _products_forward(q: jax.Array, k: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return query_key_products(q, k), (q, k)


def _products_backward(residuals: tuple[jax.Array, jax.Array], d_products: jax.Array) -> tuple[jax.Array, jax.Array]:
    q, k = residuals
    d_products = d_products.astype(k.dtype)
    return jnp.einsum('bkgls,bksd->bkgld', d_products, k), _sum_over_queries(d_products, q)


query_key_products.defvjp(_products_forward, _products_backward)


@jax.custom_vjp
def weighted_values(probability: jax.Array, v: jax.Array) -> jax.Array:
    """Probabilities [B, K, G, L, S] times values [B, K, S, D]: [B, K, G, L, D]."""
    return jnp.einsum('bkgls,bksd->bkgld', probability, v)


def _values_forward(probability: jax.Array, v: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return weighted_values(probability, v), (probability, v)


def _values_backward(residuals: tuple[jax.Array, jax.Array], d_out: jax.Array) -> tuple[jax.Array, jax.Array]:
    probability, v = residuals
    return jnp.einsum('bkgld,bksd->bkgls', d_out, v), _sum_over_queries(probability, d_out)


weighted_values.defvjp(_values_forward, _values_backward)


def _sum_over_queries(a: jax.Array, x: jax.Array) -> jax.Array:
    """The sum over queries of a [B, K, G, L, S] times x [B, K, G, L, D]: [B, K, S, D]."""
    return jnp.einsum('bkghls,bkghld->bksd', *halves(a, x))


def halves(*arrays: jax.Array) -> list[jax.Array]:
    """Arrays [..., N, D] as [..., 2, N / 2, D], or as [..., 1, N, D] if N is odd, for a product that sums over N.

    If the sum goes over two dimensions, XLA transposes the left side and multiplies in bf16; else it converts both to
    f32 and takes three times as long.
    """
    return [x.reshape(*x.shape[:-2], 2 - x.shape[-2] % 2, -1, x.shape[-1]) for x in arrays]


def sum_over_rows(x: jax.Array, y: jax.Array) -> jax.Array:
    """The sum over n of x[n, m] y[n, f], f32[m, f]."""
    return jnp.einsum('hnm,hnf->mf', *halves(x, y), preferred_element_type=jnp.float32)


@jax.custom_vjp
def materialize_gradient(y: jax.Array) -> jax.Array:
    """y, whose gradient is computed as an array of its own: XLA is slow to sum what it transposes at the same time."""
    return y


materialize_gradient.defvjp(lambda y: (y, None), lambda _, dy: (jax.lax.optimization_barrier(dy),))
