"""Products of experts in one kernel, interpreted on the CPU, against NumPy in double precision."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrax.model import expert_kernels, matmul
from pretrax.model.expert_kernels import group_gradients, times_group

G = 5  # experts; 1 and 4 have no rows, and 3 has two blocks that are not full


def operands(block, k, f, blocks=7):
    """x, w and dy in bf16 with whole values, whose products and sums f32 holds exactly; and the groups of blocks."""
    rng, groups = np.random.default_rng(block + k + f), np.asarray([0] * (blocks - 4) + [2, 2, 3, 3], np.int32)
    x, w, dy = (rng.integers(-4, 5, shape) for shape in ((blocks * block, k), (G, k, f), (blocks * block, f)))
    x[-block // 2 :] = 0
    return *(jnp.asarray(a, jnp.bfloat16) for a in (x, w, dy)), jnp.asarray(groups)


def expected(x, w, dy, groups):
    """y, dx and dw of y[n] = x[n] w[group of n]."""
    x, w, dy = (np.asarray(a, np.float64) for a in (x, w, dy))
    own = np.repeat(np.asarray(groups), len(x) // len(groups))
    dw = np.stack([x[own == group].T @ dy[own == group] for group in range(len(w))])
    return np.einsum('nk,nkf->nf', x, w[own]), np.einsum('nf,nkf->nk', dy, w[own]), dw


# Blocks smaller than a tile and larger; more tiles than a band has, and not a multiple of it; widths of half a tile
@pytest.mark.parametrize(('block', 'k', 'f', 'blocks'), [(16, 128, 192, 7), (64, 192, 128, 11), (256, 128, 256, 7)])
def test_rows_are_multiplied_by_their_experts_and_gradients_summed_over_them(block, k, f, blocks):
    x, w, dy, groups = operands(block, k, f, blocks)
    y, dx, dw = expected(x, w, dy, groups)
    bf16 = lambda a: np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64)  # noqa: E731
    close = np.testing.assert_array_equal
    close(np.asarray(times_group(x, w, groups, False, interpret=True), np.float64), bf16(y))
    close(np.asarray(times_group(dy, w, groups, True, interpret=True), np.float64), bf16(dx))
    actual = group_gradients(x, dy, groups, G, interpret=True)
    assert actual.dtype == jnp.float32
    close(np.asarray(actual, np.float64), dw)


def test_grouped_products_have_the_values_and_gradients_of_the_loop_by_a_kernel(monkeypatch):
    """Where a GPU would use it. Pallas' interpreter has no rule for values that vary over a mesh, so there is none."""
    x, w, _, groups = operands(32, 128, 256, 8)
    x, w, used = x / 16, w.astype(jnp.float32) / 16, []

    def loss(x, w):
        return jnp.sum(jnp.sin(matmul._grouped_dot('blocks', x, w, groups).astype(jnp.float32)))

    def interpreted(kernel, loop, a, b, groups):
        used.append(kernel.func)
        return kernel(a, b, groups, interpret=True)

    by_loop = jax.value_and_grad(loss, argnums=(0, 1))(x, w)
    monkeypatch.setattr(matmul, '_by_kernel', interpreted)
    by_kernel = jax.value_and_grad(loss, argnums=(0, 1))(x, w)
    assert used == [times_group, times_group, group_gradients]
    for a, b in zip(jax.tree.leaves(by_kernel), jax.tree.leaves(by_loop), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, np.float32), np.asarray(b, np.float32), rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize(
    ('dtype', 'widths', 'why'),
    [(jnp.bfloat16, (2880, 2880), ''), (jnp.float32, (128, 128), 'not float32'), (jnp.bfloat16, (128, 96), 'not 96')],
)
def test_what_the_kernels_cannot_multiply_is_reported_as_slow(dtype, widths, why):
    assert expert_kernels.obstacle(dtype, *widths).endswith(why)
    method, reason = matmul.choose_grouped('cuda', dtype, *widths)
    assert method == 'blocks'
    assert ('SLOW' in reason) == bool(why)
    assert why in reason
