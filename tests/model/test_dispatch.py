"""Who stands where: places of tokens at their experts, the way there and back,
and grouped products against plain ones.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from model.test_matmul import dots
from pretrax.model.dispatch import combine, dispatch, sort_by_expert, sort_into_blocks, sort_with_capacity
from pretrax.model.matmul import grouped_product
from pretrax.model.numerics import Format
from pretrax.shardlib import defer_reduction, f32, i32, num, psum, typed_shard_map
from small import mesh_of

T, K, E, M, F = 24, 2, 5, 8, 6


def choices(seed=0, n_experts=E):
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(n_experts)[:K] for _ in range(T)]).astype(np.int32)


def test_each_slot_holds_a_token_of_its_expert():
    chosen = choices().reshape(-1)
    places, sizes = sort_by_expert(jnp.asarray(chosen), E)
    np.testing.assert_array_equal(sizes, np.bincount(chosen, minlength=E))
    np.testing.assert_array_equal(chosen[places.choice], np.repeat(np.arange(E), sizes))
    np.testing.assert_array_equal(places.choice[places.of_choice], np.arange(T * K))


@pytest.mark.parametrize('chosen', [choices().reshape(-1), np.full(T * K, 3, np.int32), np.array([1], np.int32)])
def test_a_block_holds_tokens_of_one_expert(chosen):
    places, experts = sort_into_blocks(jnp.asarray(chosen), E, 8)
    table = np.asarray(places.choice).reshape(len(experts), 8)
    for row, expert in zip(table, experts, strict=True):
        assert all(chosen[row[row < len(chosen)]] == expert)
    assert sorted(table[table < len(chosen)]) == list(range(len(chosen)))
    np.testing.assert_array_equal(np.asarray(places.choice)[places.of_choice], np.arange(len(chosen)))


def test_choices_beyond_the_capacity_are_dropped():
    """Counted by hand for each row; later tokens change nothing."""
    chosen = choices(1).reshape(2, -1)
    places = sort_with_capacity(jnp.asarray(chosen), E, 3)
    taken, expected = {}, []
    for row in range(2):
        for expert in chosen[row]:
            number = taken[row, expert] = taken.get((row, expert), -1) + 1
            expected.append((row * E + expert) * 3 + number if number < 3 else 2 * E * 3)
    np.testing.assert_array_equal(places.of_choice, expected)
    assert (np.asarray(expected) == 2 * E * 3).sum() == T * K - len(set(expected)) + 1 > 5
    here = np.asarray(places.of_choice) < 2 * E * 3
    np.testing.assert_array_equal(places.choice[places.of_choice[here]], np.flatnonzero(here))
    other = chosen.copy()
    other[:, 12:] = 0
    np.testing.assert_array_equal(sort_with_capacity(jnp.asarray(other), E, 3).of_choice.reshape(2, -1)[:, :12],
                                  np.reshape(expected, (2, -1))[:, :12])  # fmt: skip


def run(method, mesh, dtype=jnp.float32):
    """The gated sum over each token's experts, and its gradients, through the slots of a method."""

    @typed_shard_map
    def mix(x: num['T/d M'], w: f32['E M F/t'], weight: num['T/d X'], chosen: i32['T/d X']) -> num['T/d F/t']:
        x, weight = defer_reduction('t', x), defer_reduction('t', weight)
        flat = chosen.reshape(-1)
        places, groups = sort_by_expert(flat, E) if method == 'ragged' else sort_into_blocks(flat, E, 8)
        y = grouped_product('N/d M, E M F/t -> N/d F/t', dispatch(K, x, places), w, Format('compute'), groups, method)
        return combine(K, y * dispatch(1, weight.reshape(-1, 1), places), places)

    @typed_shard_map
    def total(y: num['T/d F/t'], dy: num['T/d F/t']) -> f32['']:
        return psum('d t', jnp.sum((y * dy).astype(jnp.float32)))

    rng = np.random.default_rng(0)
    x, w, weight, dy = (rng.standard_normal(shape).astype(np.float32) for shape in ((T, M), (E, M, F), (T, K), (T, F)))
    x, weight, dy = (jnp.asarray(a, dtype) for a in (x, weight, dy))
    with jax.set_mesh(mesh):
        gradient = jax.value_and_grad(lambda *a: total(mix(*a, choices()), dy), argnums=(0, 1, 2))
        return gradient, (x, w, weight), dy


@pytest.mark.parametrize('method', ['ragged', 'blocks', 'runs'])
@pytest.mark.parametrize('mesh', [(1, 1, 1), (1, 2, 2)])
def test_values_and_gradients_of_grouped_products(method, mesh):
    gradient, operands, dy = run(method, mesh_of(*mesh))
    with jax.set_mesh(mesh_of(*mesh)):
        value, gradients = jax.jit(gradient)(*operands)
    plain = lambda x, w, weight: jnp.sum(jnp.einsum('tm,tkmf,tk->tf', x, w[choices()], weight) * dy)  # noqa: E731
    expected, expected_gradients = jax.value_and_grad(plain, argnums=(0, 1, 2))(*operands)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    for a, b in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize('method', ['ragged', 'blocks', 'runs'])
def test_grouped_products_have_the_compute_dtype_and_f32_weight_gradients(method):
    mesh = mesh_of()
    gradient, operands, _ = run(method, mesh, jnp.bfloat16)
    with jax.set_mesh(mesh):
        jaxpr = jax.make_jaxpr(gradient)(*operands)
    name = 'ragged_dot_general' if method == 'ragged' else 'dot_general'
    products = [[*(str(v.aval.dtype) for v in e.invars[:2]), str(e.outvars[0].aval.dtype)] for e in dots(jaxpr, name)]
    per_kind = 2 if method == 'runs' else 1  # of one block, and of four
    assert products[:per_kind] == per_kind * [['bfloat16', 'bfloat16', 'bfloat16']]
    gradients = per_kind * [['bfloat16', 'bfloat16', 'bfloat16']] + per_kind * [['bfloat16', 'bfloat16', 'float32']]
    assert sorted(products[per_kind:]) == gradients


def test_blocks_multiply_no_token_by_every_expert():
    """Each product is of one block and one expert's matrix, forward and backward."""
    gradient, operands, _ = run('blocks', mesh_of())
    with jax.set_mesh(mesh_of()):
        shapes = [tuple(v.aval.shape) for e in dots(jax.make_jaxpr(gradient)(*operands)) for v in e.invars]
    assert set(shapes) == {(8, M), (M, F), (8, F)}
