"""Whatever happens, and wherever the process is killed, a good checkpoint exists once one existed.

A model checker: every sequence of saves, rollbacks, damage and restarts up to a bound, with a kill before every change
of a file or an object. It runs the product's own `Checkpoints`, `Directory`, `Bucket` and `restore_newest` on real
directories and on a bucket in memory. The state is replaced by one small file per checkpoint.
"""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
import xxhash

from pretrax.checkpoint import Checkpoints, Keep, SaveError, restore_newest, steps_in
from pretrax.checkpoint.manifest import place_of, verify
from pretrax.errors import UserError
from pretrax.storage import BucketPath

CHANGES = ('os.mkdir', 'os.rename', 'os.remove', 'os.rmdir', 'open')
KINDS = {
    'good': {'skipped_in_a_row': 0, 'finite_state': True},
    'skipping': {'skipped_in_a_row': 2, 'finite_state': True},
    'not finite': {'skipped_in_a_row': 0, 'finite_state': False},
}
DAMAGED = ', damaged'
ARRAY = 'state/array'  # the only file of a checkpoint besides its manifest


KIND = ['']  # of the checkpoint that is saved next


def one_file(state, largest=None):
    """The only file of a state: the kind of the checkpoint."""
    return [(ARRAY, np.frombuffer(KIND[0].encode(), np.uint8))]


class SameThread(concurrent.futures.Executor):
    """Starting a thread takes longer than its work here, and every event waits for it anyway."""

    def __init__(self, *_, **__):
        pass

    def submit(self, work, *arguments, **options):
        future = concurrent.futures.Future()
        try:
            future.set_result(work(*arguments, **options))
        except Exception as error:
            future.set_exception(error)
        return future


class Watched:
    """A place whose content can be taken and put back. It remembers its content before each change."""

    def __init__(self, path):
        self.path, self.seen, self.is_watched = path, [], False
        self.request = lambda: None  # called before each request or system call

    @contextlib.contextmanager
    def watched(self):
        self.seen, self.is_watched = [], True
        try:
            yield
        finally:
            self.is_watched = False


class Disk(Watched):
    """A directory."""

    def __init__(self, path):
        super().__init__(path)
        sys.addaudithook(self._watch)

    def _watch(self, event, arguments):
        if event in (*CHANGES, 'os.scandir'):
            self.request()
        if not self.is_watched or event not in CHANGES:
            return
        is_read = event == 'open' and arguments[1] in ('r', 'rb', None)
        is_in_deleted_directory = event == 'os.remove' and arguments[1] != -1
        if not is_read and not is_in_deleted_directory:
            self.is_watched = False
            self.seen.append(self.content())
            self.is_watched = True

    def content(self):
        """{(name, content of the file; None for a directory)}, of everything in the directory."""
        found = []

        def look(folder, prefix):
            for entry in os.scandir(folder):
                name = prefix + entry.name
                if entry.is_dir():
                    found.append((name, None))
                    look(entry.path, name + '/')
                else:
                    with open(entry.path, 'rb', buffering=0) as file:
                        found.append((name, file.read()))

        look(self.path, '')
        return frozenset(found)

    def put(self, content):
        now = self.content() if self.path.exists() else frozenset()
        stale = {name.partition('/')[0] for name, _ in now - content}
        for name in stale:
            shutil.rmtree(self.path / name)
        self.path.mkdir(exist_ok=True)
        for name, data in sorted(content, key=lambda item: item[0]):
            if name.partition('/')[0] in stale or (name, data) not in now:
                if data is None:
                    (self.path / name).mkdir()
                else:
                    (self.path / name).write_bytes(data)


class Memory(Watched):
    """A bucket in memory, with the methods of TensorStore's KvStore that `BucketPath` uses."""

    PREFIX = 'run/checkpoints/'

    def __init__(self):
        super().__init__(BucketPath('s3://bucket/run/checkpoints'))
        self.objects = {}

    def content(self):
        return frozenset((name.removeprefix(self.PREFIX), data) for name, data in self.objects.items())

    def put(self, content):
        self.objects = {self.PREFIX + name: data for name, data in content}

    def copy(self):
        return KvStore(self)

    def write(self, key, value, expected):
        self.request()
        if expected is not None and self.version(key) != expected:
            return b''
        if self.is_watched:
            self.seen.append(self.content())
        if value is None:
            self.objects.pop(key, None)
        else:
            self.objects[key] = bytes(value)
        return self.version(key)

    def version(self, key):
        """As in S3, a digest of the content."""
        return xxhash.xxh3_64_digest(self.objects[key]) if key in self.objects else b'\x02'  # as TensorStore says it

    def read(self, key, byte_range=slice(None)):
        self.request()
        found = self.objects.get(key)
        stamp = ts.KvStore.TimestampedStorageGeneration(self.version(key), 0.0)
        return ts.KvStore.ReadResult('missing' if found is None else 'value', (found or b'')[byte_range], stamp)

    def list(self):
        self.request()
        return [key.encode() for key in self.objects]


