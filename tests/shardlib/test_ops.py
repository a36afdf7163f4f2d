"""Every operation equals plain jax.numpy on the whole arrays, in value and gradient, for random types and meshes."""

import math

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies
from jax.sharding import AxisType

from pretrax import shardlib
from pretrax.shardlib import f32, i32, psum, typed_shard_map

MESHES = [{'a': 2, 'b': 4}, {'a': 8, 'b': 1}, {'a': 2, 'b': 2, 'c': 2}]
LIGHT = hypothesis.settings(max_examples=8)


def mesh_of(sizes):
    return jax.set_mesh(jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes)))


@strategies.composite
def layouts(draw, n_dims=3):
    """A mesh, and the axes of each of some dimensions: every axis of the mesh shards at most one of them."""
    sizes = draw(strategies.sampled_from(MESHES))
    axes = [[] for _ in range(n_dims)]
    for axis in sizes:
        place = draw(strategies.integers(-1, n_dims - 1))
        if place >= 0:
            axes[place].append(axis)
    return sizes, axes


def spec(names, axes):
    return ' '.join('/'.join([name, *own]) for name, own in zip(names, axes, strict=True))


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def equal(ours, plain):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def whole_axes(sizes, axes):
    """All axes of the mesh that shard something."""
    return ' '.join(axis for own in axes for axis in own if axis in sizes)


def weighted(array_type, total_over, operation):
    """sum(weigh * operation(x)), reduced over the axes that shard the result."""

    @typed_shard_map
    def run(x: array_type[0], weigh: array_type[1]) -> f32['']:
        result = jnp.sum(jnp.sin(operation(x)) * weigh)
        return psum(total_over, result) if total_over else result

    return run


@LIGHT
@hypothesis.given(layouts(), strategies.integers(0, 2))
def test_all_gather_is_the_identity_on_global_arrays(layout, gathered):
    sizes, axes = layout
    after = [own if i != gathered else [] for i, own in enumerate(axes)]
    hypothesis.assume(axes[gathered])
    names = 'X', 'Y', 'Z'
    text = f'{spec(names, axes)} -> {spec(names, after)}'
    x, weigh = random(8, 16, 24), random(8, 16, 24, seed=1)
    with mesh_of(sizes):
        run = weighted(
            (f32[spec(names, axes)], f32[spec(names, after)]), whole_axes(sizes, after),
            lambda x: shardlib.all_gather(text, x),
        )  # fmt: skip
        equal(jax.value_and_grad(run)(x, weigh), jax.value_and_grad(lambda x: jnp.sum(jnp.sin(x) * weigh))(x))


@LIGHT
@hypothesis.given(layouts(), strategies.integers(0, 2), strategies.integers(0, 2))
def test_psum_scatter_reduces_partial_sums_of_an_einsum(layout, contracted, kept):
    """sum over one dimension, sharded; the sum is scattered over another."""
    sizes, axes = layout
    hypothesis.assume(contracted != kept and axes[contracted])
    names = 'XYZ'
    left = [i for i in range(3) if i != contracted]
    before = spec([names[i] for i in left], [axes[i] for i in left])
    after = spec([names[i] for i in left], [axes[i] + (axes[contracted] if i == kept else []) for i in left])
    full = spec(names, axes)
    x, weigh = random(16, 16, 16), random(16, 16, seed=1)

    def operation(x):
        partial = shardlib.einsum(f'{full} -> {before}', x)
        return shardlib.psum_scatter(f'{before} -> {after}', partial)

    with mesh_of(sizes):
        run = weighted((f32[full], f32[after]), whole_axes(sizes, axes), operation)
        plain = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(jnp.sum(x, contracted)) * weigh))
        equal(jax.value_and_grad(run)(x, weigh), plain(x))


@LIGHT
@hypothesis.given(layouts(), strategies.sampled_from(['psum', 'pmean']))
def test_reductions_of_partial_sums(layout, reduction):
    sizes, axes = layout
    hypothesis.assume(axes[0])
    full, rest = spec('XYZ', axes), spec('YZ', axes[1:])
    over = ' '.join(axes[0])
    share = math.prod(sizes[axis] for axis in axes[0]) if reduction == 'pmean' else 1
    x, weigh = random(16, 16, 16), random(16, 16, seed=1)

    def operation(x):
        return getattr(shardlib, reduction)(over, shardlib.einsum(f'{full} -> {rest}', x))

    with mesh_of(sizes):
        run = weighted((f32[full], f32[rest]), whole_axes(sizes, axes[1:]), operation)
        plain = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(jnp.sum(x, 0) / share) * weigh))
        equal(jax.value_and_grad(run)(x, weigh), plain(x))


