"""Expected memory: the paper's formula where it applies, exact where bytes are plain, near the compiler's elsewhere."""

import re

import jax
import jax.numpy as jnp
import pytest

from decoders import gpt
from pretrax.cost.memory import expected_memory
from pretrax.cost.step_facts import StepFacts, UpdateCost

GPT = gpt()
N_PARAMS = 1_000_000


def memory_of(arch=GPT, n_params=N_PARAMS, mesh=None, **step):
    return expected_memory(arch, n_params, StepFacts(mesh=mesh or {}, **step))


def test_adamw_in_f32_is_sixteen_bytes_a_parameter():
    memory = memory_of(tokens=1, unrolled=True, update=UpdateCost(8 * N_PARAMS))
    assert memory.phase == 'update'  # of one token nothing is as large as the gradients
    assert memory.weights + memory.moments + memory.gradients == 16 * N_PARAMS


def test_a_gpt_layer_keeps_what_the_paper_says_without_dropout_and_scores():
    """Korthikanti et al. 2022, section 4.1: 34 s b h, of which two dropout masks are s b h each."""
    memory = memory_of(tokens=4096)
    assert memory.activations == GPT.n_layers * (34 - 2) * 4096 * GPT.d_model


def test_more_norms_keep_their_inputs_and_outputs():
    """Two more norms of the stream: 4 M; of queries and keys of 4 heads of 16: 2 M here. In bf16, in each layer."""
    plain, more = (
        memory_of(tokens=4096),
        memory_of(gpt(block_norms='sandwich', qk_norm='head'), tokens=4096),
    )
    assert more.activations - plain.activations == 4 * 2 * 4096 * (4 + 2) * GPT.d_model


def test_recomputing_keeps_the_inputs_of_layers_and_what_is_named():
    none, named = (memory_of(tokens=4096, saved=saved) for saved in ({}, {'q': 'keep', 'up': 'keep'}))
    assert none.activations == 4 * 2 * 4096 * GPT.d_model
    assert named.activations - none.activations == 4 * 2 * 4096 * (GPT.d_model + GPT.feed_forward.d_ff)


def test_accumulated_gradients_are_held_in_addition_to_those_of_a_pass():
    one, four = (memory_of(tokens=4096, mesh={'d': 2}, saved={}, passes=passes) for passes in (1, 4))
    assert four.total - one.total == pytest.approx(4 * N_PARAMS / 2, abs=4)


def test_moments_in_host_memory_are_on_the_device_only_in_the_update():
    moments, large = UpdateCost(8 * N_PARAMS), {'in_host': ('optimizer',)}
    held, offloaded = (memory_of(tokens=2**16, update=moments, **where) for where in ({}, large))
    assert held.phase == offloaded.phase == 'layers'
    assert held.total - offloaded.total == offloaded.host == 8 * N_PARAMS
    few = [memory_of(tokens=1, unrolled=True, update=moments, **where).total for where in ({}, large)]
    assert few[0] == few[1]


def test_offloaded_activations_are_in_host_memory():
    """In bf16: the input of each of 4 layers, M values, and the wide values of the feed-forward, F."""
    none = memory_of(tokens=4096, saved={})
    offloaded = memory_of(tokens=4096, saved={'input': 'offload', 'up': 'offload'})
    assert offloaded.activations == 0
    assert none.total - offloaded.total == 4 * 2 * 4096 * GPT.d_model
    assert offloaded.host == 4 * 2 * 4096 * (GPT.d_model + GPT.feed_forward.d_ff)
    assert '; besides, in host memory: offloaded 10.5 MB, copy of the state' in str(offloaded)


def test_a_checkpoint_copies_the_shards_of_the_state_to_host_memory():
    """AdamW has 12 bytes per parameter. On a mesh each device copies its own part, except for replicas."""
    for mesh, part in (({}, 1), ({'d': 4}, 4), ({'r': 2, 'd': 2}, 2)):
        memory = memory_of(mesh=mesh, tokens=4096, update=UpdateCost(8 * N_PARAMS / part))
        assert memory.snapshot == 12 * N_PARAMS / part
        assert memory.total == sum(memory.parts().values())
        assert 'snapshot' not in memory.parts()


def test_on_a_cpu_the_logits_are_in_f32_too_their_gradient_is_transposed_and_the_state_is_copied():
    moments = UpdateCost(8 * N_PARAMS, copied=8 * N_PARAMS)
    large = gpt(vocab_size=100_000)
    tpu, cpu = (
        memory_of(large, 10_000_000, tokens=4096, unrolled=True, saved={}, platform=platform, update=moments)
        for platform in ('tpu', 'cpu')
    )
    assert tpu.phase == cpu.phase == 'loss'
    table = large.padded_vocab_size * large.d_model
    assert cpu.head - tpu.head == (4 + 2) * 4096 * large.padded_vocab_size
    assert cpu.copies - tpu.copies == 8 * N_PARAMS + 2 * table


