"""A bucket does not grow with the rounds, and what an island may still read stays, whenever a clean-up is killed."""

import contextlib

import pytest

from host_parts import LAYERS, SHAPES, held, random_weights
from pretrax.config.schema import Federation
from pretrax.federation import anchors, cleaning, differences
from pretrax.federation.anchors import Anchor
from pretrax.federation.cleaning import Cleaner
from pretrax.federation.fragments import fragments
from pretrax.federation.host_weights import zeros_like
from pretrax.federation.island_state import IslandState
from pretrax.federation.link import Author, Link
from pretrax.federation.objects import ISLANDS, Contribution, anchor_path
from pretrax.federation.registry import join
from pretrax.federation.rounds import Rounds
from pretrax.storage import BucketPath
from pretrax.storage.shared_path import SharedPath, locate_shared

KEEP = 3


class Islands:
    """Two islands whose every round is closed by each in turn; rounds that `KEEP` divides have an anchor."""

    def __init__(self, place, memberships, said):
        self.place, self.said = place, said
        self.rounds = {one.name: Rounds(one, 300, said.append) for one in memberships}
        self.attempts = {one.name: one.attempt for one in memberships}
        self.weights = held(random_weights(0), {'d': 8})[0]
        self.start_again()
        self.write_anchor(0, 'a')

    def start_again(self):
        self.cleaners = {
            name: Cleaner(self.place, name, rounds, KEEP, self.said.append) for name, rounds in self.rounds.items()
        }

    def write(self, prefix):
        return differences.write(self.place, prefix, self.weights, 'f32').piece

    def write_anchor(self, number, name):
        pieces = {kind: [self.write(f'anchors/{number}/{name}/{kind}')] for kind in ('weights', 'momentum')}
        anchor = Anchor(round=number, by=name, **pieces)
        (anchor_path(self.place, number) / 'anchor.json').create(anchor.content())

    def contribute(self, number, name, attempt=None):
        attempt = attempt or self.attempts[name]
        piece = self.write(f'rounds/{number}/{name}/{attempt}')
        return self.rounds[name].contribute(
            Contribution(
                round=number, name=name, attempt=attempt, base=number - 1, step=number, first_batch=number - 1,
                last_batch=number, tokens=1, anchor='a' * 32, encoding='f32', pieces={'0': [piece]},
            )
        )  # fmt: skip

    def take(self, number, bad=()):
        """A round, without its clean-up."""
        for name in 'ab':
            self.contribute(number, name)
        closer = 'ab'[number % 2]
        self.rounds[closer].close(self.rounds[closer].poll(number), dict.fromkeys(bad, 'not finite'))
        if number % KEEP == 0:
            self.write_anchor(number, closer)
        return closer

    def clean(self, number, closer):
        for name, cleaner in self.cleaners.items():
            cleaner.clean(number, name == closer)

    def keys(self):
        if isinstance(self.place, BucketPath):
            return set(self.place.files())
        return {str(path.relative_to(self.place)) for path in self.place.rglob('*') if path.is_file()}

    def left(self):
        """The rounds with numbers of each island, and the anchors."""
        parts = [key.split('/') for key in self.keys()]
        found = {name: {int(p[1]) for p in parts if p[0] == 'rounds' and p[2] == name} for name in 'ab'}
        return found | {'anchors': {int(p[1]) for p in parts if p[0] == 'anchors'}}


@pytest.fixture
def start():
    """start(place) -> Islands"""
    with contextlib.ExitStack() as stack:

        def begin(place):
            memberships = [stack.enter_context(join(place, name, {ISLANDS: 2}, 60, pytest.fail)) for name in 'ab']
            said = []
            islands = Islands(place, memberships, said)
            for rounds in islands.rounds.values():
                rounds.announce(1, 'training')
            return islands

        yield begin


def test_a_bucket_has_two_anchors_and_the_rounds_since(tmp_path, start):
    islands = start(SharedPath(tmp_path))
    most = 0
    for number in range(1, 31):
        closer = islands.take(number, bad='b' if number % 7 == 0 else '')  # whose numbers are deleted too
        islands.clean(number, closer)
        most = max(most, *(len(rounds) for rounds in islands.left().values()))
    recent = set(range(28, 31))
    assert islands.left() == {'a': recent, 'b': recent, 'anchors': {0, 27, 30}}
    assert most == 2 * KEEP - 1
    named = {f'rounds/{n}/{name}.json' for n in range(1, 31) for name in ('a', 'b', 'closed')}
    assert named <= islands.keys()
    assert not [path for path in tmp_path.rglob('*') if path.is_dir() and not any(path.iterdir())]


