"""However islands are interleaved, killed and cut off from the bucket, they agree on rounds, and none waits for ever.

A model checker of the protocol. Every island runs the product's own `Rounds` on a bucket in memory. Each request to the
bucket is one step, and every order of the steps of the islands is followed, except that what no other island can
change is read at once. At every step a process may be killed for ever, or killed and started again, from nothing or
from each state that it had saved, and a request may fail, carried out or not. A round may run out of patience at any
time after its first contribution, so no clock is assumed to be right.

The weights of an island are what they are made of: the contributions in each round that it took, and the batches that
it trained since. So a difference that is applied twice, or without being listed, is seen.
"""

import array
import collections
import contextlib
import dataclasses
import functools
import itertools
import json
from typing import NamedTuple

import numpy as np
import pytest
import xxhash

from pretrax.federation import cleaning
from pretrax.federation.anchors import Anchor
from pretrax.federation.cleaning import Cleaner
from pretrax.federation.differences import _Listing, stored
from pretrax.federation.objects import ISLANDS, Contribution, Piece, Stored, Table, anchor_path
from pretrax.federation.registry import Membership, registered
from pretrax.federation.rounds import Due, Rounds, Waiting
from pretrax.storage.bucket_path import Versioned

INDEX = _Listing(encoding='f32', arrays={}, objects=[]).content()  # of numbers
GRAPH = {'faults', 'crashes', 'mortal', 'changes_numbers'}  # arguments
FAILED = object()  # the answer to a request that raises OSError
DONE, DEAD = 'done', 'dead'


class PausedError(Exception):
    """A process is about to make a request."""

    def __init__(self, request):
        super().__init__(request)
        self.request = request


class Path:
    """An object in the bucket. Requests get the recorded answers; the next one pauses the process.

    Attributes:
        answers: of the requests so far, in order; shared with all paths below this one.
    """

    def __init__(self, answers, key=''):
        self.answers, self.key = answers, key

    def __truediv__(self, name):
        return Path(self.answers, f'{self.key}/{name}' if self.key else name)

    def __str__(self):
        return self.key

    @property
    def parent(self):
        return self  # the islands see nothing above the federation

    def ask(self, *request):
        answer = next(self.answers, self)
        if answer is self:
            raise PausedError(request)
        if answer is FAILED:
            raise OSError(5, 'does not answer', self.key)
        return answer

    def read_version(self, largest=None):
        content = self.ask('read', self.key)
        return Versioned(content, content if content is not None else b'missing')

    def write_version(self, content, expected):
        return self.ask('swap', self.key, content, expected)

    def create(self, content):
        return self.ask('create', self.key, content)

    def write_bytes(self, content):
        self.ask('write', self.key, content)

    def unlink(self, missing_ok):
        self.ask('delete', self.key)


def carry_out(store, kind, key, content=None, expected=None):
    """The store and the answer after a request. A store is a frozenset of (key, content)."""
    old = next((value for name, value in store if name == key), None)
    if kind == 'read':
        return store, old
    if kind == 'create' and old is not None:
        return store, old == content
    if kind == 'swap' and (old or b'missing') != expected:
        return store, None
    if kind == 'delete':
        assert is_numbers(key), f'{key} is needed for ever'
        return store - {(key, old)}, True
    assert kind == 'create' or is_numbers(key) or not key.startswith('rounds/'), f'{key} may never change'
    if old is not None and key == 'federation.json':
        shares = json.loads(content)['islands']
        assert json.loads(old)['islands'].items() < shares.items(), 'a share was lost'
        assert sorted(shares.values()) == list(range(len(shares)))
    return store - {(key, old)} | {(key, content)}, content if kind == 'swap' else True


@functools.cache
def is_numbers(key):
    """Whether an object has numbers, which may be deleted, or names those of an anchor."""
    return key.count('/') > 2 or (key.startswith('anchors/') and not key.startswith('anchors/0/'))


@functools.cache
def author_of(key):
    """The only island that writes an object, '' if any may; and the last round for which it does."""
    first, *rest = key.split('/')
    if first == 'anchors':
        return '', 1000
    if first == 'rounds':
        return rest[1].removesuffix('.json').replace('closed', ''), int(rest[0])
    return rest[0] if rest else '', 1000


