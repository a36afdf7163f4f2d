"""Repeats a federation from what its bucket recorded: every island learns the same again, bit for bit.

A directory takes the place of the bucket. It has the table of the federation, and its closings below `recorded/`. The
islands train from their recorded configurations, each round has the members that it had, however fast they are now, and
what has happened to an island happens again (`course.py`).
"""

import contextlib
import dataclasses
import errno
import math
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from pretrax.checkpoint import steps_in
from pretrax.config.schema import Federation
from pretrax.errors import Report, UserError
from pretrax.federation.anchors import description_path
from pretrax.federation.course import Course, courses_of
from pretrax.federation.objects import (
    Closing,
    Contribution,
    ObjectError,
    Table,
    closing_path,
    config_path,
    contribution_path,
    read_closing,
    read_contribution,
    table_path,
)
from pretrax.federation.registry import Membership, read_table
from pretrax.federation.rounds import Due, Rounds, Waiting
from pretrax.storage.shared_path import ConditionalPath, SharedPath
from pretrax.system.children import Child, prepare_training
from pretrax.system.json_file import read_entries

_RECORDED = 'recorded'
_LOOK = 0.2  # seconds between two looks
# A replay neither closes rounds by itself nor goes back by itself, and tells nobody.
_CHANGES = (
    'federation.patience=1e9',
    'faults.rollback_after=0',
    'faults.time_limit_minutes=null',
    'checkpoint.memory.every=0',
    'checkpoint.keep=1000000',
    *(f'log.{tracker}=null' for tracker in ('notify.url', 'notify.command', 'wandb', 'mlflow', 'trackio')),
)


class ReplayedRounds(Rounds):
    """The rounds of an island of a replay: each is closed as it was, once all its members have contributed.

    Args:
        course: what this process has to repeat.
    """

    may_delete = False  # an island takes the rounds that it took, however far the others are

    def __init__(self, membership: Membership, report: Report, course: Course):
        super().__init__(membership, math.inf, report)
        self._course, self._entered = course, 0

    def poll(self, number: int) -> Closing | Waiting | Due:
        """The closing of a round, or who is missing. Raises OSError."""
        if (closing := self.closing(number)) is not None:
            members = {name: one for name, one in closing.members.items() if name != self._name}
            return closing.model_copy(update={'members': members}) if number in self._course.dropped else closing
        recorded = read_closing(self._place / _RECORDED, number)
        names = [] if recorded is None else recorded.in_order()
        read = {name: read_contribution(self._place, number, name) for name in names}
        missing = tuple(name for name, found in read.items() if found is None)
        if recorded is None or missing:
            return Waiting((), missing, _LOOK)
        members = {
            name: recorded.members[name].model_copy(update={'xxh3': digest, 'learned': contribution.learned()})
            for name, (contribution, digest) in ((name, found) for name, found in read.items() if found is not None)
        }
        closing_path(self._place, number).create(recorded.model_copy(update={'members': members}).content())
        return self.poll(number)

    def is_left_out(self, number: int) -> bool:
        """Whether the island was left out of the round when it came back."""
        return self._course.enters

    def newest(self, known: int = 0) -> int:
        """The round that the island entered. Raises OSError until it is closed again."""
        more = self._course.entered[self._entered :]
        if not more or (more[0] and not isinstance(self.poll(more[0]), Closing)):
            raise self._not_yet(f'round {more[0]}' if more else 'what follows')
        self._entered += 1
        return more[0]

    def contribute(self, contribution: Contribution) -> bool:
        """Creates the contribution, if this process did so. Raises OSError if it did not."""
        number = contribution.round
        if number not in self._course.contributes and read_contribution(self._place, number, self._name) is None:
            raise self._not_yet(f'a contribution to round {number}')
        return super().contribute(contribution)

    def _not_yet(self, what: str) -> BlockingIOError:
        time.sleep(_LOOK)
        return BlockingIOError(errno.EWOULDBLOCK, f'{what} is not replayed yet', str(self._place))


def read_course(place: ConditionalPath, name: str) -> Course | None:
    """The course of an island in a replay; None outside of a replay. Raises OSError."""
    content = _course_path(place, name).read_version().content
    return None if content is None else Course.model_validate_json(content)


def rounds_of(membership: Membership, section: Federation, report: Report, course: Course | None) -> Rounds:
    """The rounds of a federation, or of a replay in its place."""
    if course is not None:
        return ReplayedRounds(membership, report, course)
    return Rounds(membership, section.patience, report, wait_for=section.wait_for)


