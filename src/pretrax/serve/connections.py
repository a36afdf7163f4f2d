"""Connections below HTTP: how many, how soon and how large the head of a request, how soon an answer is read.

A connection waits (for a request, or for its client to read the end of an answer) or is busy with a request. Where
there is no room, the connection that has waited longest makes room, so waiting connections keep nobody out; busy ones
are refused.
"""

import asyncio
import dataclasses
import resource
from collections.abc import Collection
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from pretrax.serve.access import network
from pretrax.serve.errors import ApiError
from pretrax.serve.limits import Refusals


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Bounds of connections."""

    total: int = 1024  # connections at a time
    per_address: int = 256  # those of one IPv4 address, or of 64 bits of an IPv6 address
    head_bytes: int = 32 << 10  # size of the request line and the headers
    # For the head of a request to arrive, from the connection or the end of the answer before.
    head_seconds: float = 10.0
    stalled_seconds: float = 30.0  # in which a client reads nothing although there is something to read
    # Addresses that name their clients in `X-Forwarded-For`. They have the total limit only.
    proxies: Collection[str] = ()


def limits_for(requests: int, proxies: Collection[str] = ()) -> ConnectionLimits:
    """Limits with room for this many requests at a time, from one address too, as far as the process may open files."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    total = max(ConnectionLimits.total, 2 * requests)
    if files != resource.RLIM_INFINITY:
        total = max(min(total, files // 2), 2)  # the rest is for files of the program
    per_address = min(max(ConnectionLimits.per_address, requests), total // 2)
    return ConnectionLimits(total=total, per_address=per_address, proxies=proxies)


class Connections:
    """The connections of a server. Calling it makes one, as uvicorn does."""

    def __init__(self, limits: ConnectionLimits, refusals: Refusals):
        self.limits, self.refusals = limits, refusals
        self._unlimited = {network(proxy) for proxy in limits.proxies}
        self._count = 0
        self._counts: dict[str, int] = {}  # by address
        self._waiting: dict[str, dict[Connection, None]] = {}  # by address; the longest waiting first

    def __call__(self, **options: Any) -> 'Connection':
        return Connection(self, **options)

    def enter(self, connection: 'Connection') -> bool:
        """Counts a new connection, for which a waiting one may be closed. Returns False if there is no room for it."""
        address, limits = connection.address, self.limits
        if address not in self._unlimited and self._counts.get(address, 0) >= limits.per_address:
            group, reason = self._waiting.get(address), 'address'
        elif self._count >= limits.total:
            group, reason = max(self._waiting.values(), key=len, default=None), 'total'
        else:
            group, reason = None, ''
        if reason and not group:
            self.refusals.count(reason, address)
            return False
        if group:
            oldest = next(iter(group))
            self.refusals.count('replaced', oldest.address)
            oldest.drop()
        self._count += 1
        self._counts[address] = self._counts.get(address, 0) + 1
        return True

    def leave(self, connection: 'Connection') -> None:
        self.busy(connection)
        self._count -= 1
        self._counts[connection.address] -= 1
        if not self._counts[connection.address]:
            del self._counts[connection.address]

    def wait(self, connection: 'Connection') -> None:
        """Notes that a connection waits from now on."""
        self.busy(connection)
        self._waiting.setdefault(connection.address, {})[connection] = None

    def busy(self, connection: 'Connection') -> None:
        """Notes that a connection does not wait."""
        group = self._waiting.get(connection.address, {})
        group.pop(connection, None)
        if not group:
            self._waiting.pop(connection.address, None)


class Connection(H11Protocol):
    """One connection. It is always parsed by h11, which bounds a head; httptools does not, and uvicorn prefers it."""

    def __init__(self, connections: Connections, **options: Any):
        super().__init__(**options)
        self._connections, self._limits = connections, connections.limits
        self._is_counted = False
        self._head: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.address = network(self.client[0] if self.client else '')
        self._is_counted = self._connections.enter(self)
        if self._is_counted:
            self._wait()
        else:
            self._refuse(503, 'too many connections; try again later')

    def connection_lost(self, exc: Exception | None) -> None:
        self._uncount()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_counted:
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self._is_counted and self.cycle is not None and not self.cycle.response_complete:
            self._cancel_head()
            self._connections.busy(self)

    def on_response_complete(self) -> None:
        if self._is_counted:
            self._wait()
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_writing()

    def drop(self) -> None:
        """Closes the connection now. Bytes that the client has not read are lost."""
        self._uncount()
        self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        del msg
        is_large = len(self.conn.trailing_data[0]) > self._limits.head_bytes
        self._connections.refusals.count('head_size' if is_large else 'malformed', self.address)
        if is_large:
            self._refuse(431, f'the head of the request is larger than {self._limits.head_bytes:,} bytes')
        else:
            self._refuse(400, 'this is not an HTTP request')

    def _wait(self) -> None:
        self._connections.wait(self)
        self._cancel_head()
        self._head = self.loop.call_later(self._limits.head_seconds, self._head_is_late)

    def _head_is_late(self) -> None:
        if self.transport.get_write_buffer_size():  # the answer is still read
            self._watch_writing()
            self._wait()
            return
        self._connections.refusals.count('head_time', self.address)
        if self.conn.trailing_data[0]:
            self._refuse(408, f'the head of a request did not arrive within {self._limits.head_seconds:g} s')
        else:  # browsers open connections that they may need
            self.drop()

    def _watch_writing(self) -> None:
        if self._writing is None:
            size = self.transport.get_write_buffer_size()
            self._writing = self.loop.call_later(self._limits.stalled_seconds, self._check_writing, size)

    def _check_writing(self, before: int) -> None:
        self._writing = None
        size = self.transport.get_write_buffer_size()
        if size >= before > 0:
            self._connections.refusals.count('stalled', self.address)
            self.drop()
        elif size:
            self._watch_writing()

    def _refuse(self, status: int, message: str) -> None:
        """Answers, unless an answer has begun, and closes the connection."""
        if self.cycle is None or self.cycle.response_complete:
            content = ApiError(status, message).body
            head = (
                f'HTTP/1.1 {status} \r\ncontent-type: application/json\r\n'
                f'content-length: {len(content)}\r\nconnection: close\r\n\r\n'
            )
            self.transport.write(head.encode() + content)
        self._uncount()
        self.transport.close()

    def _uncount(self) -> None:
        self._cancel_head()
        if self._writing is not None:
            self._writing.cancel()
        if self._is_counted:
            self._is_counted = False
            self._connections.leave(self)

    def _cancel_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None
