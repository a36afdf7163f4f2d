"""The log probability of a target and whether it is the likeliest token equal plain jax.numpy,
over a sharded vocabulary too.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrax.model.loss import TokenScores, token_scores
from pretrax.shardlib import i32, num, typed_shard_map
from small import mesh_of

ROWS, LENGTH, COLUMNS = 4, 6, 24


@pytest.mark.parametrize(
    ('sizes', 'dtype', 'vocab_size'),
    [
        ({}, jnp.float32, 21),
        ({'d': 2, 't': 4}, jnp.float32, 21),
        ({'d': 2, 't': 4}, jnp.bfloat16, None),
    ],
    ids=['one device', 'd t', 'bf16'],
)
def test_scores_are_those_of_log_softmax_and_argmax(sizes, dtype, vocab_size):
    """Within 2e-6 nats, also if padding columns have the largest logits.
    Of equal logits, the first is the likeliest.
    """
    rng = np.random.default_rng(0)
    logits = 4 * rng.standard_normal((ROWS, LENGTH, COLUMNS))
    logits[0, :, [3, 8, 20]] = 50
    logits[..., vocab_size or COLUMNS :] = 99
    logits = jnp.asarray(logits, dtype)
    real = logits[..., :vocab_size].astype(jnp.float32)
    targets = np.array(jnp.argmax(real, axis=-1), np.int32)
    targets[1, :3] = rng.integers(0, real.shape[-1], 3)
    targets[0, 1:] = 8  # the second of three equal ones

    @typed_shard_map
    def find(logits: num['B/r/d/e L/c V/t'], targets: i32['B/r/d/e L/c']) -> TokenScores:
        return token_scores(logits, targets, vocab_size)

    with jax.set_mesh(mesh_of(**sizes)):
        found = jax.device_get(jax.jit(find)(logits, targets))
    expected = jnp.take_along_axis(jax.nn.log_softmax(real), targets[..., None], axis=-1)[..., 0]
    np.testing.assert_allclose(found.log_probs, expected, rtol=0, atol=2e-6)
    np.testing.assert_array_equal(found.are_likeliest, jnp.argmax(real, axis=-1) == targets)
    assert found.are_likeliest[0].tolist() == [True, *[False] * (LENGTH - 1)]