class Sent(NamedTuple):
    """A contribution whose round is not taken yet: its step, its batches [first, last), and whether it is bad."""

    step: int
    first: int
    last: int
    bad: bool


class Island(NamedTuple):
    """Attributes:
    phase: the method that runs next.
    lineage: another one for a process that computes other numbers from the same batches.
    round: that it trains for, or whose closing it waits for.
    first: the first batch that it has not contributed.
    anchor: for each round that it took, the (name, lineage, first, last) of its members.
    own: the batches that its weights have besides.
    is_late: it has trained on without its round.
    clock: seconds; the patience is one second.
    saved: the states that it can start from.
    bad: the round for which its numbers are not finite.
    is_closer: it has closed the round that it took last.
    """

    name: str
    phase: str = 'begin'
    lineage: int = 0
    round: int = 0
    step: int = 0
    batch: int = 0
    first: int = 0
    anchor: tuple = ()
    own: tuple = ()
    sent: Sent | None = None
    is_late: bool = False
    clock: int = 0
    saved: tuple = ()
    bad: int = 0
    is_closer: bool = False


class World:
    """What is the same in all states.

    Args:
        steps: of each island; it contributes after each step.
        skipping: islands that skip every other batch, as after a rollback.
        wait_for: contributions that the first round needs.
        keep: rounds between anchors; 0: there are no anchors, and nobody writes, reads or deletes numbers.
        damaged: an anchor that nobody can read.
    """

    def __init__(self, names, steps=1, skipping='', wait_for=1, keep=0, damaged=-1):
        self.skipping, self.wait_for, self.keep, self.damaged = skipping, wait_for, keep, damaged
        self.anchors = {}  # {digest of weights: the members of the rounds in them}
        self.steps, self.terms = steps, {ISLANDS: len(set(names))}
        self.table = Table(
            founder=names[0], terms=self.terms, islands={name: i for i, name in enumerate(sorted(set(names)))}
        )
        self.contributed = functools.cache(self.contributed)
        self.facts = {}  # {digest of numbers: (lineage, whether they are bad)}
        self.snapshots = {}  # {key: what a `Rounds` has seen}
        self.processes, self.numbers_of, self.outcomes = [], {}, {}

    # An island, as `federation.island` does it: each method makes requests by `rounds`, and returns the next state

    def begin(self, island, place, rounds):
        if island.round == 0:
            registered(place, island.name, self.terms)
            return self.enter(island, place, rounds)
        closing = rounds.closing(island.round)
        if closing is not None and island.name not in closing.members:
            return self.enter(island, place, rounds)
        return island._replace(phase='announce')

    def enter(self, island, place, rounds):
        """Takes the newest round, and drops what the island has learned since its last contribution."""
        newest, anchor = rounds.newest(), ()
        if self.keep:
            known = island.round - 1
            anchor = island.anchor if known > 0 else () if known == 0 else None
            for number in range(newest - newest % self.keep, known, -self.keep):
                found = Anchor.read(anchor_path(place, number) / 'anchor.json')
                if found is not None and number != self.damaged and stored(place, found.weights[0]):
                    anchor = self.anchors[found.weights[0].xxh3]
                    break
            if anchor is None:
                return island
        for number in range(len(anchor) + 1, newest + 1):
            closing = rounds.closing(number)
            if self.keep and not self.are_stored(place, rounds.members(closing)):
                break
            anchor = (*anchor, self.members(rounds, closing))
        if self.keep and len(anchor) in (island.round - 1, *range(newest)):
            return island  # it looks again
        step = rounds.closing(len(anchor)).step if anchor else 0
        batch = max(island.batch, step, rounds.contributed(newest))
        return self.took(
            island,
            round=len(anchor) + 1,
            step=max(island.step, step),
            batch=batch,
            first=batch,
            anchor=anchor,
            own=(),
        )

    def are_stored(self, place, members):
        """Whether the numbers of all members are there."""
        return all(stored(place, piece) for one in members.values() for piece in one.pieces['0'])

    def announce(self, island, place, rounds):
        with contextlib.suppress(OSError):
            rounds.announce(island.round, 'training')
        return self.on(island)

    def on(self, island):
        """Trains a step, unless the island has trained them all; contributes; or ends."""
        if island.step < self.steps:
            island = self.train(island)
        if not island.own:
            return island._replace(phase='finish')
        sent = Sent(island.step, island.first, island.batch, island.bad == island.round)
        island = island._replace(phase='send' if self.keep else 'contribute', sent=sent)
        return island._replace(saved=(island.saved[0], island._replace(saved=())))

    def took(self, island, **changes):
        """The island after it has taken a round. It is saved."""
        closer = {'is_closer': changes.pop('is_closer', False)}
        island = island._replace(phase='begin', sent=None, is_late=False, clock=0, saved=(), is_closer=False, **changes)
        return island._replace(phase='write_anchor' if self.keep else 'announce', saved=(island,), **closer)

    def write_anchor(self, island, place, rounds):
        number = len(island.anchor)
        if island.is_closer and number % self.keep == 0:
            path = anchor_path(place, number) / 'anchor.json'
            if Anchor.read(path) is None:
                prefix = f'anchors/{number}/{island.name}/weights'
                (place / f'{prefix}/0/index.json').write_bytes(INDEX)
                path.create(self.anchor(prefix, island))
        return island._replace(phase='clean')

    def anchor(self, prefix, island):
        digest = xxhash.xxh3_128_hexdigest(repr(island.anchor).encode())
        self.anchors[digest] = island.anchor
        piece = Piece(object=f'{prefix}/0/index.json', size=1, xxh3=digest)
        return Anchor(round=len(island.anchor), by=island.name, weights=[piece], momentum=[]).content()

    def clean(self, island, place, rounds):
        cleaner = Cleaner(place, island.name, rounds, self.keep, lambda text: None)
        with contextlib.suppress(OSError):
            cleaner.clean(len(island.anchor), island.is_closer)
        return island._replace(phase='announce', is_closer=False)

    def send(self, island, place, rounds):
        (place / self.contribution(island).pieces['0'][0].object).write_bytes(INDEX)
        return island._replace(phase='contribute')

    def train(self, island):
        skipped = 1 if island.name in self.skipping else 0
        batch = island.batch + skipped
        return island._replace(step=island.step + 1, batch=batch + 1, own=(*island.own, batch))

    def contribute(self, island, place, rounds):
        rounds.contribute(self.contribution(island))
        return island._replace(phase='poll')

    def poll(self, island, place, rounds):
        found = rounds.poll(island.round)
        if isinstance(found, Waiting):
            return island
        if isinstance(found, Due):
            bad = {
                name: 'not finite or missing'
                for name, one in found.contributions.items()
                if self.numbers(one)[1] or (self.keep and not self.are_stored(place, {name: one}))
            }
            found = rounds.close(found, bad)
        is_readable = not self.keep or self.are_stored(place, rounds.members(found))
        if not found.lists(self.contribution(island)) or not is_readable:
            return self.enter(island, place, rounds)
        own = tuple(batch for batch in island.own if batch >= island.sent.last)
        anchor = (*island.anchor, self.members(rounds, found))
        facts = {'anchor': anchor, 'own': own, 'is_closer': found.by == island.name}
        return self.took(island, round=island.round + 1, first=island.sent.last, **facts)

    def finish(self, island, place, rounds):
        with contextlib.suppress(OSError):
            rounds.announce(island.round, 'finished')
        return island._replace(phase=DONE)

    def contribution(self, island):
        return self.contributed(island.name, island.lineage, island.round, island.sent, island.anchor)

    def contributed(self, *numbers):
        name, lineage, number, sent, anchor = numbers
        digest = xxhash.xxh3_128_hexdigest(repr(numbers).encode())
        self.facts[digest] = lineage, sent.bad
        key = f'rounds/{number}/{name}/{lineage}/0/index.json'
        return Contribution(
            round=number, name=name, attempt=str(lineage), base=number - 1, step=sent.step,
            first_batch=sent.first, last_batch=sent.last, tokens=max(1, sent.last - sent.first), encoding='f32',
            anchor=xxhash.xxh3_128_hexdigest(repr(anchor).encode()),
            pieces={'0': [Piece(object=key, size=1, xxh3=digest)]},
        )  # fmt: skip

    def numbers(self, contribution):
        """The lineage of a contribution, and whether it is bad."""
        return self.facts[contribution.pieces['0'][0].xxh3]

    def members(self, rounds, closing):
        return tuple(
            (name, self.numbers(one)[0], one.first_batch, one.last_batch)
            for name, one in rounds.members(closing).items()
        )

    # A process, and the next request that it makes. Processes are known by number

    def start(self, island):
        return self.run(Process(island))

    def number(self, process):
        if process not in self.numbers_of:
            self.numbers_of[process] = len(self.processes)
            self.processes.append(process)
        return self.numbers_of[process]

    def answered(self, number, answer):
        """The processes that a process may be when it makes its next request, or when it has ended."""
        if (number, answer) not in self.outcomes:
            process = self.processes[number]
            after = process._replace(answers=(*process.answers, answer), request=None)
            self.outcomes[number, answer] = self.run(after)
        return self.outcomes[number, answer]

    def run(self, process):
        island, seen, answers, _ = process
        if island.phase in (DONE, DEAD):
            return (self.number(process),)
        place = Path(iter(answers))
        rounds = self.restored(place, island, seen)
        try:
            following = [getattr(self, island.phase)(island, place, rounds)]
        except PausedError as pause:
            return (self.number(process._replace(request=pause.request)),)
        except OSError:
            following = [island]
            if island.sent is not None and not island.is_late and island.step < self.steps:
                following.append(self.train(island)._replace(is_late=True))
        seen = self.snapshot(rounds)
        return tuple(after for island in following for after in self.run(Process(island, seen)))

    def restored(self, place, island, seen):
        membership = Membership(place, island.name, 0, 0, False, None)
        found = Rounds(membership, 1, lambda text: None, lambda: island.clock, self.wait_for)
        if seen:
            closings, opened = self.snapshots[seen]
            found._closings = dict(closings)
            found._open = {
                number: dataclasses.replace(one, found=dict(one.found), damaged=dict(one.damaged))
                for number, one in opened.items()
            }
        return found

    def snapshot(self, rounds):
        opened = [
            (number, one.since, *((name, digest) for name, (_, digest) in sorted(one.found.items())), *one.damaged)
            for number, one in sorted(rounds._open.items())
        ]
        key = (tuple((number, id(closing)) for number, closing in sorted(rounds._closings.items())), *opened)
        self.snapshots.setdefault(key, (rounds._closings, rounds._open))
        return key


