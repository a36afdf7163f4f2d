"""Closes rounds without a server: whoever creates `closed.json` of a round first has decided who is in it.

Every method makes its requests and returns: nothing waits. Each may raise OSError at any request, also if the request
was carried out, and may be called again. Clocks are never compared: patience is measured by the clock of one process.
"""

import contextlib
import dataclasses
import time
from collections import Counter
from collections.abc import Callable, Mapping

from pretrax.errors import Report
from pretrax.federation.objects import (
    Closing,
    Contribution,
    Member,
    ObjectError,
    Piece,
    State,
    Table,
    Taken,
    closing_path,
    contribution_path,
    island_path,
    read_closing,
    read_contribution,
    table_path,
)
from pretrax.federation.registry import Membership

_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 10.0  # seconds between two polls, which grow while nothing happens


@dataclasses.dataclass(frozen=True)
class Waiting:
    """A round is open. Attributes: who has contributed; who is waited for; seconds until the next poll."""

    contributed: tuple[str, ...]
    missing: tuple[str, ...]
    pause: float


@dataclasses.dataclass(frozen=True)
class Due:
    """A round can be closed, once its contributions are verified.

    Attributes:
        contributions: to be verified, by island, in the order of the shares.
        rejected: {name: reason} of those that cannot be read.
        left_out: islands that were waited for in vain.
    """

    round: int
    contributions: Mapping[str, Contribution]
    rejected: Mapping[str, str]
    left_out: tuple[str, ...]


@dataclasses.dataclass
class _Open:
    """What this process has seen of an open round."""

    since: float | None = None  # when it saw the first contribution
    found: dict[str, tuple[Contribution, str]] = dataclasses.field(default_factory=dict)  # with their digests
    damaged: dict[str, str] = dataclasses.field(default_factory=dict)
    pause: float = _FIRST_PAUSE


