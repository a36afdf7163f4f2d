"""Which processes receive the copies of memory checkpoints: laws that hold for any cluster."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretrax.checkpoint.placement import Location, describe_copies, place_copies


@st.composite
def clusters(draw, equal=False):
    """Hosts on machines, in slices and racks, with some processes each."""
    places = []
    each = draw(st.integers(1, 3))
    for host in range(draw(st.integers(1, 12))):
        rack, machine = draw(st.integers(0, 2)), host // draw(st.sampled_from([1, 1, 1, 2]))
        place = Location(f'rack{rack}', f'slice{rack}{draw(st.integers(0, 1))}', f'machine{machine}', f'host{host}')
        places += [place] * (each if equal else draw(st.integers(1, 3)))
    return draw(st.permutations(places))


@given(clusters(), st.integers(0, 3))
def test_copies_are_on_different_hosts_and_as_many_as_there_can_be(places, copies):
    hosts = len({place.host for place in places})
    for process, targets in enumerate(place_copies(places, copies)):
        assert len({places[holder].host for holder in (process, *targets)}) == 1 + len(targets)
        assert len(targets) == min(copies, hosts - 1)


@given(clusters(equal=True), st.integers(1, 2))
def test_each_host_receives_as_many_pieces_as_it_sends(places, copies):
    targets = place_copies(places, copies)
    if copies < len({place.host for place in places}):
        received = Counter(places[target].host for held in targets for target in held)
        sent = Counter(places[process].host for process, held in enumerate(targets) for _ in held)
        assert max((received - sent).values(), default=0) <= (copies - 1) * max(sent.values(), default=0)
        assert copies > 1 or received == sent


@given(st.lists(st.integers(1, 4), min_size=2, max_size=8), st.integers(1, 3), st.sampled_from(['rack', 'slice']))
def test_no_copy_shares_the_rack_or_slice_of_its_process_if_none_has_more_than_half(sizes, each, level):
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    places = [
        Location('', '', f'machine{host}', f'host{host}')._replace(**{level: f'group{group}'})
        for host, group in enumerate(groups)
        for _ in range(each)
    ]
    if 2 * max(sizes) <= sum(sizes):
        for process, (target,) in enumerate(place_copies(places, 1)):
            assert getattr(places[process], level) != getattr(places[target], level)


def test_two_containers_of_a_machine_hold_no_copies_of_each_other_if_there_are_other_machines():
    places = [Location('', '', machine, f'{machine}-{container}') for machine in 'ab' for container in '12']
    for process, (target,) in enumerate(place_copies(places, 1)):
        assert places[process].machine != places[target].machine


@pytest.mark.parametrize('level', ['rack', 'slice', 'machine'])
def test_two_copies_are_in_two_other_places_if_there_are_three_of_equal_size(level):
    places = [Location('', '', '', f'host{host}')._replace(**{level: f'{host // 3}'}) for host in range(9)]
    for process, targets in enumerate(place_copies(places, 2)):
        assert len({getattr(places[holder], level) for holder in (process, *targets)}) == 3


def test_many_hosts_in_racks():
    places = [Location(f'{host // 64}', '', f'{host}', f'{host}') for host in range(12_736)]
    targets = place_copies(places, 1)
    assert all(places[process].rack != places[target].rack for process, (target,) in enumerate(targets))


def test_the_text_names_the_first_processes_and_those_without_a_copy():
    hosts = ['a', 'a', 'b', 'b']
    places = [Location('', '', host, host) for host in hosts]
    assert describe_copies(place_copies(places, 1), hosts) == (
        'process 0 (a) -> 2 (b), 1 (a) -> 3 (b), 2 (b) -> 0 (a), 3 (b) -> 1 (a)'
    )
    assert describe_copies([[1], [0]] * 4, ['a', 'b'] * 4).endswith(', 3 (b) -> 0 (a), 4 more')
    assert describe_copies([[], []], ['a', 'a']) == 'none: there is no other host'