class Process(NamedTuple):
    """Attributes: the island; the key of what its `Rounds` has seen; the answers to its requests; the next request."""

    island: Island
    seen: tuple = ()
    answers: tuple = ()
    request: tuple | None = None


class Graph:
    """All states that can be reached, and the steps between them.

    A state is (store, processes, faults, crashes), with numbers for stores and processes.

    Args:
        faults, crashes: how many requests may fail, and processes be killed.
        changes_numbers: a process that is started again may compute other numbers from the same batches.
    """

    def __init__(self, world, islands, store=(), faults=0, crashes=0, mortal='abc', changes_numbers=False):
        self.world, self.mortal, self.changes_numbers = world, mortal, changes_numbers
        for method in ('keys', 'is_complete', 'chain', 'has_ended'):
            setattr(self, method, functools.cache(getattr(self, method)))
        self.stores, self.store_numbers, self.carried = [], {}, {}
        self.states, self.kinds, self.goals, self.todo = {}, collections.Counter(), [], []
        self.sources, self.targets, self.ticks = (
            array.array('I'),
            array.array('I'),
            bytearray(),
        )  # steps without a fault
        first = self.store(frozenset(store))
        for processes in itertools.product(*(world.start(island) for island in islands)):
            self.add((first, processes, faults, crashes))

    def store(self, store):
        if store not in self.store_numbers:
            self.store_numbers[store] = len(self.stores)
            self.stores.append(store)
            self.check_store(store)
        return self.store_numbers[store]

    def add(self, state):
        """The number of a state."""
        store, processes, faults, crashes = state
        packed = (store << 8) + (faults << 4) + crashes  # one number takes less memory
        for process in processes:
            packed = (packed << 24) + process
        if packed not in self.states:
            self.states[packed] = len(self.states)
            self.todo.append(state)
        return self.states[packed]

    def explore(self):
        done = 0
        while self.todo:
            state = self.todo.pop()
            done += 1
            source = self.add(state)
            self.check(state, source)
            for kind, following in self.steps(state):
                self.kinds[kind] += 1
                target = self.add(following)
                if kind in ('answer', 'tick'):
                    self.sources.append(source)
                    self.targets.append(target)
                    self.ticks.append(kind == 'tick')
        assert done == len(self.states)
        return self

    def carry_out(self, store, request):
        if (store, request) not in self.carried:
            changed, answer = carry_out(self.stores[store], *request)
            self.carried[store, request] = self.store(changed), answer
        return self.carried[store, request]

    def steps(self, state):
        store, processes, faults, crashes = state
        all_of = self.world.processes
        safe = next((i for i in range(len(processes)) if self.is_safe(state, i)), None)
        for i, number in enumerate(processes):
            process = all_of[number]
            if process.request is None or safe not in (None, i):
                continue
            ahead, behind = processes[:i], processes[i + 1 :]
            changed, answer = self.carry_out(store, process.request)
            for after in self.world.answered(number, answer):
                yield 'answer', (changed, (*ahead, after, *behind), faults, crashes)
            for after in self.world.answered(number, FAILED) if faults else ():
                yield 'lost', (changed, (*ahead, after, *behind), faults - 1, crashes)
                if changed != store:
                    yield 'failed', (store, (*ahead, after, *behind), faults - 1, crashes)
            if self.may_tick(process):
                for after in self.world.run(process._replace(island=process.island._replace(clock=1), request=None)):
                    yield 'tick', (store, (*ahead, after, *behind), faults, crashes)
            for island in self.restarts(process.island) if crashes and safe is None else ():
                for after in self.world.start(island):
                    yield 'crash', (store, (*ahead, after, *behind), faults, crashes - 1)

    def is_safe(self, state, i):
        """Whether the next request of a process changes nothing, and no process can change its answer."""
        store, processes, _, crashes = state
        request = self.world.processes[processes[i]].request
        if request is None or request[0] not in ('read', 'create'):
            return False
        key, is_there = request[1], request[1] in self.keys(store)
        if is_there and key.startswith('rounds/') and not is_numbers(key):
            return True
        if is_there and key == 'federation.json' and self.is_complete(store):
            return True
        if request[0] == 'create':
            return False
        author, number = author_of(key)
        if is_numbers(key) and is_there:
            number = -1  # it may be deleted in any round
        others = (self.world.processes[other].island for j, other in enumerate(processes) if j != i)
        return not any(
            other.phase not in (DONE, DEAD) and author in ('', other.name) and (crashes > 0 or other.round <= number)
            for other in others
        )

    def is_complete(self, store):
        """Whether all islands have a share, so that the table does not change any more."""
        return (
            json.loads(dict(self.stores[store])['federation.json'])['islands'].keys() == self.world.table.islands.keys()
        )

    def keys(self, store):
        return frozenset(key for key, _ in self.stores[store])

    def may_tick(self, process):
        island = process.island
        if island.phase != 'poll' or process.answers or island.clock:
            return False
        seen = self.world.snapshots[process.seen][1].get(island.round) if process.seen else None
        return seen is not None and seen.since is not None

    def restarts(self, island):
        """What may become of an island that is killed."""
        if island.name not in self.mortal:
            return
        yield Island(island.name, phase=DEAD)
        lineages = [island.lineage, island.lineage + 1] if self.changes_numbers else [island.lineage]
        for lineage in lineages:
            yield Island(island.name, lineage=lineage, bad=island.bad)
        for i, saved in enumerate(island.saved):
            for lineage in lineages if saved.sent is None else [island.lineage]:
                yield saved._replace(saved=island.saved[: i + 1], lineage=lineage)

    # Claims

    def check_store(self, store):
        """No batch of an island is in two contributions that count."""
        batches = collections.Counter()
        for members in self.chain(store):
            batches.update((name, batch) for name, _, first, last in members for batch in range(first, last))
        assert max(batches.values(), default=0) <= 1, batches

    def chain(self, store):
        """The members of each round that is closed, read without the product's `Rounds`."""
        contents, chain = dict(store), []
        while content := contents.get(f'rounds/{len(chain) + 1}/closed.json'):
            number, members = len(chain) + 1, []
            for name, member in json.loads(content)['members'].items():
                raw = contents[f'rounds/{number}/{name}.json']
                assert xxhash.xxh3_128_hexdigest(raw) == member['xxh3']
                found = json.loads(raw)
                lineage, is_bad = self.world.facts[found['pieces']['0'][0]['xxh3']]
                assert not is_bad
                members.append((name, lineage, found['first_batch'], found['last_batch']))
            chain.append(tuple(sorted(members)))
        assert not [key for key in contents if key.endswith('closed.json') and int(key.split('/')[1]) > len(chain)]
        return tuple(chain)

    def check(self, state, number):
        store, processes, _, _ = state
        if sum(self.has_ended(store, process) for process in processes) == len(processes):
            self.goals.append(number)

    def has_ended(self, store, number):
        """Checks a process."""
        island, _, _, request = self.world.processes[number]
        chain = self.chain(self.stores[store])
        assert island.anchor == chain[: len(island.anchor)], 'weights that the rounds do not give'
        in_anchor = {
            batch
            for members in island.anchor
            for name, _, first, last in members
            if name == island.name
            for batch in range(first, last)
        }
        assert in_anchor.isdisjoint(island.own), 'a batch is trained twice'
        assert island.phase != DONE or island.step >= self.world.steps
        return request is None

    def patience(self):
        """How often a round has to run out of patience until all islands have ended, at least; -1: they cannot end."""
        order = np.argsort(np.frombuffer(self.targets, np.uint32), kind='stable')
        first = np.searchsorted(np.frombuffer(self.targets, np.uint32)[order], np.arange(len(self.states) + 1))
        least, todo = array.array('b', [-1]) * len(self.states), collections.deque((goal, 0) for goal in self.goals)
        while todo:
            target, ticks = todo.popleft()
            if least[target] < 0:
                least[target] = ticks
                for step in order[first[target] : first[target + 1]].tolist():
                    after = self.sources[step], ticks + self.ticks[step]
                    (todo.append if self.ticks[step] else todo.appendleft)(after)
        return least


