"""What the ends of processes mean together, and when an attempt is followed by another one."""

import re

import pytest

from pretrax.launch.restarts import Outcome, Restarts, outcome


@pytest.mark.parametrize(
    ('codes', 'hung', 'code', 'lost', 'why'),
    [
        ({0: 0, 1: 0}, (), 0, (), 'done'),
        ({0: 0, 1: 0}, (2,), 0, (), 'done'),  # stuck at its own end, when all the work was done
        ({0: 75, 1: 75}, (), 75, (), 'the training is not finished'),
        ({0: 75, 2: 75}, (1,), 75, (1,), 'no sign of life: process 1'),
        ({0: 75, 1: -9, 2: 75}, (3,), -9, (1,), r'killed: process 1 \(SIGKILL\)'),
        ({0: 75, 1: 1}, (), 1, (), 'process 1 failed with exit code 1'),
        ({0: 2, 1: 75, 2: -6}, (), 2, (), 'process 0 ended because of a mistake'),
        ({1: 78}, (0,), 78, (), 'process 1 ended because of a mistake'),
    ],
)
def test_the_outcome_names_the_cause_not_its_consequences(codes, hung, code, lost, why):
    ended = outcome(codes, hung, 7)
    assert (ended.code, ended.lost, ended.step) == (code, lost, 7)
    assert re.search(why, ended.why)


def waits(retries, ends):
    restarts = Restarts(retries, 0)
    return [restarts.wait(Outcome(code, '', step)) for code, step in ends]


def test_failures_are_retried_while_checkpoints_advance():
    assert waits(0, [(1, 10), (-9, 20), (75, 30), (1, 30)]) == [0, 0, 0, None]


def test_retries_count_from_the_newest_checkpoint_and_wait_longer_each_time():
    assert waits(3, [(1, 0), (1, 0), (1, 10), (1, 10), (1, 10), (1, 10), (1, 10)]) == [1, 2, 0, 1, 2, 4, None]
    assert waits(99, [(1, 0)] * 9)[-1] == 60


def test_exit_code_75_counts_as_a_failure_only_without_a_new_checkpoint():
    assert waits(1, [(75, 5), (75, 6), (75, 7), (75, 7), (75, 7)]) == [0, 0, 0, 1, None]


@pytest.mark.parametrize('code', [0, 2, 78])
def test_finished_runs_and_mistakes_are_not_retried(code):
    assert waits(9, [(code, 10)]) == [None]


@pytest.mark.parametrize(('code', 'seen'), [(-9, 137), (1, 1), (75, 75), (78, 2), (2, 2), (0, 0)])
def test_the_exit_code_follows_the_convention_of_shells(code, seen):
    assert Outcome(code, '', 0).exit_code == seen
