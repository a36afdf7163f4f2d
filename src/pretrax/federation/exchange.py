"""One round of a federation, in the background: sends what an island has learned, and computes the new weights."""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pydantic

from pretrax.errors import UserError, first_line
from pretrax.federation.anchors import Newest
from pretrax.federation.differences import DamagedPiecesError
from pretrax.federation.fragments import Fragment
from pretrax.federation.host_weights import HostWeights, mapped, select, zeros_like
from pretrax.federation.island_state import IslandState
from pretrax.federation.link import Link, Mean, StoppedError, Trouble
from pretrax.federation.objects import Closing, Contribution
from pretrax.federation.rounds import Due, Waiting
from pretrax.storage.lease import LostError

_PATIENCE = 10.0  # seconds of trouble after which an island goes on without the round
_FIRST_PAUSE = 0.5  # seconds between two attempts to read a round that is damaged; they grow to `federation.patience`


class Average(NamedTuple):
    """A fragment of the weights and the momentum after a round that has what the island has learned.

    Attributes:
        residual: what the encoding has lost; None: the island keeps none.
        closing: of the round.
        metrics: of the round.
    """

    round: int
    weights: HostWeights
    momentum: HostWeights
    residual: HostWeights | None
    closing: Closing
    metrics: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Closed:
    """A round that is closed. Attributes: its members' contributions; {}: it has not what this island has learned."""

    closing: Closing
    members: Mapping[str, Contribution]


_POLLED: pydantic.TypeAdapter[Due | _Closed] = pydantic.TypeAdapter(Due | _Closed)


