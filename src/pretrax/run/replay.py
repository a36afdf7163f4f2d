"""Replays: every `faults.replay.every` steps, devices show that they compute the same again, and replicas that they
are equal.

Every process looks at its own devices. Process 0 judges, and all of them do what it says.
"""

import collections
import contextlib
import json
import pathlib
import socket
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from pretrax.checkpoint.agreement import broadcast, gather
from pretrax.errors import Report, UnavailableError
from pretrax.model.loss import Batch
from pretrax.observe.attempts import CORRUPTED, QUARANTINED, note, read_attempts
from pretrax.run.clock import Clock
from pretrax.run.out_of_memory import explaining_full_memory
from pretrax.run.program_cache import compile_or_load
from pretrax.run.setup import Run
from pretrax.shardlib.digests import MOVES, OWN, labels_of, name_of
from pretrax.storage.locate import working_directory
from pretrax.train.replay import AXIS, arrays_of, compare_replicas, make_replay
from pretrax.train.step import TrainState

_TRIES = 4  # comparisons of one step that may differ before the run ends
_DOING = 'replaying a step (faults.replay)'
# What is compared, the most certain first, and what a difference means.
FORMS = {
    'replicas': 'its replica of the state differs from others',
    'again': 'it computed something else when it computed the same again',
    'rotated': 'it and another device computed different things from the same data',
}
_THEN = {
    'try again': 'the step waits, and is computed again',
    'off': 'this program is not deterministic on this hardware, so nothing is replayed',
    'no rotation': 'this program may add in another order on other devices, so data are not rotated',
    'quarantine': 'the device is quarantined: run the same command again without its host',
    'end': 'run the same command again: it continues from the newest checkpoint',
}


