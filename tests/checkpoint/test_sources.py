"""Wherever a run is killed and whatever is lost, it continues from the newest whole state, and never from a mixture.

A model checker of the sources of a state: the memory of each host, the copies at its peers, and the checkpoints on a
disk or in a bucket. Every sequence of up to three attempts, which keep states in memory and save checkpoints, with a
kill before every change of a file. The processes of an attempt change files independently of each other: of every
process every position between two exchanges is combined with every position of the others. Then some hosts are lost
with their memory.

It runs the product's own `Memory` and `restore_newest` on real directories, of processes that are threads here and
exchange texts in memory. A state is a small array, whose values say which step of which attempt they are from.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import shutil
import sys
import tempfile
import threading
from collections import Counter, defaultdict
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from checkpoint import test_keep
from checkpoint.test_keep import CHANGES, SameThread
from pretrax.checkpoint import Memory, restore_newest
from pretrax.checkpoint.chunks import Chunks
from pretrax.checkpoint.manifest import MANIFEST, named_arrays, partial_directory, publish
from pretrax.checkpoint.state_files import HostFiles, copy_to_host, held_shards

PER_ATTEMPT = 1000  # a value is the step plus this, times the number of the attempt
# Names of directories: the checkpoints, and a host that is out of reach. The others are hosts.
DISK, AWAY = 'disk', 'away-'


class Processes:
    """Runs a function in each of `n` threads, which are the processes. One runs at a time, until it waits for a text.

    Attributes:
        watch: called before each change of a file, and when a process takes part in an exchange.
        exchanges: how many exchanges each process has taken part in.
    """

    def __init__(self, n):
        self.n, self.own, self.turn = n, threading.local(), threading.Condition()
        self.watch = lambda: None
        self.exchanges = [0] * n

    def run(self, function):
        """The results of the processes."""
        self.texts, self.counts, self.exchanges = defaultdict(dict), Counter(), [0] * self.n
        self.waiting, self.errors = [lambda: True] * self.n, []  # for what each process waits; None: it runs

        def process(i):
            self.own.index = i
            with self.turn:
                try:
                    self.wait(lambda: True)
                    results[i] = function(i)
                except BaseException as error:
                    self.errors.append(error)
                self.waiting[i] = lambda: False
                self.turn.notify_all()

        results = [None] * self.n
        threads = [threading.Thread(target=process, args=(i,)) for i in range(self.n)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]
        return results

    @property
    def index(self):
        return getattr(self.own, 'index', None)

    def gather(self, about, text):
        texts, me = self.exchange('gather', about), self.index
        self.watch()
        self.exchanges[me] += 1
        texts[me] = text
        if me:
            return []
        self.wait(lambda: len(texts) == self.n)
        return [texts[i] for i in range(self.n)]

    def broadcast(self, about, text):
        texts = self.exchange('broadcast', about)
        if self.index == 0:
            texts[0] = text
        self.wait(lambda: 0 in texts)
        return texts[0]

    def agree(self, about, problem):
        problems = [text for text in self.gather(about, problem) if text]
        return self.broadcast(about, problems[0] if problems else '')

    def scatter(self, about, texts):
        return json.loads(self.broadcast(about, json.dumps(texts)))[self.index]

    def offer(self, about, text):
        offered = self.broadcast(about, text)
        return lambda: offered

    def exchange(self, kind, about):
        self.counts[kind, about, self.index] += 1
        return self.texts[kind, about, self.counts[kind, about, self.index]]

    def wait(self, condition):
        """Lets other processes run, and goes on as the first of those that can."""
        self.waiting[self.index] = condition
        self.turn.notify_all()
        self.turn.wait_for(lambda: self.errors or self.next() == self.index)
        if not condition():
            raise RuntimeError('another process has failed')
        self.waiting[self.index] = None

    def next(self):
        if None in self.waiting:
            return None
        return next((i for i, condition in enumerate(self.waiting) if condition()), None)


def look(folder, prefix):
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            name = prefix + entry.name
            if entry.is_dir():
                yield name, None
                yield from look(entry.path, f'{name}/')
            else:
                with open(entry.path, 'rb', buffering=0) as file:
                    yield name, file.read()


class Root:
    """A directory with the memory of each host and the checkpoints, which can be taken and put back.

    A content is {(host or DISK, writer or step): frozenset of (path, bytes; None for a directory)}: its cells.
    """

    def __init__(self, path):
        self.path = path

    def content(self):
        return {
            (top.name, cell.name): frozenset(look(cell.path, ''))
            for top in os.scandir(self.path)
            for cell in os.scandir(top.path)
        }

    def put(self, content):
        now = self.content()
        for cell in now.keys() | content.keys():
            if now.get(cell) != content.get(cell):
                place = self.path.joinpath(*cell)
                shutil.rmtree(place, ignore_errors=True)
                for name, data in sorted(content.get(cell, ()), key=lambda item: item[0]):
                    if data is None:
                        (place / name).mkdir(parents=True)
                    else:
                        (place / name).parent.mkdir(parents=True, exist_ok=True)
                        (place / name).write_bytes(data)


@dataclasses.dataclass(frozen=True)
class Layout:
    """How many processes and hosts there are, and which array they hold.

    Attributes:
        hosts: of each process.
        sharded: each process holds a part of the array; otherwise each holds all of it.
        copies: processes that keep a copy of each piece.
        bucket: the checkpoints are read from a bucket, to which they were copied from the disk.
    """

    hosts: tuple[int, ...]
    sharded: bool = True
    copies: int = 0
    bucket: bool = False


class Bucket(test_keep.Memory):
    """A bucket with the files of a directory."""

    def __init__(self, directory):
        self.directory = directory
        super().__init__()

    @property
    def objects(self):
        files = dict(look(self.directory, '')).items()
        return {self.PREFIX + name: data for name, data in files if data is not None and '.partial' not in name}

    @objects.setter
    def objects(self, objects):
        pass


class Explorer:
    """Explores what may happen to a run.

    Args:
        leftovers: whether worlds differ that differ in what unfinished changes have left.
        returns: hosts that were out of reach come back with the memory that they had.

    Attributes:
        dead: worlds in which a run may be found, by what a start can tell apart.
        sources: how often a start took its state from where.
    """

    def __init__(self, root, layout, processes, leftovers, returns):
        self.root, self.layout, self.processes, self.leftovers = root, layout, processes, leftovers
        self.returns, self.bucket = returns, Bucket(root.path / DISK)
        self.mesh = jax.make_mesh((len(layout.hosts),), ('d',), devices=jax.devices()[: len(layout.hosts)])
        self.good = {}  # {(step, attempt): {file: bytes}} of what was written
        self.manifests = set()  # of all pieces
        self.dead, self.sources, self.number = {}, Counter(), 0
        self.checkpoints = self.bucket.path if layout.bucket else root.path / DISK
        self.is_running = False
        sys.addaudithook(self.audit)

    def audit(self, event, arguments):
        """What is removed in directories that are already renamed changes nothing for a reader."""
        in_renamed = event == 'os.remove' and arguments[1] != -1
        is_read = event == 'open' and arguments[1] in ('r', 'rb', None)
        if event in CHANGES and not in_renamed and not is_read and self.is_running:
            self.processes.watch()

    def state(self, step, attempt):
        """An array whose values say where it is from."""
        spec = PartitionSpec('d') if self.layout.sharded else PartitionSpec()
        values = np.full(2 * len(self.layout.hosts), step + PER_ATTEMPT * attempt, np.int32)
        return {'x': jax.device_put(values, NamedSharding(self.mesh, spec))}

    def explore(self, attempts, plans):
        frontier = [{}]
        for attempt in range(1, attempts + 1):
            found = {}
            for world in frontier:
                for plan in plans:
                    for crashed in self.attempt(world, attempt, plan):
                        found.setdefault(self.key(crashed), crashed)
            frontier = [world for key, world in found.items() if key not in self.dead]
            self.dead |= found
        for world in frontier:
            self.attempt(world, attempts + 1, None)

    def attempt(self, world, attempt, plan):
        """Starts a run in a world, and follows a plan. Returns the worlds in which it may be killed.

        Args:
            plan: for each step whether its state goes to 'memory' or to the 'disk'; None: only the start.
        """
        self.root.put(world)
        self.number = attempt
        (self.root.path / DISK).mkdir(exist_ok=True)
        expected, positions, whole = self.newest(world), defaultdict(lambda: defaultdict(set)), {}

        def watch():
            content = self.root.content()
            for host, writer in {*content, *self.cells()}:
                phase = self.processes.exchanges[int(writer) if host != DISK else 0]
                positions[phase][host, writer].add(content.get((host, writer), frozenset()))

        def process(i):
            place = self.root.path / f'host{self.layout.hosts[i]}'
            place.mkdir(exist_ok=True)
            memory = Memory(place, 1, ignore, self.layout.copies)
            try:
                return follow(i, memory)
            finally:
                memory.close()

        def follow(i, memory):
            restored = restore_newest(self.checkpoints, self.state(0, 0), ignore, memory=memory.states())
            if plan is None:
                return restored
            step, _, description = restored or (0, None, {})
            assert not memory.begin(step, self.state(step, attempt), description).startswith('none')
            for where in plan:
                self.processes.agree('step', '')  # a step is computed together
                step += 1
                if where == DISK:
                    if i == 0:
                        self.save(step, attempt)
                    continue
                memory.save(step, self.state(step, attempt), described(step), np.True_)
                memory.wait()
                whole[self.processes.exchanges[i]] = step
                if i == 0:
                    self.learn(step, attempt)
            watch()
            return restored

        self.processes.watch = watch
        self.is_running = True
        try:
            restored = self.processes.run(process)
        finally:
            self.is_running = False
        values = {int(value) for found in restored if found for value in found[1]['x']}
        assert {found[0] if found else 0 for found in restored} == {expected}, self.key(world)
        assert {value % PER_ATTEMPT for value in values} == ({expected} if expected else set())
        assert len(values) <= 1, f'a mixture: {values}'
        self.sources[(restored[0] or (0, 0, {'where': 'nothing'}))[2].get('where', DISK)] += 1
        return [] if plan is None else self.crashed(positions, whole, expected)

    def crashed(self, positions, whole, restored):
        """The worlds that remain after a kill at any moment, and after the loss of any hosts."""
        hosts = sorted({f'host{host}' for host in self.layout.hosts})
        losses = [lost for n in range(len(hosts) + 1) for lost in itertools.combinations(hosts, n)]
        worlds = []
        for phase, cells in positions.items():
            done = max((step for at, step in whole.items() if at <= phase), default=0)
            choices = [
                [(cell, c) for c in {self.summary(c): c for c in sorted(found, key=sorted_files)}.values()]
                for cell, found in cells.items()
            ]
            for chosen in itertools.product(*choices):
                for lost in losses:
                    world = {cell: content for cell, content in chosen if content and cell[0] not in lost}
                    if not any(top.startswith(AWAY) for top, _ in world):
                        kept = max(done, restored) if not lost else done if len(lost) <= self.layout.copies else 0
                        assert self.newest(world) >= kept, f'{kept} is lost with {lost}: {self.key(world)}'
                    worlds.append(world)
                    if self.returns and len(lost) == 1:
                        worlds += self.away(dict(chosen), *lost)
        return worlds

    def away(self, world, host):
        """A host is out of reach and another one takes its place; it comes back with the memory that it had."""
        left = {cell: content for cell, content in world.items() if cell[0] != host}
        if back := {cell: content for cell, content in world.items() if cell[0] == AWAY + host and content}:
            back = {(host, writer): content for (_, writer), content in back.items()}
            return [{cell: content for cell, content in left.items() if cell[0] != AWAY + host} | back]
        return [left | {(AWAY + host, cell[1]): content for cell, content in world.items() if cell[0] == host}]

    def cells(self):
        """The pieces of each process, in the memory of its host and of those that keep copies."""
        n = len(self.layout.hosts)
        return {
            (f'host{self.layout.hosts[(writer + shift) % n]}', str(writer))
            for writer in range(n)
            for shift in range(self.layout.copies + 1)
        }

    def learn(self, step, attempt):
        """Keeps the files of a state that is whole."""
        files = self.good[step, attempt] = {}
        for (host, _), content in self.root.content().items():
            for name, data in content:
                top, _, file = name.partition('/')
                if host != DISK and top == str(step) and data is not None:
                    if file == MANIFEST:
                        self.manifests.add(data)
                    else:
                        files[file] = data

    def save(self, step, attempt):
        """Saves a checkpoint."""
        state, place = self.state(step, attempt), partial_directory(self.root.path / DISK, step)
        place.mkdir()
        written = HostFiles(copy_to_host(state)).write(lambda name, content: write(place / name, content))
        publish(place, self.root.path / DISK, step, described(step), named_arrays(state), written)

    def pieces(self, content):
        """Step, attempt and intact files of each piece of a cell, found without the product."""
        pieces = defaultdict(dict)
        for name, data in content:
            if data is not None:
                pieces[name.partition('/')[0]][name.partition('/')[2]] = data
        for step, files in pieces.items():
            if step.isdecimal() and files.get(MANIFEST) in self.manifests:
                line = json.loads(files[MANIFEST])['description']['piece']['line']
                state = int(step), int(line.partition('.')[0].removeprefix('attempt'))
                yield *state, frozenset(name for name, data in files.items() if self.good[state].get(name) == data)

    def newest(self, world):
        """The newest step of which all files are intact somewhere, and also the first process's piece."""
        found, firsts = defaultdict(set), set()
        for (top, writer), content in world.items():
            for step, attempt, files in self.pieces(content) if top.startswith('host') else ():
                found[step, attempt] |= files
                firsts |= {(step, attempt)} if writer == '0' else set()
        steps = {int(cell) for top, cell in world if top == DISK and cell.isdecimal()}
        return max(steps | {state[0] for state in firsts if found[state] == self.good[state].keys()}, default=0)

    def summary(self, content):
        """What a start can tell apart in a cell: its pieces, and whether there is something else."""
        suffixes = {Path(name.partition('/')[0]).suffix for name, _ in content}
        return frozenset(self.pieces(content)), frozenset(suffixes - {''}) if self.leftovers else 0

    def key(self, world):
        """The same for worlds that differ in the numbers of their attempts only."""
        summaries = {cell: self.summary(content) for cell, content in world.items() if cell[0] != DISK}
        attempts = sorted({piece[1] for pieces, _ in summaries.values() for piece in pieces})
        named = {
            (cell, frozenset((step, attempts.index(attempt), files) for step, attempt, files in pieces), others)
            for cell, (pieces, others) in summaries.items()
        }
        return frozenset(named | {cell for cell in world if cell[0] == DISK})


