"""Predicted times against sums done by hand, and against what was published."""

import dataclasses
import math

import pytest

from decoders import gpt
from pretrax.cost.devices import Reach, lookup
from pretrax.cost.roofline import predict
from pretrax.cost.step_facts import EightBits, StepFacts, UpdateCost
from pretrax.cost.topology import parse_topology

REACH = Reach(0.8, 0.5, 0.9)  # without latency, so that a sum by hand is short
H100 = lookup('NVIDIA H100 80GB HBM3')
# 10 layers of 12 M^2 parameters
ARCH = gpt(n_layers=10, d_model=4096, n_heads=32, n_kv_heads=32, d_head=128, d_ff=16384, vocab_size=0)
N_PARAMS = 10 * 12 * 4096**2


def predicted(tokens, passes=1, mesh=None, arch=ARCH, length=0, n_params=N_PARAMS, **step):
    """The prediction for a batch of `tokens` on H100, eight in a node; of length 0, attention takes no time."""
    n = math.prod((mesh or {}).values())
    facts = StepFacts(mesh or {}, tokens // passes, passes=passes, **step)
    return predict(arch, n_params, length, facts, reaching(f'h100x{min(n, 8)}', max(1, n // 8)))


def reaching(topology, slices=1, **reach):
    """Hardware that reaches `REACH`, but for some constants."""
    return dataclasses.replace(parse_topology(topology, slices), reach=dataclasses.replace(REACH, **reach))


def phase(prediction, name):
    return next(phase for phase in prediction.phases if phase.name.startswith(name))


def test_a_teacher_takes_two_flops_per_parameter_and_token_and_counts_in_mfu():
    """It has half the layers, in bf16; over d its weights are gathered once, and not scattered."""
    tokens, half = 2**17, ARCH.replace({'n_layers': 5})
    alone, taught = (predicted(tokens, mesh={'d': 4}, teacher=teacher) for teacher in (None, half))
    flops = 2 * 5 * 12 * 4096**2 * tokens / 4
    norms = (phase(predicted(tokens, mesh={'d': 4}, arch=half), 'norms').seconds) / 3
    assert phase(taught, 'teacher').seconds == pytest.approx(flops / (989.4e12 * REACH.products) + norms)
    of_student = phase(alone, 'weights and gradients over d').seconds  # gathers twice in bf16, sums in f32
    assert phase(taught, 'weights of the teacher').seconds == pytest.approx(of_student / 8, rel=0.01)
    used = (6 + 2 / 2) * N_PARAMS * tokens
    assert taught.mfu == pytest.approx(used / (989.4e12 * 4 * taught.seconds))


def test_products_take_six_flops_per_parameter_and_token_and_eight_if_computed_again():
    """The last product of a layer, a third of the parameters here, is not needed again."""
    tokens = 2**17
    plain, again = (predicted(tokens, saved=saved) for saved in (None, {}))
    seconds = 6 * 10 * 12 * 4096**2 * tokens / (989.4e12 * REACH.products)
    assert phase(plain, 'products').seconds == pytest.approx(seconds)
    assert phase(again, 'products').seconds == pytest.approx(seconds * (6 + 2 * 2 / 3) / 6)
    assert plain.mfu == pytest.approx(6 * N_PARAMS * tokens / (989.4e12 * plain.seconds))


def test_products_in_eight_bits_take_the_time_of_their_peak_and_of_rounding():
    """Half of the products in fp8, at 1,978.9 TFLOP/s; A100 has no units for it."""
    tokens = 2**17
    eight = EightBits('fp8', N_PARAMS / 2, 1000, 0)
    seconds = 6 * N_PARAMS / 2 * tokens * (1 / 989.4e12 + 1 / 1978.9e12) / REACH.products
    some = predicted(tokens, eight_bits=eight)
    assert phase(some, 'products').seconds == pytest.approx(seconds)
    rounded = (2 + 2 + 1) * 1000 * tokens + 2 * (4 + 4 + 1) * N_PARAMS / 2
    assert phase(some, 'rounding').seconds == pytest.approx(rounded / (3350e9 * REACH.memory))
    a100 = lookup('NVIDIA A100-SXM4-80GB')
    assert a100 is not None
    assert a100.peak('fp8') == a100.peak('nvfp4') == a100.peak('bf16')
    blackwell = {'NVIDIA B200': (4.5e15, 9e15), 'NVIDIA GB200': (5e15, 10e15), 'NVIDIA B300 SXM6 AC': (4.5e15, 13.5e15)}
    for name, peaks in blackwell.items():
        device = lookup(name)
        assert device is not None
        assert (device.peak('mxfp8'), device.peak('nvfp4')) == peaks


def test_offloading_takes_the_time_of_the_host_link_there_and_back():
    """PCIe 5.0 with 16 lanes: 64 GB/s in each direction."""
    update, tokens = UpdateCost(8 * N_PARAMS / 2), 2**17
    state = phase(predicted(tokens, mesh={'d': 2}, update=update, in_host=('optimizer',)), 'state')
    assert state.seconds == state.exposed == pytest.approx(2 * 4 * N_PARAMS / 64e9)
    both = phase(predicted(tokens, mesh={'d': 2}, in_host=('optimizer', 'weights'), update=update), 'state')
    assert both.seconds == pytest.approx(2 * (4 + 2) * N_PARAMS / 64e9)
    few, many = (
        phase(predicted(tokens, saved={'input': 'offload', **more}), 'activations in host')
        for more in ({}, {'up': 'offload', 'q': 'offload', 'k': 'offload', 'v': 'offload'})
    )
    assert few.seconds == pytest.approx(2 * 10 * 2 * tokens * 4096 / 64e9)
    assert (few.exposed, many.seconds) == (0, pytest.approx(few.seconds * (1 + 4 + 3)))


def test_a_loss_in_chunks_computes_the_unembedding_once_more():
    tokens = 2**16
    arch = ARCH.replace({'vocab_size': 32_000, 'padded_vocab_size': 32_000})
    whole, parts = (predicted(tokens, arch=arch, loss_chunks=chunks) for chunks in (1, 8))
    product = 2 * arch.vocab_size * arch.d_model * tokens / (H100.peak('bf16') * REACH.products)
    logits = 2 * arch.vocab_size * tokens / (H100.bandwidth * REACH.memory)
    assert phase(parts, 'head').seconds - phase(whole, 'head').seconds == pytest.approx(product + logits)


def test_weights_over_d_are_mostly_hidden_until_they_take_longer_than_the_layers():
    """Two gathers of 4 GB of bf16 weights and a sum of 8 GB of f32 gradients, 7/8 of them from others, at 450 GB/s."""
    expected = (2 * 2 + 4) * N_PARAMS * 7 / 8 / 450e9
    many, few = (predicted(tokens, mesh={'d': 8}) for tokens in (2**20, 2**12))
    for prediction in (many, few):
        assert phase(prediction, 'weights').seconds == pytest.approx(expected)
        assert prediction.communication == pytest.approx(expected)
    assert 0 < many.exposed < 0.1 * expected
    assert few.exposed == pytest.approx(expected - sum(phase(few, name).seconds for name in ('products', 'norms')))
    assert few.bound == 'd'


def test_tables_are_gathered_once_per_pass_and_the_first_gather_waits():
    arch = ARCH.replace({'vocab_size': 128_000, 'padded_vocab_size': 128_000, 'embedding.tied': False})
    entries = 2 * 128_000 * 4096
    prediction = predicted(2**20, mesh={'d': 8}, arch=arch, n_params=N_PARAMS + entries)
    without = predicted(2**20, mesh={'d': 8})
    assert prediction.communication - without.communication == pytest.approx((2 + 4) * entries * 7 / 8 / 450e9)
    assert prediction.exposed - without.exposed > 2 * entries / 2 * 7 / 8 / 450e9


def test_replicas_sum_gradients_once_over_the_slow_network():
    one = predicted(2**20, 4, {'r': 2, 'd': 8})
    assert phase(one, 'gradients over r').seconds == pytest.approx(2 * 4 * N_PARAMS / 8 / 2 / 50e9)
    narrow = predicted(2**20, 4, {'r': 2, 'd': 8}, reduction='bf16')
    assert phase(narrow, 'gradients over r').seconds == phase(one, 'gradients over r').seconds / 2
    assert phase(narrow, 'weights and gradients over d') == phase(one, 'weights and gradients over d')
    both = predicted(2**20, 4, {'r': 2, 'd': 8}, reduction='bf16_r_d')
    assert phase(both, 'gradients over r') == phase(narrow, 'gradients over r')
    over_d = [phase(one, 'weights and gradients over d').seconds for one in (one, both)]
    assert over_d[1] / over_d[0] == pytest.approx((2 * 2 + 2) / (2 * 2 + 4))  # gathered twice in bf16, scattered once


def test_every_axis_that_replicates_weights_sums_their_gradients():
    for axis in 'ce':
        prediction = predicted(2**20, mesh={axis: 2})
        assert phase(prediction, f'gradients over {axis}').seconds == pytest.approx(2 * 4 * N_PARAMS / 2 / 450e9)


def test_sums_of_gradients_wait_on_tpus_that_do_not_hide_them():
    """v4 all-reduces them, which sends them twice; v5p scatters them on its SparseCores while it computes."""
    v4, v5p = (
        predict(ARCH, N_PARAMS, 0, StepFacts({'d': 64}, 2**20), topology)
        for topology in map(reaching, ('v4:4x4x4', 'v5p:4x4x4'))
    )
    sums = 2 * 4 * N_PARAMS * 63 / 64 / (3 * 2 * 4.5e10)
    assert v4.exposed == pytest.approx(sums, rel=0.05)
    assert v5p.exposed < 0.15 * v5p.communication


def test_the_bubble_is_p_minus_one_over_the_passes():
    prediction = predicted(2**16, mesh={'p': 4}, micro_batches=12)  # 12 times 2**16 tokens
    busy = prediction.seconds - prediction.exposed - phase(prediction, 'pipeline').seconds
    assert phase(prediction, 'pipeline').seconds == pytest.approx(busy * 3 / 12)


def test_attention_counts_two_products_forward_and_five_backward():
    some = predicted(2**17, length=2048)
    flops = 2 * 2 * 1024 * 4096 * 2**17 * 10  # scores and values, forward, over all layers
    assert phase(some, 'attention').seconds == pytest.approx(3.5 * flops / (989.4e12 * REACH.attention))


def test_a_module_of_multi_token_prediction_has_attention_norms_and_logits_of_its_own():
    one, two = (gpt(n_layers=10, d_model=4096, vocab_size=50_000, mtp_layers=n) for n in (1, 2))
    first, second, plain = (
        predicted(2**17, length=2048, arch=arch)
        for arch in (one, two, gpt(n_layers=10, d_model=4096, vocab_size=50_000))
    )
    for name in 'attention', 'norms':
        layer = phase(plain, name).seconds / 10
        assert phase(first, name).seconds == pytest.approx(11 * layer)
        assert phase(second, name).seconds == pytest.approx(12 * layer)
    logits = 4 * 2 * 50_000 * 2**17 / (3.35e12 * REACH.memory)  # written and read, forward and backward
    assert phase(first, 'head').seconds - phase(plain, 'head').seconds == pytest.approx(logits)


def test_the_logits_for_qk_clip_are_a_product_of_all_queries_and_keys_which_gpus_write():
    """32 sequences of 4096 tokens, 10 layers of 32 heads, 128 wide; two devices share the sequences."""
    pairs = 32 * 10 * 32 * 4096**2 / 2
    on_gpus = phase(predicted(2**17, length=4096, mesh={'d': 2}, clips_logits=True), 'logits')
    assert on_gpus.seconds == on_gpus.exposed == pytest.approx(2 * 4 * pairs / (3350e9 * REACH.memory))
    facts = StepFacts({'d': 2}, 2**17, clips_logits=True)
    on_tpus = phase(predict(ARCH, N_PARAMS, 4096, facts, reaching('v5p:2x1x1')), 'logits')
    assert on_tpus.seconds == pytest.approx(2 * 128 * pairs / (459e12 * REACH.products))


def test_activations_over_t_are_ten_arrays_per_layer_and_eleven_if_recomputed():
    """Forward two gathers and two scatters, backward the same and two gathers; the ends four.
    2 bytes, 7/8 at 450 GB/s.
    """
    tokens = 2**17
    for saved, arrays in ((None, 10 * 10 + 4), ({}, 11 * 10 + 4)):
        seconds = phase(predicted(tokens, mesh={'t': 8}, saved=saved), 'activations').seconds
        assert seconds == pytest.approx(arrays * 2 * tokens * 4096 * 7 / 8 / 450e9)


def test_a_stage_communicates_in_turns_of_the_bubble_too():
    """12 passes of 4 stages take 15 turns."""
    plain, staged = (
        phase(predicted(2**16, mesh={'t': 2, 'p': p}, micro_batches=12), 'activations over t').seconds for p in (1, 4)
    )
    hidden = 2 * 12 * 2**16 * 4096
    assert plain == pytest.approx((10 * 10 + 4) * hidden / 2 / 450e9)
    assert staged == pytest.approx((15 / 12 * 10 * 10 / 4 + 4) * hidden / 2 / 450e9)


def test_attention_runs_forward_again_unless_its_result_is_kept():
    plain, kept, dots = (
        phase(predicted(2**17, length=2048, saved=saved), 'attention').seconds
        for saved in (None, {'q': 'keep', 'attention': 'keep'}, {'q': 'keep', 'up': 'keep'})
    )
    assert kept == plain
    assert dots == pytest.approx(plain * 4.5 / 3.5)


def seconds(topology, mesh, length=2048, slices=1, step=None, **reach):
    facts = StepFacts(mesh, 2**17, **(step or {}))
    return predict(ARCH, N_PARAMS, length, facts, reaching(topology, slices, **reach)).seconds


@pytest.mark.parametrize('field', [field.name for field in dataclasses.fields(Reach)])
@pytest.mark.parametrize('topology', ['h100x8', 'v5e:4x4'])
def test_every_fitted_constant_changes_the_step(topology, field):
    """Shares of a peak make it faster, and the others slower."""
    mesh = {'r': 2, 'd': parse_topology(topology).n_devices}
    low, high = (seconds(topology, mesh, slices=2, **{field: value}) for value in (0.1, 0.2))
    assert high < low if field in ('products', 'attention', 'memory', 'links', 'network') else high > low


def test_launches_take_time_in_each_layer_and_pass_and_more_if_it_runs_forward_again():
    """10 layers; a forward pass is a third of the passes."""
    for saved, passes in ((None, 4), ({}, 4 * 4 / 3)):
        facts = StepFacts({}, 2**15, passes=4, saved=saved)
        launches = phase(predict(ARCH, N_PARAMS, 0, facts, reaching('h100', launch=1e-3)), 'launches')
        assert launches.seconds == launches.exposed == pytest.approx(10 * passes * 1e-3, rel=0.05)


def test_a_small_model_is_further_from_the_roofline_than_a_large_one():
    tiny = gpt(n_layers=10, d_model=512, n_heads=4, n_kv_heads=4, d_head=128, d_ff=2048, vocab_size=0)
    slower = [
        predict(arch, n, 0, StepFacts({}, 2**13), reaching('h100', launch=1e-4)).seconds
        / predict(arch, n, 0, StepFacts({}, 2**13), reaching('h100')).seconds
        for arch, n in ((tiny, 10 * 12 * 512**2), (ARCH, N_PARAMS))
    ]
    assert slower[0] > 1.2 > 1.01 > slower[1] > 1


def test_hidden_communication_slows_the_work_that_hides_it():
    plain, slowed = (
        predict(ARCH, N_PARAMS, 0, StepFacts({'d': 8}, 2**20), reaching('h100x8', beside=b)) for b in (0, 1)
    )
    assert slowed.seconds - plain.seconds == pytest.approx(plain.communication - plain.exposed)
    assert (slowed.communication, slowed.exposed) == (plain.communication, plain.exposed)


def test_products_in_f32_run_at_the_rate_of_tf32_on_gpus_and_of_bf16_on_tpus_with_twice_the_bytes():
    """NVIDIA's datasheet: 494.7 TFLOP/s in TF32, 989.4 in bf16. JAX multiplies f32 on TPUs in one bf16 pass."""
    for topology, times in (('h100x8', 2), ('v5p:2x2x2', 1)):
        half, full = (
            predict(ARCH, N_PARAMS, 0, StepFacts({'d': 8}, 2**17, compute=compute), reaching(topology))
            for compute in ('bf16', 'f32')
        )
        assert phase(full, 'products').seconds == pytest.approx(times * phase(half, 'products').seconds)
        assert phase(full, 'norms').seconds == pytest.approx(2 * phase(half, 'norms').seconds)
        grown = phase(full, 'weights').seconds - phase(half, 'weights').seconds
        rate = 450e9 if times == 2 else 3 * 90e9  # NVLink; three dimensions of an open grid
        assert grown == pytest.approx(2 * 2 * N_PARAMS * 7 / 8 / rate)  # two gathers; sums were in f32 before