class Exchange:
    """A round in the background of all processes of an island.

    Args:
        facts: of the contribution, without its numbers; `round` among them.
        state: of the island, which stays as it is meanwhile; `sent` is what it contributes.
        newest: as `anchors.newest`, for a link and `only_anchors`.
    """

    def __init__(
        self,
        link: Link,
        facts: dict[str, Any],
        fragment: Fragment,
        state: IslandState,
        newest: Callable[[Link, bool], Newest],
    ):
        self._link, self._facts, self._number = link, facts, facts['round']
        self._fragment, self._state, self._newest = fragment, state, newest
        self._own: Contribution | None = None  # once it is written
        self._metrics: dict[str, Any] = {}  # of the round
        self._damage: Trouble | None = None  # objects of the round
        self._error: BaseException | None = None
        self._taken: Average | Newest | None = None
        self._thread = threading.Thread(target=self._run, name='federation', daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def problem(self) -> str:
        """Why the round cannot be taken: its objects are damaged, or the bucket is out of reach; '': it is open."""
        return trouble.reason if (trouble := self._trouble) is not None else ''

    @property
    def is_out_of_reach(self) -> bool:
        """Whether there is a problem for longer than an island waits."""
        return (trouble := self._trouble) is not None and time.monotonic() - trouble.since > _PATIENCE

    @property
    def _trouble(self) -> Trouble | None:
        return self._damage or self._link.trouble

    def wait(self, seconds: float) -> bool:
        """Waits until the round is taken, at most for some seconds. Returns whether it is."""
        self._thread.join(seconds)
        return self.is_done

    def result(self) -> Average | Newest:
        """The round, or the newest weights if the island cannot take it. It is called once `is_done`.

        Raises UserError if another process is this island now.
        """
        if self._error is not None:
            raise self._error
        assert self._taken is not None
        return self._taken

    def stop(self) -> None:
        """Ends it. It is called in all processes."""
        self._link.stopped.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._taken = self._exchange()
        except StoppedError:
            pass
        except BaseException as error:  # raised where the round is taken
            self._error = error

    def _exchange(self) -> Average | Newest:
        link, state = self._link, self._state
        theta, sent = select(state.anchor, self._fragment), select(state.sent, self._fragment)
        difference = mapped(np.subtract, theta, sent)
        residual = self._contribute(difference)
        pause = _FIRST_PAUSE
        while True:
            try:
                return self._take(theta, sent, difference, residual)
            except DamagedPiecesError as error:
                reason = first_line(error)
            if self._damage is not None:  # it has been read twice
                with contextlib.suppress(DamagedPiecesError):
                    return self._instead(True, f'cannot be read ({reason})')
            self._damage = Trouble(reason, self._damage.since if self._damage else time.monotonic())
            link.from_process_0(lambda pause=pause: link.pause(pause))
            pause = min(2 * pause, link.section.patience)
            link.from_process_0(lambda: link.rounds.forget(self._number))

    def _contribute(self, difference: HostWeights) -> HostWeights | None:
        """Writes a difference and contributes it. Returns what its encoding has lost; None: the island keeps none."""
        link, author, began = self._link, self._link.author, time.monotonic()
        numbers, residual = difference, None
        if self._state.residual is not None:
            numbers = mapped(np.add, difference, select(self._state.residual, self._fragment))
            residual = zeros_like(difference)
        prefix = f'rounds/{self._number}/{author.name}/{author.attempt}'
        pieces, sent = link.write(prefix, numbers, link.section.encoding, residual)
        norm, anchor = self._norm(difference), link.digest(self._state.anchor)
        self._own = own = Contribution(
            name=author.name,
            attempt=author.attempt,
            base=self._number - 1,
            encoding=link.section.encoding,
            pieces=pieces,
            norm=norm,
            bytes=sent,
            anchor=anchor,
            **self._facts,
        )
        self._metrics = {'bytes_up': sent, 'seconds_up': time.monotonic() - began, 'norm': norm}

        def create() -> None:
            assert author.lease is not None
            try:
                author.lease.confirm()
            except LostError as error:
                raise UserError(f'another process is this island now: {error}\nonly one of them can train') from error
            link.rounds.contribute(own)

        link.from_process_0(create)
        return residual

    def _take(
        self, theta: HostWeights, sent: HostWeights, difference: HostWeights, residual: HostWeights | None
    ) -> Average | Newest:
        """Takes the round once it is closed. Raises DamagedPiecesError if it cannot be read."""
        link, began = self._link, time.monotonic()
        closed, mean = self._closed(theta)
        closing = closed.closing
        self._metrics |= {'round': self._number, 'members': len(closing.members), 'tokens': closing.tokens}
        self._metrics |= {'left_out': len(closing.left_out), 'rejected': len(closing.rejected)}
        self._metrics |= {'seconds_wait': time.monotonic() - began}
        if not closed.members:
            return self._instead(False, 'was closed without this island')
        began = time.monotonic()
        mean = mean or link.mean(closed.members, theta)
        gradient = mean.whole()
        metrics = self._metrics | self._compare(difference, gradient) | {'bytes_down': mean.bytes}
        weights, momentum = (
            mapped(np.copy, select(x, self._fragment)) for x in (self._state.anchor, self._state.momentum)
        )
        link.outer_step(weights, momentum, gradient)
        metrics |= {'distance': self._norm(mapped(np.subtract, weights, sent))}
        metrics |= {'seconds_down': time.monotonic() - began}
        return Average(self._number, weights, momentum, residual, closing, metrics)

    def _instead(self, only_anchors: bool, why: str) -> Newest:
        """The newest weights, instead of this round. Raises DamagedPiecesError if they cannot be read."""
        return dataclasses.replace(self._newest(self._link, only_anchors), why=why, metrics=self._metrics)

    def _closed(self, like: HostWeights) -> tuple[_Closed, Mean | None]:
        """Waits until the round is closed, by this island or by another one.

        Returns:
            The round; and the mean difference of its members, if this island has read it to close the round.
        """
        link, mean = self._link, None
        while isinstance(found := link.from_process_0(self._poll, _POLLED), Due):
            mean = link.mean(found.contributions, like)
            link.from_process_0(lambda due=found, bad=mean.bad: link.rounds.close(due, bad))
        return found, mean if mean is not None and not mean.bad and mean.contributions == found.members else None

    def _poll(self) -> Due | _Closed:
        """Waits until the round is closed or can be closed; in process 0."""
        rounds = self._link.rounds
        while isinstance(found := rounds.poll(self._number), Waiting):
            self._link.pause(found.pause)
        if isinstance(found, Due):
            return found
        assert self._own is not None
        return _Closed(found, rounds.members(found) if found.lists(self._own) else {})

    def _norm(self, weights: HostWeights) -> float:
        """The norm over all processes."""
        return self._link.decide(_dot(weights, weights), lambda squares: float(np.sqrt(sum(squares))))

    def _compare(self, own: HostWeights, mean: HostWeights) -> dict[str, float]:
        """The norm of the outer gradient, and the cosine between it and the island's own difference."""

        def compared(products: list[list[float]]) -> dict[str, float]:
            squared, product, of_mean = np.sum(products, axis=0)
            cosine = product / max(np.sqrt(squared * of_mean), 1e-30)
            return {'outer_norm': float(np.sqrt(of_mean)), 'cosine': float(cosine)}

        return self._link.decide([_dot(own, own), _dot(own, mean), _dot(mean, mean)], compared)


def _dot(one: HostWeights, other: HostWeights) -> float:
    """The inner product over the parts that this process owns, in f64."""
    return float(
        sum(
            np.vdot(array.parts[index].astype(np.float64), other[name].parts[index].astype(np.float64))
            for name, array in one.items()
            for index in array.own
        )
    )
