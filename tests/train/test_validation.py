"""The loss on held-out batches."""

import jax
import numpy as np

from bigram import Bigram, by_hand, recipe
from pretrax.train.state import init_state
from pretrax.train.validation import make_evaluate
from small import mesh_of, random_batch

ROWS = 8


def test_evaluation_sums_over_the_mesh():
    batch = random_batch(ROWS)
    sums = []
    for mesh in (mesh_of(), mesh_of(2, 2, 2)):
        with jax.set_mesh(mesh):
            weights = init_state(recipe(), 0).weights
            sums.append(jax.device_get(make_evaluate(Bigram())(weights, batch)['nll']))
    loss, _ = by_hand(jax.device_get(weights), batch)
    for top, bottom in sums:
        np.testing.assert_allclose(bottom, batch.mask.sum(), rtol=1e-6)
        np.testing.assert_allclose(top / bottom, loss, rtol=1e-5)