class Stamp:
    def __init__(self, generation):
        self.generation = generation


class KvStore:
    def __init__(self, memory):
        self.memory, self.path, self.waiting = memory, '', []

    def read(self, key, **options):
        return Request(lambda: self.memory.read(self.path + key, **options))

    def write(self, key, value, if_equal=None):
        self.waiting.append((self.path + key, value, if_equal))
        return Request(self.write_all)

    def write_all(self):
        """Carries out what was asked for at the same time, the last first: the order is not fixed."""
        stamp = Stamp(b'')
        while self.waiting:
            stamp = Stamp(self.memory.write(*self.waiting.pop()))
        return stamp

    def list(self, keys):
        return Request(self.memory.list)


class Request:
    def __init__(self, result):
        self.result = result


@dataclasses.dataclass(frozen=True)
class World:
    """Attributes: the content of the disk; the step that training has reached, and the one it continued from."""

    disk: frozenset
    step: int
    start: int


def places(content):
    """{step: prefix} of what looks like a checkpoint, found without the product."""
    files = dict(content)
    if any(data is None for data in files.values()):  # a disk
        return {int(name): name for name in files if name.isdigit()}
    entries = json.loads(files.get('index.json', b'{"entries": {}}'))['entries']
    return {int(step): at for step, at in entries.items() if at is not None and f'{at}/manifest.json' in files}


def all_of(content):
    """The steps of everything that looks like a checkpoint."""
    return set(places(content))


def whole(content):
    """{step: kind} of the whole checkpoints: the array says what it is."""
    files = dict(content)
    return {
        step: files[f'{at}/{ARRAY}'].decode()
        for step, at in places(content).items()
        if files.get(f'{at}/{ARRAY}', b'') in map(str.encode, KINDS) and files.get(f'{at}/manifest.json')
    }


def described(content):
    """{step: kind} of the checkpoints whose manifests are whole, though their arrays may be damaged."""
    files = dict(content)
    return {
        step: files.get(f'{at}/{ARRAY}', b'').decode().removesuffix(DAMAGED)
        for step, at in places(content).items()
        if files.get(f'{at}/manifest.json')
    }


def canonical(content):
    """The content with short names for attempts, so that worlds that differ in names alone are one."""
    files, names = dict(content), {at: f'{step}/listed-' for step, at in places(content).items() if '-' in at}
    for name in sorted(files):
        first, _, rest = name.partition('/')
        attempt = rest.partition('/')[0]
        if '-' in attempt:
            names.setdefault(f'{first}/{attempt}', f'{first}/left-{len(names)}')
        elif first.endswith('.partial'):
            names.setdefault(first, f'left-{len(names)}.partial')
    if 'index.json' in files:
        entries = json.loads(files['index.json'])['entries']
        known = {step: at and names.get(at, f'{step}/lost-') for step, at in sorted(entries.items())}
        files['index.json'] = json.dumps({'entries': known}).encode()

    def renamed(name):
        prefix = next((prefix for prefix in names if name == prefix or name.startswith(f'{prefix}/')), '')
        return names.get(prefix, '') + name.removeprefix(prefix)

    return frozenset((renamed(name), data) for name, data in files.items())


def good(content):
    return {step for step, kind in whole(content).items() if kind == 'good'}


