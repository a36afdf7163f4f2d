"""Courses of an island: the processes that a replay starts one after another to repeat what the island did.

A process that went on from an earlier state, or from none, begins a new course. What it did then is a list of events
in its next contribution.
"""

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import pydantic

from pretrax.federation.objects import Closing, Contribution, Event, Table


class Course(pydantic.BaseModel):
    """The steps, rounds and contributions that one process of an island repeats.

    Attributes:
        of: the round of the first contribution that tells of it, which also says how many devices it had.
        start: the step of the state that it goes on from; 0: a new one.
        batch: that it goes on with after a rollback; None: no rollback.
        enters: whether it replaces its weights when it goes on; a new state always does.
        contributes: the rounds to which it contributes.
        entered: the rounds that it enters, one after another.
        dropped: rounds that have what it has learned, and could not be read; it entered another one instead.
        late: {round: the step at which it takes the round, or finds that it was left out}, if that is later than usual.
    """

    of: int = 1
    start: int = 0
    batch: int | None = None
    enters: bool = False
    contributes: list[int] = []
    entered: list[int] = []
    dropped: list[int] = []
    late: dict[int, int] = {}


class _Point(NamedTuple):
    """A step from which the steps until the next contribution count: a round was taken, or contributed to."""

    step: int
    round: int
    is_contribution: bool = False
    is_member: bool = False


class _Reader:
    """Follows the contributions of an island, and makes courses of them.

    Attributes:
        points: those that led to the newest state, the oldest first.
        made: {round: the number of the course that contributes to it}.
        now: the round whose contribution is read.
    """

    def __init__(self, table: Table, first: int):
        terms = {key: value for key, value in table.terms.items() if isinstance(value, int)}
        self.apart = terms.get('federation.every', 1) // terms.get('federation.fragments', 1)
        self.delay, self.steps = terms.get('federation.delay', 0), terms.get('steps', 1 << 60)
        self.courses, self.points, self.made = [Course(of=first, entered=[0])], [_Point(0, 0)], dict[int, int]()
        self.now = first

    def contributed(self, number: int, one: Contribution | None, closing: Closing | None) -> None:
        self.courses[-1].contributes.append(number)
        self.made[number] = len(self.courses) - 1
        step = one.step if one is not None else min(self.points[-1].step + self.apart, self.steps)
        is_member = one is not None and closing is not None and closing.lists(one)
        self.points.append(_Point(step, number, is_contribution=True, is_member=is_member))

    def happened(self, event: Event) -> None:
        if event.kind == 'rolled back':
            self._go_back(event.own, event.batch)
        elif event.kind == 'changed':
            self._go_back(event.own)
        elif event.kind == 'took':
            self._take(event.round, event.step)
        else:
            self._enter(event)

    def _take(self, number: int, step: int) -> None:
        places = [i for i, one in enumerate(self.points) if one.is_contribution and one.round == number]
        if places and places[-1] < len(self.points) - 1:  # an earlier process took it in time, in vain
            self._go_back(self.points[places[-1] - 1].step)
        self._hold(number, step)
        self.points.append(_Point(step, number))

    def _enter(self, event: Event) -> None:
        if event.waited:
            if event.own < self.points[-1].step:
                self._go_back(event.own)
            last, course = self.points[-1], self.courses[-1]
            is_own = last.is_contribution and last.round == event.waited
            if event.own > self.delay + (last.step if is_own else min(last.step + self.apart, self.steps)):
                self._hold(event.waited, event.own)
            course.entered.append(event.round)
            course.dropped += [event.waited] if is_own and last.is_member else []
        else:
            self._go_back(event.own)
            self.courses[-1].enters, self.courses[-1].entered = True, [event.round]
        self.points.append(_Point(event.step, event.round))

    def _hold(self, number: int, step: int) -> None:
        """A round is taken late, by all courses since the contribution."""
        for course in self.courses[self.made.get(number, 0) :]:
            course.late.setdefault(number, step)

    def _go_back(self, start: int, batch: int | None = None) -> None:
        last = self.courses[-1]
        if batch is None and start == last.start and not (last.contributes or last.late or any(last.entered)):
            return  # it has just gone back there
        self.points = [_Point(0, 0), *(one for one in self.points[1:] if one.step <= start and start)]
        self.courses.append(Course(of=self.now, start=start, batch=batch, entered=[] if start else [0]))


def courses_of(
    table: Table, contributions: Mapping[int, Contribution | None], closings: Mapping[int, Closing]
) -> list[Course]:
    """The courses of an island. `contributions`: all of them, by round; None: one that is damaged."""
    reader, before = _Reader(table, min(contributions)), list[Event]()
    for number, one in contributions.items():
        reader.now, events = number, [] if one is None else one.events
        known = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, events, strict=False))
        for event in events[sum(1 for _ in known) :]:
            reader.happened(event)
        reader.contributed(number, one, closings.get(number))
        before = events
    return reader.courses