@pytest.fixture(autouse=True)
def computed_once(monkeypatch):
    """Contents that are equal are parsed once, and what a contribution has learned is digested once."""
    monkeypatch.setattr(cleaning, 'in_parallel', lambda calls: [call(*arguments) for call, *arguments in calls])
    parse_anew, learned_anew = Stored.parse.__func__, Contribution.learned
    parse = functools.cache(lambda cls, content, key: parse_anew(cls, content, key))
    learned = {}  # by the number of the object, which is kept

    def learned_by(contribution):
        if id(contribution) not in learned:
            learned[id(contribution)] = contribution, learned_anew(contribution)
        return learned[id(contribution)][1]

    monkeypatch.setattr(Stored, 'parse', classmethod(lambda cls, content, path: parse(cls, content, str(path))))
    monkeypatch.setattr(Contribution, 'learned', learned_by)


def explored(names, bad=None, founded=True, foreign=None, **options):
    """The states of islands, and how often they need patience. Further arguments are those of `World` and `Graph`.

    Args:
        names: of the processes; two with one name are an island whose first process was only suspended.
        bad: the island whose numbers are not finite in round 1.
        founded: the islands have their shares.
        foreign: {key: content} of objects that no island has written.
    """
    of_graph = {key: options.pop(key) for key in GRAPH & options.keys()}
    world = World(names, **options)
    store = {('federation.json', world.table.content())} if founded else set()
    if world.keep:
        anchor = world.anchor('anchors/0/a', Island('a'))
        store |= {('anchors/0/anchor.json', anchor), ('anchors/0/a/0/index.json', INDEX)}
    islands = [Island(name, bad=1 if name == bad else 0, lineage=names[:i].count(name)) for i, name in enumerate(names)]
    graph = Graph(world, islands, store | set((foreign or {}).items()), **of_graph).explore()
    least = collections.Counter(graph.patience())
    assert least[-1] == 0, f'from {least[-1]} of {len(graph.states)} states, not all islands end'
    return graph, least


