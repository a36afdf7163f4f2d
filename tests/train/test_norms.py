"""Norms and products of trees that a mesh shards, replicates or leaves out, in NumPy."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from pretrax.train.norms import global_norm, inner_products
from small import mesh_of

SPECS = {'both': P('d', 't'), 'one': P(None, ('d', 't')), 'copies': P(), 'frozen': P('d')}


def tree(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(4, 8)).astype(np.float32) for name in SPECS} | {'frozen': None}


def flat(values):
    return np.concatenate([values[name].ravel() for name in ('both', 'one', 'copies')]).astype(np.float64)


@pytest.mark.parametrize('axes', [{}, {'d': 4, 't': 2}, {'r': 2, 'd': 2, 't': 2}], ids=str)
def test_copies_count_once_and_absent_arrays_do_not(axes):
    mesh, a, b = mesh_of(**axes), tree(0), tree(1)
    shardings = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(jax.jit(lambda a: global_norm(a, shardings))(a), np.linalg.norm(flat(a)), rtol=1e-6)
        found = jax.jit(lambda a, b: inner_products([(a, b), (b, b)], shardings))(a, b)
    np.testing.assert_allclose(found, [flat(a) @ flat(b), flat(b) @ flat(b)], rtol=1e-5, atol=1e-5)
