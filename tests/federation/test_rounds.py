"""Rounds are closed once, by any island, with everybody who came in time."""

import contextlib

import pytest

from pretrax.federation.objects import (
    ISLANDS,
    Closing,
    Contribution,
    ObjectError,
    Piece,
    closing_path,
    contribution_path,
)
from pretrax.federation.registry import join
from pretrax.federation.rounds import Due, Rounds, Waiting
from pretrax.storage.shared_path import locate_shared

TERMS = {ISLANDS: 3}
DIGEST = 'a' * 32


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def islands(tmp_path):
    """Three islands that have announced round 1, with a clock that all share, and what they report."""
    place, clock, said = locate_shared(str(tmp_path)), Clock(), []
    with contextlib.ExitStack() as stack:
        memberships = [stack.enter_context(join(place, name, TERMS, 60, said.append)) for name in 'abc']
        rounds = [Rounds(membership, 300, said.append, clock) for membership in memberships]
        for one in rounds:
            one.announce(1, 'training')
        yield place, clock, rounds, said


def contribution(name, number=1, attempt='5f', content='1', step=10):
    piece = Piece(object=f'rounds/{number}/{name}/{attempt}/0/x', size=1, xxh3=content * 32)
    return Contribution(
        round=number, name=name, attempt=attempt, base=number - 1, step=step, first_batch=step - 10, last_batch=step,
        tokens=100, anchor=DIGEST, encoding='bf16', pieces={'0': [piece]},
    )  # fmt: skip


def test_a_round_is_closed_when_all_have_contributed_and_the_first_closing_counts(islands):
    _, _, (a, b, c), said = islands
    assert isinstance(a.poll(1), Waiting)
    for rounds, name in ((a, 'a'), (b, 'b')):
        assert rounds.contribute(contribution(name))
    waiting = a.poll(1)
    assert (waiting.contributed, waiting.missing) == (('a', 'b'), ('c',))
    assert c.contribute(contribution('c', step=12))
    due, other = a.poll(1), b.poll(1)
    assert isinstance(due, Due)
    assert list(due.contributions) == ['a', 'b', 'c']
    closing = a.close(due, {'b': 'not finite: layers.0'})
    assert (closing.in_order(), closing.rejected, closing.step, closing.tokens) == (
        ['a', 'c'],
        {'b': 'not finite: layers.0'},
        12,
        200,
    )
    assert b.close(other, {}) == closing == c.poll(1)
    assert closing.lists(contribution('a', attempt='6a'))
    assert not closing.lists(contribution('b'))
    assert not closing.lists(contribution('a', content='2'))
    assert list(c.members(closing)) == ['a', 'c']
    assert [rounds.newest() for rounds in (a, b, c)] == [1, 1, 1]
    assert said == []


def test_who_is_late_by_patience_is_left_out_and_not_waited_for_again(islands):
    _, clock, (a, b, _), _ = islands
    assert a.contribute(contribution('a'))
    a.poll(1)
    clock.now = 200
    assert b.contribute(contribution('b'))
    assert a.poll(1).missing == ('c',)
    clock.now = 299
    assert a.poll(1).missing == ('c',)
    assert b.poll(1).missing == ('c',)
    clock.now = 300
    assert isinstance(b.poll(1), Waiting)  # it saw the first contribution later
    due = a.poll(1)
    assert due.left_out == ('c',)
    assert a.close(due, {}).left_out == ['c']
    assert isinstance(b.poll(1), Closing)
    b.announce(2, 'training')
    assert a.contribute(contribution('a', 2, step=20))
    assert a.poll(2).missing == ('b',)


def test_an_island_that_has_come_back_with_an_older_state_is_waited_for(islands):
    _, clock, (a, b, c), _ = islands
    for number in (1, 2, 3):
        for name, one in (('a', a), ('b', b), ('c', c)):
            assert one.contribute(contribution(name, number))
        a.close(a.poll(number), {})
    for one in (a, c):
        one.announce(4, 'training')
    b.announce(2, 'training')
    for name, one in (('a', a), ('c', c)):
        assert one.contribute(contribution(name, 4))
    assert a.poll(4).missing == ('b',)
    clock.now = 300
    assert a.close(a.poll(4), {}).left_out == ['b']
    a.contribute(contribution('a', 5))
    assert a.poll(5).missing == ('c',)  # not for an island that is left out


def test_the_first_round_waits_for_as_many_islands_as_it_is_told_to(islands):
    _, clock, (one, b, _), said = islands
    a = Rounds(one._membership, 300, said.append, clock, wait_for=2)
    for number, name in ((1, 'a'), (2, 'a')):
        a.contribute(contribution(name, number))
    clock.now = 1000
    assert isinstance(a.poll(1), Waiting)
    clock.now = 2000
    assert a.poll(1).contributed == ('a',)
    assert said == ['federation: round 1 waits for 2 islands (federation.wait_for); contributions so far: a']
    b.contribute(contribution('b'))
    assert a.poll(1).missing == ('c',)  # it trains, so it has the patience of any round
    clock.now = 2300
    assert a.close(a.poll(1), {}).in_order() == ['a', 'b']
    a.poll(2)
    clock.now = 2600
    assert list(a.poll(2).contributions) == ['a']