def slow(options, states):
    return pytest.param(options, states, marks=pytest.mark.slow)


TWO, THREE = {'names': 'ab'}, {'names': 'abc'}
FOREIGN = {'rounds/1/b.json': b'x', 'islands/a/state.json': b'y', 'rounds/1/d.json': b'z'}


@pytest.mark.parametrize(
    ('options', 'states'),
    [
        (THREE, 100_000),
        (THREE | {'bad': 'b'}, 100_000),
        (TWO | {'steps': 2, 'crashes': 1}, 40_000),
        (TWO | {'steps': 2, 'faults': 1}, 30_000),
        (TWO | {'faults': 1, 'crashes': 1}, 20_000),
        (TWO | {'crashes': 1, 'changes_numbers': True}, 5_000),
        (TWO | {'steps': 2, 'crashes': 1, 'foreign': FOREIGN}, 40_000),
        (TWO | {'steps': 2, 'bad': 'b'}, 5_000),
        ({'names': 'a', 'steps': 4, 'skipping': 'a', 'crashes': 2}, 100),
        (TWO | {'steps': 2, 'skipping': 'b', 'crashes': 1, 'mortal': 'b'}, 10_000),
        (TWO | {'steps': 2, 'faults': 1, 'wait_for': 2}, 10_000),
        ({'names': 'aab'}, 10_000),
        ({'names': 'a', 'steps': 3, 'faults': 2, 'crashes': 1, 'changes_numbers': True}, 1_000),
        ({'names': 'a', 'steps': 4, 'keep': 1, 'crashes': 2}, 5_000),
        (TWO | {'steps': 2, 'keep': 1}, 20_000),
        slow(TWO | {'steps': 3, 'keep': 1}, 300_000),
        slow(TWO | {'steps': 2, 'keep': 1, 'faults': 1}, 200_000),
        slow(TWO | {'steps': 2, 'keep': 1, 'crashes': 1, 'mortal': 'b', 'damaged': 2}, 300_000),
        slow(THREE | {'crashes': 1, 'mortal': 'b'}, 400_000),
        slow(THREE | {'crashes': 1, 'mortal': 'b', 'wait_for': 2}, 200_000),
        slow(THREE | {'bad': 'a', 'crashes': 1, 'mortal': 'c'}, 400_000),
        slow(TWO | {'steps': 2, 'faults': 1, 'crashes': 1}, 200_000),
        slow({'names': 'aab', 'steps': 2}, 100_000),
    ],
)
def test_islands_agree_on_rounds_and_all_of_them_end(options, states):
    graph, patience = explored(**options)
    assert len(graph.states) > states
    assert max(patience) <= options.get('crashes', 0), 'an island that lives costs patience'
    chains = [graph.chain(store) for store in graph.stores]
    assert all(len(chain[0]) >= options.get('wait_for', 0) for chain in chains if chain)
    if options.get('keep'):
        keys = [[key for key, _ in store] for store in graph.stores]
        assert any('rounds/1/a.json' in one and not any(key.startswith('rounds/1/a/') for key in one) for one in keys)
    rounds = max(map(len, chains))
    assert rounds >= options.get('steps', 1)


@pytest.mark.parametrize('options', [{}, {'faults': 1, 'crashes': 1}])
def test_each_island_gets_a_share_of_its_own(options):
    graph, _ = explored('abc', steps=0, founded=False, **options)
    tables = {dict(store).get('federation.json') for store in graph.stores}
    assert sum(content is not None and len(json.loads(content)['islands']) == 3 for content in tables) == 6
