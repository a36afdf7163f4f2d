"""Anchors: the weights and the momentum after some rounds, from which islands come in and catch up.

The founder writes those of round 0. Whoever closes a round N that `federation.keep` divides writes those of round N.
"""

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pydantic

from pretrax.federation import differences
from pretrax.federation.differences import DamagedPiecesError
from pretrax.federation.fragments import Fragment
from pretrax.federation.host_weights import HostWeights, mapped, select, zeros_like
from pretrax.federation.island_state import IslandState
from pretrax.federation.link import Link
from pretrax.federation.objects import (
    Contribution,
    Name,
    ObjectError,
    Piece,
    Stored,
    anchor_path,
    closing_path,
)
from pretrax.storage.shared_path import ConditionalPath

_LOOK = 0.5  # seconds between two looks for the first weights


class Anchor(Stored):
    """anchors/N/anchor.json: where the weights and the momentum after a round are. No momentum: it is 0."""

    largest = 64 << 20

    round: int
    by: Name
    weights: list[Piece]
    momentum: list[Piece]


_ANCHOR: pydantic.TypeAdapter[Anchor | None] = pydantic.TypeAdapter(Anchor | None)
_MEMBERS: pydantic.TypeAdapter[dict[str, Contribution]] = pydantic.TypeAdapter(dict[str, Contribution])


@dataclasses.dataclass
class Newest:
    """All weights and the momentum after the newest round that can be read.

    Attributes:
        step, batch: where an island goes on that takes them, at least.
        at_end: as `Position.at_end`.
        why: the island takes them instead of the round that it waits for.
        metrics: of that round.
    """

    round: int
    step: int
    batch: int
    at_end: int
    weights: HostWeights
    momentum: HostWeights
    why: str = ''
    metrics: dict[str, Any] = dataclasses.field(default_factory=dict)


def write_first(link: Link, weights: HostWeights) -> None:
    """Returns when there are weights of round 0.

    They are those of the founder, or, if it ends before it has written them, those of an island that has waited for
    them for `federation.patience`.
    """
    end, is_told = time.monotonic() + link.section.patience, False
    while not _is_there(link, 0):
        if link.author.is_founder or link.from_process_0(lambda: time.monotonic() > end):
            write(link, 0, weights, weights)
            return
        if not is_told:
            link.report('waiting for the weights of the island that has made the federation')
        is_told = True
        time.sleep(_LOOK)


def write(link: Link, number: int, weights: HostWeights, momentum: HostWeights) -> None:
    """Writes the weights and the momentum after a round, unless they are there."""
    if _is_there(link, number):
        return
    prefix = f'anchors/{number}/{link.author.attempt}'
    kinds = {'weights': weights, **({'momentum': momentum} if number else {})}
    written = {kind: link.write(f'{prefix}/{kind}', values, 'f32')[0] for kind, values in kinds.items()}
    pieces = {kind: [piece for one in each.values() for piece in one] for kind, each in written.items()}
    anchor = Anchor.model_validate({'round': number, 'by': link.author.name, 'momentum': [], **pieces})
    link.from_process_0(lambda: description_path(link.place, number).create(anchor.content()))


def newest(
    link: Link,
    fragments: Sequence[Fragment],
    steps: int,
    known: int,
    state: IslandState,
    only_anchors: bool = False,
) -> Newest:
    """The weights and the momentum after the newest round that can be read.

    They are computed from the newest whole anchor, or else from the island's own state, and the rounds since.

    Args:
        steps: of the run.
        known: the round after which the island's own state is; -1: before all rounds.
        only_anchors: whether the round after `known` cannot be read.

    Raises:
        DamagedPiecesError: no later round can be read. The message names an object.
    """
    last = -1
    while True:
        before, last = last, link.from_process_0(lambda: link.rounds.newest(max(0, known)))
        try:
            found = _at_most(link, fragments, steps, known, state, only_anchors=only_anchors, last=last)
        except DamagedPiecesError:
            if before == last:
                raise
            continue  # another island may have deleted what was read, since there is a newer anchor
        if found.round == last or before == last:
            return found


