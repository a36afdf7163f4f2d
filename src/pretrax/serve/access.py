"""Who may use a server: API keys, or only programs of this machine."""

import hashlib
import hmac
import re
import urllib.parse
from collections.abc import Collection, Mapping
from pathlib import Path

from pretrax.errors import UserError
from pretrax.serve.errors import ApiError

LOOPBACK = ('127.0.0.1', '::1', 'localhost')
_LOCAL = re.compile(r'(127\.0\.0\.1|\[::1\]|localhost)(:\d+)?')  # in the header `Host`


class Keys:
    """API keys, compared in constant time."""

    def __init__(self, keys: list[str]):
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def client(self, headers: Mapping[str, str]) -> str:
        """A name for the key in the header `Authorization: Bearer KEY`. Raises ApiError 401."""
        scheme, _, key = headers.get('authorization', '').partition(' ')
        given = hashlib.sha256(key.strip().encode('latin-1')).digest()
        known = [hmac.compare_digest(given, digest) for digest in self._digests]  # all of them: it takes the same time
        if scheme.lower() != 'bearer' or not any(known):
            message = 'this server needs an API key: send "Authorization: Bearer KEY"'
            raise ApiError(401, message, code='invalid_api_key', headers={'www-authenticate': 'Bearer'})
        return given.hex()


def read_keys(path: Path) -> Keys:
    """The keys in a file, one on each line; empty lines and lines that begin with # are skipped.

    Raises:
        UserError: the file cannot be read, or has no key.
    """
    try:
        lines = [line.strip() for line in path.read_text('ascii').splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else 'a key has characters other than ASCII'
        raise UserError(f'--api-key-file: {path}: {reason}') from None
    keys = [line for line in lines if line and not line.startswith('#')]
    if not keys:
        raise UserError(f'--api-key-file: {path} has no key\n  write one key on each line: openssl rand -hex 32')
    return Keys(keys)


def check_local(headers: Mapping[str, str], origins: Collection[str]) -> None:
    """Refuses what a web page of somebody else may send through the browser of this machine's user.

    Such a page can make its own name mean 127.0.0.1, and can send requests, but not choose these headers.

    Args:
        origins: of pages that may use the server: `http://127.0.0.1:8001`.

    Raises:
        ApiError: 403.
    """
    host = headers.get('host', '')
    if not _LOCAL.fullmatch(host.lower()):
        raise ApiError(
            403, f'this server answers to localhost, not to {host!r}; with --api-key-file it answers to any name'
        )
    origin = headers.get('origin')
    if origin is not None and origin not in origins and urllib.parse.urlsplit(origin).netloc != host:
        raise ApiError(403, f'requests from pages of {origin} need --allow-origin {origin}')