def test_pmax_is_the_maximum_and_its_result_is_replicated():
    with mesh_of({'a': 2, 'b': 4}):

        @typed_shard_map
        def run(x: f32['X/a Y/b']) -> f32['X/a']:
            return shardlib.pmax('b', jnp.max(x, axis=1))

        x = random(8, 16)
        np.testing.assert_array_equal(run(x), x.max(1))


def test_gradient_of_pmax_is_split_equally_among_ties():
    with mesh_of({'a': 2, 'b': 4}):

        @typed_shard_map
        def run(x: f32['X/a/b'], weigh: f32['Y/a']) -> f32['']:
            return psum('a', jnp.sum(jnp.square(shardlib.pmax('b', x)) * weigh))

        x = np.array([1, 3, 3, 2, 5, 4, 5, 5], np.float32)
        plain = jax.grad(lambda x: jnp.sum(jnp.square(jnp.max(x.reshape(2, 4), axis=1)) * np.array([7, 11])))
        equal(jax.grad(run)(x, np.array([7, 11], np.float32)), plain(x))


def test_replicated_scalar_counts_once_in_a_gradient_taken_inside():
    """It is made of gathered values, of which every device has its own part of the gradient."""
    with mesh_of({'a': 2, 'b': 4}):

        @typed_shard_map
        def gradient(w: f32['X/b/a']) -> f32['X/b/a']:
            def loss(w):
                whole = shardlib.all_gather('X/b/a -> X', w)
                return shardlib.check(jnp.sum(jnp.sin(whole)), f32[''], 'the loss')

            return jax.grad(loss)(w)

        x = random(16)
        equal(gradient(x), np.cos(x))


@LIGHT
@hypothesis.given(layouts(n_dims=2))
def test_all_to_all_is_the_identity_on_global_arrays(layout):
    sizes, axes = layout
    hypothesis.assume(axes[0])
    moved = axes[0][-1:]
    after = [axes[0][:-1], axes[1] + moved]
    text = f'{spec("XY", axes)} -> {spec("XY", after)}'
    x, weigh = random(64, 64), random(64, 64, seed=1)
    with mesh_of(sizes):
        run = weighted(
            (f32[spec('XY', axes)], f32[spec('XY', after)]), whole_axes(sizes, after),
            lambda x: shardlib.all_to_all(text, x),
        )  # fmt: skip
        equal(jax.value_and_grad(run)(x, weigh), jax.value_and_grad(lambda x: jnp.sum(jnp.sin(x) * weigh))(x))


@pytest.mark.parametrize(
    ('sizes', 'before', 'after'),
    [
        ({'a': 2, 'b': 4}, 'X Y/a Z/b', 'X/a/b Y Z'),
        ({'a': 2, 'b': 4}, 'X Y/a Z/b', 'X/b/a Y Z'),
        ({'a': 2, 'b': 2, 'c': 2}, 'X/c Y/b/a Z', 'X/c/a/b Y Z'),
        ({'a': 2, 'b': 2, 'c': 2}, 'X/a Y Z/b/c', 'X/a Y/c/b Z'),
        ({'a': 8, 'b': 1}, 'X Y/a Z/b', 'X/a/b Y Z'),
    ],
)
def test_all_to_all_moves_the_axes_of_several_dimensions_at_once(sizes, before, after):
    """To whole matrices and back: both are the identity on global arrays, and each is one collective."""
    x, weigh = random(16, 16, 16), random(16, 16, 16, seed=1)
    axes = ' '.join(sizes)
    with mesh_of(sizes):
        for text in (f'{before} -> {after}', f'{after} -> {before}'):
            start, _, end = text.split(' -> ')[0], None, text.split(' -> ')[1]
            run = weighted((f32[start], f32[end]), axes, lambda x, text=text: shardlib.all_to_all(text, x))
            equal(jax.value_and_grad(run)(x, weigh), jax.value_and_grad(lambda x: jnp.sum(jnp.sin(x) * weigh))(x))
            assert jax.jit(run).lower(x, weigh).as_text().count('stablehlo.all_to_all') == 1