def test_numbers_in_a_bucket_are_deleted_without_a_listing(s3, start):
    islands = start(locate_shared(f'{s3.url}/federation'))
    for number in range(1, 2 * KEEP + 1):
        closer = islands.take(number)
        islands.clean(number, closer)
    assert not [path for method, path in s3.requests if method == 'GET' and 'list-type' in path]
    recent = set(range(KEEP + 1, 2 * KEEP + 1))
    assert islands.left() == {'a': recent, 'b': recent, 'anchors': {0, KEEP, 2 * KEEP}}


def test_a_clean_up_that_is_killed_after_each_deletion_leaves_what_is_read_and_is_finished(
    tmp_path, start, monkeypatch
):
    monkeypatch.setattr(differences, '_OBJECT', 4000)  # several objects
    islands, allowed = start(SharedPath(tmp_path)), []

    def delete(path):
        if path.exists():  # a deletion that is made again is none
            try:
                allowed.pop()
            except IndexError:
                raise OSError(5, 'killed', str(path)) from None
        original(path)

    original = cleaning.delete
    monkeypatch.setattr(cleaning, 'delete', delete)
    for number in range(1, 3 * KEEP + 1):
        closer = islands.take(number)
    before = islands.keys()
    deleted = {key for key in before if is_old(key, 2 * KEEP)}
    assert len(deleted) > 50
    for kill in range(len(deleted) + 1):
        islands.start_again()
        with contextlib.nullcontext() if kill == len(deleted) else pytest.raises(OSError, match='killed'):
            islands.clean(3 * KEEP, closer)
        assert before - deleted <= islands.keys()
        allowed.append(True)
    assert islands.keys() == before - deleted


def is_old(key, second):
    """Whether an object is a number that nobody reads if the second newest anchor is this one, or names such."""
    kind, *rest = key.split('/')
    if kind == 'anchors':
        return 0 < int(rest[0]) < second
    return kind == 'rounds' and int(rest[0]) <= second and len(rest) > 2


def test_numbers_that_were_contributed_in_vain_are_deleted_at_once(tmp_path, start):
    islands = start(SharedPath(tmp_path))
    assert islands.contribute(1, 'a', 'first')
    before = islands.keys()
    assert islands.contribute(1, 'a', 'first')  # its answer was lost
    assert islands.contribute(1, 'a', 'second')
    assert before < islands.keys()
    islands.clean(0, None)
    assert islands.keys() == before


def test_without_a_second_anchor_nothing_is_deleted(tmp_path, start):
    """Whoever had to write an anchor was killed."""
    islands = start(SharedPath(tmp_path))
    for number in range(1, 3 * KEEP + 1):
        closer = islands.take(number)
        if number < 3 * KEEP:
            for path in (tmp_path / 'anchors' / str(number)).glob('anchor.json'):
                path.write_bytes(b'damaged')
    before = islands.keys()
    islands.clean(3 * KEEP, closer)
    assert islands.keys() == before


def test_a_failure_is_reported_once_and_ends_nothing(tmp_path, start, monkeypatch):
    islands = start(SharedPath(tmp_path))
    for number in range(1, 2 * KEEP + 1):
        closer = islands.take(number)

    def delete(path):
        raise PermissionError(13, 'Permission denied', str(path))

    with monkeypatch.context() as patched:
        patched.setattr(cleaning, 'delete', delete)
        for _ in range(2):
            islands.cleaners['a'].start(2 * KEEP, closer == 'a')
            islands.cleaners['a'].finish()
    assert len(islands.said) == 1
    assert 'old differences are not deleted: [Errno 13] Permission denied' in islands.said[0]
    islands.clean(2 * KEEP, closer)
    assert islands.left()['a'] == set(range(KEEP + 1, 2 * KEEP + 1))


def test_an_island_that_comes_in_while_its_anchor_is_deleted_begins_at_a_newer_one(tmp_path, start, monkeypatch):
    islands = start(SharedPath(tmp_path))
    for number in range(1, 2 * KEEP):
        islands.take(number)
    author = Author('a', 'x', False, '', None, islands.rounds['a'])
    link = Link(islands.place, Federation(keep=KEEP), 'test', author, pytest.fail)
    state = IslandState(zeros_like(islands.weights), zeros_like(islands.weights))
    parts = fragments(SHAPES, 1, LAYERS)

    def read_later(*arguments):
        monkeypatch.setattr(differences, 'read', original)
        for number in range(2 * KEEP, 4 * KEEP + 1):
            islands.clean(number, islands.take(number))
        assert not anchor_path(islands.place, KEEP).exists()
        return original(*arguments)

    original = differences.read
    monkeypatch.setattr(differences, 'read', read_later)
    assert anchors.newest(link, parts, 100, -1, state).round == 4 * KEEP
