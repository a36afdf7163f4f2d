"""Every kind of wrong type is rejected while tracing, with an error that names the fix."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from pretrax.shardlib import (
    Array,
    ShardingError,
    all_gather,
    all_to_all,
    bf16,
    einsum,
    f32,
    i32,
    independent,
    is_fully_sharded,
    make_abstract,
    make_partition_specs,
    make_shardings,
    ppermute,
    psum,
    psum_scatter,
    pytree_dataclass,
    scope,
    take,
    typechecked,
    typed_shard_map,
)

ONES = np.ones((8, 16), np.float32)


@pytest.fixture(autouse=True)
def mesh():
    with jax.set_mesh(jax.make_mesh((4, 2), ('d', 't'), axis_types=(AxisType.Auto,) * 2)) as mesh:
        yield mesh


def identity(annotation, result=None):
    @typed_shard_map
    def run(x: annotation) -> result or annotation:
        return x

    return run


def inside(work, annotation=f32['B/d M'], result=f32['']):
    @typed_shard_map
    def run(x: annotation) -> result:
        return work(x)

    return run


def working_apart(x, axes='d'):
    """Annotated as if there were no axis d, which is right inside independent("d"), since each device has its own."""

    @typechecked
    def alone(x: f32['C M']) -> f32['C M']:
        return 2 * x

    with independent(axes):
        return alone(x)


CASES = {
    'rank': (lambda: identity(f32['B/d'])(ONES), ['has 1 dimensions', 'shape (8, 16)']),
    'dtype': (lambda: identity(bf16['B/d M'])(ONES), ["bf16['B/d M'] expected", 'float32', 'x.astype(jnp.bfloat16)']),
    'divisibility': (lambda: identity(f32['B/d M'])(ONES[:6]), ['size 6', '4 shards', 'd=4, t=2', 'nearest: 8']),
    'unknown axis': (lambda: identity(f32['B/q M'])(ONES), ["'q'", 'd, t']),
    'size in digits': (lambda: identity(f32['B/d 5'])(ONES), ['16', '5']),
    'no array': (lambda: identity(f32['B/d M'])('text'), ['str']),
    'a sum forgotten at the end': (
        lambda: inside(lambda x: jnp.sum(x))(ONES),
        ["along 'd'", "psum('d', x)", 'where: test_errors.py, line'],
    ),
    'a sum too many': (
        lambda: inside(lambda x: psum('t', jnp.sum(x)))(ONES),
        ["replicated along 't'", 'would multiply'],
    ),
    'a scatter of what is whole': (
        lambda: inside(lambda x: psum_scatter('B/d M -> B/d M/t', x), result=f32['B/d M/t'])(ONES),
        ["replicated along 't'"],
    ),
    'a letter with two shardings': (
        lambda: inside(lambda x: einsum('B/d M, M/t F -> B/d F', x, x))(ONES),
        ["'M' is 'M'", "'M/t'", 'all_gather'],
    ),
    'a letter twice': (lambda: inside(lambda x: einsum('M M -> M', x))(ONES), ["'M' appears twice"]),
    'a letter from nowhere': (lambda: inside(lambda x: einsum('B/d M -> B/d F', x))(ONES), ["'F'"]),
    'a partial sum in a product': (
        lambda: inside(lambda x: einsum('M, M -> M', jnp.sum(x, 0), jnp.sum(x, 0)), result=f32['M'])(ONES),
        ["along 'd'", "psum('d', x)"],
    ),
    'a gather of the major axis': (
        lambda: inside(lambda x: all_gather('B/d/t M -> B/t M', x), f32['B/d/t M'])(ONES),
        ['last axes'],
    ),
    'a gather of nothing': (lambda: inside(lambda x: all_gather('B/d M -> B/d M', x))(ONES), ['changes nothing']),
    'a gather that renames': (lambda: inside(lambda x: all_gather('B/d M -> C M', x))(ONES), ['different dimensions']),
    'no arrow': (lambda: inside(lambda x: all_gather('B/d M', x))(ONES), ['not of the form']),
    'too few operands': (lambda: inside(lambda x: einsum('B/d M, M F -> B/d F', x))(ONES), ['not of the form']),
    'a malformed word': (lambda: f32['B//d'], ["'B//d'"]),
    'an axis twice': (lambda: f32['B/d M/d'], ["'d' shards two dimensions", 'gather one of them']),
    'to all from nothing': (lambda: inside(lambda x: all_to_all('B/d M -> B/d M', x))(ONES), ['all_to_all']),
    'a wrong lookup': (
        lambda: inside(lambda x: take('V/t M, B/d M -> B/d M', x, x))(ONES),
        ["take('V/t M, B/d M -> B/d M')"],
    ),
    'outside': (lambda: all_gather('B/d M -> B M', ONES), ['typed_shard_map']),
    'two slices for one device': (
        lambda: inside(lambda x: ppermute('d', x, to=[1, 2, 3, 1]), result=f32['B/d M'])(ONES),
        ['to=[1, 2, 3, 1]', 'each of the 4 devices'],
    ),
    'what devices apart have, as one': (
        lambda: inside(lambda x: working_apart(x), result=f32['C M'])(ONES),
        ["'C M'", "along 'd'", 'value differs'],
    ),
    'a sum over other axes than those apart': (
        lambda: inside(lambda x: working_apart(x, 't'), result=f32['B/d M'])(ONES),
        ["f32['C M'] is replicated along 'd'", 'where: test_errors.py, line'],
    ),
    'apart along nothing': (
        lambda: inside(lambda x: working_apart(x, 'q'))(ONES),
        ["independent('q')", "'q' is not a mesh"],
    ),
    'an axis that is not': (lambda: inside(lambda x: psum('q', jnp.sum(x)))(ONES), ["'q'", 'd=4, t=2']),
}


@pytest.mark.parametrize('case', CASES)
def test_wrong_types_are_rejected(case):
    wrong, expected = CASES[case]
    with pytest.raises(ShardingError) as error:
        wrong()
    assert [text for text in expected if text not in str(error.value)] == []


def test_a_name_has_one_size_within_a_scope_and_another_in_the_next():
    @typechecked
    def pair(x: f32['B M'], y: f32['C M']) -> f32['B C']:
        return x @ y.T

    with pytest.raises(ShardingError, match=r"has M = 8, but M is 16 by argument 'x' of pair"):
        pair(ONES, np.ones((4, 8), np.float32))

    @typechecked
    def nested(x: f32['B M']) -> f32['B B']:
        with scope():
            inner(x[:4])
        return inner(x)

    @typechecked
    def inner(x: f32['B M']) -> f32['B B']:
        return x @ x.T

    nested(jnp.asarray(ONES))


def test_types_inside_apart_omit_the_axis_and_sizes_are_per_index():
    @typed_shard_map
    def run(x: f32['B/d M']) -> tuple[f32['B/d M'], f32['M']]:
        doubled = working_apart(x)  # C is 2 there, and f32['C M'] says nothing of d
        return doubled, psum('d', jnp.sum(doubled, axis=0))

    doubled, total = run(ONES)
    np.testing.assert_array_equal(doubled, 2 * ONES)
    np.testing.assert_array_equal(total, 2 * ONES.sum(0))


def test_annotated_locals_are_checked_and_errors_name_the_line():
    number = 2.0

    @typechecked
    def scale(x: f32['B M'], by: float = 1.0, *, more: float = 0.0) -> f32['B M']:
        y: f32['M B'] = x.T * number * by + more
        z: f32['B M'] = y
        return z

    with pytest.raises(ShardingError, match=r"local 'z', line \d+: .* has B = 16, but B is 8") as error:
        scale(jnp.asarray(ONES), 3.0, more=1.0)
    line = int(str(error.value).split('line ')[1].split(':')[0])
    assert pathlib.Path(__file__).read_text().splitlines()[line - 1].strip() == "z: f32['B M'] = y"


def test_array_arguments_and_results_need_types():
    @typed_shard_map
    def untyped(x, n: int) -> f32['B/d M']:
        return x

    with pytest.raises(ShardingError, match="argument 'x' of untyped holds arrays"):
        untyped(jnp.asarray(ONES), 3)

    @typed_shard_map
    def silent(x: f32['B/d M']):
        return x

    with pytest.raises(ShardingError, match='needs a return type'):
        silent(ONES)


def test_error_without_a_mesh_explains_how_to_set_one(mesh):
    empty = jax.sharding.Mesh(np.empty((), object), ())
    with jax.set_mesh(empty), pytest.raises(ShardingError, match='no mesh is set'):
        identity(f32['B/d M'])(ONES)


@pytree_dataclass
class Layer:
    w: f32['M/d F/t']
    bias: f32['F/t'] | None


@pytree_dataclass
class Net:
    layers: Array['layers', Layer]
    table: i32['V/t/d']


def test_specs_shardings_and_abstract_values_come_from_types(mesh):
    spec = jax.sharding.PartitionSpec
    mesh = jax.sharding.get_mesh()
    assert make_partition_specs(Net).layers == Layer(w=spec(None, 'd', 't'), bias=spec(None, 't'))
    assert make_partition_specs(Net).table == spec(('t', 'd'))
    assert make_shardings(Net).layers.w == jax.sharding.NamedSharding(mesh, spec(None, 'd', 't'))
    sizes = {'layers': 3, 'M': 8, 'F': 4, 'V': 16}
    abstract = make_abstract(Net, sizes, omit=('bias',))
    assert abstract.layers.w.shape == (3, 8, 4)
    assert abstract.layers.bias is None
    assert abstract.table.dtype == jnp.int32
    assert is_fully_sharded(Net, ('t',))
    assert not is_fully_sharded(Net)
    with pytest.raises(ShardingError, match=r'layers\.w.*size 6'):
        make_abstract(Net, sizes | {'M': 6})
    with pytest.raises(ShardingError, match="'F', but no size is given for it"):
        make_abstract(Net, {'layers': 3, 'M': 8, 'V': 16})


def test_compiled_program_contains_no_checks(mesh):
    @typechecked
    def checked(x: f32['B M']) -> f32['M']:
        y: f32['B M'] = jnp.tanh(x)
        return jnp.sum(y, axis=0)

    def unchecked(x):
        return jnp.sum(jnp.tanh(x), axis=0)

    def program(function):
        return str(jax.make_jaxpr(function)(ONES))

    assert program(checked) == program(unchecked)


def test_works_under_vmap():
    @typed_shard_map
    def total(x: f32['B/d M/t']) -> f32['']:
        whole = all_gather('B/d M/t -> B/d M', x)
        return psum('d', jnp.sum(whole**2))

    batch = np.stack([ONES, 2 * ONES])
    np.testing.assert_allclose(jax.jit(jax.vmap(total))(batch), np.sum(batch**2, axis=(1, 2)))


def test_error_names_the_axis_of_a_slice_mistaken_for_the_whole_array():
    with pytest.raises(ShardingError, match=r"write 'B/d'|all_gather") as error:

        @typed_shard_map
        def run(x: f32['B/d M']) -> f32['B/d M']:
            y: f32['B M'] = x
            return y

        run(ONES)
    assert "'d'" in str(error.value) or '/d' in str(error.value)
