"""The stream of server-sent events that all clients share. Events have numbers, and the newest are kept.

A new client gets a snapshot of all runs, then each event. A client that reconnects gets the events after the last one
that it received. A client that reads too slowly, or was away for too long, gets a snapshot again. So memory does not
depend on the number of clients.
"""

import asyncio
import collections
import contextlib
import itertools
import json
import secrets
import time
from collections.abc import AsyncIterator, Iterable
from typing import Any

from pretrax.view.definitions import OF_RUNS, Definition, definition_of
from pretrax.view.live.run import Event, WatchedRun

MOST_BYTES = 16 << 20  # of events that are kept
EVERY = 2.0  # seconds; the time is sent at least this often
PIECE = 64 << 10  # bytes that are yielded at once


class Feed:
    """The events of all runs. Only the thread of the event loop uses it."""

    def __init__(self) -> None:
        self.runs: dict[str, WatchedRun] = {}
        self.readers = 0
        self._about: dict[str, Any] = {'ids': (), 'hidden': 0, 'problem': '', 'where': ''}
        self._keys: dict[str, Definition] = {}
        self._instance = secrets.token_hex(6)  # the numbers of an earlier server are not ours
        self._kept: collections.deque[bytes] = collections.deque()
        self._bytes, self._number = 0, 0
        self._changed, self._closed = asyncio.Event(), False

    def publish(self, kind: str, data: dict[str, Any]) -> None:
        """Sends an event to all clients."""
        self._number += 1
        content = event_text(kind, data, self._id(self._number))
        self._kept.append(content)
        self._bytes += len(content)
        while self._bytes > MOST_BYTES and len(self._kept) > 1:
            self._bytes -= len(self._kept.popleft())
        self._wake()

    def publish_of_run(self, events: Iterable[Event]) -> None:
        """Sends the events of a run, after the definitions of its new keys."""
        for kind, data in events:
            new = {key: definition_of(key) for key in data.get('keys', ()) if key not in self._keys}
            if new:
                self._keys |= new
                self.publish('definitions', new)
            self.publish(kind, data)

    def about(self, **what: Any) -> None:
        """Sends what concerns all runs, if it has changed.

        Args:
            what: `ids`, of the runs in order; `where`, their directory; `hidden`, how many are not shown; `problem`, of
                the directory.
        """
        if what.items() - self._about.items():
            self._about |= what
            self.publish('runs', self._about)

    def close(self) -> None:
        """Ends all streams."""
        self._closed = True
        self._wake()

    async def stream(self, last_id: str) -> AsyncIterator[bytes]:
        """Server-sent events, until the feed is closed.

        Args:
            last_id: ID of the last event that the client received; '': none.
        """
        number = self._known(last_id)
        self.readers += 1
        try:
            while not self._closed:
                changed = self._changed
                oldest = self._number - len(self._kept) + 1
                if number is None or number + 1 < oldest:
                    number = self._number  # events during the snapshot are sent again; a client may apply them twice
                    async for piece in self._everything(number):
                        yield piece
                    continue
                for content in list(itertools.islice(self._kept, number + 1 - oldest, None)):
                    for start in range(0, len(content), PIECE):
                        yield content[start : start + PIECE]
                    number += 1
                yield event_text('time', {'now': time.time()})
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), EVERY)
        finally:
            self.readers -= 1

    async def _everything(self, number: int) -> AsyncIterator[bytes]:
        yield event_text('runs', self._about)
        yield event_text('terms', OF_RUNS)
        yield event_text('definitions', self._keys)
        for run in list(self.runs.values()):
            content = await asyncio.to_thread(_snapshot, run)
            for start in range(0, len(content), PIECE):
                yield content[start : start + PIECE]
        yield event_text('ready', {}, self._id(number))

    def _id(self, number: int) -> str:
        return f'{self._instance}-{number}'

    def _known(self, last_id: str) -> int | None:
        """The number of an event of this feed."""
        instance, _, number = last_id.partition('-')
        is_ours = instance == self._instance and number.isascii() and number.isdecimal() and len(number) < 19
        return int(number) if is_ours and int(number) <= self._number else None

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _snapshot(run: WatchedRun) -> bytes:
    return b''.join(event_text(event.kind, event.data) for event in run.snapshot())


def event_text(kind: str, data: dict[str, Any], number: str = '') -> bytes:
    """A server-sent event: https://html.spec.whatwg.org/multipage/server-sent-events.html"""
    head = f'id: {number}\n' if number else ''
    body = json.dumps(data, allow_nan=False, separators=(',', ':'))
    return f'{head}event: {kind}\ndata: {body}\n\n'.encode()
