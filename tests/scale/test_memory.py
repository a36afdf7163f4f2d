"""Expected memory: the paper's formula where it applies, exact where bytes are plain, near the compiler's elsewhere."""

import jax
import jax.numpy as jnp
import pytest

from pretrax.scale.memory import expected_memory

GPT = {
    'n_params': 1_000_000,
    'n_layers': 4,
    'd_model': 64,
    'n_heads': 4,
    'n_kv_heads': 4,
    'd_head': 16,
    'd_ff': 256,
    'vocab_size': 1000,
    'gated': False,
}


def test_adamw_in_f32_is_sixteen_bytes_a_parameter():
    memory = expected_memory(**GPT, tokens=512, mesh={})
    assert memory.weights + memory.moments + memory.gradients == 16 * GPT['n_params']
    assert expected_memory(**GPT, tokens=512, mesh={}, moments=1).moments == 4 * GPT['n_params']


def test_a_gpt_layer_keeps_what_the_paper_says_without_dropout_and_scores():
    """Korthikanti et al. 2022, section 4.1: 34 s b h, of which two dropout masks are s b h each."""
    memory = expected_memory(**GPT, tokens=512, mesh={})
    assert memory.activations == GPT['n_layers'] * (34 - 2) * 512 * GPT['d_model']


def test_more_norms_keep_their_inputs_and_outputs():
    """Two more norms of the stream: 4 M; of queries and keys of 4 heads of 16: 2 M here. In bf16, in each layer."""
    plain, more = (
        expected_memory(**GPT, tokens=512, mesh={}),
        expected_memory(**GPT, tokens=512, mesh={}, n_norms=4, qk_norm=True),
    )
    assert more.activations - plain.activations == 4 * 2 * 512 * (4 + 2) * GPT['d_model']


def test_recomputing_keeps_the_inputs_of_layers_and_one_layer_in_full():
    memory = expected_memory(**GPT, tokens=512, mesh={}, recompute=True)
    assert memory.activations == (4 * 2 + 32) * 512 * GPT['d_model']


@pytest.mark.parametrize(
    ('mesh', 'weights', 'activations'),
    [
        ({'d': 4}, 4, 4),
        ({'t': 4}, 4, 4),
        ({'r': 4}, 1, 4),
        ({'r': 2, 'd': 2, 't': 2}, 4, 8),
        ({'c': 2}, 1, 2),
        ({'e': 2}, 1, 2),
    ],
)
def test_each_axis_divides_what_it_shards(mesh, weights, activations):
    one, many = (expected_memory(**GPT, tokens=4096, mesh=m) for m in ({}, mesh))
    assert one.weights / many.weights == weights
    assert one.moments / many.moments == weights
    assert one.activations / many.activations == activations
    assert one.logits / many.logits == activations


def test_e_divides_the_experts_alone():
    experts = GPT['n_layers'] * 8 * 2 * GPT['d_model'] * GPT['d_ff']
    options = GPT | {'n_experts': 8, 'experts_per_token': 2, 'n_params': GPT['n_params'] + experts}
    one, four = (expected_memory(**options, tokens=512, mesh=mesh) for mesh in ({}, {'e': 4}))
    assert one.weights - four.weights == 4 * (experts - experts // 4)


def test_it_reads_as_one_line_with_the_largest_part_first():
    assert str(expected_memory(**GPT, tokens=512, mesh={})) == (
        'about 24.3 MB a device: moments 8 MB, activations 4.19 MB, weights 4 MB, gradients 4 MB, gathered 2.1 MB, '
        'logits 2.05 MB'
    )


def test_activations_are_near_what_xla_allocates():
    """A stack of gated feed-forward blocks in plain jax.numpy: no part of the estimate is off by a multiple."""
    B, M, F, n_layers = 2048, 256, 1024, 8

    def loss(weights, x):
        for gate, up, down in weights:
            y = x / jnp.sqrt((x * x).mean(-1, keepdims=True))
            x = x + (jax.nn.silu(y @ gate) * (y @ up)) @ down
        return (x * x).mean()

    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    weights = [(array(M, F), array(M, F), array(F, M)) for _ in range(n_layers)]
    compiled = jax.jit(jax.grad(loss)).lower(weights, array(B, M)).compile()
    ours = expected_memory(
        n_params=3 * M * F * n_layers,
        n_layers=n_layers,
        d_model=M,
        n_heads=0,
        n_kv_heads=0,
        d_head=0,
        d_ff=F,
        vocab_size=0,
        gated=True,
        tokens=B,
        mesh={},
        compute='f32',
    )
    xla = compiled.memory_analysis()
    assert xla.output_size_in_bytes == pytest.approx(ours.gradients, rel=0.001)
    assert 0.9 < xla.temp_size_in_bytes / ours.activations < 1.6
