"""Which products are counted in eight bits."""

import jax
import pytest

from pretrax.config import from_values
from pretrax.cost.eight_bits import eight_bits_of
from pretrax.run.setup import prepare

VALUES = {
    'name': 'eight', 'steps': 3, 'data': {'name': 'synthetic', 'vocab_size': 256},
    'model': {'family': 'llama', 'n_layers': 3, 'd_model': 64, 'attention': {'n_heads': 4},
              'feed_forward': {'d_ff': 192}},
    'batch': {'tokens': 64, 'sequence_length': 32}, 'optimizer': {'learning_rate': 1e-3}, 'mesh': {'d': 1},
}  # fmt: skip


@pytest.mark.parametrize(('exempt', 'layers', 'head'), [(None, 1, 0), (['head'], 3, 0), ([], 3, 256 * 64)])
def test_products_that_are_not_exempt_are_in_eight_bits(exempt, layers, head):
    """Of a layer: q, k, v and o of 64 x 64; gate and up of 64 x 192, down of 192 x 64."""
    precision = {'matmul': 'fp8'} | ({} if exempt is None else {'exempt': exempt})
    run = prepare(from_values(VALUES | {'precision': precision}), lambda text: None, jax.devices()[:1])
    found = eight_bits_of(run.recipe.model, run.like.weights)
    assert found is not None
    assert (found.kind, found.params, found.head) == ('fp8', layers * (4 * 64**2 + 3 * 64 * 192), head)
    rounded = 4 * (2 * 64 + 64) + 2 * (2 * 64 + 192) + 2 * 192 + 64
    assert found.values == layers * rounded + (2 * 64 + 256 if head else 0)
    plain = prepare(from_values(VALUES), lambda text: None, jax.devices()[:1])
    assert eight_bits_of(plain.recipe.model, plain.like.weights) is None
