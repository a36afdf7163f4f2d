"""The outer optimizer, compared with optax and with the formulas of the papers."""

import numpy as np
import optax
import pytest

from pretrax.federation.outer import add_weighted, mix, nesterov, shares_of


def test_nesterov_is_that_of_optax():
    random = np.random.default_rng(0)
    theta = random.normal(size=(5, 6)).astype(np.float32)
    reference, momentum = theta.copy(), np.zeros_like(theta)
    optimizer = optax.sgd(0.7, momentum=0.9, nesterov=True)
    state = optimizer.init(reference)
    for _ in range(5):
        gradient = random.normal(size=theta.shape).astype(np.float32)
        updates, state = optimizer.update(gradient, state)
        reference = optax.apply_updates(reference, updates)
        nesterov(theta, momentum, gradient, 0.7, 0.9)
        np.testing.assert_allclose(theta, np.asarray(reference), rtol=2e-6, atol=2e-6)


def test_nesterov_in_numbers():
    """torch.optim.SGD(nesterov=True): b = mu b + g; p -= lr (g + mu b)."""
    theta, momentum = np.array([1.0], np.float32), np.array([2.0], np.float32)
    nesterov(theta, momentum, np.array([4.0], np.float32), 0.5, 0.25)
    assert momentum.item() == 0.25 * 2 + 4
    assert theta.item() == 1 - 0.5 * (4 + 0.25 * 4.5)


def test_islands_count_by_their_tokens():
    assert shares_of([300, 100]) == [np.float32(0.75), np.float32(0.25)]
    total = np.zeros(2, np.float32)
    for weight, difference in zip(shares_of([300, 100]), ([4, 8], [8, 16]), strict=True):
        add_weighted(total, weight, np.array(difference, np.float32))
    assert total.tolist() == [5, 10]
    for tokens in ([0, 0], [], [5, -1]):
        with pytest.raises(ValueError, match='no tokens'):
            shares_of(tokens)


def test_parts_of_an_array_get_the_bits_of_the_whole():
    random = np.random.default_rng(1)
    theta, momentum, *differences = random.normal(size=(5, 8, 30)).astype(np.float32)

    def update(part):
        new, m, total = theta[part].copy(), momentum[part].copy(), np.zeros_like(theta[part])
        for weight, difference in zip(shares_of([3, 5, 9]), differences, strict=True):
            add_weighted(total, weight, difference[part])
        nesterov(new, m, total, 0.7, 0.9)
        return new

    whole = update(np.s_[:])
    for part in (np.s_[2:3, 4:9], np.s_[:, 7:8], np.s_[::2], np.s_[5, 1:2]):
        np.testing.assert_array_equal(update(part), whole[part])


def test_mixing_keeps_a_share_of_the_own_weights():
    weights = np.array([8.0, -4.0], np.float32)
    mix(weights, np.array([0.0, 4.0], np.float32), 0.25)
    assert weights.tolist() == [2, 2]