def replay(place: ConditionalPath, out: Path, say: Report) -> list[str]:
    """Repeats a federation in a new directory.

    Returns:
        The first contribution that differs, and those that were not compared, with the reason.

    Raises:
        UserError: nothing is recorded, a configuration is missing, the directory is not new, or an island fails.
        OSError: the bucket cannot be read, or the directory cannot be written.
    """
    if out.exists() and any(out.iterdir()):
        raise UserError(f'--out {out}: it is not empty\ngive a new directory')
    target = SharedPath((out / 'bucket').absolute())
    record = _copied(place, target)
    number_of = max(record.closings)
    say(f'replaying {number_of} rounds of {", ".join(record.islands)} in {out}')
    with contextlib.ExitStack() as stack:
        again = {name: stack.enter_context(_Again(place, target, name, record).running()) for name in record.islands}
        for number in range(1, number_of + 2):
            own = {name: one for name, each in record.islands.items() if (one := each.get(number)) is not None}
            for name, recorded in own.items():
                repeated = _awaited(target, number, name, again)
                if repeated.learned() != recorded.learned():
                    what = _difference(place, recorded, target, repeated)
                    return [f'round {number}: island {name} has another {what}', *record.damaged]
            if own:
                say(f'round {number}: {", ".join(own)} learned the same')
    return record.damaged


@dataclasses.dataclass(frozen=True)
class _Record:
    """A recorded federation: `islands` has None for a contribution that is damaged, and `damaged` says why."""

    table: Table
    closings: Mapping[int, Closing]
    islands: Mapping[str, Mapping[int, Contribution | None]]
    damaged: list[str]


def _copied(place: ConditionalPath, target: ConditionalPath) -> _Record:
    """Copies the table and the closings, and reads the contributions. Raises UserError if no round is closed."""
    table, closings, damaged = read_table(place), dict[int, Closing](), list[str]()
    while (closing := read_closing(place, len(closings) + 1)) is not None:
        closings[closing.round] = closing
        closing_path(target / _RECORDED, closing.round).write_bytes(closing.content())
    if not closings:
        raise UserError(f'{place}: no round is closed yet, so there is nothing to replay')
    islands: dict[str, dict[int, Contribution | None]] = {name: {} for name in table.islands}
    for number in range(1, len(closings) + 2):
        for name, own in islands.items():
            try:
                if (found := read_contribution(place, number, name)) is not None:
                    own[number] = found[0]
            except ObjectError as error:
                own[number] = None
                damaged.append(f'round {number}: what island {name} has learned is not compared: {error}')
    islands = {name: own for name, own in islands.items() if any(own.values())}
    anchor = read_entries(description_path(place, 0))
    first = next(iter(closings.values())).in_order()
    founder = next(name for name in (anchor.get('by'), table.founder, *first, *islands) if name in islands)
    table = table.model_copy(update={'founder': founder})
    table_path(target).write_bytes(table.content())
    return _Record(table, closings, islands, damaged)


