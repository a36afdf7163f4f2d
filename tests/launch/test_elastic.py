"""When an elastic run has fewer processes, and when it tries all of them again."""

import pytest

from pretrax.launch.elastic import FIRST_PAUSE, LONGEST_PAUSE, PAUSE_AFTER_GONE, Slots


def small_group(now):
    """Three of four slots, since time 0 and step 10."""
    slots = Slots(4, lambda count: True, lambda: now[0])
    assert slots.drop([1])
    assert slots.used == [0, 2, 3]
    slots.started(10)
    return slots


def test_all_are_tried_again_after_a_pause_and_a_checkpoint():
    now = [0.0]
    slots = small_group(now)
    now[0] = FIRST_PAUSE - 1
    assert not slots.is_time_to_grow(lambda: 20)
    now[0] = FIRST_PAUSE
    assert not slots.is_time_to_grow(lambda: 10)
    assert not slots.is_time_to_grow(lambda: pytest.fail('a look takes a moment'))
    now[0] += 1
    assert slots.is_time_to_grow(lambda: 11)
    slots.grow()
    assert slots.used == [0, 1, 2, 3]
    assert not slots.is_time_to_grow(lambda: 20)


def test_after_a_trial_that_failed_the_smaller_group_continues_for_longer():
    now = [0.0]
    slots = small_group(now)
    pauses = []
    for _ in range(8):
        began = now[0]
        while not slots.is_time_to_grow(lambda: 99):
            now[0] += 1
        pauses.append(now[0] - began)
        slots.grow()
        slots.started(20)
        assert slots.ended(20)
        assert slots.used == [0, 2, 3]
        slots.started(20)
    assert pauses == [min(LONGEST_PAUSE, FIRST_PAUSE * 2**trial) for trial in range(8)]


def test_a_larger_group_that_has_made_a_checkpoint_stays():
    slots = small_group([1e9])
    slots.grow()
    slots.started(20)
    assert not slots.ended(21)
    assert slots.used == [0, 1, 2, 3]
    assert not slots.ended(21)


def test_the_largest_number_that_fits_is_kept():
    slots = Slots(4, lambda count: count in (1, 2, 4))
    assert slots.drop([0])
    assert slots.used == [1, 2]
    assert slots.drop([1])
    assert slots.used == [1]
    assert not slots.drop([0])
    assert slots.used == [1]


def test_machines_that_were_gone_are_used_again_when_they_are_back():
    now, back = [0.0], []
    slots = Slots(
        4, lambda count: count != 3, lambda: now[0], ready=lambda asked: [slot for slot in back if slot in asked]
    )
    assert slots.drop([1, 3], gone=True)
    assert slots.used == [0, 2]
    slots.started(10)
    now[0] = PAUSE_AFTER_GONE
    assert not slots.is_time_to_grow(lambda: 11)
    back.append(3)
    now[0] += 1
    assert not slots.is_time_to_grow(lambda: 11), 'three do not fit'
    back.append(1)
    now[0] += 1
    assert not slots.is_time_to_grow(lambda: 10), 'there is no new checkpoint'
    now[0] += 1
    assert slots.is_time_to_grow(lambda: 11)
    slots.grow()
    assert slots.used == [0, 1, 2, 3]
    slots.started(11)
    assert slots.ended(11)
    assert slots.used == [0, 2]
    slots.started(11)
    now[0] += FIRST_PAUSE - 1
    assert not slots.is_time_to_grow(lambda: 12), 'they were back, but failed'


def test_spares_take_the_places_of_those_that_are_gone():
    spares = [3, 4]
    slots = Slots(5, lambda count: True, spares=spares)
    assert slots.used == [0, 1, 2]
    assert slots.replace([1])
    assert (slots.used, spares) == ([0, 3, 2], [4]), 'the others keep their numbers'
    assert not slots.replace([0, 2]), 'one is not enough for two'
    assert slots.used == [0, 3, 2]
    assert slots.replace([1])
    assert (slots.used, spares) == ([0, 4, 2], [])


def test_an_elastic_run_grows_again_with_the_spare_in_the_place_of_the_lost_one():
    now = [0.0]
    slots = Slots(4, lambda count: True, lambda: now[0], spares=[3])
    assert slots.replace([0])
    assert slots.drop([2])
    assert slots.used == [3, 1]
    slots.started(10)
    now[0] = FIRST_PAUSE
    assert slots.is_time_to_grow(lambda: 20)
    slots.grow()
    assert slots.used == [1, 2, 3]