def _at_most(
    link: Link,
    fragments: Sequence[Fragment],
    steps: int,
    known: int,
    state: IslandState,
    only_anchors: bool,
    last: int,
) -> Newest:
    """As `newest`, of a round up to the last one that is closed."""
    weights, momentum, base = state.anchor, state.momentum, known
    problem = f'there is no anchor after round {known}'
    for number in range(last - last % link.section.keep, known, -link.section.keep):
        try:
            found = _read(link, number, state.anchor)
        except DamagedPiecesError as error:
            problem = str(error)
            continue
        if found is not None:
            (weights, momentum), base = found, number
            break
    if base == known:
        if only_anchors or known < 0:
            raise DamagedPiecesError(problem)
        weights, momentum = mapped(np.copy, weights), mapped(np.copy, momentum)
    reached = base
    try:
        for number in range(base + 1, last + 1):
            _add_round(link, number, fragments[(number - 1) % len(fragments)], weights, momentum)
            reached = number
    except DamagedPiecesError as error:
        problem = str(error)
    if reached == known:
        raise DamagedPiecesError(problem)
    step, batch, at_end = link.from_process_0(lambda: _where(link, reached, last, len(fragments), steps))
    return Newest(reached, step, batch, at_end, weights, momentum)


def _add_round(link: Link, number: int, fragment: Fragment, weights: HostWeights, momentum: HostWeights) -> None:
    """Takes a round, in place. Raises DamagedPiecesError before it changes anything."""

    def members() -> dict[str, Contribution]:
        closing = link.rounds.closing(number)
        if closing is None:
            raise ObjectError(closing_path(link.place, number), 'it was removed')
        return link.rounds.members(closing)

    contributions = link.from_process_0(members, _MEMBERS)
    if contributions:
        theta = select(weights, fragment)
        link.outer_step(theta, select(momentum, fragment), link.mean(contributions, theta).whole())


def _where(link: Link, number: int, last: int, fragments: int, steps: int) -> tuple[int, int, int]:
    """The step of a round; the first batch that the island has not contributed up to the round after the last one; and
    `Position.at_end`.
    """
    closings = [link.rounds.undamaged_closing(n) for n in range(max(0, number - fragments) + 1, number + 1)]
    newest = closings[-1] if closings else None
    at_end = sum(closing is not None and closing.is_after(steps) for closing in closings)
    return newest.step if newest else 0, link.rounds.contributed(last) if last else 0, at_end


def description_path(place: ConditionalPath, number: int) -> ConditionalPath:
    """The path of an `Anchor`."""
    return anchor_path(place, number) / 'anchor.json'


def _is_there(link: Link, number: int) -> bool:
    return link.from_process_0(lambda: description_path(link.place, number).read_version().content is not None)


def _read(link: Link, number: int, like: HostWeights) -> tuple[HostWeights, HostWeights] | None:
    """The weights and the momentum of an anchor; None: there is none, or its round is open.

    Raises DamagedPiecesError, also if the closing of its round is damaged.
    """

    def described() -> Anchor | None:
        is_closed = number == 0 or link.rounds.closing(number) is not None
        return Anchor.read(description_path(link.place, number)) if is_closed else None

    def read() -> tuple[HostWeights, HostWeights]:
        assert anchor is not None
        weights, momentum = zeros_like(like), zeros_like(like)
        for kind, pieces, into in (('weights', anchor.weights, weights), ('momentum', anchor.momentum, momentum)):
            if pieces:
                author = f'the {kind} after round {number}, which island {anchor.by} wrote'
                differences.read(link.place, pieces, into, author)
        return weights, momentum

    anchor = link.from_process_0(described, _ANCHOR)
    return None if anchor is None else link.together(read)
