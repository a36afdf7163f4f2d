"""The choice of a kernel, and what the fused kernels get and compute. Pallas interprets the TPU kernel on the CPU."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from pretrax.errors import UserError
from pretrax.jax_compat import assume_cudnn, cudnn_attention
from pretrax.model.attention import attend
from pretrax.model.attention_kernels import Kernel, choose_kernel, packed_documents, splash_blocks
from pretrax.model.attention_kernels import splash as splash_attention
from pretrax.model.options.attention import AttentionOptions
from pretrax.model.scores import Scores
from pretrax.shardlib import f32, i32, num, psum, save, scan, typed_shard_map, unroll
from pretrax.shardlib.ops import vary, vary_together
from small import mesh_of


@pytest.mark.parametrize(
    ('length', 'window', 'block', 'inside'),
    [(128, 0, 128, 128), (1024, 0, 256, 256), (2560, 0, 512, 512), (4096, 0, 1024, 512), (131072, 128, 256, 256)],
)
def test_splash_has_blocks_that_divide_the_sequence_and_skip_most_of_what_a_mask_hides(length, window, block, inside):
    sizes = splash.BlockSizes(*splash_blocks(length, window))
    assert length % block == 0
    assert (sizes.block_q, sizes.block_kv, sizes.block_q_dkv, sizes.block_kv_dkv, sizes.block_q_dq) == (block,) * 5
    assert (sizes.block_kv_compute, sizes.block_kv_dkv_compute, sizes.block_kv_dq) == (inside,) * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ('kv_heads', 'scores', 'has_sinks'),
    [(4, Scores(8.0, 0.0, 0), False), (2, Scores(8.0, 0.0, 0), True), (2, Scores(5.0, 1.5, 50), False)],
)
def test_splash_equals_blockwise_in_value_and_gradient(monkeypatch, kv_heads, scores, has_sinks):
    interpreted = functools.partial(splash.make_splash_mha_single_device, interpret=True)
    monkeypatch.setattr(splash, 'make_splash_mha_single_device', interpreted)
    random = np.random.default_rng(0)
    q = random.normal(size=(2, 256, 4, 64)).astype(np.float32)
    k, v = random.normal(size=(2, 2, 256, kv_heads, 64)).astype(np.float32)
    weigh = random.normal(size=q.shape).astype(np.float32)
    sinks = random.normal(size=4).astype(np.float32) if has_sinks else None
    segments = np.sort(random.integers(1, 4, (2, 256)), axis=1).astype(np.int32)

    def outcome(name):
        @typed_shard_map
        def run(
            q: f32['B/r/d/e L H/t D'],
            k: f32['B/r/d/e L K/t D'],
            v: f32['B/r/d/e L K/t D'],
            segments: i32['B/r/d/e L'],
            sinks: f32['H/t'] | None,
        ) -> f32['B/r/d/e L H/t D']:
            own = None if sinks is None else vary_together(q, sinks)[1]
            return attend(q, k, v, segments, Kernel(name, 'test', 3), scores, own)

        def loss(q, k, v, sinks):
            out = run(q, k, v, segments, sinks)
            return jnp.sum(out * weigh), out

        argnums = (0, 1, 2, 3) if has_sinks else (0, 1, 2)
        return jax.jit(jax.value_and_grad(loss, argnums=argnums, has_aux=True))(q, k, v, sinks)

    with jax.set_mesh(mesh_of(d=2, t=2)):
        ((_, out), gradients), ((_, plain_out), plain_gradients) = outcome('splash'), outcome('blockwise')
    np.testing.assert_allclose(out, plain_out, rtol=2e-3, atol=2e-3)
    for ours, plain in zip(gradients, plain_gradients, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=5e-3, atol=5e-3)


def test_cudnn_computes_with_the_sums_that_have_the_sinks(monkeypatch):
    """In the place of the kernel: the same mathematics,
    whose backward pass takes the output and the sums from the forward one.
    """
    scores, random = Scores(3.0, 0.0, 0), np.random.default_rng(0)
    q, k, v, d_out = random.normal(size=(4, 2, 12, 4, 8)).astype(np.float32)
    sinks = random.normal(size=4).astype(np.float32)
    visible = np.tril(np.ones((12, 12), bool))

    @jax.custom_vjp
    def plain(q, k, v):
        score = jnp.where(visible, jnp.einsum('blhd,bshd->bhls', q, k) / scores.divisor, -jnp.inf)
        sums = jax.nn.logsumexp(score, axis=-1)
        return jnp.einsum('bhls,bshd->blhd', jnp.exp(score - sums[..., None]), v), sums

    def backward(residuals, d):
        (q, k, v, out, sums), (d_out, _) = residuals, d
        score = jnp.where(visible, jnp.einsum('blhd,bshd->bhls', q, k) / scores.divisor, -jnp.inf)
        p = jnp.exp(score - sums[..., None])
        mean = jnp.einsum('blhd,blhd->bhl', d_out, out)
        d_score = p * (jnp.einsum('blhd,bshd->bhls', d_out, v) - mean[..., None]) / scores.divisor
        return (
            jnp.einsum('bhls,bshd->blhd', d_score, k), jnp.einsum('bhls,blhd->bshd', d_score, q),
            jnp.einsum('bhls,blhd->bshd', p, d_out),
        )  # fmt: skip

    plain.defvjp(lambda q, k, v: ((found := plain(q, k, v)), (q, k, v, *found)), backward)

    def kernel(q, k, v, *, return_residual, **_):
        return plain(q, k, v) if return_residual else plain(q, k, v)[0]

    monkeypatch.setattr(cudnn_attention(), 'dot_product_attention', kernel)

    def outcome(name):
        def run(q, k, v, sinks):
            return attend(q, k, v, jnp.ones((2, 12), jnp.int32), Kernel(name, 'test', 1), scores, sinks)

        out, pullback = jax.vjp(run, q, k, v, sinks)
        return out, run(q, k, v, sinks), *pullback(d_out)

    with jax.set_mesh(mesh_of()):
        for name, ours, expected in zip(
            ('out', 'out without gradient', 'dq', 'dk', 'dv', 'dsinks'),
            outcome('cudnn'),
            outcome('blockwise'),
            strict=True,
        ):
            np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-5, err_msg=name)


def test_cudnn_refuses_a_backward_pass_that_does_not_take_the_output_and_the_sums(monkeypatch):
    """Its gradient would be that of attention without sinks."""

    def kernel(q, k, v, **_):
        score = jnp.einsum('blhd,bshd->bhls', q, k)
        return jnp.einsum('bhls,bshd->blhd', jax.nn.softmax(score), v), jax.nn.logsumexp(score, axis=-1)

    monkeypatch.setattr(cudnn_attention(), 'dot_product_attention', kernel)
    q, sinks, ids = jnp.ones((1, 4, 2, 8)), jnp.ones(2), jnp.ones((1, 4), jnp.int32)
    with jax.set_mesh(mesh_of()), pytest.raises(AssertionError, match='as if there were no sinks'):
        jax.vjp(lambda q: attend(q, q, q, ids, Kernel('cudnn', 'test', 1), Scores(3.0, 0.0, 0), sinks), q)


@pytest.mark.parametrize('loop', [scan, unroll])
@pytest.mark.parametrize(
    ('name', 'forward', 'documents'),
    [
        ('splash', 'splash_mha_fwd', 4),
        ('cudnn', 'dot_product_attention_fwd', 1),
        ('cudnn', 'dot_product_attention_fwd', 4),
    ],
)
def test_the_backward_pass_runs_the_forward_kernel_again_only_if_attention_is_not_kept(
    monkeypatch, name, forward, documents, loop
):
    """The program is traced, not run: each layer, or one in a loop,
    has one call of the kernel more if it recomputes.
    """
    for check in ('check_cudnn_version', 'check_compute_capability', 'is_cuda_compute_capability_equal'):
        monkeypatch.setattr(cudnn_attention(), check, getattr(cudnn_attention(), check))  # put back after the test
    assume_cudnn('9.0')
    n_layers = 2

    def calls(choices):
        def layer(x, w):
            q, k, v = (save(x * w, name) for name in 'qkv')
            return x + attend(q, k, v, segments_of(x), Kernel(name, 'test', documents), Scores(8.0, 0.0, 0)), None

        @typed_shard_map
        def loss(x: num['B/d L H D'], w: num['layers D']) -> f32['']:
            bodies = [layer] if loop is scan else [layer] * n_layers
            return psum('d', jnp.sum(loop(bodies, x, w, choices)[0].astype(F32)))

        with jax.set_mesh(mesh_of(d=2)):
            program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(
                jnp.ones((4, 256, 4, 64), BF16), jnp.ones((n_layers, 64), BF16)
            )
        return sum(forward in kernel for kernel in kernels(program.jaxpr))

    layers = 1 if loop is scan else n_layers
    kept = dict.fromkeys(('q', 'k', 'v', 'attention'), 'keep')
    assert calls(kept) == calls({'attention': 'keep'}) == layers
    assert calls({}) == calls(kept | {'attention': 'recompute'}) == 2 * layers


def segments_of(x):
    return vary(jnp.ones(x.shape[:2], jnp.int32), 'd')


def kernels(jaxpr):
    """The names of a program's kernels: of its primitives, and of what Pallas calls."""
    for equation in jaxpr.eqns:
        yield str(equation.params['name']) if equation.primitive.name == 'pallas_call' else equation.primitive.name
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=is_program):
            if is_program(inner):
                yield from kernels(getattr(inner, 'jaxpr', inner))


