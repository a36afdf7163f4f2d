"""Who may use a server: API keys, or only programs of this machine."""

import asyncio
import hashlib
import hmac
import ipaddress
import re
import urllib.parse
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import Scope

from pretrax.errors import UserError
from pretrax.serve.errors import ApiError, busy
from pretrax.serve.limits import Rate, Refusals

LOOPBACK = ('127.0.0.1', '::1', 'localhost')
_LOCAL = re.compile(r'(127\.0\.0\.1|\[::1\]|localhost)(:\d+)?')  # in the header `Host`
_WRONG_KEYS = 10  # a minute from one address; then it waits
_MOST_WAITING = 64  # requests of one address
_MOST_USED = 10_000  # pairs of an address and a key


class Keys:
    """API keys, compared in constant time; an address that sends wrong ones is slowed.

    After some wrong keys in a minute, an address waits for the answer to a key that it has not used before, be the key
    right or wrong, and few of its requests wait at once. A right key is never refused because of wrong ones, unless
    all these places are taken; an address that has used it before does not wait.
    """

    def __init__(self, keys: list[str], seconds: float = 2.0):
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._seconds = seconds
        self._wrong = Rate(_WRONG_KEYS)
        self._waiting: Counter[str] = Counter()
        self._used: dict[tuple[str, bytes], None] = {}  # addresses with the keys that they have used, the newest last

    async def client(self, headers: Mapping[str, str], address: str, refusals: Refusals) -> str:
        """A name for the key in the header `Authorization: Bearer KEY`.

        Args:
            address: address of the client, from `network`.

        Raises:
            ApiError: 401, or 429 if too many requests from this address wait.
        """
        scheme, _, key = headers.get('authorization', '').partition(' ')
        if scheme.lower() != 'bearer' or not key.strip():
            raise _unknown_key()  # nothing was guessed
        given = hashlib.sha256(key.strip().encode('latin-1')).digest()
        if (address, given) not in self._used and self._wrong.seconds(address):
            await self._wait(address, refusals)
        known = [hmac.compare_digest(given, digest) for digest in self._digests]  # all of them: it takes the same time
        if not any(known):
            self._wrong.count(address)
            refusals.count('wrong_key', address)
            raise _unknown_key()
        self._used.pop((address, given), None)
        self._used[address, given] = None
        if len(self._used) > _MOST_USED:
            del self._used[next(iter(self._used))]
        return given.hex()

    async def _wait(self, address: str, refusals: Refusals) -> None:
        if self._waiting[address] >= _MOST_WAITING:
            refusals.count('wrong_keys', address)
            raise busy('too many wrong keys from this address', self._seconds, 'too_many_wrong_keys')
        self._waiting[address] += 1
        try:
            await asyncio.sleep(self._seconds)  # even if the client goes away
        finally:
            self._waiting[address] -= 1
            if not self._waiting[address]:
                del self._waiting[address]


def _unknown_key() -> ApiError:
    message = 'this server needs an API key: send "Authorization: Bearer KEY"'
    return ApiError(401, message, code='invalid_api_key', headers={'www-authenticate': 'Bearer'})


def network(address: str) -> str:
    """What counts as one address of a client: an IPv4 address, or the first 64 bits of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address.partition('%')[0])
    except ValueError:
        return address[:64]
    if isinstance(parsed, ipaddress.IPv6Address):
        mapped = parsed.ipv4_mapped
        return str(mapped) if mapped else str(ipaddress.ip_network((parsed, 64), strict=False))
    return str(parsed)


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
    """Refuses requests that another site's web page sends through the browser of this machine's user.

    Such a page can make its own name mean 127.0.0.1, and can send requests, but not choose these headers.

    Args:
        origins: origins of pages that may use the server: `http://127.0.0.1:8001`.

    Raises:
        ApiError: 403.
    """
    host = headers.get('host', '')
    if not _LOCAL.fullmatch(host.lower()):
        raise ApiError(
            403, f'this server answers to localhost, not to {host!r}; with --api-key-file it answers to any name'
        )
    origin = headers.get('origin')
    if origin is not None and origin not in origins and _host(origin) != host:
        raise ApiError(403, f'requests from pages of {origin} need --allow-origin {origin}')


async def admit(
    scope: Scope, keys: Keys | None, origins: Collection[str] | None, free: Collection[str], refusals: Refusals
) -> str:
    """Refuses a request that may not come in, and otherwise names its client: by its key, or by its address.

    Args:
        keys: who may use the server; None: everybody.
        origins: as of `check_local`; None: requests are accepted from any page, under any name of the server.
        free: paths that need no key.

    Raises:
        ApiError: 401, 403 or 429.
    """
    headers, address = Headers(scope=scope), network((scope.get('client') or ('',))[0])
    if origins is not None:
        check_local(headers, origins)
    if keys is None or scope['path'] in free:
        return address
    return await keys.client(headers, address, refusals)


def _host(origin: str) -> str | None:
    try:
        return urllib.parse.urlsplit(origin).netloc
    except ValueError:  # such as http://[
        return None