@pytest.mark.parametrize('shift', [1, 3, -1])
def test_ppermute_sends_slices_around_the_ring(shift):
    with mesh_of({'a': 2, 'b': 4}):
        x, weigh = random(16), random(16, seed=1)
        run = weighted((f32['X/b'], f32['X/b']), 'b', lambda x: shardlib.ppermute('b', x, shift=shift))
        plain = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(jnp.roll(x, 4 * shift)) * weigh))
        equal(jax.value_and_grad(run)(x, weigh), plain(x))


def test_ppermute_sends_each_slice_to_the_given_device():
    with mesh_of({'a': 2, 'b': 4}):
        x, weigh = random(16), random(16, seed=1)
        run = weighted((f32['X/b'], f32['X/b']), 'b', lambda x: shardlib.ppermute('b', x, to=[2, 0, 3, 1]))
        sent = lambda x: x.reshape(4, 4)[np.array([1, 3, 0, 2])].reshape(-1)  # 0 gets what 1 had, ...  # noqa: E731
        plain = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(sent(x)) * weigh))
        equal(jax.value_and_grad(run)(x, weigh), plain(x))


@LIGHT
@hypothesis.given(layouts(n_dims=4))
def test_einsum_and_psum_equal_the_product_of_global_arrays(layout):
    """'B X Y, X Y F -> B F' with any of the four letters sharded, contracted ones too."""
    sizes, (b, x_, y, f) = layout
    left, right = spec('BXY', [b, x_, y]), spec('XYF', [x_, y, f])
    result = spec('BF', [b, f])
    over = ' '.join(x_ + y)
    x, w, weigh = random(8, 8, 8), random(8, 8, 8, seed=1), random(8, 8, seed=2)

    @typed_shard_map
    def run(x: f32[left], w: f32[right], weigh: f32[result]) -> f32['']:
        product = shardlib.einsum(f'{left}, {right} -> {result}', x, w)
        product = psum(over, product) if over else product
        total = jnp.sum(jnp.sin(product) * weigh)
        return psum(' '.join(b + f), total) if b + f else total

    with mesh_of(sizes):
        plain = jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(jnp.einsum('bxy,xyf->bf', x, w)) * weigh), (0, 1))
        equal(jax.value_and_grad(run, (0, 1))(x, w, weigh), plain(x, w))


@pytest.mark.parametrize('table_axes', ['', '/b', '/b/a'])
def test_take_looks_up_rows_of_a_sharded_table(table_axes):
    table, weigh = random(16, 3), random(4, 5, 3, seed=1)
    ids = np.random.default_rng(2).integers(0, 16, (4, 5)).astype(np.int32)
    ids[0, 0] = 99  # no such row: zeros
    places = 'B' if 'a' in table_axes else 'B/a'
    over = ' '.join(table_axes.strip('/').split('/')) if table_axes else ''

    @typed_shard_map
    def run(table: f32[f'V{table_axes} M'], ids: i32[f'{places} L'], weigh: f32[f'{places} L M']) -> f32['']:
        rows = shardlib.take(f'V{table_axes} M, {places} L -> {places} L M', table, ids)
        rows = psum(over, rows) if over else rows
        total = jnp.sum(jnp.cos(rows) * weigh)
        return total if places == 'B' else psum('a', total)

    def plain(table):
        rows = jnp.where((ids < 16)[..., None], table[np.minimum(ids, 15)], 0)
        return jnp.sum(jnp.cos(rows) * weigh)

    with mesh_of({'a': 2, 'b': 4}):
        equal(jax.value_and_grad(run)(table, ids, weigh), jax.value_and_grad(plain)(table))


def test_gather_with_wire_dtype_rounds_the_value_and_reduces_gradients_in_f32():
    with mesh_of({'a': 8, 'b': 1}):
        x = random(16)
        # Gradients of the eight devices: 256 once and 1 seven times. In bf16, 256 + 1 is 256 again.
        weigh = np.ones((8, 16), np.float32)
        weigh[0] = 256

        @typed_shard_map
        def run(x: f32['X/a'], weigh: f32['D/a X']) -> f32['']:
            whole = shardlib.all_gather('X/a -> X', x, wire=jnp.bfloat16)
            return psum('a', jnp.sum(whole * weigh))

        value, gradient = jax.value_and_grad(run)(x, weigh)
        rounded = np.asarray(jnp.asarray(x).astype(jnp.bfloat16), np.float32)
        np.testing.assert_allclose(value, np.sum(rounded * weigh), rtol=1e-5)
        np.testing.assert_array_equal(gradient, np.full(16, 263, np.float32))