def is_program(x):
    return hasattr(x, 'eqns') or hasattr(getattr(x, 'jaxpr', None), 'eqns')


def test_the_example_of_jax_documentation():
    # jax.nn's cuDNN entry: 'if 2 batches has 3 and 2 segments respectively, each segment has size 1,
    # q_offsets = [[0,1,2,-1], [0,1,-1,-1]]'; the second row's last segment is longer here, to fill the row.
    lengths, offsets = packed_documents(np.array([[1, 2, 3], [1, 2, 2]], np.int32), 3)
    np.testing.assert_array_equal(offsets, [[0, 1, 2, -1], [0, 1, -1, -1]])
    np.testing.assert_array_equal(lengths, [[1, 1, 1], [1, 2, -1]])


def test_lengths_cover_the_row_and_offsets_are_their_sums():
    random = np.random.default_rng(0)
    segments = np.cumsum(random.random((16, 64)) < 0.1, axis=1).astype(np.int32)
    segments += 1 - segments[:, :1]
    most = int(segments.max())
    lengths, offsets = map(np.asarray, packed_documents(segments, most))
    for row in range(16):
        count = int(segments[row].max())
        assert [int(n) for n in lengths[row, :count]] == [int((segments[row] == i + 1).sum()) for i in range(count)]
        assert (lengths[row, count:] == -1).all()
        assert [int(n) for n in offsets[row, :count]] == [int(np.argmax(segments[row] == i + 1)) for i in range(count)]
        assert (offsets[row, count:] == -1).all()


