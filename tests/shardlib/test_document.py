"""docs/shardlib.md: its program is right, and its errors are the ones that are raised."""

import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pretrax.shardlib import ShardingError, all_gather, einsum, f32, psum, typed_shard_map

DOCUMENT = (pathlib.Path(__file__).parents[2] / 'docs' / 'shardlib.md').read_text()
ERRORS = re.findall(r'```text\n(.*?)```', DOCUMENT, re.DOTALL)


@pytest.fixture(scope='module')
def example(tmp_path_factory):
    path = tmp_path_factory.mktemp('doc') / 'example.py'  # on disk, as annotated locals are found in the source
    path.write_text('\n'.join(re.findall(r'```python\n(.*?)```', DOCUMENT, re.DOTALL)))
    names = {'__name__': 'example'}
    before = jax.sharding.get_mesh()
    exec(compile(path.read_text(), str(path), 'exec'), names)
    yield names
    jax.set_mesh(before)


def test_the_program_equals_plain_numpy_in_value_and_gradient(example):
    def plain(w, x, y):
        h = jax.nn.silu(jax.nn.silu(x @ w[0]) @ w[1])
        return jnp.sum((h @ w[2] - y) ** 2)

    w = example['w']
    arrays = jax.device_get((w.first, w.second, w.third)), *jax.device_get((example['x'], example['y']))
    value, gradient = jax.value_and_grad(plain)(*arrays)
    np.testing.assert_allclose(example['value'], value, rtol=1e-5)
    for name, expected in zip(('first', 'second', 'third'), gradient, strict=True):
        np.testing.assert_allclose(
            getattr(example['gradient'], name), expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max()
        )
        assert getattr(example['gradient'], name).sharding.spec == getattr(w, name).sharding.spec


def raised(function, *arguments):
    with pytest.raises(ShardingError) as error:
        function(*arguments)
    return str(error.value)


def test_missing_gather_raises_the_documented_error(example):
    @typed_shard_map
    def forgotten(w: example['Weights'], x: f32['batch/d inputs']) -> f32['batch/d hidden/t']:
        return einsum('batch/d inputs, inputs/d hidden/t -> batch/d hidden/t', x, w.first)

    assert raised(forgotten, example['w'], example['x']) == ERRORS[0].rstrip()


def test_missing_reduction_raises_the_documented_error(example):
    @typed_shard_map
    def forgotten(w: example['Weights'], h: f32['batch/d hidden/t']) -> f32['']:
        second = all_gather('hidden/t width/d -> hidden/t width', w.second)
        h: f32['batch/d width'] = einsum('batch/d hidden/t, hidden/t width -> batch/d width', h, second)
        return psum('d', jnp.sum(h))

    message = raised(forgotten, example['w'], np.zeros((64, 32), np.float32))
    where, _, rest = message.partition(': ')
    assert re.fullmatch(r"local 'h', line \d+", where)
    rest, _, place = rest.partition('\n  where: ')
    assert rest == ERRORS[1].rstrip()
    assert place.startswith('test_document.py, line')


def test_reused_axis_raises_the_documented_error():
    assert raised(lambda: f32['batch/d width/d']) == ERRORS[2].rstrip()