def test_sums_with_a_wire_are_exact_over_the_other_axes_and_rounded_over_its_own():
    """In value, and as the transpose of `reduce_gradient_here`. Sums of these integers are exact in f32."""
    x = np.random.default_rng(0).integers(0, 1000, (4, 2, 64)).astype(np.float32)
    wires = {'b': jnp.bfloat16}

    @typed_shard_map
    def total(x: f32['A/a B/b X']) -> f32['X']:
        return psum('a b', x[0, 0], wires=wires)

    @typed_shard_map
    def weighted_sum(w: f32['X'], x: f32['A/a B/b X']) -> f32['']:
        return psum('a b', jnp.sum(shardlib.reduce_gradient_here(w, wires=wires) * x[0, 0]))

    first, second = x.sum(0).astype(jnp.bfloat16)
    rounded = (first + second).astype(np.float32)
    assert np.mean(rounded != x.sum((0, 1))) > 0.5
    with mesh_of({'a': 4, 'b': 2}):
        np.testing.assert_array_equal(total(x), rounded)
        np.testing.assert_array_equal(jax.grad(weighted_sum)(np.ones(64, np.float32), x), rounded)


def test_copies_of_a_value_count_once_in_a_sum_of_partial_sums():
    x, y = random(8), random(3)

    @typed_shard_map
    def total(x: f32['N/a'], y: f32['M']) -> f32['']:
        parts = shardlib.as_partial_sum('b', jnp.sum(x)) + shardlib.as_partial_sum('a b', jnp.sum(y))
        return psum('a b', parts)

    with mesh_of({'a': 2, 'b': 4}):
        np.testing.assert_allclose(total(x, y), x.sum() + y.sum(), rtol=1e-5)


def test_first_axis_is_major_in_axis_size_and_axis_index():
    with mesh_of({'a': 2, 'b': 4}):

        @typed_shard_map
        def run(x: f32['X/a/b']) -> i32['X/a/b']:
            return shardlib.axis_index('a b') + shardlib.axis_size('a b') * jnp.ones(x.shape, jnp.int32)

        np.testing.assert_array_equal(run(np.zeros(8, np.float32)), 8 + np.arange(8))


@pytest.mark.parametrize('passes', [1, 3])
def test_deferred_gradients_of_a_scan_are_reduced_once_at_the_end(passes):
    """Stacked, replicated weights through `scan`, gradients of several passes added before one psum."""
    w, x, weigh = random(4, 8, 8), random(16, 8, seed=1), random(16, 8, seed=2)

    @typed_shard_map
    def gradient(w: f32['layers X Y'], x: f32['B/a/b X'], weigh: f32['B/a/b X']) -> f32['layers X Y']:
        w = shardlib.defer_reduction('a b', w)

        def loss(w):
            body = lambda h, layer: (jnp.tanh(shardlib.einsum('B/a/b X, X Y -> B/a/b Y', h, layer)), None)  # noqa: E731
            return jnp.sum(shardlib.scan([body], x, w)[0] * weigh)

        total = shardlib.zero_gradient(w)
        for _ in range(passes):
            total = total + jax.grad(loss)(w)
        return psum('a b', total)

    def plain(w):
        h = x
        for layer in w:
            h = jnp.tanh(h @ layer)
        return jnp.sum(h * weigh)

    with mesh_of({'a': 4, 'b': 2}):
        np.testing.assert_allclose(gradient(w, x, weigh), passes * jax.grad(plain)(w), rtol=1e-4, atol=1e-4)


def test_collectives_over_one_device_are_not_compiled():
    with mesh_of({'a': 8, 'b': 1}):

        @typed_shard_map
        def run(x: f32['X/a Y/b']) -> f32['X/a']:
            whole = shardlib.all_gather('X/a Y/b -> X/a Y', x)
            return psum('b', shardlib.einsum('X/a Y/b -> X/a', shardlib.psum_scatter('X/a Y -> X/a Y/b', whole)))

        text = jax.jit(run).lower(random(8, 8)).compile().as_text()
        assert not [name for name in ('all-gather', 'all-reduce', 'reduce-scatter') if name in text]