BF16, F32 = jnp.bfloat16, jnp.float32


@pytest.mark.parametrize(
    ('wanted', 'platform', 'dtype', 'd_head', 'length', 'documents', 'name', 'reason'),
    [
        ('auto', 'cpu', F32, 64, 1024, None, 'blockwise', 'no fused kernel for cpu'),
        ('auto', 'cuda', BF16, 64, 1024, 1, 'cudnn', 'fused kernel for cuda'),
        ('auto', 'gpu', BF16, 128, 1024, 128, 'cudnn', 'fused kernel for gpu'),
        (
            'auto',
            'cuda',
            F32,
            64,
            1024,
            1,
            'blockwise',
            'SLOW: not cudnn, because it computes in bf16 or f16, not float32',
        ),
        ('auto', 'cuda', BF16, 60, 1024, 1, 'blockwise', 'SLOW: .* multiple of 8 up to 256, not 60'),
        ('auto', 'cuda', BF16, 264, 1024, 1, 'blockwise', 'SLOW: .* multiple of 8 up to 256, not 264'),
        ('auto', 'cuda', BF16, 64, 1024, 129, 'blockwise', 'SLOW: .* at most 128 documents or chunks per row, not 129'),
        ('auto', 'cuda', BF16, 64, 1024, None, 'blockwise', 'SLOW: .* not an unknown number'),
        ('auto', 'tpu', BF16, 128, 1024, None, 'splash', 'fused kernel for tpu'),
        ('auto', 'tpu', BF16, 128, 1000, None, 'blockwise', 'SLOW: not splash, .* not 1000 and 128'),
        ('auto', 'tpu', BF16, 128, 2**18, None, 'splash', 'fused kernel for tpu'),
        ('auto', 'tpu', BF16, 128, 2**20, None, 'blockwise', 'SLOW: not splash, .* scalar memory .* 1048576'),
        ('blockwise', 'cuda', BF16, 64, 1024, 1, 'blockwise', 'as configured'),
        ('cudnn', 'cuda', BF16, 64, 1024, 1, 'cudnn', 'as configured'),
    ],
)
def test_choice_of_kernel(wanted, platform, dtype, d_head, length, documents, name, reason):
    kernel = choose_kernel(wanted, platform, dtype, d_head, length, documents, AttentionOptions())
    assert kernel.name == name
    assert re.search(reason, str(kernel))


