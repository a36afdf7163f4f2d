"""Predicted times against sums done by hand, and against what was published."""

import dataclasses

import pytest

from pretrax.scale.devices import lookup
from pretrax.scale.roofline import REACH_GPU, Sizes, predict

H100 = lookup('NVIDIA H100 80GB HBM3')
# 10 layers of 12 M^2 parameters, no attention to speak of
SIZES = Sizes(10, 4096, 32, 32, 128, 16384, 0, 10 * 12 * 4096**2, 10 * 12 * 4096**2, keys=0)


def phase(prediction, name):
    return next(phase for phase in prediction.phases if phase.name.startswith(name))


def test_products_take_six_flops_a_parameter_and_token_and_eight_with_recomputation():
    tokens = 2**17
    plain, again = (predict(SIZES, H100, {}, tokens, 1, recompute) for recompute in (False, True))
    seconds = 6 * 10 * 12 * 4096**2 * tokens / (989.4e12 * REACH_GPU.products)
    assert phase(plain, 'products').seconds == pytest.approx(seconds)
    assert phase(again, 'products').seconds == pytest.approx(seconds * 8 / 6)
    assert plain.mfu == pytest.approx(6 * SIZES.matmul_params * tokens / (989.4e12 * plain.seconds))


def test_a_loss_in_chunks_does_the_product_of_the_head_once_more():
    tokens = 2**16
    sizes = dataclasses.replace(SIZES, vocab_size=32_000)
    whole, parts = (predict(sizes, H100, {}, tokens, 1, recompute=False, loss_again=again) for again in (False, True))
    product = 2 * sizes.vocab_size * sizes.d_model * tokens / (H100.peak('bf16') * REACH_GPU.products)
    logits = 2 * sizes.vocab_size * tokens / (H100.bandwidth * REACH_GPU.memory)
    assert phase(parts, 'head').seconds - phase(whole, 'head').seconds == pytest.approx(product + logits)


def test_weights_over_d_are_hidden_until_they_take_longer_than_the_layers():
    """Three times 4 GB of bf16 weights, 7/8 of them from others, at 450 GB/s."""
    expected = 3 * 2 * SIZES.params * 7 / 8 / 450e9
    many, few = (predict(SIZES, H100, {'d': 8}, tokens, 1, False) for tokens in (2**20, 2**12))
    for prediction in (many, few):
        assert phase(prediction, 'weights').seconds == pytest.approx(expected)
    assert phase(many, 'weights').exposed == 0
    assert 0 < phase(few, 'weights').exposed < expected
    assert few.bound == 'd'


def test_replicas_add_up_gradients_once_over_the_slow_network():
    one = predict(SIZES, H100, {'r': 2, 'd': 8}, 2**20, 4, False)
    assert phase(one, 'gradients over r').exposed == pytest.approx(2 * 4 * SIZES.params / 8 / 2 / 50e9)


def test_a_bubble_is_p_less_one_over_the_passes():
    prediction = predict(SIZES, H100, {'p': 4}, 2**20, 12, False)
    busy = sum(phase.exposed for phase in prediction.phases if not phase.name.startswith('pipeline'))
    assert phase(prediction, 'pipeline').seconds == pytest.approx(busy * 3 / 12)


def test_attention_counts_two_products_forward_and_five_backward():
    some = predict(dataclasses.replace(SIZES, keys=1024), H100, {}, 2**17, 1, False)
    flops = 2 * 2 * 1024 * 4096 * 2**17 * 10  # scores and values, forward, over all layers
    assert phase(some, 'attention').seconds == pytest.approx(3.5 * flops / (989.4e12 * REACH_GPU.attention))


def test_a_device_whose_links_are_not_known_has_no_prediction():
    assert predict(SIZES, lookup('AMD Instinct MI300X'), {}, 2**17, 1, False) is None
