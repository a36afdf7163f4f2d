"""Weights between devices and the host, fragments of them, and digests that do not depend on the mesh."""

import jax
import numpy as np
import pytest

from host_parts import LAYERS, MESHES, SHAPES, held, joined, numbers_in, on_mesh, random_weights
from pretrax.federation.fragments import fragments
from pretrax.federation.host_weights import digest_of, joined_digest, mapped, select, to_devices, to_host, zeros_like
from pretrax.shardlib.digests import digest


@pytest.mark.parametrize('sizes', MESHES, ids=str)
def test_weights_go_to_the_host_and_back(sizes):
    weights = random_weights(0)
    arrays = on_mesh(weights, sizes)
    host = to_host(arrays)
    for name, values in joined([host], SHAPES).items():
        np.testing.assert_array_equal(values, weights[name])
    back = to_devices(host, arrays)
    for name, array in back.items():
        np.testing.assert_array_equal(array, weights[name])
        assert array.sharding == arrays[name].sharding


def test_each_distinct_part_is_held_and_owned_once():
    host = to_host(on_mesh(random_weights(0), {'r': 2, 'd': 2, 'e': 2}))
    assert [len(host[name].parts) for name in ('embed', 'layers.experts', 'norm', 'scale')] == [2, 4, 1, 1]
    assert all(array.own == set(array.parts) for array in host.values())


def test_the_host_keeps_its_values_when_a_step_reuses_the_memory():
    arrays = on_mesh(random_weights(0), {'d': 8})
    host, before = to_host(arrays), random_weights(0)
    jax.jit(lambda weights: jax.tree.map(lambda w: w + 1, weights), donate_argnums=0)(arrays)
    np.testing.assert_array_equal(joined([host], SHAPES)['embed'], before['embed'])


@pytest.mark.parametrize('sizes', MESHES, ids=str)
def test_a_fragment_is_a_view_of_its_rows(sizes):
    weights = random_weights(0)
    (host,) = held(weights, sizes)
    for fragment in fragments(SHAPES, 2, LAYERS):
        parts = [values for array in select(host, fragment).values() for values in array.parts.values()]
        assert sum(values.size for values in parts) == numbers_in(fragment, SHAPES)
        for values in parts:
            values += 1
    for name, values in joined([host], SHAPES).items():
        np.testing.assert_array_equal(values, weights[name] + np.float32(1))


def test_corresponding_parts_are_combined():
    (one,), (other,) = (held(random_weights(seed), {'d': 8}) for seed in (0, 1))
    difference = mapped(np.subtract, one, other)
    expected = random_weights(0)['embed'] - random_weights(1)['embed']
    np.testing.assert_array_equal(joined([difference], SHAPES)['embed'], expected)
    assert not joined([zeros_like(one)], SHAPES)['embed'].any()


def test_the_digest_is_that_of_the_devices_and_the_same_on_every_mesh():
    weights = random_weights(0)
    expected = {name: int(digest(array)[0]) for name, array in weights.items()}
    found = set()
    for sizes in MESHES:
        for processes in (1, 2, 4):
            digests = [digest_of(part) for part in held(weights, sizes, processes)]
            assert {name: sum(one[name] for one in digests) % 2**32 for name in SHAPES} == expected
            found.add(joined_digest(digests))
    assert len(found) == 1


def test_exchanged_numbers_and_arrays_change_the_digest():
    weights = random_weights(0)
    (before,) = (joined_digest([digest_of(part) for part in held(weights, {'d': 8})]),)
    exchanged = weights | {'embed': weights['embed'][:, [1, 0, *range(2, 8)]]}
    swapped = weights | {'layers.norm': weights['layers.norm'][::-1]}
    for changed in (exchanged, swapped):
        assert joined_digest([digest_of(part) for part in held(changed, {'d': 8})]) != before
