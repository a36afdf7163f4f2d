"""Arrays of numbers for a page: exact, small, and decoded by `page.js`.

All arrays are in one gzip stream, as text in base64. Measured numbers are mostly noise, which does not compress, so an
array is stored with as few bytes as keep every number bit for bit:

    decimal   integers, after multiplication by a power of ten: differences, i32
    f32       numbers that f32 represents exactly, as the metrics of a step
    scaled    a factor times another array of the page, which differs by a few units in the last place, i8: such as MFU
    f64       all others

f32 and f64 are stored as they are, or as differences of their bit patterns. The bytes of each array are stored by
significance: first all first bytes, then all second bytes, and so on.
"""

import base64
import gzip
import zlib
from typing import Any

import numpy as np

_SAMPLE = 4096  # numbers that decide whether differences are smaller


class Arrays:
    """Collects arrays. `add` returns the index of an array, `page` what the page needs to decode all of them."""

    def __init__(self) -> None:
        self._heads: list[dict[str, Any]] = []
        self._parts: list[bytes] = []
        self._offset = 0
        self._known: dict[bytes, int] = {}
        self._references: list[tuple[int, np.ndarray]] = []

    def add(self, values: np.ndarray) -> int:
        """Adds an array of numbers, in f64; an array that is there already is not stored again."""
        values = np.ascontiguousarray(values, np.float64) + 0.0
        values = np.where(np.isnan(values), np.nan, values)  # one NaN
        key = values.tobytes()
        if key not in self._known:
            head, content = self._encoded(values)
            self._heads.append({**head, 'offset': self._offset, 'count': len(values)})
            self._parts.append(content)
            self._offset += len(content)
            self._known[key] = len(self._heads) - 1
        return self._known[key]

    def page(self) -> dict[str, Any]:
        """The descriptions of the arrays, and their bytes as text."""
        content = base64.b64encode(gzip.compress(b''.join(self._parts), 6, mtime=0)).decode()
        return {'arrays': self._heads, 'content': content}

    def _encoded(self, values: np.ndarray) -> tuple[dict[str, Any], bytes]:
        found = _decimal(values)
        if found is not None:
            return found
        with np.errstate(over='ignore'):
            single = values.astype(np.float32)
        is_single = np.array_equal(single.astype(np.float64), values, equal_nan=True)
        for index, reference in [] if is_single else self._references:
            scaled = _scaled(values, index, reference)
            if scaled is not None:
                return scaled
        self._references.append((len(self._heads), values))
        return _floats('f32', single.view(np.uint32)) if is_single else _floats('f64', values.view(np.uint64))


def _decimal(values: np.ndarray) -> tuple[dict[str, Any], bytes] | None:
    """Integers after multiplication by a power of ten, as differences."""
    if not len(values) or not np.isfinite(values).all():
        return None
    for digits in range(5):
        scale = 10.0**digits
        if np.abs(values[:64] * scale).max() > 2.0**51:
            return None
        if not np.array_equal(np.round(values[:64] * scale) / scale, values[:64]):
            continue
        whole = np.round(values * scale)
        if np.abs(whole).max() > 2.0**51 or not np.array_equal(whole / scale, values):
            continue
        steps = np.diff(whole.astype(np.int64), prepend=np.int64(whole[0]))
        if np.abs(steps).max(initial=0) < 2**31:
            return {'codec': 'decimal', 'scale': scale, 'first': int(whole[0])}, _planes(steps.astype(np.int32))
    return None


def _floats(codec: str, bits: np.ndarray) -> tuple[dict[str, Any], bytes]:
    differences = np.diff(bits, prepend=bits.dtype.type(0))  # wraps around
    plain = len(zlib.compress(_planes(bits[:_SAMPLE]), 1))
    is_smaller = len(zlib.compress(_planes(differences[:_SAMPLE]), 1)) < plain
    return {'codec': codec, 'differences': is_smaller}, _planes(differences if is_smaller else bits)


def _scaled(values: np.ndarray, index: int, reference: np.ndarray) -> tuple[dict[str, Any], bytes] | None:
    if len(values) != len(reference) or not np.isfinite(values).all():
        return None
    where = int(np.argmax(np.abs(reference)))
    if not np.isfinite(reference).all() or reference[where] == 0:
        return None
    factor = float(values[where] / reference[where])
    units = values.view(np.int64) - (reference * factor).view(np.int64)
    if np.abs(units[:_SAMPLE]).max() > 127 or np.abs(units).max() > 127:
        return None
    return {'codec': 'scaled', 'of': index, 'factor': factor}, units.astype(np.int8).tobytes()


def _planes(array: np.ndarray) -> bytes:
    """The bytes of an array by significance."""
    return (
        array.astype(array.dtype.newbyteorder('<')).view(np.uint8).reshape(len(array), array.dtype.itemsize).T.tobytes()
    )
