"""Slow steps: which ones are found, against times written by hand."""

import pytest

from pretrax.observe.profile import SlowSteps


class Time:
    """A clock that a test moves."""

    now, interruptions, done = 0.0, 0, 0

    def seconds_of_done(self):
        return self.now

    def step(self, seconds):
        self.done, self.now = self.done + 1, self.now + seconds


def found(times, factor=3.0, pauses=()):
    """Numbers of the steps that are slow, of steps that take these seconds; time stands still at a pause."""
    clock = Time()
    slow = SlowSteps(factor, clock)
    numbers = []
    for number, seconds in enumerate(times):
        if slow.begin():
            numbers.append(number - 1)
        if number in pauses:
            clock.interruptions += 1
        clock.step(seconds)
    if slow.begin():
        numbers.append(len(times) - 1)
    return numbers


def test_a_step_of_three_times_the_usual_time_is_slow_and_one_below_is_not():
    usual = [1.0, 1.1, 0.9, 1.0] * 5
    assert found([*usual, 2.9, 1.0, 3.1, 1.0]) == [22]
    assert found([*usual, 2.9, 1.0, 3.1, 1.0], factor=2.5) == [20, 22]


def test_the_first_steps_do_not_count():
    assert found([50.0, 9.0, 9.0] + [1.0] * 10 + [3.5]) == [13]  # neither slow themselves, nor part of the usual time
    assert found([9.0] * 3 + [1.0] * 5 + [3.5]) == []
    assert found([1.0] * 6 + [9.0]) == []  # too few steps to know what is usual


def test_steps_that_became_slower_for_good_are_usual_after_a_while():
    numbers = found([1.0] * 60 + [4.0] * 60)
    assert numbers[0] == 60
    assert numbers[-1] < 60 + 30


def test_what_a_pause_interrupts_is_not_a_step():
    times = [1.0] * 20 + [9.0] + [1.0] * 3
    assert found(times) == [20]
    assert found(times, pauses=[20]) == []


def test_a_clock_that_goes_back_makes_no_step_slow():
    clock = Time()
    slow = SlowSteps(2.0, clock)
    for _ in range(15):
        slow.begin()
        clock.step(1)
    clock.now, clock.done = clock.now - 10, clock.done - 10  # a rollback
    assert not slow.begin()
    clock.step(2.5)
    assert slow.begin()
    assert (slow.latest, slow.usual) == pytest.approx((2.5, 1.0))


def slow_calls(factor, between):
    """Calls of a loop that reads a step after it has begun the next one; the device needs 1 s for a step.

    Args:
        factor: what is slow.
        between: what the loop does before a step, by its number.
    """
    clock, numbers = Time(), []
    slow = SlowSteps(factor, clock)
    ends = pending = 0.0  # when the device ends all its work, and the step that the loop has not read
    for number in range(60):
        work = between.get(number)
        if work in ('evaluation', 'state in memory'):  # reads the newest step; then the clock stops
            clock.now, clock.done, pending = ends, number, 0.0
        elif work == 'layer statistics':
            ends += 1.7
        clock.interruptions += work in ('evaluation', 'layer statistics')
        if slow.begin():
            numbers.append(number)
        ends = max(ends, clock.now) + (5.0 if work == 'slow' else 1.0)
        if pending:
            clock.now, clock.done = max(clock.now, pending), number
        pending = ends
    return numbers


@pytest.mark.parametrize('work', ['evaluation', 'layer statistics'])
def test_what_is_done_between_steps_makes_no_step_slow(work):
    assert slow_calls(1.5, dict.fromkeys((20, 30, 40), work)) == []
    assert slow_calls(1.5, {20: work, 30: 'slow'}) == slow_calls(1.5, {30: 'slow'}) == [32]


@pytest.mark.parametrize('every', [1, 2, 7])
def test_states_in_memory_hide_no_slow_step(every):
    states = dict.fromkeys(range(0, 60, every), 'state in memory')
    assert slow_calls(1.5, states) == []
    [number] = slow_calls(1.5, states | {31: 'slow'})
    assert number in (32, 33)  # one sooner if it is read before a state is kept


def test_steps_that_end_two_at_a_time_take_half_of_the_time_each():
    """A step that ended while the next one was dispatched is read together with it."""
    clock = Time()
    slow = SlowSteps(1.5, clock)
    for number in range(60):
        assert not slow.begin()
        if number % 2:
            clock.step(1.0)
            clock.step(1.0)
    assert slow.usual == 1.0
