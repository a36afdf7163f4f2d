"""An OCDBT database whose values are the files of a state, packed or not: through it, Orbax finds packed files.

Format: https://google.github.io/tensorstore/kvstore/ocdbt/index.html#storage-format. It has one B+tree node.
"""

from collections.abc import Iterable, Mapping

import google_crc32c
import numpy as np
import xxhash

from pretrax.checkpoint.files import File
from pretrax.checkpoint.manifest import STATE

_NODE = 'keys.ocdbt'
_CONFIGURATION = (0, 100, 8 << 20, 4, 0)  # as TensorStore configures a database: kind, sizes, arity, no compression


def database(files: Mapping[str, File]) -> dict[str, np.ndarray]:
    """The files of the database by path inside the checkpoint; none if no file is packed."""
    if not any(file.pack for file in files.values()):
        return {}
    found = sorted((_relative(name), _relative(file.pack or name), file) for name, file in files.items())
    keys, paths = [key for key, _, _ in found], sorted({path for _, path, _ in found})
    number = {path: i for i, path in enumerate(paths)}
    node = _framed(
        0x0CDB20DE,
        b'\0'  # height: a leaf
        + _table(paths)
        + _varints([len(keys), *[0] * (len(keys) - 1), *map(len, keys)])  # no key leaves out what the last one had
        + b''.join(keys)
        + _varints([*(file.size for _, _, file in found), *[1] * len(keys)])  # each value is in a file
        + _varints([*(number[path] for _, path, _ in found), *(file.offset for _, _, file in found)]),
    )
    size = sum(file.size for file in files.values())
    manifest = _framed(
        0x0CDB3A2A,
        xxhash.xxh3_128_digest(node)  # identifies the database
        + _varints(_CONFIGURATION)
        + _table([_NODE.encode()])
        + _varints([1, 1, 0, 0, 0, len(node), len(keys), len(node), size])  # one version, whose tree is the node
        + (1).to_bytes(8, 'little')  # its time
        + _varints([0]),  # earlier versions
    )
    contents = {f'{STATE}/{_NODE}': node, f'{STATE}/manifest.ocdbt': manifest}
    return {name: np.frombuffer(content, np.uint8) for name, content in contents.items()}


def _relative(name: str) -> bytes:
    return name.removeprefix(f'{STATE}/').encode()


def _framed(magic: int, body: bytes) -> bytes:
    header = magic.to_bytes(4, 'big') + (len(body) + 18).to_bytes(8, 'little') + b'\0\0'  # version 0, not compressed
    return header + body + google_crc32c.value(header + body).to_bytes(4, 'little')


def _table(paths: list[bytes]) -> bytes:
    n = len(paths)
    return _varints([n, *[0] * (n - 1), *map(len, paths), *[0] * n]) + b''.join(paths)


def _varints(numbers: Iterable[int]) -> bytes:
    """Each number in groups of seven bits, the lowest first; all but its last byte have the highest bit set."""
    content = bytearray()
    for number in numbers:
        while number > 0x7F:
            content.append(number & 0x7F | 0x80)
            number >>= 7
        content.append(number)
    return bytes(content)
