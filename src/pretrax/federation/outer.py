"""The outer optimizer: SGD with Nesterov momentum on the mean difference of the islands. Douillard et al. 2023,
arXiv:2311.08105, algorithm 1; Douillard et al. 2025, arXiv:2501.18512, algorithm 2. Imports no JAX.

Everything is f32 in numpy, one elementwise operation after another, which no compiler fuses or reorders. So islands
with other meshes and chips compute the same bits.
"""

from collections.abc import Sequence

import numpy as np


def shares_of(tokens: Sequence[int]) -> list[np.float32]:
    """The weight of each island in a round: its share of the tokens. Raises ValueError if there are none."""
    total = sum(tokens)
    if total <= 0 or min(tokens) < 0:
        raise ValueError(f'{list(tokens)}: no tokens')
    return [np.float32(count / total) for count in tokens]


def add_weighted(total: np.ndarray, weight: np.float32, difference: np.ndarray) -> None:
    """total += weight * difference, in place."""
    np.add(total, np.multiply(difference, weight, dtype=np.float32), out=total)


def nesterov(theta: np.ndarray, momentum: np.ndarray, gradient: np.ndarray, rate: float, mu: float) -> None:
    """momentum = mu momentum + gradient; theta -= rate (gradient + mu momentum). In place; destroys the gradient."""
    np.multiply(momentum, np.float32(mu), out=momentum)
    np.add(momentum, gradient, out=momentum)
    np.add(gradient, np.multiply(momentum, np.float32(mu)), out=gradient)
    np.multiply(gradient, np.float32(rate), out=gradient)
    np.subtract(theta, gradient, out=theta)


def mix(weights: np.ndarray, theta: np.ndarray, mixing: float) -> None:
    """weights = mixing weights + (1 - mixing) theta, in place. Douillard et al. 2025, equation 3."""
    np.multiply(weights, np.float32(mixing), out=weights)
    np.add(weights, np.multiply(theta, np.float32(1 - mixing)), out=weights)
