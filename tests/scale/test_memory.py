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
    memory = expected_memory(**GPT, tokens=1, mesh={}, unrolled=True)
    assert memory.phase == 'update'  # of one token nothing is as large as the gradients
    assert memory.weights + memory.moments + memory.gradients == 16 * GPT['n_params']
    assert expected_memory(**GPT, tokens=512, mesh={}, moments=1).moments == 4 * GPT['n_params']


def test_a_gpt_layer_keeps_what_the_paper_says_without_dropout_and_scores():
    """Korthikanti et al. 2022, section 4.1: 34 s b h, of which two dropout masks are s b h each."""
    memory = expected_memory(**GPT, tokens=4096, mesh={})
    assert memory.activations == GPT['n_layers'] * (34 - 2) * 4096 * GPT['d_model']


def test_more_norms_keep_their_inputs_and_outputs():
    """Two more norms of the stream: 4 M; of queries and keys of 4 heads of 16: 2 M here. In bf16, in each layer."""
    plain, more = (
        expected_memory(**GPT, tokens=4096, mesh={}),
        expected_memory(**GPT, tokens=4096, mesh={}, n_norms=4, qk_norm=True),
    )
    assert more.activations - plain.activations == 4 * 2 * 4096 * (4 + 2) * GPT['d_model']


def test_recomputing_keeps_the_inputs_of_layers_and_what_is_named():
    none, named = (
        expected_memory(**GPT, tokens=4096, mesh={}, saved=saved) for saved in ({}, {'q': 'keep', 'up': 'keep'})
    )
    assert none.activations == 4 * 2 * 4096 * GPT['d_model']
    assert named.activations - none.activations == 4 * 2 * 4096 * (GPT['d_model'] + GPT['d_ff'])


def test_gradients_that_are_added_up_are_there_beside_those_of_a_pass():
    one, four = (expected_memory(**GPT, tokens=4096, mesh={'d': 2}, saved={}, passes=passes) for passes in (1, 4))
    assert four.total - one.total == pytest.approx(4 * GPT['n_params'] / 2, abs=4)


def test_a_loss_in_chunks_holds_the_logits_of_one_and_the_gradient_of_the_table():
    large = GPT | {'vocab_size': 100_000, 'n_params': 10_000_000}
    whole, parts = (expected_memory(**large, tokens=4096, mesh={}, unrolled=True, loss_chunks=n) for n in (1, 8))
    assert whole.phase == parts.phase == 'loss'
    saved = 2 * 4096 * 100_000 * 7 / 8 - 4 * 100_000 * GPT['d_model']
    assert whole.head - parts.head == pytest.approx(saved, abs=4)


def test_the_phase_is_that_which_takes_most():
    """A large vocabulary is most in the loss, a large layer in its backward pass, and few tokens in the update."""
    large = {'n_params': 10_000_000, 'n_layers': 1}
    assert expected_memory(**GPT | large | {'vocab_size': 100_000}, tokens=4096, mesh={}, unrolled=True).phase == 'loss'
    assert expected_memory(**GPT | large | {'d_ff': 30_000}, tokens=4096, mesh={}, saved={}).phase == 'layers'
    assert expected_memory(**GPT | large, tokens=1, mesh={}).phase == 'update'


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


def test_e_divides_the_experts_alone():
    experts = GPT['n_layers'] * 8 * 2 * GPT['d_model'] * GPT['d_ff']
    options = GPT | {'n_experts': 8, 'experts_per_token': 2, 'n_params': GPT['n_params'] + experts}
    one, four = (expected_memory(**options, tokens=512, mesh=mesh) for mesh in ({}, {'e': 4}))
    assert one.weights - four.weights == 4 * (experts - experts // 4)


def test_it_reads_as_one_line_with_the_largest_part_first():
    line = str(expected_memory(**GPT, tokens=4096, mesh={}))
    assert line.startswith('about ')
    names = [part.split()[0] for part in line.partition(': ')[2].split(', ')]
    assert names[:3] == ['activations', 'layer', 'head']


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
