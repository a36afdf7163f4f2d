"""Every prefix of a run has the shares of its weights to within a few rows, and the rows of each source in order."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pretrax.data.batches import assignment as module
from pretrax.data.batches.assignment import Assignment
from pretrax.errors import UserError

WEIGHTS = st.lists(st.floats(0.01, 10), min_size=1, max_size=9)


def assignment(weights, batch_rows=8, rows=None, exhausted='repeat'):
    names = [f's{at}' for at in range(len(weights))]
    schedules = [weight if isinstance(weight, list) else [(0, weight)] for weight in weights]
    return Assignment(names, schedules, rows or [10**9] * len(weights), exhausted, batch_rows.__mul__)


def check(found, n, limits=None):
    """Checks that each source gives its rows 0, 1, 2, .. in order; returns the counts after each row of the run."""
    source, index = found(np.arange(n))
    so_far = (source[:, None] == np.arange(len(found._names))).cumsum(axis=0)
    assert (index == so_far[np.arange(n), source] - 1).all()
    for at in {0, n // 3, n // 2, n}:
        assert found.counts(at) == ([0] * so_far.shape[1] if at == 0 else so_far[at - 1].tolist())
    if limits:
        assert (so_far[-1] <= limits).all()
    return so_far


@settings(max_examples=60)
@given(weights=WEIGHTS, batch_rows=st.integers(1, 50))
def test_constant_weights_hold_at_every_row(weights, batch_rows):
    n = 3000
    ideal = np.arange(1, n + 1)[:, None] * (np.array(weights) / sum(weights))
    off = np.abs(check(assignment(weights, batch_rows), n) - ideal)
    assert off.max() <= 1 + math.log2(len(weights)) / 2


def test_constant_weights_hold_far_into_a_run():
    found = assignment([0.7, 0.2, 0.1])
    for n in (10**6, 10**9, 10**12 + 12345):
        np.testing.assert_allclose(found.counts(n), [0.7 * n, 0.2 * n, 0.1 * n], rtol=1e-5)
    source, index = found(10**12 + np.arange(1000))
    before = found.counts(10**12)
    for at in range(3):
        assert index[source == at].tolist() == list(range(before[at], before[at] + (source == at).sum()))


@settings(max_examples=40)
@given(
    schedules=st.lists(
        st.lists(st.tuples(st.integers(0, 400), st.floats(0, 5)), min_size=1, max_size=4,
        unique_by=lambda knot: knot[0])
        .map(sorted),
        min_size=2, max_size=4,
    ),
    batch_rows=st.integers(1, 9),
    ramp=st.sampled_from([5, 256]),
)  # fmt: skip
def test_shares_follow_the_schedules(schedules, batch_rows, ramp):
    """Compares with the sum over steps of the interpolated weights."""
    steps = np.arange(450)
    raw = np.array([np.interp(steps, *zip(*schedule, strict=True)) for schedule in schedules])
    assume(raw.sum(axis=0).min() > 0.1)
    shares = raw / raw.sum(axis=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, 'RAMP', ramp)
        so_far = check(assignment(schedules, batch_rows), len(steps) * batch_rows)
    if ramp == 256:
        off = np.abs(so_far[batch_rows - 1 :: batch_rows] - (shares.cumsum(axis=1) * batch_rows).T)
        assert off.max() <= 4 + 0.02 * len(steps)  # a ramp of up to 400 steps has 256 treads
    nothing = raw.cumsum(axis=1)[:, -1] == 0
    assert (so_far[-1][nothing] == 0).all(), 'a source of weight 0 has no rows'


def test_a_short_ramp_changes_at_every_step():
    so_far = check(assignment([[(0, 1.0), (100, 0.0)], [(0, 0.0), (100, 1.0)]], 64), 200 * 64)
    steps = np.arange(200)
    ideal = 64 * np.cumsum(np.clip(1 - steps / 100, 0, 1))
    assert np.abs(so_far[63::64, 0] - ideal).max() <= 1
    assert so_far[-1, 0] == so_far[100 * 64, 0], 'no rows after the ramp'


@settings(max_examples=60)
@given(data=st.data(), weights=WEIGHTS)
def test_drop_uses_every_row_of_every_source(data, weights):
    limits = data.draw(st.lists(st.integers(1, 60), min_size=len(weights), max_size=len(weights)))
    found = assignment(weights, 4, limits, 'drop')
    assert found.end == sum(limits)
    so_far = check(found, found.end, limits)
    assert so_far[-1].tolist() == limits
    with pytest.raises(UserError, match='used up'):
        found(np.array([found.end]))


@given(data=st.data(), weights=WEIGHTS)
def test_stop_ends_the_run_before_a_source_repeats(data, weights):
    limits = data.draw(st.lists(st.integers(1, 60), min_size=len(weights), max_size=len(weights)))
    found = assignment(weights, 4, limits, 'stop')
    endless = assignment(weights, 4)
    so_far = check(endless, found.end + 1)
    assert (so_far[-1] > limits).any()
    assert (so_far[:-1] <= limits).all()
    assert [array.tolist() for array in found(np.arange(found.end))] == [
        array.tolist() for array in endless(np.arange(found.end))
    ]


def test_a_step_without_any_weight_is_refused():
    with pytest.raises(UserError, match='all weights are 0 at step 10'):
        assignment([[(0, 1.0), (10, 0.0)]])
