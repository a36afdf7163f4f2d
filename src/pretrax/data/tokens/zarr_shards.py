"""An array of flat-tokens in zarr version 3: one dimension, in shards of compressed chunks.

A shard is a file. It has chunks, each compressed by zstd and followed by its crc32c, and then an index of their offsets
and sizes, followed by its own crc32c. docs/formats.md specifies it.
"""

import dataclasses
from typing import Any, Self

import google_crc32c
import numpy as np

from pretrax.system.json_file import parse_json
from pretrax.system.zstd import zstd

_NOT_STORED = 2**64 - 1  # the offset and the size of a chunk without values
_ENTRY = 16  # bytes of the index for each chunk
_CRC = 4
_MOST_VALUES = 1 << 52
_CODECS = ['bytes', 'zstd', 'crc32c']
_RAW = {'name': 'bytes', 'configuration': {'endian': 'little'}}


class OtherArrayError(Exception):
    """An array that is stored in another way than those that pretrax writes."""


@dataclasses.dataclass(frozen=True)
class Shards:
    """How an array is stored."""

    dtype: np.dtype
    length: int  # number of values
    shard: int  # values per file
    chunk: int  # values per chunk

    @property
    def index_size(self) -> int:
        """Bytes of the index at the end of a shard."""
        return self.shard // self.chunk * _ENTRY + _CRC

    @property
    def chunk_size(self) -> int:
        """Bytes of the values of a chunk."""
        return self.chunk * self.dtype.itemsize

    def metadata(self) -> dict[str, Any]:
        """The content of `zarr.json`."""
        chunks = {
            'chunk_shape': [self.chunk],
            'codecs': [
                _RAW,
                {'name': 'zstd', 'configuration': {'level': 1, 'checksum': False}},
                {'name': 'crc32c'},
            ],
            'index_codecs': [_RAW, {'name': 'crc32c'}],
            'index_location': 'end',
        }
        return {
            'zarr_format': 3,
            'node_type': 'array',
            'shape': [self.length],
            'data_type': self.dtype.name,
            'chunk_grid': {'name': 'regular', 'configuration': {'chunk_shape': [self.shard]}},
            'chunk_key_encoding': {'name': 'default'},
            # Not a valid token or offset, so a missing chunk cannot pass for data.
            'fill_value': int(np.iinfo(self.dtype).max),
            'codecs': [{'name': 'sharding_indexed', 'configuration': chunks}],
        }

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Reads `zarr.json`. Raises ValueError if it is not JSON, and OtherArrayError."""
        found = parse_json(content)
        try:
            [sharding], [length] = found['codecs'], found['shape']
            [shard], inner = found['chunk_grid']['configuration']['chunk_shape'], sharding['configuration']
            [chunk], key = inner['chunk_shape'], found['chunk_key_encoding']
            names = [codec['name'] for codec in inner['codecs']]
            facts = (
                (found['zarr_format'], 3),
                (found['node_type'], 'array'),
                (found['chunk_grid']['name'], 'regular'),
                (key['name'], 'default'),
                (key.get('configuration', {}).get('separator', '/'), '/'),
                (sharding['name'], 'sharding_indexed'),
                (names, _CODECS),
                (inner['codecs'][0]['configuration']['endian'], 'little'),
                ([codec['name'] for codec in inner['index_codecs']], ['bytes', 'crc32c']),
                (inner['index_codecs'][0]['configuration']['endian'], 'little'),
                (inner.get('index_location', 'end'), 'end'),
            )
            wrong = next(((is_, expected) for is_, expected in facts if is_ != expected), None)
            sizes = (length, shard, chunk)
            if any(type(size) is not int or not 0 <= size <= _MOST_VALUES for size in sizes) or not chunk:
                raise ValueError(f'the sizes are {sizes}')
            if shard % chunk or not shard:
                raise ValueError(f'{shard} values per file are not a multiple of {chunk} values per chunk')
            dtype = np.dtype({'uint8': 'u1', 'uint32': '<u4', 'uint64': '<u8'}[found['data_type']])
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise OtherArrayError(f'not an array as pretrax writes one ({type(error).__name__}: {error})') from None
        if wrong is not None:
            raise OtherArrayError(f'not an array as pretrax writes one: it has {wrong[0]!r}, not {wrong[1]!r}')
        return cls(dtype, length, shard, chunk)

    def encode(self, values: np.ndarray) -> bytes:
        """The content of a shard with these values; the last shard may have fewer than `shard`."""
        n_chunks = -(-len(values) // self.chunk)
        padded = np.full(n_chunks * self.chunk, np.iinfo(self.dtype).max, self.dtype)
        padded[: len(values)] = values
        index = np.full((self.shard // self.chunk, 2), _NOT_STORED, '<u8')
        parts, offset = [], 0
        for number, chunk in enumerate(padded.reshape(n_chunks, self.chunk)):
            part = _with_crc(zstd.compress(chunk.tobytes(), 1))
            index[number] = offset, len(part)
            parts.append(part)
            offset += len(part)
        return b''.join([*parts, _with_crc(index.tobytes())])

    def index(self, content: bytes) -> list[tuple[int, int] | None]:
        """Where each chunk of a shard begins and ends, from the last `index_size` bytes; None: it is not stored.

        Raises ValueError if they are damaged.
        """
        if len(content) != self.index_size:
            raise ValueError('truncated')
        entries = np.frombuffer(_checked(content, 'the index'), '<u8').reshape(-1, 2).tolist()
        if any(size > 2 * self.chunk_size + 1024 and offset != _NOT_STORED for offset, size in entries):
            raise ValueError('a chunk is larger than its values')
        return [None if offset == _NOT_STORED else (offset, offset + size) for offset, size in entries]

    def decode(self, content: bytes) -> np.ndarray:
        """The values of a chunk. Raises ValueError if it is damaged."""
        stream = zstd.ZstdDecompressor()
        try:
            plain = stream.decompress(_checked(content, 'a chunk'), self.chunk_size + 1)
        except zstd.ZstdError as error:
            raise ValueError(f'a chunk cannot be decompressed: {error}') from None
        if not stream.eof or len(plain) != self.chunk_size:
            raise ValueError(f'a chunk does not have {self.chunk_size:,} bytes')
        return np.frombuffer(plain, self.dtype)


def _with_crc(content: bytes) -> bytes:
    return content + google_crc32c.value(content).to_bytes(_CRC, 'little')


def _checked(content: bytes, what: str) -> bytes:
    body, crc = content[:-_CRC], content[-_CRC:]
    if google_crc32c.value(body).to_bytes(_CRC, 'little') != crc:
        raise ValueError(f'the crc32c of {what} is wrong')
    return body
