"""The way from the processes of an island to the bucket: process 0 decides, and all read and write numbers.

All processes call every method, in the same order. A request that fails is made again until it succeeds, so that a
bucket that is out of reach delays an island, and never ends it.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import pydantic

from pretrax.checkpoint import agreement
from pretrax.config.schema import Federation
from pretrax.errors import Report, UserError, first_line
from pretrax.federation import differences
from pretrax.federation.differences import DamagedPiecesError
from pretrax.federation.encoding import Encoding, NotFiniteError
from pretrax.federation.host_weights import HostWeights, digest_of, joined_digest, mapped, zeros_like
from pretrax.federation.objects import Contribution, ObjectError
from pretrax.federation.outer import nesterov, shares_of
from pretrax.federation.rounds import Rounds
from pretrax.storage.lease import Lease
from pretrax.storage.shared_path import ConditionalPath

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0  # seconds between two attempts of a request
_JSON: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(Any)


class StoppedError(Exception):
    """The processes of the island were asked to stop waiting."""


_ERRORS = (StoppedError, DamagedPiecesError, UserError)  # raised in all processes if one raises them


class Author(NamedTuple):
    """Who an island is, in one of its processes.

    Attributes:
        attempt: another one whenever its processes are started.
        config: digest of its configuration.
        lease, rounds: in process 0; None in the others.
    """

    name: str
    attempt: str
    is_founder: bool
    config: str
    lease: Lease | None
    rounds: Rounds | None


class Trouble(NamedTuple):
    """Why something fails, and since when, by `time.monotonic`."""

    reason: str
    since: float


class Mean(NamedTuple):
    """The mean difference of some contributions, weighted by their tokens.

    Attributes:
        contributions: by island, in the order of the shares.
        gradient: the parts that this process holds; wrong if there are bad contributions.
        bytes: that all processes have read.
        bad: {island: why its contribution cannot be used}.
    """

    contributions: Mapping[str, Contribution]
    gradient: HostWeights
    bytes: int
    bad: dict[str, str]

    def whole(self) -> HostWeights:
        """The gradient. Raises DamagedPiecesError if there are bad contributions."""
        if self.bad:
            raise DamagedPiecesError('\n'.join(self.bad.values()))
        return self.gradient


class Link:
    """The bucket, for all processes of one island.

    Args:
        place: of the federation.
        topic: of the exchanges between processes; another one for each thread.
        author: the island.

    Attributes:
        stopped: ends all waiting, with `StoppedError`. It is set in all processes.
        trouble: why requests fail; None: the newest one has succeeded.
    """

    def __init__(self, place: ConditionalPath, section: Federation, topic: str, author: Author, report: Report):
        self.place, self.section, self.author, self.report, self._topic = place, section, author, report, topic
        self.stopped = threading.Event()
        self.trouble: Trouble | None = None

    @property
    def rounds(self) -> Rounds:
        """The rounds of the federation, in process 0."""
        assert self.author.rounds is not None
        return self.author.rounds

    def pause(self, seconds: float) -> None:
        """Waits. Raises StoppedError."""
        if self.stopped.wait(seconds):
            raise StoppedError

    def persistently[T](self, request: Callable[[], T]) -> T:
        """Makes a request until it succeeds. Raises StoppedError, or DamagedPiecesError if an object is damaged."""
        pause = _FIRST_PAUSE
        while not self.stopped.is_set():
            try:
                answer = request()
            except ObjectError as error:
                raise DamagedPiecesError(str(error)) from error
            except OSError as error:
                self.trouble = Trouble(first_line(error), self.trouble.since if self.trouble else time.monotonic())
                self.pause(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                self.trouble = None
                return answer
        raise StoppedError

    def together[T](self, work: Callable[[], T]) -> T:
        """Does something in each process. Raises StoppedError or UserError in all if one of them does."""
        with agreement.together(self._topic, *_ERRORS):
            return self.persistently(work)

    def from_process_0[T](self, work: Callable[[], T], kind: pydantic.TypeAdapter[T] = _JSON) -> T:
        """Returns in all processes what `work` returns in process 0: JSON, or a value of a kind.

        Raises StoppedError or UserError in all processes if `work` does.
        """

        def in_json() -> Any:
            return kind.dump_python(self.persistently(work), mode='json')

        return kind.validate_python(agreement.from_process_0(self._topic, in_json, _ERRORS))

    def decide(self, own: Any, decision: Callable[[list[Any]], Any]) -> Any:
        """As `agreement.decide`."""
        return agreement.decide(self._topic, own, decision)

    def digest(self, weights: HostWeights) -> str:
        """The digest of the weights, which does not depend on the mesh."""
        return self.decide(digest_of(weights), joined_digest)

    def write(
        self, prefix: str, weights: HostWeights, encoding: Encoding, residual: HostWeights | None = None
    ) -> tuple[dict[str, Any], int]:
        """Writes weights below a prefix. Returns the pieces of each process, as JSON, and the bytes of all.

        A process whose numbers are not finite writes nothing, so that all readers refuse the whole.

        Args:
            residual: gets what the encoding loses.
        """

        def write() -> tuple[list[Any], int]:
            try:
                written = differences.write(self.place, prefix, weights, encoding, residual)
            except NotFiniteError as error:
                self.report(f'WARNING: {prefix}: {error}')
                return [], 0
            return [written.piece.model_dump()], written.size

        def joined(processes: list[tuple[list[Any], int]]) -> tuple[dict[str, Any], int]:
            return {str(i): pieces for i, (pieces, _) in enumerate(processes)}, sum(size for _, size in processes)

        pieces, size = self.decide(self.together(write), joined)
        return pieces, size

    def mean(self, contributions: Mapping[str, Contribution], like: HostWeights) -> Mean:
        """The mean difference of contributions in the order of the shares.

        Args:
            like: weights in the parts to read.
        """
        weights = shares_of([one.tokens for one in contributions.values()]) if contributions else []

        def read() -> tuple[HostWeights, int, dict[str, str]]:
            gradient, size, bad = zeros_like(like), 0, dict[str, str]()
            for weight, (name, one) in zip(weights, contributions.items(), strict=True):
                author = f'the difference of island {name} for round {one.round}'
                with _named(bad, name):
                    size += differences.add(self.place, one.all_pieces(), gradient, author, weight)
            return gradient, size, bad

        def joined(processes: list[tuple[int, dict[str, str]]]) -> tuple[int, dict[str, str]]:
            reasons = {name: reason for _, bad in reversed(processes) for name, reason in bad.items()}
            return sum(size for size, _ in processes), reasons

        gradient, size, bad = self.together(read)
        return Mean(contributions, gradient, *self.decide([size, bad], joined))

    def outer_step(self, theta: HostWeights, momentum: HostWeights, gradient: HostWeights) -> None:
        """The outer optimizer, in place; destroys the gradient."""
        rate, mu = self.section.outer_rate, self.section.outer_momentum

        def step(theta: np.ndarray, momentum: np.ndarray, gradient: np.ndarray) -> np.ndarray:
            nesterov(theta, momentum, gradient, rate, mu)
            return theta

        mapped(step, theta, momentum, gradient)


@contextlib.contextmanager
def _named(bad: dict[str, str], name: str) -> Iterator[None]:
    try:
        yield
    except DamagedPiecesError as error:
        bad[name] = first_line(error)
