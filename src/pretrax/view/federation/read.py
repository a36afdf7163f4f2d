"""A federation as the objects in its bucket describe it: its islands and its rounds. Nothing here writes.

All keys are known, as in `federation.objects`, so other objects in the bucket are not seen. A damaged object is a
problem for people, and no error.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from pretrax.federation.objects import (
    Closing,
    Contribution,
    ObjectError,
    State,
    Table,
    Taken,
    contribution_path,
    island_path,
    read_closing,
    read_contribution,
)
from pretrax.federation.registry import read_table
from pretrax.federation.rounds import is_waited_for
from pretrax.observe.attempts import FINISHED, LOST, RUNNING, STOPPED
from pretrax.observe.attempts import State as RunState
from pretrax.storage import AnyPath, lease
from pretrax.storage.shared_path import ConditionalPath, shared

NEWEST = 32  # rounds that a list reads
_AT_ONCE = 32  # requests
_LARGEST_BATCH = 32  # closings that are asked for at once
_TRAINING, _WAITING, _UNREADABLE, _SILENT = 'training', 'waiting', 'unreadable', 'silent'


@dataclasses.dataclass(frozen=True)
class Round:
    """A round. `closing`: None while it is open. `contributions`: those in it, and those that count for nothing."""

    number: int
    closing: Closing | None
    contributions: Mapping[str, Contribution]

    @property
    def members(self) -> list[Contribution]:
        """The contributions in it, as far as they were read, in the order of the shares."""
        names = self.closing.in_order() if self.closing is not None else []
        return [self.contributions[name] for name in names if name in self.contributions]

    @property
    def tokens(self) -> dict[str, int]:
        """{island: tokens in it}, by share. A contribution after the last step weighs one token, but trained none."""
        idle = {name for name, one in self.contributions.items() if one.first_batch == one.last_batch}
        members = self.closing.members if self.closing is not None else {}
        names = self.closing.in_order() if self.closing is not None else []
        return {name: 0 if name in idle else members[name].tokens for name in names}

    @property
    def left_out(self) -> dict[str, int]:
        """{island: tokens that it has trained for this round in vain}."""
        counted = self.closing.members if self.closing is not None else self.contributions
        return {name: one.tokens for name, one in self.contributions.items() if name not in counted}


@dataclasses.dataclass(frozen=True)
class Island:
    """An island. None: not known.

    Attributes:
        state: 'training', 'stopped' or 'finished'; 'waiting': it has not trained yet; 'lost': it has not said that it
            ended, and no process has its lease; 'silent': its process does not renew its lease; 'unreadable'.
        holder: the process that has its lease, and since when; '': none.
        round: that it trains for.
        step: of its newest contribution, and `loss` its mean since the one before.
        used, left_out: tokens in rounds, and tokens trained in vain.
        late, rejected: how many rounds were closed without it because it was late, and because of damaged numbers.
    """

    name: str
    share: int
    state: str
    holder: str
    round: int | None
    step: int | None
    loss: float | None
    used: int
    left_out: int
    late: int
    rejected: int


@dataclasses.dataclass(frozen=True)
class Federation:
    """A federation.

    Attributes:
        rounds: the closed ones, oldest first; all of them, or the newest.
        opened: the round that is open, with its contributions, and `waits_for` the islands that it waits for.
        taken: what islands have found in the newest rounds.
        problems: damaged objects.
    """

    table: Table
    islands: Sequence[Island]
    rounds: Sequence[Round]
    opened: Round
    waits_for: Sequence[str]
    taken: Sequence[Taken]
    problems: Sequence[str]

    @property
    def config(self) -> str:
        """The key of the configuration of its first island."""
        return f'islands/{self.islands[0].name}/config.yaml'

    @property
    def state(self) -> tuple[RunState, str]:
        """The state of the whole, as that of a run, and how many islands train."""
        states = [island.state for island in self.islands]
        training = states.count(_TRAINING)
        why = f'{training} of {len(states)} islands train'
        if training:
            return RUNNING, why
        if set(states) == {FINISHED}:
            return FINISHED, ''
        return (LOST if {LOST, _SILENT} & set(states) else STOPPED), why


class Silence:
    """Finds islands whose machine has vanished: the lease stays as it is while this process watches it.

    Clocks of machines are never compared. An island renews its lease four times in the time for which it is valid.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock, self._seen = clock, dict[str, tuple[lease.Renewal, float]]()

    @property
    def wait(self) -> float:
        """Seconds after which an island is silent that was seen."""
        return max((seen.seconds / 2 for seen, _ in self._seen.values() if seen.holder), default=0.0)

    def includes(self, name: str, renewal: lease.Renewal) -> bool:
        """Whether an island is silent whose lease was read now."""
        now = self._clock()
        if self._seen.get(name, (None, 0.0))[0] != renewal:
            self._seen[name] = renewal, now
        return now - self._seen[name][1] >= renewal.seconds / 2


