"""Islands join a federation: each has a share of its own, and one that does not fit is refused by name and value."""

import threading

import pytest

from pretrax.config.schema import Federation
from pretrax.errors import UserError
from pretrax.federation.objects import ISLANDS
from pretrax.federation.registry import join, read_table, registered
from pretrax.storage.shared_path import locate_shared

TERMS = {ISLANDS: 3, 'federation.every': 100, 'model': 'a' * 32, 'optimizer.betas': '[0.9, 0.95]', 'seed': 7}


@pytest.fixture
def place(tmp_path):
    return locate_shared(str(tmp_path))


def ignore(text):
    pass


def test_each_island_has_a_share_and_keeps_it(place):
    with join(place, 'a', TERMS, 60, ignore) as a, join(place, 'b', TERMS, 60, ignore) as b:
        assert (a.share, a.shares, a.is_founder) == (0, 3, True)
        assert (b.share, b.shares, b.is_founder) == (1, 3, False)
    with join(place, 'b', TERMS, 60, ignore) as again:
        assert (again.share, again.is_founder) == (1, False)
        assert again.attempt != b.attempt
    assert read_table(place).islands == {'a': 0, 'b': 1}


def test_islands_that_join_at_once_have_different_shares(bucket):
    place = locate_shared(f'{bucket.url}/federation')
    bucket.fault(method='PUT' if bucket.scheme == 's3' else 'POST', match='federation.json', lose_answer=True, times=2)
    names = ['a', 'b', 'c']
    threads = [threading.Thread(target=registered, args=(place, name, TERMS)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    table = read_table(place)
    assert sorted(table.islands) == names
    assert sorted(table.islands.values()) == [0, 1, 2]


def refusal(place, name, terms):
    with pytest.raises(UserError) as caught, join(place, name, terms, 60, ignore):
        pass
    assert caught.value.exit_code == 2
    assert len(str(caught.value).splitlines()) <= 10
    return str(caught.value)


def test_an_island_that_differs_is_refused_by_name_and_both_values(place):
    registered(place, 'a', TERMS)
    text = refusal(place, 'b', TERMS | {'federation.every': 50, 'seed': 8})
    assert 'which island a has made' in text
    assert 'federation.every: 50 here, 100 in the federation' in text
    assert 'seed: 8 here, 7 in the federation' in text
    assert len(text.splitlines()) == 4
    assert 'model' not in text
    many = refusal(place, 'b', dict.fromkeys('abcdefghijk', 0) | {ISLANDS: 3})
    assert 'more' in many
    assert read_table(place).islands == {'a': 0}


def test_an_island_without_a_share_learns_who_has_them(place):
    for name in 'abc':
        registered(place, name, TERMS)
    assert 'the islands are a, b, c' in refusal(place, 'd', TERMS)


def test_two_processes_are_not_one_island(place):
    with join(place, 'a', TERMS, 0.4, ignore):
        text = refusal(place, 'a', TERMS)
    assert 'federation.name: ' in text
    assert 'islands/a is held by process' in text


@pytest.mark.parametrize('name', ['', 'a/b', 'a b', 'ü', '..', 'closed', 'b.json', '.', 'a-', 'a' * 101])
def test_a_name_that_is_no_part_of_a_key_is_refused(place, name):
    assert 'cannot name an island' in refusal(place, name, TERMS)


def test_a_name_of_a_run_can_name_an_island(place):
    longest = Federation(name='a' * 100).name
    assert registered(place, longest, TERMS).founder == longest
    with pytest.raises(ValueError, match='at most 100'):
        Federation(name='a' * 101)


def test_names_that_differ_only_by_case_are_not_two_islands(place):
    registered(place, 'North', TERMS)
    assert 'north differs only by case from island North' in refusal(place, 'north', TERMS)
    assert registered(place, 'North', TERMS).islands == {'North': 0}


def test_a_federation_is_not_made_inside_another_one(place):
    registered(place, 'a', TERMS)
    text = refusal(place / 'rounds' / '1', 'b', TERMS)
    assert f'{place}/rounds/1 is inside the federation {place}' in text
    assert f'use {place} to join it' in text
    assert not (place / 'rounds').exists()


def test_a_federation_is_not_made_inside_another_one_in_a_bucket(bucket):
    place = locate_shared(f'{bucket.url}/federation')
    registered(place, 'a', TERMS)
    assert 'is inside the federation' in refusal(place / 'b', 'b', TERMS)
    bucket.fault(method='GET', match='/federation/federation.json|/federation%2Ffederation', status=403, times=9)
    assert registered(place / 'b', 'b', TERMS).founder == 'b'


@pytest.mark.parametrize('content', [b'x', b'{}', b'{"format": 9}'])
def test_a_foreign_table_is_named(place, content):
    (place / 'federation.json').create(content)
    assert 'federation.json: ' in refusal(place, 'a', TERMS)


def test_a_bucket_out_of_reach_is_named(bucket):
    place = locate_shared(f'{bucket.url}/federation')
    with bucket.down():
        text = refusal_of_a_bucket(place)
    assert str(place) in text


def refusal_of_a_bucket(place):
    with pytest.raises(UserError) as caught, join(place, 'a', TERMS, 60, ignore):
        pass
    return str(caught.value)