def test_splash_reads_the_mask_where_it_is_partial_only(monkeypatch):
    """JAX reads every block of a mask: 36 s for 131,072 tokens, and 64 times as long for 1,048,576."""
    read, of_jax = [], masks.CausalMask.__getitem__
    monkeypatch.setattr(masks.CausalMask, '__getitem__', lambda *mask: read.append(mask[1]) or of_jax(*mask))
    x, segments = jax.ShapeDtypeStruct((1, 8192, 2, 128), BF16), jax.ShapeDtypeStruct((1, 8192), jnp.int32)
    kernel = Kernel('splash', '', 1)
    jax.eval_shape(lambda q, k, v, s: splash_attention(q, k, v, s, kernel, Scores(8.0, 0.0, 0)), x, x, x, segments)
    assert {(rows.start // 1024, columns.start // 1024) for rows, columns in read} == {(i, i) for i in range(8)}


def test_cudnn_does_not_support_a_soft_cap():
    capped = [
        choose_kernel('auto', p, BF16, 128, 1024, 1, AttentionOptions(softcap=50.0)) for p in ('cuda', 'tpu', 'cpu')
    ]
    assert [kernel.name for kernel in capped] == ['blockwise', 'splash', 'blockwise']
    assert 'SLOW: not cudnn, because it does not support a soft cap of the scores, which is 50' in str(capped[0])


@pytest.mark.parametrize(('documents', 'name'), [(1, 'cudnn'), (4, 'blockwise'), (None, 'blockwise')])
def test_cudnn_supports_sinks_with_one_document_per_row(documents, name):
    kernel = choose_kernel('auto', 'cuda', BF16, 64, 1024, documents, AttentionOptions(sinks=True))
    assert kernel.name == name
    assert name == 'cudnn' or 'SLOW: not cudnn, because it supports attention sinks only' in str(kernel)


@pytest.mark.parametrize(
    ('wanted', 'platform', 'dtype', 'reason'),
    [
        ('cudnn', 'cpu', BF16, 'attention.kernel=cudnn cannot run: it needs an NVIDIA GPU, not cpu'),
        ('cudnn', 'cuda', F32, 'attention.kernel=cudnn cannot run: it computes in bf16'),
        ('splash', 'cuda', BF16, 'attention.kernel=splash cannot run: it needs a TPU, not cuda'),
    ],
)
def test_a_kernel_that_cannot_run_is_refused(wanted, platform, dtype, reason):
    with pytest.raises(UserError, match=reason):
        choose_kernel(wanted, platform, dtype, 128, 1024, 1, AttentionOptions())
