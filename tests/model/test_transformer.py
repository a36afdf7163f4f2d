"""The parts of the decoder against other formulations, its initial weights, and that documents stay apart."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from decoders import decoder_options
from pretrax.model import mlp, numerics
from pretrax.model.architecture import resolve
from pretrax.model.axes import TOKENS
from pretrax.model.loss import Batch
from pretrax.model.norm import norm
from pretrax.model.part import weight_types
from pretrax.model.pipeline_schedule import PipelineSchedule
from pretrax.model.plan import choose_reduction
from pretrax.model.rope import rope
from pretrax.model.weights import Weights
from pretrax.shardlib import f32, psum, typed_shard_map
from pretrax.train.step import make_gradients
from pretrax.train.validation import make_evaluate
from small import GPT2, LLAMA, assert_same, mesh_of, random_batch, random_weights, transformer


@pytest.mark.parametrize('base', [10000.0, 500000.0])
def test_rope_multiplies_complex_numbers(base):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 9, 3, 8)).astype(np.float32)
    positions = rng.integers(0, 5000, (2, 9)).astype(np.int32)
    z = x[..., :4].astype(np.complex128) + 1j * x[..., 4:]
    z *= np.exp(1j * positions[:, :, None, None] * base ** (-2 * np.arange(4) / 8))
    expected = np.concatenate([z.real, z.imag], axis=-1)
    np.testing.assert_allclose(rope(x, positions, base), expected, atol=2e-3)  # angles of 5000 carry f32's rounding
    near = positions % 50
    z = (x[..., :4] + 1j * x[..., 4:]) * np.exp(1j * near[:, :, None, None] * base ** (-2 * np.arange(4) / 8))
    np.testing.assert_allclose(rope(x, near, base), np.concatenate([z.real, z.imag], axis=-1), atol=3e-5)


@pytest.mark.parametrize('name', ['gelu', 'gelu_erf', 'relu2'])
def test_activations_without_a_gate_and_their_derivatives(name):
    """The formulas of Hendrycks and Gimpel 2016, section 2, and So et al.
    2021, section 4, and their differences in f64.
    """
    formula = {
        'gelu': lambda x: x / 2 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        'gelu_erf': lambda x: x / 2 * (1 + math.erf(x / math.sqrt(2))),
        'relu2': lambda x: max(x, 0.0) ** 2,
    }[name]
    x = np.linspace(-5, 5, 201, dtype=np.float32)
    y, back = jax.vjp(getattr(mlp, name), x)
    np.testing.assert_allclose(y, [formula(float(v)) for v in x], atol=2e-6)
    slopes = [(formula(float(v) + 1e-6) - formula(float(v) - 1e-6)) / 2e-6 for v in x]
    np.testing.assert_allclose(back(np.ones_like(x))[0], slopes, atol=1e-5)


def test_rope_depends_on_distances_only():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 6, 1, 8)).astype(np.float32)
    here = np.arange(6, dtype=np.int32)[None]
    scores = lambda shift: jnp.einsum('blhd,bshd->ls', rope(q, here + shift, 1e4), rope(k, here + shift, 1e4))  # noqa: E731
    np.testing.assert_allclose(scores(0), scores(40), atol=1e-4)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize('options', [LLAMA, GPT2, LLAMA | {'norm_eps': 0.5}], ids=['rmsnorm', 'layernorm', 'eps'])
def test_norms(options, dtype):
    arch = transformer(options).arch
    rng = np.random.default_rng(0)
    x = jnp.asarray(5 + 3 * rng.standard_normal((2, 4, 32)), dtype)
    scale, shift = rng.standard_normal((2, 32)).astype(np.float32)
    shift = shift if arch.norm.bias else None
    exact = np.asarray(x, np.float64)
    if arch.norm.kind == 'layernorm':
        exact = exact - exact.mean(-1, keepdims=True)
    exact = exact / np.sqrt(np.mean(exact**2, -1, keepdims=True) + arch.norm.eps) * scale
    exact = exact if shift is None else exact + shift
    y = norm(x, scale, shift, arch)
    assert y.dtype == dtype
    tolerance = 1e-5 if dtype == jnp.float32 else 2**-8
    np.testing.assert_allclose(np.asarray(y, np.float64), exact, rtol=tolerance, atol=tolerance)


def initializer(options, mesh):
    """seed -> initial weights on the host."""
    model = transformer(options, mesh)
    with jax.set_mesh(mesh):
        shardings = jax.tree.map(lambda like: like.sharding, model.abstract())
        init = jax.jit(model.init, out_shardings=shardings).lower(jax.random.key(0)).compile()
    return lambda seed: jax.device_get(init(jax.random.key(seed)))


WIDE = {
    'n_layers': 8,
    'd_model': 64,
    'n_heads': 4,
    'd_ff': 256,
    'init_std': 0.05,
    'activation': 'swiglu',
    'tied': False,
}
LATENT = {'kv_rank': 32, 'd_rope': 8, 'd_nope': 16}
ALL_WEIGHTS = [  # between them they have every weight there is
    WIDE | {'family': 'gpt2'},
    WIDE | {'family': 'gemma3', 'd_head': 16},
    WIDE | {'family': 'gemma4', 'd_head': 16, 'attention.global_d_head': 32, 'attention.global_k_as_v': False},
    WIDE | {'block_norms': 'post', 'qk_norm': 'full'},
    WIDE | {'n_experts': 4, 'd_shared': 64, 'shared_gate': True},
    WIDE | {'family': 'gpt-oss', 'n_experts': 4},
    WIDE | {'family': 'phi'},
    WIDE | LATENT | {'family': 'deepseek-v3', 'n_experts': 4, 'experts_per_token': 2},
    WIDE | LATENT | {'q_rank': 32, 'mtp_layers': 4},
    WIDE | {
        'family': 'qwen3-next', 'layer_types': ('delta', 'mamba', 'full', 'full'), 'conv_bias': True, 'n_experts': 0,
        'linear_d_head': 16, 'linear_d_key': 16,
    },
]  # fmt: skip
# Of layers with a state: the interval of a function of the values, over which they are uniform (the code of Mamba 2)
UNIFORM = {
    'linear_dt_bias': (lambda x: np.log(np.log1p(np.exp(x))), math.log(0.001), math.log(0.1)),
    'linear_log_decay': (np.exp, 1, 16),
    **dict.fromkeys(('linear_q_conv', 'linear_k_conv', 'linear_v_conv'), (lambda x: x, -0.5, 0.5)),
}


def test_the_models_of_this_file_have_every_weight():
    found = set()
    for options in ALL_WEIGHTS:
        with jax.set_mesh(mesh_of()):
            paths = jax.tree_util.tree_leaves_with_path(transformer(options).abstract())
        found |= {path[-1].name for path, _ in paths}
    of_distillation = {'hidden_projection'}  # distill/test_hidden_states.py
    assert found == weight_types(Weights).keys() - of_distillation


@pytest.mark.parametrize('options', ALL_WEIGHTS)
def test_initial_weights(options):
    w = initializer(options, mesh_of())(0)
    scale = 0 if options.get('family') in ('gemma3', 'qwen3-next') else 1  # 1 is kept as its distance from the offset
    for path, x in jax.tree_util.tree_leaves_with_path(w):
        name = path[-1].name
        if name in UNIFORM:
            of, low, high = UNIFORM[name]
            values = (of(x) - low) / (high - low)
            assert -1e-3 < values.min() < 0.15, name
            assert 0.85 < values.max() < 1 + 1e-3, name
            assert values.mean() == pytest.approx(0.5, abs=0.1), name
        elif name.endswith('bias'):
            assert not x.any(), name
        elif 'norm' in name or name in ('linear_skip', 'layer_scale'):
            assert np.all(x == (1 if name.startswith('linear_') else scale)), name
        else:  # normal; smaller by sqrt(2 * 8 layers) where it feeds the residual stream
            std = 0.05 / 4 if name in ('o', 'o_global', 'linear_o') or name.endswith('down') else 0.05
            few = name == 'sinks'  # 8 layers of 4 heads
            assert x.std() == pytest.approx(std, rel=0.3 if few else 0.05), name
            assert abs(x.mean()) < (0.5 if few else 0.05) * std, name
    attention = w.layers.attention
    latent = attention.latent
    first = (attention.q, attention.k, attention.v, attention.q[1]) if latent is None else (latent.kv_a, latent.kv_b)
    modules = (w.multi_token.layer.attention.o, w.multi_token.from_hidden) if w.multi_token.norm is not None else ()
    everything = [x.ravel()[:8] for x in (w.embed, *first, attention.o, *modules)]
    assert len({x.tobytes() for x in everything}) == len(everything)  # no two weights begin alike


@pytest.mark.parametrize('init', ['normal', 'truncated', 'xavier'])
def test_initial_weights_by_choice(init):
    """Standard deviations and largest values, from the definitions of the distributions."""
    w = initializer(WIDE | {'n_experts': 4, 'd_shared': 64, 'shared_gate': True, 'init': init}, mesh_of())(0)
    inputs_and_outputs = {  # WIDE: M 64, 4 heads of 16, F 256
        'q': (64, 64), 'k': (64, 64), 'v': (64, 64), 'o': (64, 64), 'expert_gate': (64, 256), 'expert_up': (64, 256),
        'expert_down': (256, 64), 'shared_gate': (64, 64), 'shared_up': (64, 64), 'shared_down': (64, 64),
    }  # fmt: skip
    for path, x in jax.tree_util.tree_leaves_with_path(w):
        name = path[-1].name
        if 'norm' in name:
            continue
        std, most = 0.05, np.inf
        if init == 'truncated':  # the variance of a standard normal within 3 is 1 - 6 phi(3) / (2 Phi(3) - 1)
            std, most = 0.05 * math.sqrt(1 - 6 * 0.004431848 / 0.997300204), 0.15
        elif init == 'xavier' and name in inputs_and_outputs:
            most = math.sqrt(6 / sum(inputs_and_outputs[name]))
            std = most / math.sqrt(3)
        assert x.std() == pytest.approx(std, rel=0.05 if x.size > 4000 else 0.12), name
        assert np.abs(x).max() <= most * (1 + 1e-6), name
        if most < np.inf and x.size > 4000:
            assert np.abs(x).max() > 0.9 * most, name


def test_families_draw_weights_as_published():
    chosen = {family: resolve(decoder_options(family=family, n_layers=2, d_model=32, n_heads=4), 64, 16).init.kind
              for family in ('gpt2', 'llama', 'olmo2')}  # fmt: skip
    assert chosen == {'gpt2': 'scaled', 'llama': 'scaled', 'olmo2': 'normal'}


@pytest.mark.parametrize('init', ['scaled', 'truncated', 'xavier'])
def test_initial_weights_are_the_same_on_any_mesh(init):
    model = LLAMA | {'init': init}
    on_one, on_eight = initializer(model, mesh_of()), initializer(model, mesh_of(2, 2, 2))
    one, many, other = on_one(0), on_eight(0), on_one(1)
    same = jax.tree.map(np.array_equal, one, many)
    assert all(jax.tree.leaves(same)), same
    assert not np.array_equal(one.embed, other.embed)


@pytest.mark.parametrize('options', [LLAMA, GPT2], ids=['llama', 'gpt2'])
def test_documents_do_not_see_each_other(options):
    """Changing the tokens of one document changes no bit of the loss and gradients of the others."""
    model, batch = transformer(options), random_batch(2)
    weights = random_weights(model)
    other = batch.segments != 2
    assert np.any(other & (batch.segments > 2))  # a later document is looked at too
    batch = dataclasses.replace(batch, mask=batch.mask * other)
    changed = dataclasses.replace(batch, tokens=np.where(other, batch.tokens, 7))
    one_document = np.ones_like(batch.segments)

    @typed_shard_map
    def loss(weights: Weights, batch: Batch) -> f32['']:
        return psum(TOKENS, model.loss(weights, batch)['nll'][0])

    with jax.set_mesh(mesh_of()):
        value_and_grad = jax.jit(jax.value_and_grad(loss))
        before, after = value_and_grad(weights, batch), value_and_grad(weights, changed)
        # The same tokens as one document: now it matters what they are.
        joined = [value_and_grad(weights, dataclasses.replace(x, segments=one_document)) for x in (batch, changed)]
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, jax.device_get(before), jax.device_get(after))))
    assert joined[0][0] != joined[1][0]


def test_the_report_has_every_choice_of_the_plan():
    model = transformer(LLAMA | {'save': {'q': 'keep', 'k': 'recompute'}, 'layers': 'scan'})
    assert model.choices['layers'] == 'scan (as configured)'
    assert model.choices['activations'].startswith('kept: q; the rest is recomputed (model.save)')
    assert transformer(LLAMA).choices['attention'] == 'blockwise (no fused kernel for cpu)'
    assert transformer(LLAMA, mesh_of(1, 2, 1)).choices['layers'].startswith('scan')


@pytest.mark.slow
def test_recomputed_activations_take_no_memory():
    """The fewer activations are kept for the backward pass, the less memory the compiled gradient needs."""

    def memory(save):
        model = transformer(LLAMA | {'n_layers': 4, 'layers': 'scan', 'save': save}, length=64)
        weights = random_weights(model)
        with jax.set_mesh(mesh_of()):
            gradients = jax.jit(make_gradients(model, 1)).lower(weights, random_batch(8, length=64)).compile()
        return gradients.memory_analysis().temp_size_in_bytes

    everything, some, nothing = memory('all'), memory({'q': 'keep', 'up': 'keep'}), memory('none')
    kept = 4 * 8 * 64 * (32 + 48) * 4  # layers, rows, length, widths of q and up, bytes
    assert some - nothing == pytest.approx(kept, rel=0.2)
    assert everything > some + kept


EVERY_CHOICE = {
    'family': 'gemma2', 'n_layers': 3, 'd_model': 32, 'n_heads': 4, 'n_kv_heads': 2, 'd_head': 8, 'd_ff': 48,
    'window': 5, 'global_every': 2, 'nope_every': 2, 'rope_base': 500.0, 'local_rope_base': 50.0, 'qkv_bias': True,
    'rope_scaling': {'kind': 'llama3', 'factor': 4.0, 'original_length': 16}, 'attention_softcap': 2.0,
    'final_softcap': 3.0, 'query_pre_attn_scalar': 5.0, 'tied': False,
}  # fmt: skip


@pytest.mark.parametrize(
    ('choices', 'mesh', 'layers'),
    [
        (EVERY_CHOICE | {'qk_norm': 'head'}, (2, 2, 2), 'scan'),
        (EVERY_CHOICE | {'qk_norm': 'full', 'block_norms': 'post', 'activation': 'swiglu'}, (1, 4, 2), 'scan'),
        (EVERY_CHOICE | {'qk_norm': 'full'}, (1, 1, 1), 'scan'),  # three layers of two kinds: one is left over
    ],
)
@pytest.mark.slow
def test_every_choice_is_the_same_on_any_mesh_and_in_a_loop(choices, mesh, layers):
    """Loss and gradients of unrolled layers on one device."""

    def outcome(model, mesh):
        @typed_shard_map
        def loss(weights: Weights, batch: Batch) -> f32['']:
            total, count = model.loss(weights, batch)['nll']
            return psum(TOKENS, total) / psum(TOKENS, count)

        with jax.set_mesh(mesh):
            weights = random_weights(model)
            placed = jax.tree.map(lambda w, like: jax.device_put(w, like.sharding), weights, model.abstract())
            return jax.device_get(jax.jit(jax.value_and_grad(loss))(placed, random_batch(8)))

    expected = outcome(transformer(choices | {'layers': 'unroll'}), mesh_of())
    actual = outcome(transformer(choices | {'layers': layers}, mesh_of(*mesh)), mesh_of(*mesh))
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-6)
    length = np.sqrt(sum(np.sum(g**2) for g in jax.tree.leaves(expected[1])))
    assert_same(actual[1], expected[1], rtol=2e-5, floor=1e-6 * length)


@pytest.mark.parametrize(
    ('platform', 'kind', 'slices', 'by_layer'),
    [
        ('tpu', 'TPU v5', 2, True), ('tpu', 'TPU v5', 1, False), ('tpu', 'TPU v5 lite', 2, False),
        ('gpu', 'NVIDIA H100 80GB HBM3', 2, True), ('gpu', 'NVIDIA H100 80GB HBM3', 1, True), ('cpu', 'cpu', 2, True),
    ],
)  # fmt: skip
def test_gradients_are_reduced_layer_by_layer_where_the_backward_pass_hides_it(platform, kind, slices, by_layer):
    assert choose_reduction(platform, kind, slices, None)[0] is by_layer
    assert choose_reduction(platform, kind, slices, PipelineSchedule(2, 1, 4))[0] is False


def test_a_plan_without_number_formats_for_the_layers_is_an_error():
    model = transformer(LLAMA)
    model.plan = dataclasses.replace(model.plan, numerics=numerics.UNIFORM)
    with jax.set_mesh(mesh_of()), pytest.raises(AssertionError, match='number formats for fewer layers'):
        jax.eval_shape(make_evaluate(model), model.abstract(), random_batch(2))
