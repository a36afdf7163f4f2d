"""Repeats a federation from what its bucket recorded: every island learns the same again, bit for bit.

A directory takes the place of the bucket. It has the table of the federation, and its closings below `recorded/`. The
islands train from their recorded configurations, and each round has the members that it had, however fast they are now.
"""

import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from pretrax.config.schema import Federation
from pretrax.errors import Report, UserError
from pretrax.federation.objects import (
    Closing,
    Contribution,
    closing_path,
    island_path,
    read_closing,
    read_contribution,
    table_path,
)
from pretrax.federation.registry import Membership, read_table
from pretrax.federation.rounds import Due, Rounds, Waiting
from pretrax.storage.shared_path import ConditionalPath, SharedPath
from pretrax.system.children import Child, prepare_training
from pretrax.system.json_file import read_entries

CONFIG = 'config.yaml'  # of an island, beside its state
_RECORDED = 'recorded'
_LOOK = 0.2  # seconds between two looks

type Record = Mapping[int, Mapping[str, Contribution]]  # the contributions to each closed round


class ReplayedRounds(Rounds):
    """The rounds of an island of a replay: each is closed as it was, once all its members have contributed."""

    def poll(self, number: int) -> Closing | Waiting | Due:
        """The closing of a round, or who is missing. Raises OSError."""
        if (closing := self.closing(number)) is not None:
            return closing
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
        return self.closing(number) or Waiting((), missing, _LOOK)

    def newest(self, known: int = 0) -> int:
        """The round that the island took when it came in, or came back. Raises OSError until it is closed again."""
        own = (self._place / _RECORDED / 'islands' / self._name).read_bytes().split()
        later = [int(number) for number in own if int(number) > (known + 1 if self._has_begun else 0)]
        taken = later[0] - 1 if later else 1 << 40
        if taken and self.closing(taken) is None:
            raise BlockingIOError(11, f'round {taken} is not replayed yet', str(self._place))
        return taken

    def contribute(self, contribution: Contribution) -> bool:
        """Creates the contribution, as `Rounds` does."""
        self._has_begun = True
        return super().contribute(contribution)

    _has_begun = False  # whether this process has contributed


def rounds_of(membership: Membership, section: Federation, report: Report) -> Rounds:
    """The rounds of a federation, or of a replay in its place. Raises OSError."""
    is_replay = (table_path(membership.place / _RECORDED)).read_version().content is not None
    rounds = ReplayedRounds if is_replay else Rounds
    return rounds(membership, section.patience, report, wait_for=section.wait_for)


def replay(place: ConditionalPath, out: Path, say: Report) -> str:
    """Repeats a federation in a new directory. Returns the first contribution that differs; '': none does.

    Raises:
        UserError: nothing is recorded, a configuration is missing, the directory is not new, or an island fails.
        OSError: the bucket cannot be read, or the directory cannot be written.
    """
    if out.exists() and any(out.iterdir()):
        raise UserError(f'--out {out}: it is not empty\ngive a new directory')
    target = SharedPath((out / 'bucket').absolute())
    record = _copied(place, target)
    islands = sorted({name for contributions in record.values() for name in contributions})
    say(f'replaying {len(record)} rounds of {", ".join(islands)} in {out}')
    with contextlib.ExitStack() as stack:
        children = {name: stack.enter_context(_island(place, name, out)) for name in islands}
        for number, contributions in record.items():
            for name, recorded in contributions.items():
                again = _awaited(target, number, name, children)
                if again.learned() != recorded.learned():
                    return f'round {number}: island {name} has another {_difference(place, recorded, target, again)}'
            say(f'round {number}: {", ".join(contributions)} learned the same')
    return ''


def _copied(place: ConditionalPath, target: ConditionalPath) -> Record:
    """Copies the table and the closings, and returns the contributions. Raises UserError if no round is closed."""
    table, record = read_table(place), dict[int, dict[str, Contribution]]()
    while (closing := read_closing(place, len(record) + 1)) is not None:
        number = closing.round
        read = {name: read_contribution(place, number, name) for name in table.islands}
        record[number] = {name: found[0] for name, found in read.items() if found is not None}
        closing_path(target / _RECORDED, number).write_bytes(closing.content())
    if not record:
        raise UserError(f'{place}: no round is closed yet, so there is nothing to replay')
    for name in table.islands:
        numbers = [str(number) for number, contributions in record.items() if name in contributions]
        (target / _RECORDED / 'islands' / name).write_bytes(' '.join(numbers).encode())
    for path in (table_path(target), table_path(target / _RECORDED)):
        path.write_bytes(table.content())
    return record


@contextlib.contextmanager
def _island(place: ConditionalPath, name: str, out: Path) -> Iterator[Child]:
    """The process of an island, which ends with the block. Raises UserError without a configuration."""
    content = (island_path(place, name) / CONFIG).read_version().content
    if content is None:
        raise UserError(f'{island_path(place, name)} has no {CONFIG}: the island cannot be trained again')
    config, log = out / f'{name}.yaml', out / f'{name}.txt'
    config.write_bytes(content)
    mesh = (yaml.safe_load(content) or {}).get('mesh') or {}
    devices = 1
    for size in mesh.values() if isinstance(mesh, dict) else ():
        devices *= size if type(size) is int and size > 0 else 1
    flags = re.sub(r'--xla_force_host_platform_device_count=\d+', '', os.environ.get('XLA_FLAGS', ''))
    environment = os.environ | {'JAX_PLATFORMS': 'cpu', 'JAX_NUM_CPU_DEVICES': str(devices), 'XLA_FLAGS': flags}
    changes = [f'federation.bucket={out / "bucket"}', f'federation.name={name}', f'run_dir={out / "runs" / name}']
    command = [sys.executable, '-m', 'pretrax', 'train', str(config), *changes]
    with log.open('wb') as output:
        child = Child(command, environment, prepare_training, stdout=output, stderr=output)
        try:
            yield child
        finally:
            child.end(10)


def _awaited(place: ConditionalPath, number: int, name: str, children: Mapping[str, Child]) -> Contribution:
    """The contribution of an island in the replay. Raises UserError if it can no longer come."""
    while True:
        failed = [each for each, child in children.items() if child.poll()]
        is_over = children[name].poll() is not None  # it may have contributed before
        if (found := read_contribution(place, number, name)) is not None:
            return found[0]
        if failed or is_over:
            who = failed[0] if failed else name
            raise UserError(f'island {who} ended before round {number} was replayed\nsee {place.parent / f"{who}.txt"}')
        time.sleep(_LOOK)


def _difference(place: ConditionalPath, recorded: Contribution, target: ConditionalPath, again: Contribution) -> str:
    """What differs: the first of the facts, and where the numbers begin to."""
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
    for piece in (piece for pieces in contribution.pieces.values() for piece in pieces):
        for digests in read_entries(place / piece.object).get('objects', []):
            found |= digests
    return found