def described(step):
    return {'productive_seconds': float(step), 'finite_state': True}


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def ignore(text):
    pass


def sorted_files(content):
    return sorted(content, key=lambda item: item[0])


def read(place, manifest, reading):
    """The arrays of a state, read and checked as by `restore`, but not put on devices."""
    arrays = {name: np.zeros(array.shape, array.dtype) for name, array in manifest.arrays.items()}
    for name, array in arrays.items():
        chunks = Chunks(place, manifest, name)
        for file, at in chunks:
            chunks.read(file, at, [(tuple((0, n) for n in array.shape), array)], True)
    return [arrays[name] for name in reading]


@pytest.fixture
def explorer(monkeypatch):
    """explorer(layout, leftovers) -> Explorer"""
    with contextlib.ExitStack() as stack:

        def begin(layout, leftovers=True, returns=False):
            processes = Processes(len(layout.hosts))
            for module in ('agreement', 'memory', 'restoring', 'peers'):
                for name in ('gather', 'broadcast', 'agree', 'scatter', 'offer'):
                    monkeypatch.setattr(f'pretrax.checkpoint.{module}.{name}', getattr(processes, name), raising=False)
            monkeypatch.setattr('jax.process_index', lambda: processes.index or 0)
            monkeypatch.setattr('jax.process_count', lambda: processes.n)
            monkeypatch.setattr('pretrax.checkpoint.peers.coordinator_address', lambda: '127.0.0.1:1')
            monkeypatch.setattr('concurrent.futures.ThreadPoolExecutor', SameThread)
            monkeypatch.setattr('pretrax.checkpoint.restoring._read_arrays', read)
            monkeypatch.setattr('pretrax.checkpoint.memory.secrets.token_hex', lambda n: f'attempt{found.number}')

            def held(leaf, replicas=True):
                every = held_shards(leaf, replicas)
                return (
                    every
                    if not replicas
                    else [
                        shard
                        for shard in leaf.addressable_shards
                        if shard.device == jax.devices()[processes.index or 0]
                    ]
                )

            for module in ('memory', 'state_files'):
                monkeypatch.setattr(f'pretrax.checkpoint.{module}.held_shards', held)
            monkeypatch.setattr('pretrax.storage.bucket_path.open_bucket', lambda scheme, name: found.bucket)
            place = '/dev/shm' if os.access('/dev/shm', os.W_OK) else None
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=place)))
            found = Explorer(Root(root), layout, processes, leftovers, returns)
            return found

        yield begin


