"""Products of experts in runs of blocks, against NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from pretrax.model.expert_runs import group_gradients, times_group

BLOCK, K, F = 8, 24, 40


# Blocks of each group: products of 16, 4 and 1 blocks, of which the first and the second occur several times; groups
# without rows at the start, between others and at the end; fewer blocks than a product of several has
@pytest.mark.parametrize('counts', [[0, 37, 0, 11, 16, 0], [1, 0, 2], [1]])
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_rows_are_multiplied_by_their_experts_and_gradients_summed_over_them(counts, dtype):
    rng = np.random.default_rng(0)
    groups = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    shapes = (len(groups) * BLOCK, K), (len(counts), K, F), (len(groups) * BLOCK, F)
    x, w, dy = (jnp.asarray(rng.integers(-3, 4, shape), dtype) for shape in shapes)  # whole numbers: sums are exact
    of_rows, x64, w64, dy64 = np.repeat(groups, BLOCK), *(np.asarray(a, np.float64) for a in (x, w, dy))

    def rounded(a):
        return np.asarray(jnp.asarray(a, dtype), np.float64)

    y, dx = times_group(x, w, groups, False), times_group(dy, w, groups, True)
    assert y.dtype == dx.dtype == dtype
    np.testing.assert_array_equal(np.asarray(y, np.float64), rounded(np.einsum('nk,nkf->nf', x64, w64[of_rows])))
    np.testing.assert_array_equal(np.asarray(dx, np.float64), rounded(np.einsum('nf,nkf->nk', dy64, w64[of_rows])))
    dw = group_gradients(x, dy, groups, len(counts))
    assert dw.dtype == jnp.float32
    expected = [x64[of_rows == group].T @ dy64[of_rows == group] for group in range(len(counts))]
    np.testing.assert_array_equal(dw, expected)