def test_probabilities_of_short_sequences_are_kept_in_f32_and_in_the_compute_dtype():
    fused, kept = (memory_of(tokens=4096, unrolled=True, probabilities=n) for n in (0.0, 320.0))
    heads = GPT.n_layers * GPT.attention.n_heads
    assert kept.activations - fused.activations == heads * 4096 * 320 * (4 + 2)


def test_a_loss_in_chunks_holds_the_logits_of_one_chunk_and_the_gradient_of_the_table():
    large = gpt(vocab_size=100_000)
    whole, parts = (memory_of(large, 10_000_000, tokens=4096, unrolled=True, loss_chunks=n) for n in (1, 8))
    assert whole.phase == parts.phase == 'loss'
    saved = 2 * 4096 * 100_000 * 7 / 8 - 4 * 100_000 * GPT.d_model
    assert whole.head - parts.head == pytest.approx(saved, abs=4)


def test_the_phase_is_the_one_that_needs_most_memory():
    """A large vocabulary is most in the loss, a large layer in its backward pass, and few tokens in the update."""
    vocabulary, wide, small = (gpt(n_layers=1, **sizes) for sizes in ({'vocab_size': 100_000}, {'d_ff': 30_000}, {}))
    assert memory_of(vocabulary, 10_000_000, tokens=4096, unrolled=True).phase == 'loss'
    assert memory_of(wide, 10_000_000, tokens=4096, saved={}).phase == 'layers'
    assert memory_of(small, 10_000_000, tokens=1).phase == 'update'


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
    one, many = (memory_of(tokens=4096, mesh=m) for m in ({}, mesh))
    assert one.weights / many.weights == weights
    assert one.activations / many.activations == activations


def test_e_divides_the_experts_alone():
    experts = GPT.n_layers * 8 * 2 * GPT.d_model * GPT.feed_forward.d_ff
    arch = gpt(n_experts=8, experts_per_token=2)
    one, four = (memory_of(arch, N_PARAMS + experts, tokens=512, mesh=mesh) for mesh in ({}, {'e': 4}))
    assert one.weights - four.weights == 4 * (experts - experts // 4)


def test_memory_prints_as_one_line_with_the_largest_part_first():
    line = str(memory_of(tokens=4096))
    assert line.startswith('about ')
    names = [part.split()[0] for part in line.partition(': ')[2].split(', ')]
    assert names[:3] == ['activations', 'layer', 'head']


def test_activations_are_close_to_what_xla_allocates():
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
    arch = gpt(
        n_layers=n_layers, d_model=M, n_heads=0, n_kv_heads=0, d_head=0, d_ff=F, vocab_size=0, activation='swiglu'
    )
    ours = memory_of(arch, 3 * M * F * n_layers, tokens=B, compute='f32')
    xla = compiled.memory_analysis()
    assert xla.output_size_in_bytes == pytest.approx(ours.gradients, rel=0.001)
    assert 0.9 < xla.temp_size_in_bytes / ours.activations < 1.6


def test_the_widest_layer_works_in_the_most_memory():
    """One dense layer of 8192 among layers of experts of 128 decides, and not the mean."""
    mixed = {'n_layers': 4, 'activation': 'swiglu', 'n_experts': 4, 'experts_per_token': 2, 'd_ff': 64}
    narrow, wide = (
        memory_of(gpt(**mixed, dense_layers=(0,), d_ff_dense=n), tokens=4096, saved={}) for n in (128, 8192)
    )
    assert wide.layer - narrow.layer == pytest.approx(2 * 4096 * 3 * (8192 - 128), rel=0.01)  # on a TPU


def test_a_module_of_multi_token_prediction_needs_what_a_layer_and_the_logits_need():
    large = {'vocab_size': 100_000, 'tied': False}
    plain, module, layer = (
        memory_of(gpt(**large, **more), 10_000_000, tokens=4096) for more in ({}, {'mtp_layers': 1}, {'n_layers': 5})
    )
    assert module.activations == layer.activations
    assert module.head - plain.head == 2 * 4096 * gpt(**large).padded_vocab_size
    unrolled = [memory_of(gpt(**large, mtp_layers=n), 10_000_000, tokens=4096, unrolled=True).head for n in (0, 1)]
    assert unrolled[0] == unrolled[1], 'the logits of the last layer are done before those of the module are made'


def test_a_process_on_cpus_copies_an_eighth_of_a_large_state_and_needs_room_to_compile():
    """AdamW: 12 bytes per parameter; a small state is below the 64 MiB that a step may copy."""
    sizes = {'tokens': 128, 'unrolled': True, 'platform': 'cpu'}
    large, small = (memory_of(n_params=n, update=UpdateCost(8 * n), **sizes) for n in (100_000_000, N_PARAMS))
    assert (large.snapshot, small.snapshot) == (150_000_000, 12 * N_PARAMS)
    steps, saves, compiles = (float(n) for n in re.findall(r'([\d.]+) GB', large.process_text(1)))
    assert saves - steps == pytest.approx(0.15, abs=0.02)
    assert steps > large.total / 1e9 + 0.4
    assert compiles == pytest.approx(1.2 + 1.35, abs=0.01)