class Rounds:
    """The rounds of a federation, for process 0 of an island.

    Args:
        patience: seconds that a round waits for islands after its first contribution was seen here.
        wait_for: contributions that round 1 needs before its patience begins.

    Attributes:
        unused: numbers of this process that do not count, because an earlier one had contributed.
        may_delete: whether islands need no numbers of old rounds, since they take newer ones instead.
    """

    may_delete = True

    def __init__(
        self,
        membership: Membership,
        patience: float,
        report: Report,
        clock: Callable[[], float] = time.monotonic,
        wait_for: int = 1,
    ):
        self._membership, self._patience, self._report, self._clock = membership, patience, report, clock
        self._place, self._name, self._wait_for = membership.place, membership.name, wait_for
        self._closings: dict[int, Closing] = {}
        self._open: dict[int, _Open] = {}
        self._said: set[str] = set()
        self.unused: list[list[Piece]] = []

    def announce(self, number: int, state: str, took: Taken | None = None) -> None:
        """Says that this island trains for a round next, or that it has 'stopped' or 'finished'. Raises OSError.

        `took`: the newest round that it has taken.
        """
        content = State.model_validate({'round': number, 'state': state, 'took': took}).content()
        (island_path(self._place, self._name) / 'state.json').write_bytes(content)

    def contribute(self, contribution: Contribution) -> bool:
        """Creates the contribution of this island, unless it has one for the round.

        Returns:
            Whether the contribution that counts has learned the same as this one. If not, an earlier process of this
            island wrote it, and the island takes the round as if it were left out of it.

        Raises:
            OSError: it may be there, or not: call it again with the same contribution.
        """
        path = contribution_path(self._place, contribution.round, self._name)
        if path.create(contribution.content()):
            return True
        try:
            other = Contribution.read(path)
        except ObjectError as error:
            self._say(f'WARNING: island {self._name} cannot contribute to round {contribution.round}: {error}')
            return False
        if other is not None and other.attempt != contribution.attempt:
            self.unused.append(contribution.all_pieces())
        return other is not None and other.learned() == contribution.learned()

    def closing(self, number: int) -> Closing | None:
        """The closing of a round; None if it is open. Raises OSError, or ObjectError if it is damaged or foreign.

        A damaged one is not replaced, since another island may have read it whole: somebody has to remove it.
        """
        if number not in self._closings:
            closing = read_closing(self._place, number)
            if closing is None:
                return None
            self._closings[number] = closing
            self._open.pop(number, None)
        return self._closings[number]

    def undamaged_closing(self, number: int) -> Closing | None:
        """As `closing`; None for one that is damaged."""
        with contextlib.suppress(ObjectError):
            return self.closing(number)
        return None

    def is_closed(self, number: int) -> bool:
        """Whether there is a closing of a round, which may be damaged."""
        try:
            return self.closing(number) is not None
        except ObjectError:
            return True

    def forget(self, number: int) -> None:
        """Reads the closing of a round again when it is needed: somebody may have removed or restored it."""
        self._closings.pop(number, None)

    def newest(self, known: int = 0) -> int:
        """The newest round that is closed; 0 if none is. Rounds are closed one after another, and may be damaged.

        Args:
            known: a round that is closed, to begin with.
        """
        low, step = max([known, *self._closings]), 1
        while self.is_closed(low + step):
            low, step = low + step, 2 * step
        high = low + step  # open
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.is_closed(middle) else (low, middle)
        return low

    def is_left_out(self, number: int) -> bool:
        """Whether a round is closed without this island."""
        closing = self.undamaged_closing(number)
        return closing is not None and self._name not in closing.members

    def contributed(self, newest: int) -> int:
        """The end of the batches that this island has contributed, for one that has lost its state; 0: none.

        Args:
            newest: the newest round that is closed; there may be a contribution to the one after it.
        """
        if (island_path(self._place, self._name) / 'state.json').read_version().content is None:
            return 0  # a new island
        for number in range(newest + 1, 0, -1):
            try:
                own = read_contribution(self._place, number, self._name)
            except ObjectError:  # it was rejected
                continue
            if own is not None:
                return own[0].last_batch
        return 0

    def members(self, closing: Closing) -> dict[str, Contribution]:
        """The contributions of a round, in the order of their shares. Raises OSError, or ObjectError if one differs."""
        found = {}
        for name in closing.in_order():
            path = contribution_path(self._place, closing.round, name)
            if (read := read_contribution(self._place, closing.round, name)) is None:
                raise ObjectError(path, 'it was removed')
            contribution, digest = read
            if digest != closing.members[name].xxh3:
                raise ObjectError(path, f'it is not the contribution of island {name} that closed.json lists')
            found[name] = contribution
        return found

    def poll(self, number: int) -> Closing | Waiting | Due:
        """Looks whether a round is closed, and who has contributed to it.

        It makes a few small requests per island, and none for an island whose contribution it has seen.

        Raises:
            OSError: the bucket cannot be reached, or an object that nobody can replace is damaged.
        """
        if (closing := self.closing(number)) is not None:
            return closing
        seen = self._open.setdefault(number, _Open())
        before, missing = len(seen.found) + len(seen.damaged), []
        islands = self._islands()
        for name in islands:
            # An island may contribute and stop between the first two of these requests.
            has_contributed = self._has_contributed(number, name, seen)
            if not has_contributed and self._is_waited_for(number, name):
                missing.append(name)
            elif not has_contributed:
                self._has_contributed(number, name, seen)
        now, count = self._clock(), len(seen.found) + len(seen.damaged)
        is_begun = count >= (self._wait_for if number == 1 else 1)
        if count and not is_begun:
            who = ', '.join([*seen.found, *seen.damaged])
            problem = f'round 1 waits for {self._wait_for} islands (federation.wait_for)'
            self._say(f'federation: {problem}; contributions so far: {who}')
        if is_begun and seen.since is None:
            seen.since = now
        is_over = seen.since is not None and now - seen.since >= self._patience
        if is_begun and (not missing or is_over):
            bad = seen.damaged | self._astray(seen)
            contributions = {name: seen.found[name][0] for name in islands if name in seen.found and name not in bad}
            return Due(number, contributions, bad, tuple(missing))
        seen.pause = _FIRST_PAUSE if count > before else min(1.5 * seen.pause, _LONGEST_PAUSE)
        return Waiting(tuple(sorted(seen.found)), tuple(missing), seen.pause)

    def close(self, due: Due, bad: Mapping[str, str]) -> Closing:
        """Closes a round. If another island was faster, its closing counts.

        Args:
            bad: {name: reason} of the contributions whose numbers are damaged or not finite.

        Raises:
            OSError: it may be closed, or not: call `poll` again.
        """
        number, seen, shares = due.round, self._open.get(due.round, _Open()), self._islands()
        members = {
            name: Member(
                share=shares[name],
                xxh3=seen.found[name][1],
                learned=contribution.learned(),
                tokens=contribution.tokens,
                step=contribution.step,
            )
            for name, contribution in due.contributions.items()
            if name not in bad
        }
        before = self.undamaged_closing(number - 1) if number > 1 else None
        steps = [member.step for member in members.values()] + ([before.step] if before is not None else [0])
        closing = Closing(
            round=number,
            by=self._name,
            members=members,
            rejected={name: reason[:500] for name, reason in sorted({**due.rejected, **bad}.items())},
            left_out=list(due.left_out),
            tokens=sum(member.tokens for member in members.values()),
            step=max(steps),
        )
        closing_path(self._place, number).create(closing.content())
        written = self.closing(number)
        if written is None:
            raise ObjectError(closing_path(self._place, number), 'it was removed')
        return written

    def _islands(self) -> dict[str, int]:
        """The share of each island, in the order of the shares."""
        path = table_path(self._place)
        table = Table.read(path)
        if table is None:
            raise ObjectError(path, 'it was removed')
        return dict(sorted(table.islands.items(), key=lambda item: item[1]))

    def _has_contributed(self, number: int, name: str, seen: _Open) -> bool:
        """Whether there is a contribution of an island, which is read once."""
        if name in seen.found or name in seen.damaged:
            return True
        try:
            found = read_contribution(self._place, number, name)
            if found is None:
                return False
            seen.found[name] = found
        except ObjectError as error:
            seen.damaged[name] = str(error)
        return True

    def _astray(self, seen: _Open) -> dict[str, str]:
        """Contributions that are not finite, or begin at other weights than most; of as many, than this island's."""
        anchors = Counter(contribution.anchor for contribution, _ in seen.found.values())
        own = seen.found[self._name][0].anchor if self._name in seen.found else ''
        usual = max(anchors, key=lambda anchor: (anchors[anchor], anchor == own, anchor), default='')
        reason = f'it begins at other weights (digest {{}}) than those of the other islands ({usual})'
        astray = {name: reason.format(one.anchor) for name, (one, _) in seen.found.items() if one.anchor != usual}
        finite = {name: one.is_finite for name, (one, _) in seen.found.items()}
        return astray | {name: f'the difference of island {name} is not finite' for name in finite if not finite[name]}

    def _is_waited_for(self, number: int, name: str) -> bool:
        try:
            state = State.read(island_path(self._place, name) / 'state.json')
        except ObjectError as error:
            self._say(f'WARNING: nobody waits for island {name}: {error}')
            return False
        before = self.undamaged_closing(number - 1) if number > 1 else None
        return is_waited_for(name, state, number, before)

    def _say(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._report(text)


def is_waited_for(name: str, state: State | None, number: int, before: Closing | None) -> bool:
    """Whether an island will contribute to an open round. `before`: the closing before it; None: there is none."""
    if state is None or state.state != 'training' or state.round > number:
        return False
    return state.round == number or (before is not None and name in before.members)  # it may have an older state now