class Explorer:
    """Explores every sequence of `depth` events, with a kill and a restart anywhere."""

    def __init__(self, place, keep):
        self.disk, self.keep = place, keep
        self.worlds, self.restarts, self.contents = set(), {}, set()

    def explore(self, depth):
        reached = {World(frozenset(), 0, 0)}
        for _ in range(depth):
            self.worlds |= reached
            reached = {
                after for world in reached for event in self.events(world) for after in self.outcomes(world, event)
            }
            reached -= self.worlds | {None}

    def outcomes(self, world, event):
        """The worlds after an event, and after a kill during it and a restart."""
        after, crashed = self.happens(world, event)
        yield after
        for content in crashed:
            yield self.restart(content)

    def events(self, world):
        yield from KINDS
        yield 'roll back'
        for step in whole(world.disk):
            yield ('damage', step)
            yield ('tear', step)

    def happens(self, world, event):
        """The world after an event, and the content of the disk before each change."""
        if isinstance(event, tuple):
            disk = harmed(world.disk, *event)
            return dataclasses.replace(world, disk=disk), [disk]
        self.disk.put(world.disk)
        checkpoints = self.open()
        checkpoints.continue_from(world.start)
        step, start = world.step, world.start
        with checkpoints, self.disk.watched():
            if event == 'roll back':
                lost = all_of(world.disk) - whole(world.disk).keys()
                try:
                    restored = restore_newest(self.disk.path, {}, ignore, good=True)
                except UserError:
                    assert lost
                    assert not good(world.disk)
                    return world, []
                step = start = restored[0] if restored else 0
                assert step == max(good(world.disk), default=0)
                checkpoints.roll_back_to(step)
            else:
                step += 1
                KIND[0] = event
                checkpoints.save(step, {}, KINDS[event])
                checkpoints.wait()
                content = self.disk.content()
                assert whole(content)[step] == event
                self.check_kept(world.disk, content, step)
                names = {name.partition('/')[0] for name, _ in content} - {'index.json'}
                assert names == set(map(str, all_of(content))), 'leftovers'
        after = World(canonical(self.disk.content()), step, start)
        self.check_nothing_good_is_lost([world.disk, *self.disk.seen, after.disk], event)
        return after, list(map(canonical, self.disk.seen))

    def check_nothing_good_is_lost(self, contents, event):
        for before, now in zip(contents, contents[1:], strict=False):
            assert good(now) or not good(before), f'{event}: {whole(before)} became {whole(now)}'
            assert all_of(now) - whole(now).keys() <= all_of(before) - whole(before).keys(), f'{event}: looks whole'
        self.contents.update(contents)

    def check_kept(self, before, now, saved):
        """A save keeps the newest good checkpoints and no others, but for a doubtful one that is the newest of all."""
        known = described(before)
        best = sorted(step for step, kind in (known | described(now)).items() if kind == 'good' and step <= saved)
        assert set(best[-self.keep.last :]) <= all_of(now)
        if described(now)[saved] == 'good':
            assert set(described(now).values()) == {'good'}
            assert len(described(now)) <= self.keep.last
        elif best:
            assert [step for step, kind in described(now).items() if kind != 'good' and step <= saved] == [saved]

    def restart(self, content):
        """The world after a start of training, which takes the newest whole checkpoint with a finite state.

        None if training refuses to start because all checkpoints are damaged.
        """
        if content not in self.restarts:
            self.disk.put(content)
            with self.disk.watched():
                self.open().close()
                try:
                    restored = restore_newest(self.disk.path, {}, ignore)
                except UserError:
                    assert all_of(content)
                    assert not whole(content)
                    restored = None
            self.check_nothing_good_is_lost([content, *self.disk.seen, self.disk.content()], 'restart')
            assert all_of(self.disk.content()) == all_of(content)
            found = whole(content)
            finite = [step for step, kind in found.items() if kind != 'not finite']
            step = restored[0] if restored else 0
            assert step == max(finite or found, default=0)
            refused = restored is None and all_of(content)
            self.restarts[content] = None if refused else World(canonical(self.disk.content()), step, step)
        return self.restarts[content]

    def open(self):
        return Checkpoints(self.disk.path, self.keep)


def harmed(content, how, step):
    files = dict(content)
    at = places(content)[step]
    array, manifest = f'{at}/{ARRAY}', f'{at}/manifest.json'
    change = {array: files[array] + DAMAGED.encode()} if how == 'damage' else {manifest: b''}
    return frozenset({**files, **change}.items())


def ignore(text):
    pass


@pytest.mark.parametrize(
    ('keep', 'doubtful', 'unreadable', 'stay'),
    [
        (Keep(last=1), {5}, set(), {4, 5}),
        (Keep(last=1), {4, 5}, set(), {3, 5}),
        (Keep(last=2), {3}, set(), {4, 5}),
        (Keep(last=2), {4}, set(), {3, 5}),
        (Keep(last=2, best=1), {2}, set(), {3, 4, 5}),
        (Keep(last=1, every=2), {4}, set(), {2, 4, 5}),
        (Keep(last=2), {1, 2, 3, 4, 5}, set(), {4, 5}),
        (Keep(last=2), set(), {4}, {3, 4, 5}),
        (Keep(last=2), set(), {3}, {4, 5}),
        (Keep(last=2), set(), {1, 2, 3, 4}, {1, 2, 3, 4, 5}),
    ],
)
def test_doubtful_and_unreadable_checkpoints_take_no_place_of_good_ones(keep, doubtful, unreadable, stay):
    reasons = keep.reasons({1: 5.0, 2: 1.0, 3: 2.0, 4: None, 5: 4.0}, doubtful, unreadable)
    assert {step for step, why in reasons.items() if why} == stay


def test_a_loss_that_is_not_a_number_is_not_the_best():
    """NaN compares with nothing, so that sorting would put it anywhere."""
    nan = float('nan')
    for losses in (
        {1: nan, 2: 3.0, 3: 2.0, 4: 5.0},
        {1: 3.0, 2: nan, 3: 2.0, 4: nan},
        {1: -float('inf'), 3: 2.0, 4: nan},
    ):
        assert {step for step, why in Keep(last=1, best=1).reasons(losses).items() if why} == {3, 4}


