"""The way from the processes of an island to the bucket: process 0 decides, and all read and write numbers.

All processes call every method, in the same order. A request that fails is made again until it succeeds, so that a
bucket that is out of reach delays an island, and never ends it.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from pretrax.checkpoint.agreement import from_process_0, gather, together
from pretrax.config.schema import Federation
from pretrax.errors import Report, UserError, first_line
from pretrax.federation import differences
from pretrax.federation.differences import DamagedPiecesError, Piece
from pretrax.federation.encoding import Encoding, NotFiniteError
from pretrax.federation.host_weights import HostWeights, digest_of, joined_digest, mapped, zeros_like
from pretrax.federation.objects import Name, Stored, anchor_path
from pretrax.federation.outer import nesterov, shares_of
from pretrax.federation.rounds import Rounds
from pretrax.storage.lease import Lease
from pretrax.storage.shared_path import ConditionalPath

_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0  # seconds between two attempts of a request


class StoppedError(Exception):
    """The processes of the island were asked to stop waiting."""


_ERRORS = (StoppedError, UserError)  # of which all processes of an island learn


class Author(NamedTuple):
    """Who an island is, in one of its processes.

    Attributes:
        attempt: another one whenever its processes are started.
        lease, rounds: in process 0; None in the others.
    """

    name: str
    attempt: str
    is_founder: bool
    lease: Lease | None
    rounds: Rounds | None


class Anchor(Stored):
    """anchors/N/anchor.json: where the weights and the momentum after a round are. No momentum: it is 0."""

    largest = 64 << 20

    round: int
    by: Name
    weights: list[Piece]
    momentum: list[Piece]


class Link:
    """The bucket, for all processes of one island.

    Args:
        place: of the federation.
        topic: of the exchanges between processes; another one for each thread.

    Attributes:
        stopped: ends all waiting, with `StoppedError`. It is set in all processes.
        down_since: when requests began to fail, by `time.monotonic`; None: the newest one has succeeded.
        problem: why they fail.
    """

    def __init__(self, place: ConditionalPath, section: Federation, topic: str, report: Report):
        self.place, self.section, self._topic, self._report = place, section, topic, report
        self.stopped = threading.Event()
        self.down_since: float | None = None
        self.problem = ''

    def persistently[T](self, request: Callable[[], T]) -> T:
        """Makes a request until it succeeds. Raises StoppedError."""
        pause = _FIRST_PAUSE
        while not self.stopped.is_set():
            try:
                answer = request()
            except OSError as error:
                self.problem = first_line(error)
                self.down_since = self.down_since or time.monotonic()
                self.stopped.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                self.down_since = None
                return answer
        raise StoppedError

    def together[T](self, work: Callable[[], T]) -> T:
        """Does something in each process. Raises StoppedError or UserError in all if one of them does."""
        with together(self._topic, *_ERRORS):
            return self.persistently(work)

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, as JSON, in process 0; [] in the others."""
        return [json.loads(text) for text in gather(self._topic, json.dumps(value))]

    def from_process_0(self, work: Callable[[], Any]) -> Any:
        """Returns in all processes the JSON value that `work` returns in process 0.

        Raises StoppedError or UserError in all processes if `work` does.
        """
        return from_process_0(self._topic, lambda: self.persistently(work), _ERRORS)

    def digest(self, weights: HostWeights) -> str:
        """The digest of the weights in process 0, which does not depend on the mesh; '' in the others."""
        digests = self.gather(digest_of(weights))
        return joined_digest(digests) if digests else ''

    def write(
        self, prefix: str, weights: HostWeights, encoding: Encoding, residual: HostWeights | None = None
    ) -> tuple[dict[str, list[Any]], int]:
        """Writes weights below a prefix. Returns the pieces of all processes and their bytes, in process 0.

        A process whose numbers are not finite writes nothing, so that all readers refuse the whole.

        Args:
            residual: gets what the encoding loses.
        """

        def write() -> list[Any]:
            try:
                written = differences.write(self.place, prefix, weights, encoding, residual)
            except NotFiniteError as error:
                self._report(f'WARNING: {prefix}: {error}')
                return [[], 0]
            return [[written.piece.model_dump()], written.size]

        gathered = self.gather(self.together(write))
        return {str(i): pieces for i, (pieces, _) in enumerate(gathered)}, sum(size for _, size in gathered)

    def mean(self, number: int, members: Sequence[Any], like: HostWeights) -> tuple[HostWeights, int, dict[str, str]]:
        """The mean difference of some contributions, and the bytes that all processes have read.

        Args:
            members: name, tokens and pieces of each, in the order of the shares.

        Returns:
            Also why contributions cannot be used, by island, in process 0. If there are such, the mean is wrong.
        """
        weights = shares_of([tokens for _, tokens, _ in members]) if members else []

        def read() -> tuple[HostWeights, int, dict[str, str]]:
            total, size, bad = zeros_like(like), 0, dict[str, str]()
            for weight, (name, _, pieces) in zip(weights, members, strict=True):
                with _named(bad, name):
                    size += differences.add(self.place, _pieces(pieces), total, _author(name, number), weight)
            return total, size, bad

        total, size, bad = self.together(read)
        gathered = self.gather([size, bad])
        reasons = {name: reason for _, bad in gathered for name, reason in bad.items()}
        return total, sum(size for size, _ in gathered), reasons

    def outer_gradient(self, number: int, members: Sequence[Any], like: HostWeights) -> tuple[HostWeights, int]:
        """The mean difference of a round that is closed, and the bytes read; as `mean`.

        Raises UserError if a contribution cannot be used any more.
        """
        total, size, bad = self.mean(number, members, like)

        def refuse() -> None:
            if bad:
                raise UserError('\n'.join(bad.values()))

        self.from_process_0(refuse)
        return total, size

    def outer_step(self, theta: HostWeights, momentum: HostWeights, gradient: HostWeights) -> None:
        """The outer optimizer, in place; destroys the gradient."""
        rate, mu = self.section.outer_rate, self.section.outer_momentum

        def step(theta: np.ndarray, momentum: np.ndarray, gradient: np.ndarray) -> np.ndarray:
            nesterov(theta, momentum, gradient, rate, mu)
            return theta

        mapped(step, theta, momentum, gradient)

    def write_anchor(self, number: int, author: Author, weights: HostWeights, momentum: HostWeights) -> None:
        """Writes the weights and the momentum after a round, unless they are there."""
        path = anchor_path(self.place, number) / 'anchor.json'
        if self.from_process_0(lambda: Anchor.read(path) is not None):
            return
        prefix = f'anchors/{number}/{author.attempt}'
        kinds = {'weights': weights, **({'momentum': momentum} if number else {})}
        written = {kind: self.write(f'{prefix}/{kind}', values, 'f32')[0] for kind, values in kinds.items()}
        pieces = {kind: [piece for one in each.values() for piece in one] for kind, each in written.items()}
        facts = {'round': number, 'by': author.name, 'momentum': []}
        self.from_process_0(lambda: path.create(Anchor.model_validate(facts | pieces).content()))

    def anchor(self, number: int) -> Any:
        """The description of an anchor; None: there is none."""

        def read() -> Any:
            anchor = Anchor.read(anchor_path(self.place, number) / 'anchor.json')
            return anchor and anchor.model_dump()

        return self.from_process_0(read)

    def read_anchor(self, anchor: Any, like: HostWeights) -> tuple[HostWeights, HostWeights]:
        """The weights and the momentum of an anchor."""

        def read() -> tuple[HostWeights, HostWeights]:
            weights, momentum = zeros_like(like), zeros_like(like)
            for kind, into in (('weights', weights), ('momentum', momentum)):
                if anchor[kind]:
                    author = f'the {kind} after round {anchor["round"]}, which island {anchor["by"]} wrote'
                    differences.read(self.place, [Piece(**piece) for piece in anchor[kind]], into, author)
            return weights, momentum

        return self.together(read)


def _pieces(pieces: Mapping[str, Sequence[Any]]) -> list[Piece]:
    return [Piece(**piece) for _, each in sorted(pieces.items(), key=lambda item: int(item[0])) for piece in each]


def _author(name: str, number: int) -> str:
    return f'the difference of island {name} for round {number}'


@contextlib.contextmanager
def _named(bad: dict[str, str], name: str) -> Iterator[None]:
    try:
        yield
    except DamagedPiecesError as error:
        bad[name] = first_line(error)
