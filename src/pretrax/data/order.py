"""The order of an epoch: a keyed permutation of range(n) that is computed, not stored.

A Feistel network over pairs (left, right) of Z_a x Z_b with a b >= n is a permutation of range(a b) whatever its round
function; walking its cycle until the value falls below n makes it one of range(n).
Black and Rogaway 2002, "Ciphers with Arbitrary Finite Domains", methods 2 (cycle walking) and 3 (generalised Feistel).
"""

import math

import numpy as np

_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def permute(index: np.ndarray, n: int, seed: int, epoch: np.ndarray) -> np.ndarray:
    """Where `index` goes in the permutation of range(n) that (seed, epoch) chooses; memory does not grow with n.

    Args:
        index: int64 [...], each in [0, n).
        n: size of the permuted range.
        seed: any integer; its lowest 64 bits count.
        epoch: int64, broadcast against index.
    """
    index, epoch = np.broadcast_arrays(index, epoch)
    if n < 1 or (index.size and (index.min() < 0 or index.max() >= n)):
        raise ValueError(f'indices outside range({n})')
    # Halves of nearly equal size; a * b exceeds n by less than sqrt(n) + 1, so walking is rare.
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    keys = _scramble(np.full(index.size, seed % 2**64, np.uint64))
    keys = _scramble(keys ^ epoch.ravel().astype(np.uint64))
    x = _feistel(index.ravel().astype(np.uint64), a, b, keys)
    while (outside := np.flatnonzero(x >= n)).size:
        x[outside] = _feistel(x[outside], a, b, keys[outside])
    return x.astype(np.int64).reshape(index.shape)


def _feistel(x: np.ndarray, a: int, b: int, keys: np.ndarray) -> np.ndarray:
    size_a, size_b = np.uint64(a), np.uint64(b)
    left, right = x // size_b, x % size_b
    for _ in range(_ROUNDS // 2):
        keys = keys + _GOLDEN
        left = (left + _scramble(right ^ keys) % size_a) % size_a
        keys = keys + _GOLDEN
        right = (right + _scramble(left ^ keys) % size_b) % size_b
    return left * size_b + right


def _scramble(x: np.ndarray) -> np.ndarray:
    """SplitMix64 (Steele, Lea and Flood 2014): 64 bits in, 64 well-mixed bits out. Arrays only: they wrap silently."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
