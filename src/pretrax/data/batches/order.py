"""The order of the rows in an epoch: a keyed permutation that is computed, not stored, and touches few blocks at once.

`Order` permutes blocks of consecutive rows, then the rows within each window of `window` permuted blocks. A reader that
caches the blocks of one window reads each block once per epoch, and the rows of a batch come from far apart.

`permute` is a Feistel network over pairs (left, right) of Z_a x Z_b with a b >= n. It is a permutation of range(a b)
for any round function. Applying it until the value falls below n makes it a permutation of range(n). Black and
Rogaway 2002, "Ciphers with Arbitrary Finite Domains", methods 2 (cycle walking) and 3 (generalized Feistel).
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

# Blocks per window: how many regions of the corpus are mixed. Changing any number here changes the order of a run.
WINDOW = 64
_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)

_PAGE = 1024  # positions that are computed together, since a call takes as long for one; it does not change the order


@dataclass(frozen=True)
class Order:
    """An endless sequence of rows: each epoch has every row of range(n) once. Seeking takes constant time and space."""

    n: int  # rows per epoch
    block: int  # consecutive rows per block; the last block may be shorter
    seed: int  # any integer
    # Blocks whose rows are mixed. Rows k to k + m of an epoch lie in at most window * (2 + m / (window * block))
    # blocks, and no block is in two windows.
    window: int = WINDOW

    def __call__(self, number: np.ndarray) -> np.ndarray:
        """The rows, int64 [...], at the positions `number`, int64 [...], counted through all epochs."""
        if not number.size:
            return np.zeros(number.shape, np.int64)
        first, last = int(number.min()) // _PAGE, int(number.max()) // _PAGE
        if last > first + 1:
            return self._rows(number)
        pages = [_page(self, page) for page in range(first, last + 1)]
        return np.concatenate(pages)[number - first * _PAGE]

    def _rows(self, number: np.ndarray) -> np.ndarray:
        epoch, index = np.divmod(number, self.n)
        n_blocks = -(-self.n // self.block)
        missing = n_blocks * self.block - self.n  # rows missing from the last block
        epochs, which = np.unique(epoch, return_inverse=True)
        # Position of the last block in the order of blocks. `padded` counts rows as if the last block were full.
        last = unpermute(np.full(len(epochs), n_blocks - 1), n_blocks, self.seed, epochs)[which].reshape(index.shape)
        end_of_last = (last + 1) * self.block - missing
        padded = index + missing * (index >= end_of_last)
        window = padded // (self.window * self.block)
        first = window * self.window * self.block
        missing_here = missing * (last // self.window == window)
        size = np.minimum(self.window * self.block, n_blocks * self.block - first) - missing_here
        within = padded - first - missing_here * (padded >= end_of_last)
        shuffled = permute(within, size, self.seed, epoch, window)
        padded = first + shuffled + missing_here * (first + shuffled >= end_of_last)
        position, row = np.divmod(padded, self.block)
        return permute(position, n_blocks, self.seed, epoch) * self.block + row


@functools.lru_cache(256)
def _page(order: Order, page: int) -> np.ndarray:
    """The rows at all positions of a page."""
    return order._rows(np.arange(page * _PAGE, (page + 1) * _PAGE))


def permute(index: np.ndarray, n: int | np.ndarray, seed: int, *keys: np.ndarray) -> np.ndarray:
    """The image of `index` under the permutation of range(n) that (seed, *keys) selects.

    Args:
        index: int64 [...], each in [0, n).
        n: size of the permuted range.
        seed: any integer; only its lowest 64 bits are used.
        keys: int64, for example the epoch; broadcast against `index`, like `n`.

    Raises:
        ValueError: an index is outside range(n).
    """
    return _walk(_feistel, index, n, seed, keys)


def unpermute(index: np.ndarray, n: int | np.ndarray, seed: int, *keys: np.ndarray) -> np.ndarray:
    """The inverse of `permute`."""
    return _walk(_feistel_inverse, index, n, seed, keys)


def _walk(step, index: np.ndarray, n: int | np.ndarray, seed: int, keys: tuple[np.ndarray, ...]) -> np.ndarray:
    index, sizes, *keys_of = np.broadcast_arrays(index, n, *keys)
    if index.size and (sizes.min() < 1 or index.min() < 0 or (index >= sizes).any()):
        raise ValueError(f'indices outside range({sizes.max()})')
    key = _scramble(np.full(index.size, seed % 2**64, np.uint64))
    for more in keys_of:
        key = _scramble(key ^ more.ravel().astype(np.uint64))
    # a and b are nearly equal, and a * b exceeds n by less than sqrt(n) + 1, so further rounds are rare.
    limits, which = np.unique(sizes.ravel(), return_inverse=True)
    halves = [(a, -(-limit // a)) for limit in limits.tolist() for a in [math.isqrt(limit - 1) + 1]]
    a, b = np.array(halves, np.uint64).reshape(-1, 2)[which].T
    limit = limits.astype(np.uint64)[which]
    x = step(index.ravel().astype(np.uint64), a, b, key)
    while (outside := np.flatnonzero(x >= limit)).size:
        x[outside] = step(x[outside], a[outside], b[outside], key[outside])
    return x.astype(np.int64).reshape(index.shape)


def _feistel(x: np.ndarray, a: np.ndarray, b: np.ndarray, key: np.ndarray) -> np.ndarray:
    left, right = x // b, x % b
    for _ in range(_ROUNDS // 2):
        key = key + _GOLDEN
        left = (left + _scramble(right ^ key) % a) % a
        key = key + _GOLDEN
        right = (right + _scramble(left ^ key) % b) % b
    return left * b + right


def _feistel_inverse(x: np.ndarray, a: np.ndarray, b: np.ndarray, key: np.ndarray) -> np.ndarray:
    left, right = x // b, x % b
    key = key + np.full_like(key, _ROUNDS) * _GOLDEN
    for _ in range(_ROUNDS // 2):
        right = (right + b - _scramble(left ^ key) % b) % b
        key = key - _GOLDEN
        left = (left + a - _scramble(right ^ key) % a) % a
        key = key - _GOLDEN
    return left * b + right


def _scramble(x: np.ndarray) -> np.ndarray:
    """SplitMix64 (Steele, Lea and Flood 2014): mixes 64 bits. Only for arrays, which overflow without a warning."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
