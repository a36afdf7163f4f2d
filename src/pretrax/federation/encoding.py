"""Encodes f32 numbers in fewer bytes: bf16, or integers of 8 or 4 bits in blocks with a scale. Imports no JAX.

    f32     4 bytes a number, little-endian
    bf16    2 bytes a number, rounded to the nearest, ties to even
    int8    a bf16 scale per block of 64 numbers, then a byte a number: scale * [-127, 127]
    int4    a bf16 scale per block of 64 numbers, then two numbers a byte, the first in the low bits: scale * [-7, 7]

A scale is the largest magnitude of its block divided by 127 or 7, rounded up to bf16, so an integer is off by half a
scale at most. The product of a scale and an integer is exact in f32: every machine decodes the same bits. What int8 and
int4 lose, the residual, is added to the next numbers (error feedback: Seide et al. 2014; Karimireddy et al. 2019,
arXiv:1901.09847), so that over time nothing is lost.
"""

from collections.abc import Buffer
from typing import Literal

import numpy as np

type Encoding = Literal['f32', 'bf16', 'int8', 'int4']

BLOCK = 64  # numbers with the same scale
_TILE = 1 << 15  # numbers that are encoded at a time, so that the intermediate arrays stay in the cache
_LARGEST = {'int8': 127, 'int4': 7}
_SMALLEST_NORMAL = np.float32(2.0**-126)


class NotFiniteError(ValueError):
    """Some numbers are NaN or infinite, or too large for the encoding."""


def keeps_residual(encoding: Encoding) -> bool:
    """Whether what an encoding loses has to be added to the next numbers. bf16 rounds each number to 8 bits."""
    return encoding in _LARGEST


def encoded_size(count: int, encoding: Encoding) -> int:
    """Bytes of `count` encoded numbers."""
    scales = 2 * -(-count // BLOCK)
    return {'f32': 4 * count, 'bf16': 2 * count, 'int8': scales + count, 'int4': scales + -(-count // 2)}[encoding]


def encode(
    values: np.ndarray, encoding: Encoding, residual: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Encodes f32 numbers of any shape in row-major order.

    Args:
        residual: added to the values before they are encoded; None: 0.

    Returns:
        u8[encoded_size], and values + residual - decoded in the shape of the values; None if the encoding keeps none.

    Raises:
        NotFiniteError: a number is not finite.
    """
    wanted = values if residual is None else values + residual
    flat = np.ascontiguousarray(wanted, np.float32).reshape(-1)
    content = np.empty(encoded_size(flat.size, encoding), np.uint8)
    left = np.empty_like(flat) if keeps_residual(encoding) else None
    views = _views(content, flat.size, encoding)
    for start in range(0, flat.size, _TILE):
        part = slice(start, min(start + _TILE, flat.size))
        with np.errstate(all='ignore'):
            decoded = _encode_tile(flat[part], encoding, views, part)
        if left is not None and decoded is not None:
            np.subtract(flat[part], decoded, out=left[part])
    return content, None if left is None else left.reshape(np.shape(values))


def decode(content: Buffer, encoding: Encoding, count: int) -> np.ndarray:
    """Decodes f32[count].

    Raises:
        NotFiniteError: a number is not finite.
        ValueError: the content has another size.
    """
    encoded = np.frombuffer(content, np.uint8)
    if encoded.size != encoded_size(count, encoding):
        raise ValueError(f'{encoded.size} bytes, not {encoded_size(count, encoding)}')
    decoded = np.empty(count, np.float32)
    views = _views(encoded, count, encoding)
    for start in range(0, count, _TILE):
        part = slice(start, min(start + _TILE, count))
        _decode_tile(decoded[part], encoding, views, part)
    return decoded


type _Views = tuple[np.ndarray, np.ndarray]  # the scales as the upper halves of f32, and the codes


def _views(content: np.ndarray, count: int, encoding: Encoding) -> _Views:
    """The scales and the codes of encoded numbers. The codes of int4 are pairs."""
    end = 2 * -(-count // BLOCK) if encoding in _LARGEST else 0
    dtype = {'f32': '<u4', 'bf16': '<u2', 'int8': np.int8, 'int4': np.uint8}[encoding]
    return content[:end].view('<u2'), content[end:].view(dtype)


def _encode_tile(values: np.ndarray, encoding: Encoding, views: _Views, part: slice) -> np.ndarray | None:
    """Encodes some numbers, of which the first starts a block. Returns them decoded if there are scales."""
    scales, codes = views
    bits = values.view(np.uint32)
    if encoding == 'f32':
        _check((bits >> 16).astype(np.uint16))
        codes[part] = bits
        return None
    if encoding == 'bf16':
        codes[part] = (bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16
        _check((bits >> 16).astype(np.uint16), codes[part])
        return None
    largest, blocks = _LARGEST[encoding], slice(part.start // BLOCK, -(-part.stop // BLOCK))
    padded = values
    if values.size % BLOCK:
        padded = np.zeros((blocks.stop - blocks.start) * BLOCK, np.float32)
        padded[: values.size] = values
    rows = padded.reshape(-1, BLOCK)
    peak = np.maximum(rows.max(axis=1), -rows.min(axis=1))
    exact = peak / np.float32(largest)
    exact[exact < _SMALLEST_NORMAL] = 0  # some machines compute with such numbers as with 0
    upper = (exact.view(np.uint32) + np.uint32(0xFFFF)) >> 16
    _check((peak.view(np.uint32) >> 16).astype(np.uint16))
    scales[blocks] = upper
    scale = (upper << 16).view(np.float32)[:, None]
    whole = np.rint(rows / np.where(scale == 0, np.float32(np.inf), scale))
    integers = whole.astype(np.int8).reshape(-1)
    if encoding == 'int8':
        codes[part] = integers[: values.size]
    else:
        pairs = (integers.view(np.uint8) & 15).reshape(-1, 2)
        start, stop = part.start // 2, -(-part.stop // 2)
        codes[start:stop] = (pairs[:, 0] | pairs[:, 1] << 4)[: stop - start]
    return (whole * scale).reshape(-1)[: values.size]


def _decode_tile(target: np.ndarray, encoding: Encoding, views: _Views, part: slice) -> None:
    scales, codes = views
    if encoding not in _LARGEST:
        shift = 16 if encoding == 'bf16' else 0
        bits = target.view(np.uint32)
        np.left_shift(codes[part], np.uint32(shift), out=bits, dtype=np.uint32)
        _check((bits >> 16).astype(np.uint16))
        return
    blocks = slice(part.start // BLOCK, -(-part.stop // BLOCK))
    _check(scales[blocks])
    scale = (scales[blocks].astype(np.uint32) << 16).view(np.float32)
    integers = codes[part]
    if encoding == 'int4':
        pairs = codes[part.start // 2 : -(-part.stop // 2)]
        low, high = (pairs << 4).view(np.int8) >> 4, pairs.view(np.int8) >> 4
        integers = np.stack([low, high], axis=1).reshape(-1)[: target.size]
    whole = target.size // BLOCK * BLOCK
    np.multiply(
        integers[:whole].reshape(-1, BLOCK), scale[: whole // BLOCK, None], out=target[:whole].reshape(-1, BLOCK)
    )
    if whole < target.size:
        np.multiply(integers[whole:], scale[-1], out=target[whole:])


def _check(*halves: np.ndarray) -> None:
    """Raises NotFiniteError if one of the upper halves of f32 numbers is that of a NaN or of an infinity."""
    for half in halves:
        if ((half & 0x7F80) == 0x7F80).any():
            raise NotFiniteError('some numbers are not finite')
