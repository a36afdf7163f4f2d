"""Attention over a sequence that is sharded over a mesh axis of your own, in three versions that give the same values.

Letters: B batch, L length, H heads, D head. The axis `s` shards L.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.shardlib import all_gather, axis_index, axis_size, f32, ppermute, typed_shard_map

jax.config.update('jax_platforms', 'cpu')
jax.config.update('jax_num_cpu_devices', 8)  # eight simulated devices; leave the two lines out if you have real ones
B, L, H, D = 2, 512, 4, 32


@jax.checkpoint
def attention(q, k, v, first_query=0, first_key=0):
    """Causal attention: sums over keys, not yet divided, with the sum of the weights and the largest score.

    The backward pass computes the scores again, so that they are never all in memory.
    """
    scores = jnp.einsum('bqhd, bkhd -> bhqk', q, k) / D**0.5
    queries, keys = first_query + jnp.arange(q.shape[1]), first_key + jnp.arange(k.shape[1])
    scores = jnp.where(keys <= queries[:, None], scores, -1e30)
    largest = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - largest)
    return jnp.einsum('bhqk, bkhd -> bhqd', weights, v), jnp.sum(weights, axis=-1, keepdims=True), largest


def plain(q, k, v):
    """One device."""
    total, weight, _ = attention(q, k, v)
    return jnp.moveaxis(total / weight, 1, 2)


@typed_shard_map
def gathered(q: f32['B L/s H D'], k: f32['B L/s H D'], v: f32['B L/s H D']) -> f32['B L/s H D']:
    """Each device has its queries, and gathers all keys and values."""
    k_all = all_gather('B L/s H D -> B L H D', k)
    v_all = all_gather('B L/s H D -> B L H D', v)
    total, weight, _ = attention(q, k_all, v_all, first_query=axis_index('s') * q.shape[1])
    return jnp.moveaxis(total / weight, 1, 2)


@typed_shard_map
def ring(q: f32['B L/s H D'], k: f32['B L/s H D'], v: f32['B L/s H D']) -> f32['B L/s H D']:
    """Keys and values go around the ring of devices. No device ever holds more than two slices of them.

    Liu et al. 2023, arXiv:2310.01889; the sums are joined as in Milakov and Gimelshein 2018, arXiv:1805.02867.
    """
    here, count, length = axis_index('s'), axis_size('s'), q.shape[1]
    total, weight, largest = attention(q, k, v, here * length, here * length)
    for turn in range(1, count):
        k, v = ppermute('s', k, shift=1), ppermute('s', v, shift=1)
        owner = (here - turn) % count  # the device that these keys are from
        more, more_weight, more_largest = attention(q, k, v, here * length, owner * length)
        highest = jnp.maximum(largest, more_largest)
        old, new = jnp.exp(largest - highest), jnp.exp(more_largest - highest)
        total, weight, largest = old * total + new * more, old * weight + new * more_weight, highest
    return jnp.moveaxis(total / weight, 1, 2)


def report(name, function, arrays, expected):
    """Prints the largest difference from one device, and the collectives and memory of the gradient's program."""

    def gradient(*arrays):
        return jax.grad(lambda *arrays: jnp.sum(function(*arrays) ** 2), argnums=(0, 1, 2))(*arrays)

    compiled = jax.jit(gradient).lower(*arrays).compile()
    found = re.findall(
        r'(all-gather|reduce-scatter|collective-permute|all-reduce)(?:-start)?\(', compiled.as_text() or ''
    )
    counts = ', '.join(f'{found.count(kind)} {kind}' for kind in sorted(set(found))) or 'nothing'
    values = [jax.jit(function)(*arrays), *compiled(*arrays)]
    difference = max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(values, expected, strict=True))
    memory = compiled.memory_analysis()
    assert memory is not None
    print(f'{name:9} differs by {difference:.0e}; sends {counts}; {memory.temp_size_in_bytes:,} bytes')


if __name__ == '__main__':
    jax.set_mesh(jax.make_mesh((8,), ('s',), axis_types=(jax.sharding.AxisType.Auto,)))
    keys = jax.random.split(jax.random.key(0), 3)
    whole = [jax.random.normal(key, (B, L, H, D)) for key in keys]
    slices = [jax.device_put(x, jax.NamedSharding(jax.sharding.get_mesh(), jax.P(None, 's'))) for x in whole]
    expected = [plain(*whole), *jax.grad(lambda *x: jnp.sum(plain(*x) ** 2), argnums=(0, 1, 2))(*whole)]
    expected = [np.asarray(x) for x in expected]
    report('plain', plain, whole, expected)
    report('gathered', gathered, slices, expected)
    report('ring', ring, slices, expected)