def simulated(monkeypatch):
    """Replaces what takes time. Returns the only bucket."""
    memory, tokens = Memory(), itertools.count()
    monkeypatch.setattr('pretrax.storage.bucket_path.open_bucket', lambda scheme, name: memory)
    monkeypatch.setattr('pretrax.checkpoint.bucket.copy_to_host', one_file)
    monkeypatch.setattr('pretrax.checkpoint.directory.copy_to_host', lambda state: [])
    monkeypatch.setattr('pretrax.checkpoint.directory.tree_metadata', lambda state: one_file(state)[0])
    monkeypatch.setattr('concurrent.futures.ThreadPoolExecutor', SameThread)
    monkeypatch.setattr('os.fsync', lambda descriptor: None)
    monkeypatch.setattr('secrets.token_hex', lambda size: f'token{next(tokens)}')
    return memory


@pytest.mark.parametrize(
    ('kind', 'keep', 'depth'),
    [
        ('bucket', 1, 4),
        pytest.param('bucket', 2, 5, marks=pytest.mark.slow),
        ('disk', 1, 4),
        pytest.param('disk', 2, 5, marks=pytest.mark.slow),
    ],
)
def test_a_good_checkpoint_exists_once_one_existed_wherever_the_process_is_killed(kind, keep, depth, monkeypatch):
    memory = simulated(monkeypatch)
    with tempfile.TemporaryDirectory(dir='/dev/shm' if os.access('/dev/shm', os.W_OK) else None) as place:
        explorer = Explorer(memory if kind == 'bucket' else Disk(Path(place) / 'checkpoints'), Keep(keep))
        explorer.explore(depth)
    assert len(explorer.contents) > 500


class TakenOverError(Exception):
    """The lease of a process belongs to another one."""


class Writers:
    """Two processes of one run. The first is stopped before one of its requests,
    and goes on when the second has saved.
    """

    def __init__(self, place):
        self.place, self.holder = place, 'first'

    def open(self, name):
        def confirm():
            self.place.request()
            if self.holder != name:
                raise TakenOverError

        return Checkpoints(self.place.path, 2, confirm=confirm)

    def run(self, how, stop):
        """Returns how many requests the first process made,
        and the files of the second when it had saved and at the end.
        """
        self.holder = 'first'
        with self.open('first') as checkpoints:
            for step in (1, 2):
                self.save(checkpoints, step, 'first')
        count, files = itertools.count(), []

        def request():
            if next(count) == stop:
                self.place.request = lambda: None
                self.holder = 'second'
                self.second()
                files.append(self.files())

        self.place.request = request
        with contextlib.suppress(SaveError, UserError, TakenOverError), self.open('first') as checkpoints:
            if how == 'rollback':
                checkpoints.roll_back_to(1)
            else:
                checkpoints.continue_from(1)
                for step in (2, 3, 4):  # replaces one, and removes some
                    self.save(checkpoints, step, 'first')
        self.place.request = lambda: None
        files.append(self.files())
        if self.holder == 'second':
            with self.open('second') as checkpoints:
                self.save(checkpoints, 9, 'third')
            assert self.files()[9] == 'third'
        return next(count), files

    def second(self):
        checkpoints = self.open('second')
        step = max(self.files())
        checkpoints.continue_from(step)
        for number in (step + 1, step + 2):
            self.save(checkpoints, number, 'second')
        self.after = self.files()

    def save(self, checkpoints, step, text):
        KIND[0] = text
        checkpoints.save(step, {}, KINDS['good'])
        checkpoints.wait()

    def files(self):
        """{step: content of the array} of the checkpoints, each of which is verified."""
        found = {}
        for step in steps_in(self.place.path):
            verify(self.place.path, step)
            found[step] = (place_of(self.place.path, step) / ARRAY).read_bytes().decode()
        return found


@pytest.mark.parametrize('how', ['saves', 'rollback'])
@pytest.mark.parametrize('kind', ['bucket', 'disk'])
def test_a_writer_that_was_stopped_at_any_request_changes_nothing_for_its_successor(kind, how, monkeypatch, tmp_path):
    memory = simulated(monkeypatch)
    monkeypatch.setattr('pretrax.checkpoint.state_files._THREADS', 1)
    place = Disk(tmp_path / 'checkpoints') if kind == 'disk' else memory
    for stop in range(10_000):
        place.put(frozenset())
        requests, files = Writers(place).run(how, stop)
        assert all(one == files[0] for one in files), stop
        if stop >= requests:
            break
    assert stop > (10 if how == 'rollback' else 50)