def read_federation(
    path: AnyPath,
    first: int = 1,
    newest: int | None = None,
    detailed: int | None = None,
    silence: Silence | None = None,
) -> Federation:
    """Reads a federation.

    Args:
        first: the first round to read. The one before it is closed.
        newest: about how many rounds to read; None: all.
        detailed: in how many of these to read all contributions; None: in all. In the others, only those are read that
            count for nothing.
        silence: what earlier calls have seen; None: no island is silent.

    Raises:
        UserError: there is none, or its table cannot be read.
        OSError: the bucket is out of reach.
    """
    place = shared(path)
    table, problems = read_table(place), list[str]()
    with ThreadPoolExecutor(_AT_ONCE, 'federation') as pool:
        states = dict(zip(table.islands, pool.map(functools.partial(_state, place), table.islands), strict=True))
        holders = dict(zip(table.islands, pool.map(functools.partial(_holder, place), table.islands), strict=True))
        known = max((state.round for state in states.values() if isinstance(state, State)), default=1)
        first = first if newest is None else max(1, known - newest)
        closings = [*closings_from(place, first, problems)]
        if not closings and newest is not None and first > 1:  # an island names a round that does not exist
            closings = [*closings_from(place, first := 1, problems)]
        since = 0 if detailed is None else len(closings) - detailed

        def read(place_in_list: int) -> Round:
            closing = closings[place_in_list]
            names = [name for name in table.islands if place_in_list >= since or name not in closing.members]
            return read_round(place, closing.round, closing, names, problems)

        rounds = list(pool.map(read, range(len(closings))))
    before = closings[-1] if closings else next(closings_from(place, first - 1, problems), None) if first > 1 else None
    number = first if before is None else before.round + 1
    opened = read_round(place, number, None, table.islands, problems)
    waits_for = [
        name
        for name, state in states.items()
        if name not in opened.contributions
        and is_waited_for(name, state if isinstance(state, State) else None, number, before)
    ]
    problems += [state for state in states.values() if isinstance(state, str)]
    known_rounds = [*rounds, opened]
    islands = [_island(name, table, states[name], holders[name], silence, known_rounds) for name in table.islands]
    taken = [state.took for state in states.values() if isinstance(state, State) and state.took is not None]
    return Federation(
        table=table,
        islands=sorted(islands, key=lambda one: one.share),
        rounds=rounds,
        opened=opened,
        waits_for=waits_for,
        taken=taken,
        problems=sorted(set(problems)),
    )


def closings_from(place: ConditionalPath, first: int, problems: list[str]) -> Iterator[Closing]:
    """The closings of a round and those after it, up to one that is open or damaged. Raises OSError."""

    def read(number: int) -> Closing | None:
        try:
            return read_closing(place, number)
        except ObjectError as error:
            problems.append(str(error))
            return None

    size = 1
    with ThreadPoolExecutor(_LARGEST_BATCH, 'federation') as pool:
        while True:
            for closing in pool.map(read, range(first, first + size)):
                if closing is None:
                    return
                yield closing
            first, size = first + size, min(2 * size, _LARGEST_BATCH)


def read_round(
    place: ConditionalPath, number: int, closing: Closing | None, names: Iterable[str], problems: list[str]
) -> Round:
    """A round with the contributions of these islands. Raises OSError."""
    members, rejected = (closing.members, closing.rejected) if closing is not None else ({}, {})
    contributions = {}
    for name in names:
        try:
            if (read := read_contribution(place, number, name)) is None:
                continue
            contribution, digest = read
            if name in members and digest != members[name].xxh3:
                path = contribution_path(place, number, name)
                raise ObjectError(path, 'it is not the contribution that closed.json lists')
            contributions[name] = contribution
        except ObjectError as error:
            problems += [str(error)] if name not in rejected else []
    return Round(number, closing, contributions)


def _state(place: ConditionalPath, name: str) -> State | str | None:
    """What an island says that it does; None: nothing yet; a text: what is wrong with it."""
    try:
        return State.read(island_path(place, name) / 'state.json')
    except ObjectError as error:
        return str(error)


def _holder(place: ConditionalPath, name: str) -> lease.Renewal:
    path = island_path(place, name)
    renewal = lease.renewal_of(path / lease.FILE)
    return renewal._replace(holder=renewal.holder.removeprefix(f'{path} is held by '))


def _island(
    name: str,
    table: Table,
    state: State | str | None,
    renewal: lease.Renewal,
    silence: Silence | None,
    rounds: Sequence[Round],
) -> Island:
    holder, is_silent = renewal.holder, silence is not None and silence.includes(name, renewal)
    known = state if isinstance(state, State) else None
    closings = [one.closing for one in rounds if one.closing is not None]
    own = [one.contributions[name] for one in rounds if name in one.contributions]
    steps = [one.step for one in own] + [one.members[name].step for one in closings if name in one.members]
    named = known.state if known is not None else _WAITING if state is None else _UNREADABLE
    return Island(
        name=name,
        share=table.islands[name],
        state=named if named != _TRAINING else LOST if not holder else _SILENT if is_silent else named,
        holder=holder,
        round=known.round if known is not None else None,
        step=max(steps, default=None),
        loss=own[-1].loss if own else None,
        used=sum(one.tokens.get(name, 0) for one in rounds),
        left_out=sum(one.left_out.get(name, 0) for one in rounds),
        late=sum(name in one.left_out for one in closings),
        rejected=sum(name in one.rejected for one in closings),
    )
