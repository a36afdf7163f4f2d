"""Decompresses gzip without trusting it to be small."""

import gzip
import io
import zlib

MOST = 1 << 30  # bytes


def gunzip(content: bytes) -> bytes:
    """The content of a gzip file. Raises ValueError if it is damaged, or longer than 1 GiB."""
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
            plain = file.read(MOST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f'not readable as gzip: {error}') from error
    if len(plain) > MOST:
        raise ValueError(f'more than {MOST:,} bytes when decompressed')
    return plain