@pytest.mark.parametrize('state', ['stopped', 'finished'])
def test_nobody_waits_for_an_island_that_has_said_that_it_ends(islands, state):
    _, _, (a, b, c), _ = islands
    b.announce(1, state)
    c.announce(1, state)
    assert a.contribute(contribution('a'))
    assert list(a.poll(1).contributions) == ['a']


def test_an_island_that_was_killed_after_its_contribution_keeps_it(islands):
    _, _, (a, _, _), _ = islands
    assert a.contribute(contribution('a'))
    assert a.contribute(contribution('a', attempt='6a'))
    assert not a.contribute(contribution('a', content='2'))


def test_damaged_objects_are_rejected_with_their_author(islands):
    place, _, (a, b, _), said = islands
    contribution_path(place, 1, 'b').create(b'x')
    contribution_path(place, 1, 'c').create(contribution('c', 2).content())
    assert a.contribute(contribution('a'))
    due = a.poll(1)
    assert {name: reason.partition(': ')[2] for name, reason in due.rejected.items()} == {
        'b': 'Expecting value: line 1 column 1 (char 0)',
        'c': 'it says round 2 of island c',
    }
    assert not b.contribute(contribution('b'))
    assert 'island b cannot contribute to round 1' in said[0]
    assert a.close(due, {}).in_order() == ['a']
    (place / 'islands' / 'b' / 'state.json').write_bytes(b'x')
    assert a.contribute(contribution('a', 2))
    assert isinstance(a.poll(2), Due)
    assert 'nobody waits for island b: ' in said[1]
    closing_path(place, 2).create(b'x')
    with pytest.raises(ObjectError, match=r'rounds/2/closed\.json: '):
        a.poll(2)


@pytest.mark.parametrize('count', [0, 1, 2, 3, 7, 8, 100])
def test_the_newest_round_is_found_with_few_requests(islands, count):
    place, _, (a, _, _), _ = islands
    for number in range(1, count + 1):
        closing = Closing(round=number, by='a', members={}, tokens=0, step=0)
        closing_path(place, number).create(closing.content())
    read, requests = a.closing, []
    a.closing = lambda number: requests.append(number) or read(number)
    assert a.newest() == count
    assert len(requests) <= 15


def test_an_island_whose_weights_went_astray_is_rejected_with_both_digests(islands):
    _, _, (a, b, c), _ = islands
    for rounds, name in ((a, 'a'), (b, 'b'), (c, 'c')):
        rounds.contribute(contribution(name).model_copy(update={'anchor': ('b' if name == 'b' else 'a') * 32}))
    for rounds in (a, b):
        due = rounds.poll(1)
        assert list(due.contributions) == ['a', 'c']
        assert due.rejected['b'].startswith(f'it begins at other weights (digest {"b" * 32}) than')


def test_an_island_whose_numbers_are_not_finite_is_named_by_the_closing(islands):
    _, _, (a, b, c), _ = islands
    for rounds, name in ((a, 'a'), (c, 'c')):
        rounds.contribute(contribution(name))
    pieces = {**contribution('b').pieces, '1': []}  # process 1 has written none
    b.contribute(contribution('b').model_copy(update={'pieces': pieces, 'norm': None}))
    closing = a.close(a.poll(1), {})
    assert list(closing.members) == ['a', 'c']
    assert closing.rejected == {'b': 'the difference of island b is not finite'}


def test_an_island_that_contributes_and_stops_while_others_look_is_in_the_round(islands):
    _, _, (a, b, c), _ = islands
    a.contribute(contribution('a'))
    b.announce(1, 'stopped')
    is_waited_for = a._is_waited_for

    def meanwhile(number, name):
        if name == 'c':
            c.contribute(contribution('c'))
            c.announce(1, 'stopped')
        return is_waited_for(number, name)

    a._is_waited_for = meanwhile
    assert list(a.poll(1).contributions) == ['a', 'c']


def test_an_island_that_lost_its_state_learns_which_batches_it_has_contributed(islands):
    place, _, (a, b, c), _ = islands
    a.contribute(contribution('a', step=20))
    for number in (1, 2, 3):
        closing_path(place, number).create(Closing(round=number, by='b', members={}, tokens=0, step=0).content())
    contribution_path(place, 3, 'a').create(b'x')
    b.contribute(contribution('b', 4, step=50))
    assert [rounds.contributed(3) for rounds in (a, b, c)] == [20, 50, 0]


def test_rounds_go_on_after_a_damaged_closing_and_a_removed_one_is_closed_again(islands):
    place, _, (a, b, c), _ = islands
    for number in (1, 2, 3):
        a.contribute(contribution('a', number, step=10 * number))
        closing_path(place, number).create(Closing(round=number, by='c', members={}, tokens=0, step=0).content())
    (place / 'rounds' / '3' / 'closed.json').write_bytes(b'x')
    assert [rounds.newest() for rounds in (a, b)] == [3, 3]
    assert (b.undamaged_closing(3), b.undamaged_closing(2).round, b.contributed(3)) == (None, 2, 0)
    for rounds, name in ((b, 'b'), (c, 'c')):
        rounds.announce(4, 'stopped')
        rounds.contribute(contribution(name, 3, attempt='7b'))
    a.contribute(contribution('a', 4, step=40))
    assert c.close(c.poll(4), {}).step == 40
    assert b.closing(2) is not None
    closing_path(place, 2).unlink()
    b.forget(2)
    assert list(b.poll(2).contributions) == ['a']
