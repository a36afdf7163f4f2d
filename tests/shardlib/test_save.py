"""Names of arrays that are kept."""

import jax
import jax.numpy as jnp
import numpy as np

from pretrax.shardlib import (
    recompute_by_name,
    save,
)

ONES = np.ones((8, 16), np.float32)


def test_saved_names_control_residuals_and_gradients_do_not_change():
    def deep(x, choices):
        def layer(x):
            return jnp.sin(save(jnp.sin(save(jnp.sin(x), 'a')), 'b'))

        for _ in range(3):
            x = recompute_by_name(layer, choices)(x)
        return jnp.sum(x)

    def residuals(choices):
        _, pullback = jax.vjp(lambda x: deep(x, choices), ONES)
        return len([leaf for leaf in jax.tree.leaves(pullback) if getattr(leaf, 'shape', ()) == ONES.shape])

    every = jax.grad(deep)(ONES, None)
    for choices in ({}, {'a': 'keep', 'b': 'recompute'}, {'a': 'keep', 'b': 'keep'}):
        np.testing.assert_allclose(jax.grad(deep)(ONES, choices), every, rtol=1e-6)
    assert residuals({}) < residuals({'a': 'keep'}) < residuals({'a': 'keep', 'b': 'keep'})
