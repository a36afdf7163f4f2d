"""One round of a federation, in the background: sends what an island has learned, and computes the new weights."""

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pretrax.errors import UserError
from pretrax.federation.fragments import Fragment
from pretrax.federation.host_weights import HostWeights, mapped, select, zeros_like
from pretrax.federation.island_state import IslandState
from pretrax.federation.link import Author, Link, StoppedError
from pretrax.federation.objects import Contribution
from pretrax.federation.rounds import Due, Waiting
from pretrax.storage.lease import LostError

_PATIENCE = 10.0  # seconds for which a bucket may be out of reach before an island that waits goes on


@dataclasses.dataclass
class Outcome:
    """A round that is closed, as this island takes it: the new values of a fragment, or of all weights.

    Attributes:
        round: its number; a later one if the island was left out.
        step, batch: where the island goes on, at least.
        is_member: whether it has what the island has learned.
        is_closer: whether the island has closed it.
        at_end: how many rounds up to this one came after the last step.
        metrics: of the round.
    """

    round: int
    step: int
    batch: int
    anchor: HostWeights
    momentum: HostWeights
    residual: HostWeights | None = None
    is_member: bool = False
    is_closer: bool = False
    at_end: int = 0
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)


class Exchange:
    """A round in the background of all processes of an island.

    Args:
        facts: of the contribution, without its numbers; `round` among them.
        state: of the island, which stays as it is meanwhile; `sent` is what it contributes.
        catch_up: weights, momentum, step and batch of the newest round for an island that was left out.
    """

    def __init__(
        self,
        link: Link,
        author: Author,
        facts: dict[str, Any],
        fragment: Fragment,
        state: IslandState,
        catch_up: Callable[[Link], Outcome],
    ):
        self._link, self._author, self._facts = link, author, facts
        self._fragment, self._state, self._catch_up = fragment, state, catch_up
        self._error: BaseException | None = None
        self._taken: Outcome | None = None
        self._thread = threading.Thread(target=self._run, name='federation', daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    @property
    def is_out_of_reach(self) -> bool:
        """Whether the island goes on without the bucket, which has been out of reach for longer than it waits."""
        since = self._link.down_since
        return since is not None and time.monotonic() - since > _PATIENCE

    @property
    def problem(self) -> str:
        """Why the bucket is out of reach."""
        return self._link.problem

    def wait(self, seconds: float) -> bool:
        """Waits until the round is taken, at most for some seconds. Returns whether it is."""
        self._thread.join(seconds)
        return self.is_done

    def result(self) -> Outcome:
        """The round, if it is done. Raises UserError if it cannot be computed."""
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

    def _exchange(self) -> Outcome:
        number, link, began = self._facts['round'], self._link, time.monotonic()
        theta, sent = select(self._state.anchor, self._fragment), select(self._state.sent, self._fragment)
        difference = mapped(np.subtract, theta, sent)
        numbers, residual = difference, None
        if self._state.residual is not None:
            numbers = mapped(np.add, difference, select(self._state.residual, self._fragment))
            residual = zeros_like(difference)
        name, attempt = self._author.name, self._author.attempt
        prefix = f'rounds/{number}/{name}/{attempt}'
        pieces, sent_bytes = link.write(prefix, numbers, link.section.encoding, residual)
        norm, digest = self._norm(difference), link.digest(self._state.anchor)
        up, began = time.monotonic() - began, time.monotonic()

        def contribution() -> Contribution:
            facts = {'name': name, 'attempt': attempt, 'base': number - 1, 'encoding': link.section.encoding}
            more = {'pieces': pieces, 'norm': norm, 'bytes': sent_bytes, 'anchor': digest}
            return Contribution(**self._facts, **facts, **more)

        is_member, members, closing, found = self._closed(number, contribution, theta)
        waited, began = time.monotonic() - began, time.monotonic()
        metrics = {'round': number, 'members': len(closing['members']), 'tokens': closing['tokens']}
        metrics |= {'left_out': len(closing['left_out']), 'rejected': len(closing['rejected'])}
        metrics |= {'bytes_up': sent_bytes, 'seconds_up': up, 'seconds_wait': waited, 'norm': norm}
        if not is_member:
            return dataclasses.replace(self._catch_up(link), metrics=metrics)
        gradient, received = found or link.outer_gradient(number, members, theta)
        metrics |= self._compare(difference, gradient) | {'bytes_down': received}
        theta, momentum = (
            mapped(np.copy, select(x, self._fragment)) for x in (self._state.anchor, self._state.momentum)
        )
        link.outer_step(theta, momentum, gradient)
        metrics |= {'distance': self._norm(mapped(np.subtract, theta, sent))}
        metrics |= {'seconds_down': time.monotonic() - began}
        is_closer = closing['by'] == name
        return Outcome(
            number, closing['step'], 0, theta, momentum, residual, is_member=True, is_closer=is_closer, metrics=metrics
        )

    def _closed(
        self, number: int, own: Callable[[], Contribution], like: HostWeights
    ) -> tuple[bool, list[Any], Any, tuple[HostWeights, int] | None]:
        """Contributes, and waits until the round is closed, by this island or by another one.

        Returns:
            Whether the round has what this island has learned; its members; its closing; and the mean difference of
            these members with the bytes read, if this island has read them to close the round.
        """
        rounds, link, due = self._author.rounds, self._link, dict[str, Due]()
        contribution = own() if rounds is not None else None

        def contribute() -> None:
            assert rounds is not None
            assert contribution is not None
            assert self._author.lease is not None
            try:
                self._author.lease.confirm()
            except LostError as error:
                raise UserError(f'another process is this island now: {error}\nonly one of them can train') from error
            rounds.contribute(contribution)

        def poll() -> Any:
            assert rounds is not None
            found = rounds.poll(number)
            while isinstance(found, Waiting):
                if link.stopped.wait(found.pause):
                    raise StoppedError
                found = rounds.poll(number)
            if isinstance(found, Due):
                due['now'] = found
                return ['check', listed(found.contributions)]
            assert contribution is not None
            members = listed(rounds.members(found))
            return ['closed', [found.lists(contribution), members, found.model_dump(mode='json')]]

        link.from_process_0(contribute)
        read: dict[str, Any] = {}  # the members whose mean difference is known, and that
        while True:
            what, value = link.from_process_0(poll)
            if what == 'closed':
                is_member, members, closing = value
                return is_member, members, closing, read['mean'] if read.get('members') == members else None
            *mean, bad = link.mean(number, value, like)

            def close(bad: dict[str, str] = bad) -> bool:
                assert rounds is not None
                rounds.close(due['now'], bad)
                return not bad

            read = {'members': value, 'mean': mean} if link.from_process_0(close) else {}

    def _norm(self, weights: HostWeights) -> float:
        """The norm over all processes, in process 0; 0 in the others."""
        return float(np.sqrt(sum(self._link.gather(dot(weights, weights)))))

    def _compare(self, own: HostWeights, mean: HostWeights) -> dict[str, float]:
        """The norm of the outer gradient, and the cosine between it and the island's own difference."""
        gathered = self._link.gather([dot(own, own), dot(own, mean), dot(mean, mean)])
        squared, product, of_mean = np.sum(gathered, axis=0) if gathered else (1.0, 0.0, 1.0)
        return {
            'outer_norm': float(np.sqrt(of_mean)),
            'cosine': float(product / max(np.sqrt(squared * of_mean), 1e-30)),
        }


def listed(contributions: Mapping[str, Contribution]) -> list[Any]:
    """Name, tokens and pieces of each, as JSON."""
    return [[name, one.tokens, one.model_dump(mode='json')['pieces']] for name, one in contributions.items()]


def dot(one: HostWeights, other: HostWeights) -> float:
    """The inner product over the parts that this process owns, in f64."""
    return float(
        sum(
            np.vdot(array.parts[index].astype(np.float64), other[name].parts[index].astype(np.float64))
            for name, array in one.items()
            for index in array.own
        )
    )
