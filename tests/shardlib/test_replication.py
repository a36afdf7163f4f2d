"""What a value is said to be the same along, it is the same along: wrong claims are refused, right ones are not."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies
from jax import lax
from jax.sharding import AxisType

from pretrax import shardlib
from pretrax.shardlib import (
    ShardingError,
    all_gather,
    bool_,
    check,
    defer_reduction,
    einsum,
    f32,
    i32,
    pmean,
    ppermute,
    psum,
    pytree_dataclass,
    recompute_by_name,
    take,
    typed_shard_map,
)

AXES = 'abc'
WIDTH = 4


@pytest.fixture(autouse=True, scope='module')
def mesh():
    with jax.set_mesh(jax.make_mesh((2, 2, 2), tuple(AXES), axis_types=(AxisType.Auto,) * 3)) as mesh:
        yield mesh


# Random programs. A program is a list of (operation, operands, axis); an operand is the number of an earlier value.

PAIRS = {
    'plain': lambda x, y: jnp.sin(x) + y,
    'jit': lambda x, y: jax.jit(lambda x, y: (x * y, jnp.cos(x)))(x, y)[0],
    'remat': lambda x, y: jax.checkpoint(lambda x, y: jnp.tanh(x) - y)(x, y),
    'vmap': lambda x, y: jax.vmap(lambda a, b: a * jnp.exp(-b * b))(x, y),
    'grad': lambda x, y: jax.grad(lambda v: jnp.sum(jnp.sin(v) * y))(_vary_as(x, y)),
    'scan': lambda x, y: lax.scan(lambda s, v: (jnp.sin(s) + v, None), _vary_as(x, y), jnp.stack([y, 2 * y]))[0],
    'while': lambda x, y: lax.while_loop(
        lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] * jnp.cos(y)), (0, _vary_as(x, y))
    )[1],
    'cond': lambda x, y: lax.cond(jnp.sum(x) > 0, lambda v: v + 1, lambda v: 2 * v, _vary_as(y, x)),
    'custom': lambda x, y: _custom(x, y),
}


def _vary_as(x, y):
    """x as it is; JAX wants what a loop carries to vary as what is added to it does."""
    missing = jax.typeof(y).manual_axis_type.varying - jax.typeof(x).manual_axis_type.varying
    return lax.pcast(x, tuple(missing), to='varying') if missing else x


@jax.custom_vjp
def _custom(x, y):
    return x * y


_custom.defvjp(lambda x, y: (_custom(x, y), (x, y)), lambda kept, g: (g * kept[1], g * kept[0]))


def passed_along(x, y):
    """Four carries: each takes from the next, so that the first learns of the last in the third round."""
    x, y = _vary_as(x, y), _vary_as(y, x)
    nothing = _vary_as(jnp.zeros(WIDTH), x)
    carry = lambda c, _: ((c[0] + c[1], c[1] + c[2], c[2] + jnp.sin(c[3]), c[3]), None)  # noqa: E731
    return lax.scan(carry, (x, nothing, nothing, y), length=4)[0][0]


def apart(x, y):
    """Two carries that do not meet, and two operands of one barrier: the first of them."""
    first, _ = lax.scan(lambda c, _: ((jnp.sin(c[0]), jnp.cos(c[1])), None), (x, y), length=2)[0]
    return lax.optimization_barrier((first, y))[0]


@strategies.composite
def programs(draw):
    """A program, and the axes along which its last value differs.
    It begins with a sharded, a gathered, a whole value.
    """
    differ = [set('abc'), set('a'), set()]
    program = []
    for _ in range(draw(strategies.integers(2, 6))):
        operation = draw(strategies.sampled_from([*PAIRS, 'gather', 'psum', 'scatter', 'ring', 'passed', 'apart']))
        operands = tuple(draw(strategies.integers(0, len(differ) - 1)) for _ in range(2))
        axis = draw(strategies.sampled_from(AXES))
        first = differ[operands[0]]
        if operation in ('gather', 'psum', 'scatter', 'ring'):
            if axis not in first:
                continue
            differ.append(first - {axis} if operation in ('gather', 'psum') else first)
        else:
            differ.append(first if operation == 'apart' else first | differ[operands[1]])
        program.append((operation, operands, axis, tuple(sorted(first))))
    return program, frozenset(differ[-1])


def run(program, x, w, g):
    values = [x, w, g]
    for operation, operands, axis, differs in program:
        first, second = (values[i] for i in operands)
        others = ''.join(f'/{a}' for a in differs if a != axis)
        with shardlib.scope():
            match operation:
                case 'gather':
                    both = all_gather(f'N{others}/{axis} -> N{others}', first)
                    new = both[:WIDTH] + 3 * both[WIDTH:]
                case 'psum':
                    new = psum(axis, first)
                case 'scatter':
                    new = jnp.tile(shardlib.psum_scatter(f'N{others} -> N{others}/{axis}', first), 2)
                case 'ring':
                    new = ppermute(axis, first)
                case 'passed':
                    new = passed_along(first, second)
                case 'apart':
                    new = apart(first, second)
                case _:
                    new = PAIRS[operation](first, second)
        values.append(new)
    return values[-1]


@hypothesis.settings(max_examples=25)
@hypothesis.given(
    programs(), strategies.sets(strategies.sampled_from(AXES)), strategies.sampled_from(['', 'jit', 'vmap'])
)
def test_claims_about_random_programs_are_rejected_exactly_when_false(made, sharded, transformation):
    program, differs = made
    claim = f32['/'.join(['N', *sorted(sharded)])]

    @typed_shard_map
    def claimed(x: f32['P/a/b/c'], w: f32['Q/a'], g: f32['R']) -> f32['A/a B/b C/c R']:
        with shardlib.scope():
            last = run(program, x, w, g)
        with shardlib.scope():
            last = check(last, claim, 'the last value')
        return last[None, None, None]

    draw = np.random.default_rng(0).standard_normal
    operands = [draw(n * WIDTH).astype(np.float32) for n in (8, 2, 1)]
    if transformation == 'jit':
        claimed = jax.jit(claimed)
    elif transformation == 'vmap':
        claimed, operands = jax.vmap(claimed), [np.stack([x, 2 * x]) for x in operands]
    if differs - sharded:
        with pytest.raises(ShardingError, match=r'the last value: .* the value differs along it') as error:
            jax.eval_shape(claimed, *operands)
        assert all(axis in str(error.value).split("along '")[1].split("'")[0] for axis in differs - sharded)
        return
    found = np.asarray(claimed(*operands)).reshape(-1, 2, 2, 2, WIDTH)
    for axis in set(AXES) - sharded:  # what was accepted is true
        one, other = np.split(found, 2, axis=1 + AXES.index(axis))
        np.testing.assert_array_equal(one, other)


# Claims by hand: `x` is sharded over a and b and the same along c.


def whole(x):
    return all_gather('M/a N -> M N', all_gather('M/a N/b -> M/a N', x))


def whole_rows(x):
    return all_gather('M/a N/b -> M/a N', x, wire=jnp.bfloat16)


def rows(x):
    return check(x, f32['Q'], 'a row')


def start(x):
    return jnp.sum(x) * 0


@jax.custom_vjp
def custom_sum(x):
    return jnp.sum(check(jnp.sin(x), f32['P Q'], 'it'))


custom_sum.defvjp(lambda x: (jnp.sum(x), x), lambda x, g: (g * x,))


@jax.custom_jvp
def custom_tangent(x):
    return jnp.sum(check(jnp.sin(x), f32['P Q'], 'it'))


custom_tangent.defjvp(lambda x, dx: (custom_tangent(*x), jnp.sum(dx[0])))


@pytree_dataclass
class Pair:
    total: f32['']
    row: f32['K'] | None


def total(x):
    return psum('a b', jnp.sum(x))


WRONG = {
    'a sum of slices': (lambda x: jnp.sum(x), f32['']),
    'half gathered': (lambda x: jnp.sum(all_gather('M/a N/b -> M/a N', x)), f32['']),
    'a slice of rows': (lambda x: x[0], f32['N/b']),
    'carried by a scan': (lambda x: lax.scan(lambda s, r: (s + jnp.sum(r), None), start(x), x)[0], f32['']),
    'in the body of a scan': (lambda x: total(lax.scan(lambda s, r: (s, rows(r)), 0, x)[1]), f32['']),
    'handed from carry to carry': (lambda x: passed_along(whole(x)[0], jnp.tile(x[0], 2)), f32['K']),
    'carried by a while': (
        lambda x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + jnp.sum(x)), (0, start(x)))[1],
        f32[''],
    ),
    'a while that runs as long as it likes': (
        lambda x: lax.while_loop(lambda s: s[0] < jnp.sum(x), lambda s: (s[0] + 1, s[1] + 1), (start(x),
        start(whole(x))))[1],
        f32[''],
    ),
    'a cond that chooses by itself': (
        lambda x: lax.cond(jnp.sum(x) > 3, lambda y: y, lambda y: 2 * y, jnp.sum(whole(x))), f32[''],
    ),
    'one branch of a cond': (
        lambda x: lax.cond(jnp.sum(whole(x)) > 3, lambda y, z: y, lambda y, z: z, jnp.sum(whole(x)), jnp.sum(x)),
        f32[''],
    ),
    'inside jit': (lambda x: total(jax.jit(lambda x: check(x, f32['P Q'], 'it'))(x)), f32['']),
    'inside checkpoint': (
        lambda x: total(jax.checkpoint(lambda x: jnp.sum(check(jnp.sin(x), f32['P Q'], 'it')))(x)), f32[''],
    ),
    'inside checkpoint, recomputed by the gradient': (
        lambda x: total(jax.grad(recompute_by_name(lambda w: jnp.sum(jnp.sin(check(w, f32['P Q'], 'it'))), {}))(x)),
        f32[''],
    ),
    'inside a gradient of something linear': (
        lambda x: total(jax.grad(lambda w: jnp.sum(check(w, f32['P Q'], 'it')))(x)), f32[''],
    ),
    'inside vmap': (lambda x: total(jax.vmap(rows)(x)), f32['']),
    'inside custom_vjp': (lambda x: total(custom_sum(x)), f32['']),
    'inside custom_jvp': (lambda x: total(custom_tangent(x)), f32['']),
    'integers': (lambda x: jnp.argmax(x).astype(jnp.int32), i32['']),
    'booleans': (lambda x: x[0] > 3, bool_['K']),
    'a place on the mesh': (lambda x: shardlib.axis_index('a') + 0 * total(x).astype(jnp.int32), i32['']),
    'the second of a tuple': (lambda x: (total(x), jnp.sum(x)), tuple[f32[''], f32['']]),
    'in a dict': (lambda x: {'one': total(x), 'two': jnp.sum(x)}, dict[str, f32['']]),
    'a field': (lambda x: Pair(total(x), x[0]), Pair),
    'a gathered partial sum': (lambda x: all_gather('M/a -> M', jnp.sum(x, axis=1)), f32['M']),
    'a product of partial sums': (
        lambda x: psum('a', einsum('M/a, M/a -> ', jnp.sum(x, 1), jnp.sum(x, 1))), f32[''],
    ),
    'a contraction': (lambda x: einsum('M/a N/b -> M/a', x), f32['M/a']),
    'rows of a sharded table': (lambda x: take('N/b M/a, L -> L M/a', x.T, jnp.arange(3)), f32['L M/a']),
    'a mean over one axis of two': (lambda x: pmean('a', jnp.sum(x)), f32['']),
    'a gradient that was deferred': (
        lambda x: jax.grad(lambda w: jnp.sum(w * shardlib.axis_index('c')))(defer_reduction('c', x)), f32['M/a N/b'],
    ),
    'a ring that leaves one out': (
        lambda x: lax.ppermute(total(x) + start(whole(x)), 'a', [(0, 1)]), f32[''],
    ),
    'an index': (lambda x: whole(x)[shardlib.axis_index('a')], f32['N']),
    'a scattered update': (lambda x: whole(x).at[0, 0].set(jnp.sum(x)), f32['M N']),
}  # fmt: skip

ADDED_TWICE = {
    'a total': lambda x: psum('a', total(x)),
    'a gathered value': lambda x: psum('a b', jnp.sum(whole(x))),
    'half gathered': lambda x: psum('a b', jnp.sum(all_gather('M/a N/b -> M/a N', x))),
    'what nothing shards': lambda x: psum('a b c', jnp.sum(x)),
}

RIGHT = {
    'gathered': (lambda x: jnp.sum(whole(x)) + total(x), f32['']),
    'a scan with a carry that differs': (
        lambda x: lax.scan(lambda s, r: ((s[0] + jnp.sum(r), s[1] + jnp.sum(x)), None), (start(whole(x)), start(x)),
        whole(x))[0][0],
        f32[''],
    ),
    'a while that all run alike': (
        lambda x: lax.while_loop(
            lambda s: s[0] < jnp.sum(whole(x)), lambda s: (s[0] + 9, s[1] + 1), (start(whole(x)), start(whole(x)))
        )[1],
        f32[''],
    ),
    'a cond that all decide alike': (
        lambda x: lax.cond(jnp.sum(whole(x)) > 3, lambda y, z: y, lambda y, z: 2 * y, jnp.sum(whole(x)), jnp.sum(x)),
        f32[''],
    ),
    'inside jit': (lambda x: check(jax.jit(lambda y, z: (y * 2, z))(whole(x), x)[0], f32['P Q'], 'it'), f32['M N']),
    'inside custom_vjp': (lambda x: custom_sum(whole(x)), f32['']),
    'inside custom_vjp, differentiated': (lambda x: total(jax.grad(lambda x: custom_sum(whole(x)))(x)), f32['']),
    'inside custom_jvp': (lambda x: custom_tangent(whole(x)), f32['']),
    'inside vmap': (lambda x: jnp.sum(jax.vmap(rows)(whole(x))), f32['']),
    'reduced inside vmap': (lambda x: jnp.sum(jax.vmap(total)(x)), f32['']),
    'integers': (lambda x: jnp.argmax(whole(x)).astype(jnp.int32), i32['']),
    'booleans': (lambda x: whole(x)[0] > 3, bool_['N']),
    'passed around the ring': (lambda x: jnp.sum(ppermute('a', whole(x))), f32['']),
    'beside another in a barrier': (lambda x: jnp.sum(lax.optimization_barrier((whole(x), x))[0]), f32['']),
    'of a narrow wire': (lambda x: jnp.sum(all_gather('M/a N -> M N', whole_rows(x), wire=jnp.bfloat16)), f32['']),
    'a gradient of nothing': (
        lambda x: psum('c', jax.grad(lambda w: jnp.sum(x))(defer_reduction('c', jnp.ones(3)))), f32['K'],
    ),
}  # fmt: skip


def traced(work, result):
    @typed_shard_map
    def run(x: f32['M/a N/b']) -> result:
        return work(x)

    return jax.eval_shape(run, np.ones((4, 4), np.float32))


@pytest.mark.parametrize('case', WRONG)
def test_false_claim_is_rejected(case):
    with pytest.raises(ShardingError, match=r'replicated along .* but the value differs along it'):
        traced(*WRONG[case])


@pytest.mark.parametrize('case', ADDED_TWICE)
def test_psum_of_a_replicated_value_is_rejected(case):
    with pytest.raises(ShardingError, match=r'replicated along .* would multiply it'):
        traced(ADDED_TWICE[case], f32[''])


def test_pmean_of_a_replicated_value_is_rejected():
    with pytest.raises(ShardingError, match='there is nothing to reduce') as error:
        traced(lambda x: pmean('a b', jnp.sum(whole(x))), f32[''])
    assert 'multiply' not in str(error.value)


@pytest.mark.parametrize('case', RIGHT)
def test_true_claim_is_accepted(case):
    traced(*RIGHT[case])


# One program with gathers, scan, remat and reductions, under transformations of transformations.


@typed_shard_map
def loss(w: f32['layers X/b Y'], x: f32['B/a X'], scale: f32['']) -> f32['']:
    def layer(h, w):
        return jnp.tanh(einsum('B/a X, X Y -> B/a Y', h, all_gather('X/b Y -> X Y', w)) * scale), None

    h, _ = shardlib.scan([layer], x, w)
    error: f32['B/a X'] = recompute_by_name(jnp.sin, {})(h) - x
    return psum('a', jnp.sum(error**2))


def plain_loss(w, x, scale):
    h = x
    for layer in w:
        h = jnp.tanh(h @ layer * scale)
    return jnp.sum((jnp.sin(h) - x) ** 2)


def batched(f):
    """The sum over a leading dimension of x."""
    return lambda w, x, scale: jnp.sum(jax.vmap(f, (None, 0, None))(w, jnp.stack([x, x / 2]), scale))


def scanned(f):
    return lambda w, x, scale: lax.scan(lambda s, x: (s + f(w, x, scale), None), 0.0, jnp.stack([x, x / 2]))[0]


def forward_mode(f):
    return lambda w, x, scale: jax.jvp(f, (w, x, scale), (w, x, scale))[1]


EVERY = functools.partial(jax.grad, argnums=(0, 1, 2))
COMPOSED = {
    'jit grad': [jax.jit, EVERY],
    'jit grad remat vmap': [jax.jit, EVERY, jax.checkpoint, batched],
    'jit grad scan remat': [jax.jit, EVERY, scanned, jax.checkpoint],
    'jit grad jvp': [jax.jit, EVERY, forward_mode],
    'jit scan vmap jit': [jax.jit, scanned, batched, jax.jit],
}


@pytest.mark.parametrize('name', COMPOSED)
def test_composed_transformations_equal_plain_numpy(name):
    draw = np.random.default_rng(0).standard_normal
    operands = [draw((3, 4, 4)).astype(np.float32), draw((4, 4)).astype(np.float32), np.float32(0.7)]
    ours, plain = (functools.reduce(lambda f, t: t(f), COMPOSED[name][::-1], f) for f in (loss, plain_loss))
    for a, b in zip(jax.tree.leaves(ours(*operands)), jax.tree.leaves(plain(*operands)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4)