class Replay:
    """Compares the digests of a step before it is taken. The step waits until they agree.

    Attributes:
        replays, differences: how many comparisons there were, and how many of them differed.
    """

    def __init__(self, run: Run, clock: Clock, report: Report, tell: Report):
        self._clock, self._report, self._tell = clock, report, tell
        self.replays = self.differences = 0
        self._directory = working_directory(run.run_dir)
        self._counts = _counts(self._directory)
        self._blamed: set[int] = set()  # by the differences of this step
        self.prepare(run)

    def prepare(self, run: Run) -> None:
        """The next step is of this run: its batches may be larger than before."""
        self._run, self._mesh = run, run.mesh
        self._every, self._program = run.faults.replay.every, None
        self._rotates = run.faults.replay.rotate and self._mesh.shape[AXIS] > 1
        self._is_first = True

    def metrics(self) -> dict[str, int]:
        """The counts of this process, for a line of metrics; {} if nothing is replayed."""
        return {'replays': self.replays, 'replay_differences': self.differences} if self.replays else {}

    def is_due(self, number: int) -> bool:
        """Whether `check` does something before this step. It does before the first one of a process."""
        return bool(self._every) and (self._program is None or number % self._every == 0)

    def check(self, number: int, state: TrainState, batch: Batch) -> None:
        """Call it before step `number`, with its state and batch.

        Raises:
            UnavailableError: a device is quarantined, replicas of the state differ, or a step cannot be replayed.
        """
        if not self.is_due(number):
            return
        with self._clock.paused('replay', number), explaining_full_memory(self._run, _DOING, self._program):
            if self._program is None:
                self._compile(state, batch)
            for attempt in range(1, _TRIES + 1):
                found = self._find_corruption(number, attempt, state, batch)
                self.replays += 1
                if not found:
                    break
                self._follow(number, found)
                if not self._every:
                    return
        self._is_first = False

    def _compile(self, state: TrainState, batch: Batch) -> None:
        began = time.perf_counter()
        program, self._places = make_replay(self._run.recipe)
        lowered = program.lower(state, batch, np.bool_(False))
        self._program, cache = compile_or_load(lowered, options=self._run.compiler_options.values)
        self._labels = labels_of(self._places)
        shape, axis = tuple(self._mesh.shape.values()), self._mesh.axis_names.index(AXIS)
        self._before = np.roll(np.arange(self._mesh.size).reshape(shape), 1, axis).reshape(-1)  # of each device
        self._move = jax.jit(
            lambda x: jnp.roll(x.reshape(*shape, -1), 1, axis).reshape(x.shape),
            out_shardings=NamedSharding(self._mesh, PartitionSpec(self._mesh.axis_names)),
        )
        compared = np.count_nonzero(self._labels < MOVES | OWN) if self._rotates else 0
        rotated = f', {compared:,} of them also with rotated data' if compared else ''
        how = f'loaded the replay of a step from {cache}' if cache else 'compiled the replay of a step'
        seconds = time.perf_counter() - began
        self._report(f'{how} in {seconds:.1f} s: {len(self._labels):,} digests per device{rotated}')

    def _find_corruption(self, number: int, attempt: int, state: TrainState, batch: Batch) -> dict[str, Any]:
        """What process 0 says about a difference: `devices`, `place`, `form`, `then`; {} if all is equal."""
        own = self._unequal_replicas(state) | self._unequal_digests(state, batch)
        texts = gather('replay', json.dumps({'host': socket.gethostname(), **own}) if own else '')
        unequal = {i: json.loads(text) for i, text in enumerate(texts) if text}
        found = self._judge(number, attempt, state, unequal) if unequal else {}
        return json.loads(broadcast('replay', json.dumps(found)))

    def _unequal_digests(self, state: TrainState, batch: Batch) -> dict[str, Any]:
        """The first difference of each device of this process, {device: number of the digest}, by the form."""
        assert self._program is not None
        once = self._program(state, batch, np.bool_(False))
        first, second = _own_rows(once), _own_rows(self._program(state, batch, np.bool_(False)))
        unequal = {'again': {i: first[i] != second[i] for i in first}}
        if self._rotates and (self._is_first or self.replays % 2 == 0):  # every second time, since it costs a third run
            moved, ahead = _own_rows(self._move(once)), _own_rows(self._program(state, batch, np.bool_(True)))
            expected = {i: np.where(self._labels == MOVES, moved[i], first[i]) for i in first}
            unequal['rotated'] = {i: (ahead[i] != expected[i]) & (self._labels < MOVES | OWN) for i in first}
        return {
            form: {i: int(np.argmax(differ)) for i, differ in devices.items() if differ.any()}
            for form, devices in unequal.items()
            if any(differ.any() for differ in devices.values())
        }

    def _unequal_replicas(self, state: TrainState) -> dict[str, Any]:
        """The first array whose replicas differ, and the digests that this process has of it, {device: digest}."""
        digests, differ = map(_own_rows, compare_replicas(*arrays_of(state)))
        array = min((int(np.argmax(flags)) for flags in differ.values() if flags.any()), default=None)
        if array is None:
            return {}
        return {'array': array, 'replicas': {i: int(digests[i][array]) for i in digests if differ[i][array]}}

    def _suspects(self, state: TrainState, texts: list[dict[str, Any]]) -> tuple[str, str, list[int]]:
        """The form of the first difference, where it is, and the devices that may have caused it."""
        form = next(form for form in FORMS if any(form in text for text in texts))
        array: int = min((text['array'] for text in texts if 'array' in text), default=-1)
        own = {int(i): x for t in texts if t.get('array', array) == array for i, x in t.get(form, {}).items()}
        if form == 'replicas':
            path, x = jax.tree_util.tree_leaves_with_path(state)[array]
            slices = x.sharding.devices_indices_map(x.shape)
            replicas = collections.defaultdict(list)
            for i in own:
                replicas[str(slices[self._mesh.devices.flat[i]])].append(i)
            name = jax.tree_util.keystr(path, simple=True, separator='.')
            return form, name, sorted(i for group in replicas.values() for i in _minority(group, own))
        first = min(own.values())
        suspects = {i for i, number in own.items() if number == first}
        if form == 'rotated' and self._labels[first] == MOVES:  # also compared with the device before
            before = {i: int(self._before[i]) for i in suspects}
            suspects = {one for one in before.values() if one in before} or {*before, *before.values()}
        return form, name_of(self._places, first), sorted(suspects)

    def _judge(self, number: int, attempt: int, state: TrainState, texts: dict[int, dict[str, Any]]) -> dict[str, Any]:
        """The verdict on what some processes found, in process 0, and what all processes do then."""
        form, place, suspects = self._suspects(state, list(texts.values()))
        self._blamed = {*suspects} | (self._blamed if attempt > 1 else set())
        names = [self._name(i, texts) for i in suspects]
        is_trial = self._is_first and form != 'replicas'  # whether the program is deterministic is not known yet
        then = 'end' if form == 'replicas' or attempt == _TRIES else 'try again'
        if is_trial and attempt > 1 and (len(self._blamed) > 1 or self._mesh.size == 1):
            then = 'no rotation' if form == 'rotated' else 'off'
        elif len(suspects) == 1 and not (is_trial and attempt == 1):
            self._counts[names[0]] += 1
            is_enough = self._counts[names[0]] >= self._run.faults.replay.quarantine_after
            then = 'quarantine' if is_enough else then
            about = {'step': number, 'device': names[0], 'process': self._process(suspects[0]), 'place': place}
            with contextlib.suppress(OSError):  # a full disk: the error says the same
                note(self._directory, QUARANTINED if is_enough else CORRUPTED, **about)
        return {'devices': names, 'place': place, 'form': form, 'then': then}

    def _name(self, i: int, texts: dict[int, dict[str, Any]]) -> str:
        devices, process = self._mesh.devices.flat, self._process(i)
        first = min(device.id for device in devices if device.process_index == process)
        host = texts.get(process, {}).get('host', 'another host')
        return f'device {devices[i].id - first} of process {process} on {host}'

    def _process(self, i: int) -> int:
        return self._mesh.devices.flat[i].process_index

    def _follow(self, number: int, found: dict[str, Any]) -> None:
        """Does what process 0 says about a difference. Raises UnavailableError."""
        self.differences += 1
        devices, then = found['devices'], found['then']
        who = ' and '.join(devices[:2]) + (f' and {len(devices) - 2} others' if len(devices) > 2 else '')
        what = f'step {number}: {who}: {FORMS[found["form"]]}: {found["place"]}'
        self._every = 0 if then == 'off' else self._every
        self._rotates = self._rotates and then != 'no rotation'
        if then in ('quarantine', 'end'):
            raise UnavailableError(f'{what}\n{_THEN[then]}')
        self._report(f'WARNING: {what}; {_THEN[then]}')
        if then == 'try again':
            self._tell(what)


def _minority(group: list[int], digests: dict[int, int]) -> list[int]:
    """The devices whose replica differs from most others; all of them if there is no majority."""
    value, count = collections.Counter(digests[i] for i in group).most_common(1)[0]
    return [i for i in group if digests[i] != value or 2 * count <= len(group)]


def _own_rows(x: jax.Array) -> dict[int, np.ndarray]:
    """The rows of the devices of this process, by the number of the device in the mesh."""
    return {shard.index[0].start or 0: np.asarray(shard.data)[0] for shard in x.addressable_shards}


def _counts(directory: pathlib.Path) -> collections.Counter[str]:
    """How often each device has differed, from `attempts.jsonl`. A device that was quarantined counts from 0 again."""
    counts: collections.Counter[str] = collections.Counter()
    for event in read_attempts(directory):
        if event['event'] == CORRUPTED:
            counts[str(event.get('device'))] += 1
        elif event['event'] == QUARANTINED:
            del counts[str(event.get('device'))]
    return counts
