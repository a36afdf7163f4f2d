"""How much a server takes on."""

import dataclasses
import time
from collections import deque
from pathlib import Path

from pretrax.errors import Report, printable
from pretrax.serve.errors import ApiError, busy
from pretrax.tables import read_table

_MOST_CLIENTS = 10_000  # whose rates are remembered
REASONS = read_table(Path(__file__).with_name('metrics.yaml'))['refused']


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Bounds of what clients may ask for."""

    queue: int = 64  # requests that wait for a slot
    body: int = 4 << 20  # bytes
    body_seconds: float = 30.0  # for the body to arrive
    seconds: float = 600.0  # from the request to the end of the answer
    rate: float | None = None  # HTTP requests a minute from one key, or without keys from one address
    silence: float = 60.0  # seconds for a block of the engine; then it counts as hanging


MOST_AT_ONCE = 2048  # prompts times answers in one HTTP request, as for OpenAI's embeddings


class Admission:
    """Counts the requests of an engine, and refuses those that would wait in too long a queue.

    An HTTP request with more texts than there are slots takes the places of `slots` requests; see
    `EngineThread.submit`.
    """

    def __init__(self, slots: int, queue: int):
        self.capacity, self.slots = slots + queue, slots
        self.admitted = 0
        self._seconds: deque[float] = deque([1.0], maxlen=32)  # that recent requests took

    def check(self, count: int, what: str = 'answers', param: str = 'n') -> None:
        """Raises ApiError 429 if `count` more requests have no room now, and 400 if they never have."""
        if count > MOST_AT_ONCE:
            message = f'{count:,} {what}; this server takes at most {MOST_AT_ONCE:,} in one request'
            raise ApiError(400, message, param=param, code='invalid_value')
        count = min(count, self.slots)
        if self.admitted + count > self.capacity:
            rounds = -(-(self.admitted + count - self.capacity) // self.slots)
            seconds = rounds * sum(self._seconds) / len(self._seconds)
            raise busy(f'the queue is full: {self.admitted} requests run or wait', seconds, 'queue_full')

    def enter(self, count: int) -> float:
        """Counts `count` requests; returns the time for `leave`. Raises as `check` does."""
        self.check(count)
        self.admitted += min(count, self.slots)
        return time.monotonic()

    def leave(self, count: int, entered: float) -> None:
        self.admitted -= min(count, self.slots)
        self._seconds.append(time.monotonic() - entered)


class Rate:
    """Allows each client a number of requests a minute, at most that many at once (a token bucket)."""

    def __init__(self, per_minute: float):
        self._per_second, self._most = per_minute / 60, max(1.0, per_minute)
        self._left: dict[str, tuple[float, float]] = {}  # by client: requests, and when that was; the newest last

    def seconds(self, client: str) -> float:
        """Seconds until a request is allowed; 0: now."""
        return max(0.0, (1 - self._allowed(client)) / self._per_second)

    def count(self, client: str) -> None:
        """Counts a request, if one is allowed."""
        left = max(0.0, self._allowed(client) - 1)
        self._left.pop(client, None)
        self._left[client] = left, time.monotonic()
        if len(self._left) > _MOST_CLIENTS:
            del self._left[next(iter(self._left))]

    def check(self, client: str) -> None:
        """Counts a request. Raises ApiError 429 if it is one too many."""
        if seconds := self.seconds(client):
            raise busy('too many requests from this client', seconds, 'rate_limit_exceeded')
        self.count(client)

    def _allowed(self, client: str) -> float:
        now = time.monotonic()
        left, at = self._left.get(client, (self._most, now))
        return min(self._most, left + (now - at) * self._per_second)


class Refusals:
    """Counts what is refused before it is a request, by reason, and reports the first of each."""

    def __init__(self, report: Report):
        self._report = report
        self.counts = dict.fromkeys(REASONS, 0)

    def count(self, reason: str, address: str) -> None:
        if not self.counts[reason]:
            self._report(f'refused: {REASONS[reason]}, from {printable(address)}; later ones are counted only')
        self.counts[reason] += 1

    def summary(self) -> str:
        """What was refused, for people; empty if nothing was."""
        return ', '.join(f'{count:,} {reason}' for reason, count in self.counts.items() if count)
