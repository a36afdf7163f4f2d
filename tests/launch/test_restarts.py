"""What the ends of processes mean together, and when an attempt is followed by another one."""

import re

import pytest

from pretrax.launch.restarts import Ended, Restarts, judge


@pytest.mark.parametrize(
    ('codes', 'hung', 'code', 'lost', 'why'),
    [
        ({0: 0, 1: 0}, (), 0, (), 'done'),
        ({0: 0, 1: 0}, (2,), 0, (), 'done'),  # stuck at its own end, when all the work was done
        ({0: 75, 1: 75}, (), 75, (), 'there is more to do'),
        ({0: 75, 2: 75}, (1,), 75, (1,), 'no sign of life: process 1'),
        ({0: 75, 1: -9, 2: 75}, (3,), -9, (1,), r'killed: process 1 \(SIGKILL\)'),
        ({0: 75, 1: 1}, (), 1, (), 'process 1 failed with exit code 1'),
        ({0: 2, 1: 75, 2: -6}, (), 2, (), 'process 0 ended for a mistake'),
        ({1: 78}, (0,), 78, (), 'process 1 ended for a mistake'),
    ],
)
def test_the_cause_is_told_from_what_came_of_it(codes, hung, code, lost, why):
    ended = judge(codes, hung, 7)
    assert (ended.code, ended.lost, ended.step) == (code, lost, 7)
    assert re.search(why, ended.why)


def waits(retries, ends):
    restarts = Restarts(retries, 0)
    return [restarts.wait(Ended(code, '', step)) for code, step in ends]


def test_a_failure_is_tried_again_for_as_long_as_checkpoints_advance():
    assert waits(0, [(1, 10), (-9, 20), (75, 30), (1, 30)]) == [0, 0, 0, None]


def test_retries_are_counted_from_the_last_advance_and_wait_longer_each_time():
    assert waits(3, [(1, 0), (1, 0), (1, 10), (1, 10), (1, 10), (1, 10), (1, 10)]) == [1, 2, 0, 1, 2, 4, None]
    assert waits(99, [(1, 0)] * 9)[-1] == 60


def test_75_counts_only_where_no_checkpoint_came_of_it():
    assert waits(1, [(75, 5), (75, 6), (75, 7), (75, 7), (75, 7)]) == [0, 0, 0, 1, None]


@pytest.mark.parametrize('code', [0, 2, 78])
def test_what_is_done_or_mistaken_is_not_tried_again(code):
    assert waits(9, [(code, 10)]) == [None]


@pytest.mark.parametrize(('code', 'seen'), [(-9, 137), (1, 1), (75, 75), (78, 2), (2, 2), (0, 0)])
def test_the_exit_code_is_one_that_a_shell_has(code, seen):
    assert Ended(code, '', 0).exit_code == seen
