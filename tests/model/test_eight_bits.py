"""Products in int8 and fp8: what they compute, that no mesh changes it, that chance is fair,
and that training goes on.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from decoders import decoder_options
from model.test_matmul import dots
from pretrax.config import schema
from pretrax.errors import UserError
from pretrax.model import eight_bits, numerics
from pretrax.model.matmul import product
from pretrax.model.numerics import Format, choose_numerics, unsupported_experts
from pretrax.model.request import ModelRequest
from pretrax.model.transformer import Transformer
from pretrax.model.weights import Layer
from pretrax.shardlib import all_gather, defer_reduction, f32, num, psum, typed_shard_map  # fmt: skip
from pretrax.train import optimizer
from pretrax.train.step import Recipe, make_gradients, make_step, step_keys
from run.test_equivalence import fresh_state
from small import LENGTH, LLAMA, MIXTURE, VOCAB, assert_same, mesh_of, random_batch, random_weights

SEED = np.array([3, 5], np.uint32)


@typed_shard_map
def into_and_out_of(
    x: num['B/r/d/e L/c M'],
    w: f32['M/d H/t D'],
    v: f32['H/t D M/d'],
    dy: num['B/r/d/e L/c M'],
    kind: str,
    seed: num['two'],
) -> tuple[num['B/r/d/e L/c M'], num['B/r/d/e L/c M'], f32['M/d H/t D'], f32['H/t D M/d']]:
    """x w v and its gradients, weights sharded as those of attention are:
    one product splits its result, one its sum.
    """

    def loss(x, w, v):
        h = product(
            'B/r/d/e L/c M, M H/t D -> B/r/d/e L/c H/t D', x, all_gather('M/d H/t D -> M H/t D', w), Format(kind, seed)
        )
        v = all_gather('H/t D M/d -> H/t D M', v)
        y = psum('t', product('B/r/d/e L/c H/t D, H/t D M -> B/r/d/e L/c M', h, v, Format(kind, seed + 1)))
        return psum('r d e c', jnp.sum(y * dy)), y

    gradient = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    (_, y), (dx, dw, dv) = gradient(x, *defer_reduction('r e c', (w, v)))
    return y, dx, psum('r e c', dw), psum('r e c', dv)


@functools.cache
def outcome(kind, **mesh):
    rng = np.random.default_rng(0)
    shapes = (8, 8, 32), (32, 8, 4), (8, 4, 32), (8, 8, 32)
    x, w, v, dy = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    v *= np.float32(0.1)
    with jax.set_mesh(mesh_of(**mesh)):
        run = jax.jit(functools.partial(into_and_out_of, kind=kind))
        return jax.device_get(run(x, w, v, dy, seed=SEED)), (x, w, v, dy)


@pytest.mark.parametrize(('kind', 'error'), [('int8', 0.02), ('fp8', 0.12)])
def test_values_and_gradients_equal_exact_products_within_eight_bits(kind, error):
    (y, dx, dw, dv), (x, w, v, dy) = outcome(kind)
    h, dh = np.einsum('blm,mhd->blhd', x, w), np.einsum('blm,hdm->blhd', dy, v)
    exact = (
        np.einsum('blhd,hdm->blm', h, v), np.einsum('blhd,mhd->blm', dh, w), np.einsum('blm,blhd->mhd', x, dh),
        np.einsum('blhd,blm->hdm', h, dy),
    )  # fmt: skip
    assert_same((y, dx, dw, dv), exact, rtol=error)
    with pytest.raises(AssertionError):  # and eight bits it is
        assert_same((y, dx, dw, dv), exact, rtol=error / 20)


@pytest.mark.parametrize('kind', ['int8', 'fp8'])
@pytest.mark.parametrize('mesh', [{'d': 8}, {'t': 8}, {'d': 2, 'c': 2, 't': 2}, {'e': 2, 'd': 2, 'c': 2}])
def test_scales_and_rounding_are_the_same_on_every_mesh(kind, mesh):
    """But for rounding at a tie: the sums that are rounded next differ by the order of f32 additions."""
    assert_same(outcome(kind, **mesh)[0], outcome(kind)[0], rtol=1e-4)


@pytest.mark.parametrize(('kind', 'error'), [('int8', 0.015), ('fp8', 0.1)])
def test_replicas_have_their_own_scales_for_sums_over_tokens(kind, error):
    """Nothing but gradients goes over their slow network."""
    mine, one = outcome(kind, r=2)[0], outcome(kind)[0]
    assert_same(mine, one, rtol=error)
    if kind == 'int8':  # a token's scale is its own
        assert_same(mine[:2], one[:2], rtol=1e-4)


def test_int8_rounds_as_an_independent_implementation():
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((6, 16)).astype(np.float32), rng.standard_normal((16, 5)).astype(np.float32)
    xs, ws = np.abs(x).max(1, keepdims=True) / 127, np.abs(w).max(0, keepdims=True) / 127
    exact = np.rint(x / xs).astype(np.int64) @ np.rint(w / ws).astype(np.int64) * xs * ws
    np.testing.assert_allclose(simple('int8', x, w), exact, rtol=1e-6)


def test_fp8_rounds_as_an_independent_implementation():
    rng = np.random.default_rng(0)
    x, w = 1e-3 * rng.standard_normal((6, 16)).astype(np.float32), 50 * rng.standard_normal((16, 5)).astype(np.float32)
    scales = [2.0 ** np.ceil(np.log2(np.abs(a).max() / 448)) for a in (x, w)]
    rounded = [(a / s).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) for a, s in zip((x, w), scales, strict=True)]
    np.testing.assert_allclose(simple('fp8', x, w), rounded[0] @ rounded[1] * scales[0] * scales[1], rtol=1e-6)


def simple(kind, x, w):
    @typed_shard_map
    def run(x: f32['B M'], w: f32['M F']) -> f32['B F']:
        return product('B M, M F -> B F', x, w, Format(kind))

    with jax.set_mesh(mesh_of()):
        return np.asarray(jax.jit(run)(x, w))


@pytest.mark.parametrize('bad', [np.nan, np.inf])
@pytest.mark.parametrize('kind', ['int8', 'fp8'])
def test_values_that_are_not_finite_stay_so(kind, bad):
    x = np.ones((2, 16), np.float32)
    x[1, 3] = bad
    y = simple(kind, x, np.ones((16, 5), np.float32))
    assert not np.isfinite(y[1]).any()
    assert np.isfinite(simple(kind, np.zeros((2, 16), np.float32), np.ones((16, 5), np.float32))).all()


def test_stochastic_rounding_is_unbiased_and_depends_on_the_seed():
    @jax.jit
    def rounded(seed):
        dims = eight_bits.parse_dims('B M')
        x = jnp.broadcast_to(jnp.asarray([0.1, 0.25, 0.5, 0.9, 127]), (64, 5))
        return jnp.floor(x + eight_bits.uniform(seed, x.shape, dims))

    seeds = np.random.default_rng(0).integers(0, 2**32, (400, 2), np.uint32)
    with jax.set_mesh(mesh_of()):
        draws = np.stack([rounded(seed) for seed in seeds])
    mean = draws.mean((0, 1))  # of 25,600: a standard deviation of at most 0.0032
    np.testing.assert_allclose(mean, [0.1, 0.25, 0.5, 0.9, 127], atol=0.012)
    assert np.array_equal(draws[0], rounded(seeds[0]))
    halves = draws[:, :, 2].reshape(400, -1)
    correlation = np.corrcoef(halves[:40])  # between seeds, over rows: 1 / sqrt(64) is chance
    assert np.abs(correlation - np.eye(40)).max() < 0.6
    between_rows = np.corrcoef(halves.T)
    assert np.abs(between_rows - np.eye(64)).max() < 0.3


@pytest.mark.parametrize('kind', ['int8', 'fp8'])
def test_all_three_products_have_eight_bits(kind):
    with jax.set_mesh(mesh_of()):
        program = jax.make_jaxpr(functools.partial(into_and_out_of, kind=kind))(
            *(jnp.ones(shape, jnp.bfloat16) for shape in ((4, 8, 16),)), jnp.ones((16, 2, 4)), jnp.ones((2, 4, 16)),
            jnp.ones((4, 8, 16), jnp.bfloat16), seed=SEED,
        )  # fmt: skip
    kinds = [(*(str(v.aval.dtype) for v in dot.invars), str(dot.outvars[0].aval.dtype)) for dot in dots(program)]
    if kind == 'int8':
        assert kinds == [('int8', 'int8', 'int32')] * 6
    else:
        e4, e5 = 'float8_e4m3fn', 'float8_e5m2'
        assert sorted(kinds) == sorted(
            [(e4, e4, 'bfloat16')] * 2 + [(e5, e4, 'bfloat16')] * 2 + [(e4, e5, 'float32')] * 2
        )


def test_a_sum_that_may_overflow_is_refused():
    terms = eight_bits.LONGEST + 1
    with pytest.raises(UserError, match=r'133,145 values on one device may overflow(.|\n)*batch.micro'):
        simple('int8', np.ones((2, terms), np.float32), np.ones((terms, 2), np.float32))


def decoder(options, mesh, matmul, exempt, dtype=jnp.float32):
    request = ModelRequest(
        VOCAB, LENGTH, None, dtype, 'cpu', dict(mesh.shape), device_kind='a CPU', matmul=matmul, exempt=exempt
    )
    return Transformer(request, options=decoder_options(**options))


@pytest.mark.slow
def test_a_decoder_on_a_mesh_equals_one_device():
    """Blocks of two kinds in a loop against unrolled ones; experts, whose places are those of their sequence."""
    options = MIXTURE | {'n_layers': 3, 'capacity': 1.5}

    def gradient(mesh, **more):
        model = decoder(options | more, mesh, 'int8', ('head', 'first.*'))
        with jax.set_mesh(mesh):
            weights = jax.tree.map(
                lambda w, like: jax.device_put(w, like.sharding), random_weights(model), model.abstract()
            )
            run = jax.jit(make_gradients(model, 1))
            return jax.device_get(run(weights, random_batch(8), jax.random.key(0))[:2])

    # A tie here and there is rounded the other way: a hundredth of what eight bits themselves change
    assert_same(gradient(mesh_of(d=2, t=2), layers='scan'), gradient(mesh_of(), layers='unroll'), rtol=0.01)


def chain(step, rows=16):
    """Text that can be learned: each token has four likely followers."""
    rng = np.random.default_rng([7, step])
    followers = np.random.default_rng(3).integers(0, VOCAB, (VOCAB, 4))
    tokens = np.zeros((rows, LENGTH + 1), np.int32)
    tokens[:, 0] = rng.integers(0, VOCAB, rows)
    for i in range(LENGTH):
        tokens[:, i + 1] = followers[tokens[:, i], rng.integers(0, 4, rows)]
    whole = random_batch(rows)
    ones, places = np.ones((rows, LENGTH), np.int32), np.tile(np.arange(LENGTH, dtype=np.int32), (rows, 1))
    return type(whole)(tokens[:, :-1], tokens[:, 1:], ones, places, ones.astype(np.float32))


@pytest.mark.slow
def test_training_in_eight_bits_ends_near_the_compute_dtype_and_is_reproducible():
    mesh, losses = mesh_of(), {}
    for matmul in ('compute', 'int8', 'fp8'):
        exempt = ('head',) if matmul != 'compute' else numerics.EXEMPT
        model = decoder(LLAMA, mesh, matmul, exempt, jnp.bfloat16)
        recipe = Recipe(model, optimizer.adamw(), lambda step: 0.01, 0.0, ('*norm*', '*bias'), 1.0, 1)
        with jax.set_mesh(mesh):
            state = fresh_state(recipe, jax.device_get(jax.jit(model.init)(jax.random.key(0))))
            start = jax.device_get(state)
            step = make_step(recipe)
            losses[matmul] = []
            for i in range(150):
                state, metrics = step(state, chain(i))
                losses[matmul].append(float(metrics['loss']))
            if matmul == 'int8':
                once = []
                for n in (0, 0, 1):
                    again = jax.tree.map(jax.device_put, start._replace(step=np.int32(n)))
                    once.append(np.asarray(step(again, chain(0))[0].optimizer.mu.layers.attention.q))
                assert np.array_equal(once[0], once[1])
                assert not np.array_equal(once[0], once[2])  # other roundings in another step
                assert step_keys(recipe, 0)
            else:
                assert not step_keys(recipe, 0)
    ends = {matmul: np.mean(values[-20:]) for matmul, values in losses.items()}
    assert losses['compute'][0] > 4.5
    assert ends['compute'] < 1.6  # it has learned: the chain itself has log(4) = 1.39
    assert abs(ends['int8'] - ends['compute']) < 0.02
    assert abs(ends['fp8'] - ends['compute']) < 0.02


def test_patterns_choose_products():
    arch = decoder(LLAMA | {'n_layers': 4}, mesh_of(), 'compute', ()).arch

    sizes = dict(mesh_of().shape)

    def choose(exempt, **more):
        where = {'platform': 'tpu', 'device_kind': 'TPU v5e'} | more
        return choose_numerics('int8', exempt, Layer.products_in(arch), '', sizes, **where)

    chosen, line = choose(numerics.EXEMPT)
    assert [set(block.values()) for block in chosen.blocks] == [{'compute'}, {'int8'}, {'int8'}, {'compute'}]
    assert chosen.head == 'compute'
    assert (
        'in 14 of 29 products; compute dtype: head, first.*, last.* (precision.exempt); TPU v5e has hardware for it'
        in line
    )
    chosen, line = choose(('down', '2.q'), platform='cpu', device_kind='a CPU')
    assert chosen.head == 'int8'
    assert [name for name, kind in chosen.blocks[2].items() if kind == 'compute'] == ['q', 'down']
    assert [name for name, kind in chosen.blocks[3].items() if kind == 'compute'] == ['down']
    assert 'SLOW: TPUs have hardware for it; a CPU emulates it' in line
    with pytest.raises(UserError, match=r"'4.q' matches no product\nthere are head, and in each of the layers 0"):
        choose(('4.q',))
    with pytest.raises(UserError, match='exempts every product'):
        choose(('*',))
    assert schema.Precision().exempt == numerics.EXEMPT


@pytest.mark.parametrize(
    ('kind', 'platform', 'device', 'fast'),
    [
        ('int8', 'tpu', 'TPU v5 lite', True), ('fp8', 'tpu', 'TPU v5 lite', False), ('fp8', 'cuda', 'NVIDIA H200',
        True),
        ('fp8', 'cuda', 'NVIDIA H100 80GB HBM3', True), ('fp8', 'cuda', 'NVIDIA A100-SXM4-80GB', False),
        ('int8', 'cuda', 'NVIDIA H200', False), ('fp8', 'cuda', 'NVIDIA GH200 480GB', True),
    ],
)  # fmt: skip
def test_the_report_says_slow_for_a_device_without_hardware(kind, platform, device, fast):
    line = numerics.fast_path(kind, platform, device)
    assert line.startswith('SLOW') != fast
    assert device in line


def test_unsupported_experts_and_stages_are_reported_or_refused():
    mesh = mesh_of()
    arch = decoder(MIXTURE, mesh, 'compute', numerics.EXEMPT).arch
    layers, stages = Layer.products_in(arch), dict(mesh_of(p=2).shape)
    experts = unsupported_experts(arch)
    chosen, line = choose_numerics('int8', ('head',), layers, experts, dict(mesh.shape), 'tpu', 'TPU v5e')
    assert chosen.blocks[0]['expert_up'] == 'compute'
    assert chosen.blocks[0]['shared_up'] == 'int8'
    assert 'expert_up too: products of rows by expert do not support it' in line
    with_capacity = decoder(MIXTURE | {'capacity': 1.5}, mesh, 'compute', numerics.EXEMPT).arch
    assert unsupported_experts(with_capacity) == ''
    four = Layer.products_in(decoder(LLAMA | {'n_layers': 4}, mesh, 'compute', ()).arch)
    with pytest.raises(UserError, match=r"the stages of mesh.p = 2 run one program\n.*exempt='\[head\]'"):
        choose_numerics('fp8', numerics.EXEMPT, four, '', stages, 'cuda', 'NVIDIA H200')
    with pytest.raises(UserError, match=r'int8 does not support pipeline stages .mesh.p = 2'):
        choose_numerics('int8', ('head',), layers, '', stages, 'tpu', 'TPU v5e')