class _Again:
    """The processes of an island, one course after another."""

    def __init__(self, place: ConditionalPath, target: SharedPath, name: str, record: _Record):
        own = record.islands[name]
        self._place, self._target, self._name, self._out = place, target, name, target.parent
        self._courses = courses_of(record.table, own, record.closings)
        known = [(number, one) for number, one in own.items() if one is not None]
        self._setups = [next((one for n, one in known if n >= course.of), known[-1][1]) for course in self._courses]
        self._configs = [self._config(one.config) for one in self._setups]
        self._number, self._children, self._left = 0, list[Child](), list[int]()

    def _config(self, digest: str | None) -> bytes:
        path = config_path(self._place, self._name, digest)
        if (content := path.read_version().content) is None:
            raise UserError(f'{path} is missing: island {self._name} cannot be trained again')
        return content

    @contextlib.contextmanager
    def running(self) -> Iterator['_Again']:
        """Starts the first course. All processes end with the block."""
        self._start()
        try:
            yield self
        finally:
            self._end()

    def look(self) -> str:
        """Goes on to the next course when the current one is repeated. Returns what is wrong; '': nothing."""
        more = self._courses[self._number + 1 :]
        while self._left and contribution_path(self._target, self._left[0], self._name).exists():
            self._left.pop(0)
        ended = [child.returncode for child in self._children if child.poll() is not None]
        if not self._left and (not more or not more[0].start or more[0].start in self._steps()):
            self._end()
            if more:
                self._number += 1
                self._start()
        elif any(ended) or (ended and len(ended) == len(self._children)):
            return f'island {self._name} ended before its part was repeated\nsee {self._log(0)}'
        return ''

    def _start(self) -> None:
        course, run_dir = self._courses[self._number], self._out / 'runs' / self._name
        self._left = [*course.contributes]
        (self._out / f'{self._name}.yaml').write_bytes(self._configs[self._number])
        if not course.start:
            shutil.rmtree(run_dir, ignore_errors=True)
        for step in self._steps():
            if step > course.start:
                shutil.rmtree(run_dir / 'checkpoints' / str(step))
        _course_path(self._target, self._name).write_bytes(course.model_dump_json().encode())
        changes = [f'federation.bucket={self._target}', f'federation.name={self._name}', f'run_dir={run_dir}']
        changes += _CHANGES
        if starts := [one.start for one in self._courses if one.start]:
            changes.append(f'checkpoint.every={math.gcd(*starts)}')
        count = len(self._setups[self._number].pieces)
        with socket.socket() as free:
            free.bind(('localhost', 0))
            port = free.getsockname()[1]
        for index in range(count):
            more = [f'processes.count={count}', f'processes.index={index}', f'processes.coordinator=localhost:{port}']
            self._children.append(self._child(index, [*changes, *(more if count > 1 else [])]))

    def _child(self, index: int, changes: list[str]) -> Child:
        setup = self._setups[self._number]
        devices = max(1, setup.devices // len(setup.pieces))
        flags = re.sub(r'--xla_force_host_platform_device_count=\d+', '', os.environ.get('XLA_FLAGS', ''))
        environment = os.environ | {'JAX_NUM_CPU_DEVICES': str(devices), 'XLA_FLAGS': flags}
        if setup.device in ('', 'cpu'):
            environment['JAX_PLATFORMS'] = 'cpu'
        config = str(self._out / f'{self._name}.yaml')
        command = [sys.executable, '-m', 'pretrax', 'train', config, *changes, '--allow-changes']
        with self._log(index).open('ab') as output:
            return Child(command, environment, prepare_training, stdout=output, stderr=output)

    def _end(self) -> None:
        for child in self._children:
            child.end(10)
        self._children = []

    def _log(self, index: int) -> Path:
        return self._out / (f'{self._name}-{index}.txt' if index else f'{self._name}.txt')

    def _steps(self) -> list[int]:
        return steps_in(self._out / 'runs' / self._name / 'checkpoints')


def _course_path(place: ConditionalPath, name: str) -> ConditionalPath:
    return place / _RECORDED / 'islands' / name


def _awaited(place: ConditionalPath, number: int, name: str, again: Mapping[str, _Again]) -> Contribution:
    """The contribution of an island in the replay. Raises UserError if it can no longer come."""
    while True:
        problems = [problem for each in again.values() if (problem := each.look())]
        if (found := read_contribution(place, number, name)) is not None:
            return found[0]
        if problems:
            raise UserError(problems[0])
        time.sleep(_LOOK)


def _difference(place: ConditionalPath, recorded: Contribution, target: ConditionalPath, again: Contribution) -> str:
    """The first fact that differs, or else the first weight whose numbers do."""
    for fact in ('step', 'first_batch', 'last_batch', 'tokens', 'encoding'):
        if (old := getattr(recorded, fact)) != (new := getattr(again, fact)):
            return f'{fact.replace("_", " ")}: {old} is recorded, {new} now'
    if recorded.anchor != again.anchor:
        return f'anchor: the weights after round {recorded.base} differ'
    changed = [key for key, digest in _chunks(place, recorded).items() if _chunks(target, again).get(key) != digest]
    events = ', '.join(f'{one.kind} round {one.round} at step {one.step}' for one in recorded.events)
    weight = f' of {changed[0].rpartition("/")[0]}' if changed else ''
    return f'difference{weight}' + (f'; before, it {events}' if events else '')


def _chunks(place: ConditionalPath, contribution: Contribution) -> dict[str, str]:
    """{weight and chunk: digest} of a contribution, as far as its chunks are listed still."""
    found: dict[str, str] = {}
    for piece in contribution.all_pieces():
        for digests in read_entries(place / piece.object).get('objects', []):
            found |= digests
    return found
