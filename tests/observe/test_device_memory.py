"""Memory of a device by owner, from the shapes and shardings of arrays."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pretrax.observe.device_memory import memory_by_owner, memory_in_use


class State(NamedTuple):
    step: jax.Array
    weights: dict[str, jax.Array]
    optimizer: list[jax.Array]


def test_each_owner_has_the_bytes_of_its_shards_on_one_device():
    mesh = Mesh(np.array(jax.devices()[:4]), ('d',))
    sharded, whole = NamedSharding(mesh, PartitionSpec('d')), NamedSharding(mesh, PartitionSpec())
    state = State(
        jnp.int32(3),
        {'table': jax.device_put(jnp.ones((8, 16)), sharded), 'norm': jax.device_put(jnp.ones(16), whole)},
        [jax.device_put(jnp.ones((8, 16), jnp.bfloat16), sharded)],
    )
    found = memory_by_owner(state)
    assert found == {'weights': 8 * 16 * 4 // 4 + 16 * 4, 'optimizer': 8 * 16 * 2 // 4, 'step': 4}
    assert list(found) == ['weights', 'optimizer', 'step']  # largest first


def test_memory_in_use_is_that_of_the_fullest_device_and_absent_on_a_cpu(monkeypatch):
    assert memory_in_use() == {}

    class Gpu:
        def __init__(self, now, peak):
            self.now, self.peak = now, peak

        def memory_stats(self):
            return {'bytes_in_use': self.now, 'peak_bytes_in_use': self.peak, 'bytes_limit': 100}

    monkeypatch.setattr(jax, 'local_devices', lambda: [Gpu(10, 30), Gpu(20, 25)])
    assert memory_in_use() == {'memory_bytes': 20, 'memory_peak_bytes': 30}