PLANS = [('memory', 'memory'), ('memory', DISK, 'memory')]


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ('layout', 'attempts', 'options', 'worlds'),
    [
        (Layout((0, 0)), 2, {}, 200),
        (Layout((0, 1), sharded=False), 1, {}, 30),
        (Layout((0, 1), copies=1), 1, {}, 200),
        (Layout((0, 1), copies=1, bucket=True), 1, {'leftovers': False}, 50),
        (Layout((0, 1, 2), copies=1), 1, {'leftovers': False}, 300),
        slow(Layout((0, 1)), 2, {'leftovers': False, 'returns': True}, 600),
        slow(Layout((0, 0)), 3, {'leftovers': False}, 200),
        slow(Layout((0, 1), sharded=False), 2, {'leftovers': False}, 100),
        slow(Layout((0, 1), copies=1), 2, {'leftovers': False}, 900),
        slow(Layout((0, 0, 1)), 2, {'leftovers': False}, 300),
    ],
)
def test_a_run_continues_from_the_newest_whole_state(layout, attempts, options, worlds, explorer):
    found = explorer(layout, **options)
    found.explore(attempts, PLANS)
    assert len(found.dead) > worlds, found.sources
    assert {'nothing', DISK} < found.sources.keys()  # and memory, in different words


@pytest.mark.parametrize('layout', [Layout((0, 1)), Layout((0, 1), sharded=False)])
def test_a_damaged_file_is_passed_over(layout, explorer):
    """One file of one piece is truncated or changed, in every world after one attempt."""
    found = explorer(layout, leftovers=False)
    found.explore(1, PLANS)
    for world in list(found.dead.values()):
        for cell, content in world.items():
            for name, data in content:
                if cell[0] != DISK and data is not None and name.partition('/')[0].isdecimal():
                    for harmed in (data[:-1], data[:-1] + bytes([data[-1] ^ 1])):
                        found.attempt(world | {cell: content - {(name, data)} | {(name, harmed)}}, 2, None)
    assert found.sources.total() > 200
    assert {'nothing', DISK} < found.sources.keys()
