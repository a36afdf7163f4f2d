"""Encodes f32 numbers in fewer bytes: bf16, or integers of 8 or 4 bits in blocks with a scale. Imports no JAX.

    f32     4 bytes a number, little-endian
    bf16    2 bytes a number, rounded to the nearest, ties to even
    int8    a bf16 scale for each block of 64 numbers; then a byte for each number: scale * [-127, 127]
    int4    the same scales; then half a byte for each number: scale * [-7, 7]; the second half of a block is in the
            high bits. The last block of integers is filled with zeros.

A scale is the largest magnitude of its block divided by 127 or 7, rounded up to bf16, so an integer is off by half a
scale at most. The product of a scale and an integer is exact in f32: every machine decodes the same bits. What int8 and
int4 lose, the residual, is added to the next numbers (error feedback: Karimireddy et al. 2019, arXiv:1901.09847), so
that over time nothing is lost.
"""

from collections.abc import Buffer
from typing import Literal

import ml_dtypes
import numpy as np

type Encoding = Literal['f32', 'bf16', 'int8', 'int4']

BLOCK = 64  # numbers with the same scale
_FLOATS = {'f32': np.dtype('<f4'), 'bf16': np.dtype(ml_dtypes.bfloat16)}
_LARGEST = {'int8': 127, 'int4': 7}
_SMALLEST_NORMAL = np.float32(2.0**-126)
_INFINITY = 0x7F80  # as bf16; NaN is larger


class NotFiniteError(ValueError):
    """Some numbers are NaN or infinite, or too large for the encoding."""


def keeps_residual(encoding: Encoding) -> bool:
    """Whether what an encoding loses has to be added to the next numbers. bf16 rounds each number to 8 bits."""
    return encoding in _LARGEST


def arrays_held(encoding: Encoding, fragments: int) -> float:
    """How many f32 numbers an island holds in host memory for each of its weights, while a round is taken.

    These are the newest average, its momentum and what was sent; and of a fragment the difference, the mean difference,
    the new average and the new momentum. Residuals are kept, and needed twice for a fragment.
    """
    rest = keeps_residual(encoding)
    return 3 + rest + (4 + 2 * rest) / fragments


def encoded_size(count: int, encoding: Encoding) -> int:
    """Bytes of `count` encoded numbers."""
    if encoding in _FLOATS:
        return count * _FLOATS[encoding].itemsize
    return -(-count // BLOCK) * (2 + (BLOCK if encoding == 'int8' else BLOCK // 2))


def encode(
    values: np.ndarray, encoding: Encoding, residual: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Encodes f32 numbers of any shape in row-major order. It is fast if they fit in the cache.

    Args:
        residual: added to the values before they are encoded; None: 0.

    Returns:
        u8[encoded_size], and values + residual - decoded in the shape of the values; None if the encoding keeps none.

    Raises:
        NotFiniteError: a number is not finite.
    """
    flat = np.ascontiguousarray(values if residual is None else values + residual, np.float32).reshape(-1)
    if encoding in _FLOATS:
        with np.errstate(over='ignore', invalid='ignore'):
            numbers = flat.astype(_FLOATS[encoding])
        _check_finite(numbers.view('<u2') if encoding == 'bf16' else numbers.view('<u4') >> 16)
        return numbers.view(np.uint8), None
    blocks = np.zeros((-(-flat.size // BLOCK), BLOCK), np.float32)
    blocks.reshape(-1)[: flat.size] = flat
    peak = (blocks.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(axis=1)  # as bits, magnitudes have the same order
    _check_finite(peak >> 16)
    exact = peak.view(np.float32) / np.float32(_LARGEST[encoding])
    exact[exact < _SMALLEST_NORMAL] = 0  # some machines compute with such numbers as with 0
    scales = (exact.view(np.uint32) + np.uint32(0xFFFF)) >> 16
    scale = (scales << 16).view(np.float32)[:, None]
    whole = np.rint(blocks / np.where(scale == 0, np.float32(np.inf), scale))
    codes = whole.astype(np.int8)
    if encoding == 'int4':
        codes = codes[:, : BLOCK // 2] & 15 | codes[:, BLOCK // 2 :] << 4
    content = np.concatenate([scales.astype('<u2').view(np.uint8), codes.reshape(-1).view(np.uint8)])
    whole *= scale
    return content, np.subtract(blocks, whole, out=whole).reshape(-1)[: flat.size].reshape(np.shape(values))


def decode(content: Buffer, encoding: Encoding, count: int) -> np.ndarray:
    """Decodes f32[count].

    Raises:
        NotFiniteError: a number is not finite.
        ValueError: the content has another size.
    """
    encoded = np.frombuffer(content, np.uint8)
    if encoded.size != encoded_size(count, encoding):
        raise ValueError(f'{encoded.size} bytes, not {encoded_size(count, encoding)}')
    if encoding in _FLOATS:
        numbers = encoded.view(_FLOATS[encoding]).astype(np.float32)
        _check_finite(numbers.view(np.uint32) >> 16)
        return numbers
    end = 2 * -(-count // BLOCK)
    width = BLOCK if encoding == 'int8' else BLOCK // 2
    scales, codes = encoded[:end].view('<u2'), encoded[end:].view(np.int8).reshape(-1, width)
    _check_finite(scales)
    if encoding == 'int4':
        codes = np.concatenate([codes << 4 >> 4, codes >> 4], axis=1)
    return (codes * (scales.astype(np.uint32) << 16).view(np.float32)[:, None]).reshape(-1)[:count]


def _check_finite(halves: np.ndarray) -> None:
    """Raises NotFiniteError if one of the upper halves of f32 numbers is that of a NaN or of an infinity."""
    if ((halves & _INFINITY) == _INFINITY).any():
        raise NotFiniteError('some numbers are not finite')
