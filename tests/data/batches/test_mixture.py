"""Mixtures: shares are kept to a row or so at every moment, and each source is read through in its order."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pretrax.data.batches import mixture
from pretrax.data.batches.mixture import Assignment, Member, Mixture, open_mixture
from pretrax.data.batches.source import DataRequest
from pretrax.data.batches.token_source import open_stores
from pretrax.errors import UserError
from token_arrays import ArrayStore

WEIGHTS = st.lists(st.floats(0.01, 10), min_size=1, max_size=9)


def assignment(weights, batch_rows=8, rows=None, exhausted='repeat'):
    names = [f's{at}' for at in range(len(weights))]
    schedules = [weight if isinstance(weight, list) else [(0, weight)] for weight in weights]
    return Assignment(names, schedules, rows or [10**9] * len(weights), exhausted, batch_rows)


def check(found, n, limits=None):
    """Each source gives its rows 0, 1, 2, .. in turn, `counts` counts them; returns the counts after each row."""
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
def test_constant_shares_are_kept_at_every_row(weights, batch_rows):
    n = 3000
    ideal = np.arange(1, n + 1)[:, None] * (np.array(weights) / sum(weights))
    off = np.abs(check(assignment(weights, batch_rows), n) - ideal)
    assert off.max() <= 1 + math.log2(len(weights)) / 2


def test_shares_are_kept_far_into_a_run():
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
        st.lists(st.tuples(st.integers(0, 400), st.floats(0, 5)), min_size=1, max_size=4, unique_by=lambda knot: knot[0])
        .map(sorted),
        min_size=2, max_size=4,
    ),
    batch_rows=st.integers(1, 9),
    ramp=st.sampled_from([5, 256]),
)  # fmt: skip
def test_schedules_are_followed(schedules, batch_rows, ramp):
    """Against a sum over every step of the weights interpolated there."""
    steps = np.arange(450)
    raw = np.array([np.interp(steps, *zip(*schedule, strict=True)) for schedule in schedules])
    assume(raw.sum(axis=0).min() > 0.1)
    shares = raw / raw.sum(axis=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mixture, 'RAMP', ramp)
        so_far = check(assignment(schedules, batch_rows), len(steps) * batch_rows)
    if ramp == 256:
        off = np.abs(so_far[batch_rows - 1 :: batch_rows] - (shares.cumsum(axis=1) * batch_rows).T)
        assert off.max() <= 4 + 0.02 * len(steps)  # a ramp of up to 400 steps has 256 treads
    nothing = raw.cumsum(axis=1)[:, -1] == 0
    assert (so_far[-1][nothing] == 0).all(), 'weight 0 is no row'


def test_a_ramp_of_few_steps_is_followed_step_by_step():
    so_far = check(assignment([[(0, 1.0), (100, 0.0)], [(0, 0.0), (100, 1.0)]], 64), 200 * 64)
    steps = np.arange(200)
    ideal = 64 * np.cumsum(np.clip(1 - steps / 100, 0, 1))
    assert np.abs(so_far[63::64, 0] - ideal).max() <= 1
    assert so_far[-1, 0] == so_far[100 * 64, 0], 'and then no more'


@settings(max_examples=60)
@given(data=st.data(), weights=WEIGHTS)
def test_dropped_sources_are_used_to_the_last_row(data, weights):
    limits = data.draw(st.lists(st.integers(1, 60), min_size=len(weights), max_size=len(weights)))
    found = assignment(weights, 4, limits, 'drop')
    assert found.end == sum(limits)
    so_far = check(found, found.end, limits)
    assert so_far[-1].tolist() == limits
    with pytest.raises(UserError, match='used up'):
        found(np.array([found.end]))


@given(data=st.data(), weights=WEIGHTS)
def test_a_run_stops_before_a_source_begins_again(data, weights):
    limits = data.draw(st.lists(st.integers(1, 60), min_size=len(weights), max_size=len(weights)))
    found = assignment(weights, 4, limits, 'stop')
    endless = assignment(weights, 4)
    so_far = check(endless, found.end + 1)
    assert (so_far[-1] > limits).any()
    assert (so_far[:-1] <= limits).all()
    assert [array.tolist() for array in found(np.arange(found.end))] == [
        array.tolist() for array in endless(np.arange(found.end))
    ]


@pytest.fixture
def member(tmp_path):
    def opened(name, lengths, weight=1.0, packing='concatenate', held_out=None, length=8):
        request = DataRequest(0, length, tmp_path, lambda _: None)
        held_out = held_out and ArrayStore(held_out)
        return Member(name, [(0, weight)], open_stores(ArrayStore(lengths), held_out, None, request, packing))

    return opened


def test_rows_are_those_of_the_members_in_their_order(member):
    members = [member('a', [100], 3.0), member('b', [50, 70]), member('c', [9] * 30, 0.5)]
    found = Mixture(members, 'repeat')
    source, index = found.assignment(16)(np.arange(160))
    batches = [found.batch(step, slice(None), 16) for step in range(10)]
    for number, (at, i) in enumerate(zip(source.tolist(), index.tolist(), strict=True)):
        for mixed, alone in zip(batches[number // 16], members[at].source.batch(i, slice(None), 1), strict=True):
            assert mixed[number % 16].tolist() == alone[0].tolist()
            assert mixed.dtype == alone.dtype
    part = found.batch(3, slice(5, 9), 16)
    for a, b in zip(part, batches[3], strict=True):
        assert a.tolist() == b[5:9].tolist()


def test_weights_are_by_tokens_where_rows_have_padding(member):
    lengths = [6] * 300  # 5 targets in rows of 8: whole documents fill five eighths
    padded, full = member('padded', lengths, packing='whole'), member('full', [2001])
    assert padded.source.train.density == 5 / 8
    batch = Mixture([padded, full], 'repeat').batch(0, slice(None), 130)
    is_padded = batch.segments[:, -1] == 2
    assert is_padded.sum() == 80
    assert batch.mask[is_padded].sum() == batch.mask[~is_padded].sum() == 400


def test_each_member_is_validated_apart(member):
    found = Mixture(
        [member('a', [99], 3.0, held_out=[40]), member('b', [99]), member('c', [99], 1.0, held_out=[64])], 'repeat'
    )
    assert {name: share for name, (share, _) in found.validation_parts.items()} == {'a': 0.75, 'c': 0.25}
    of_c = found.validation_parts['c'][1](0, slice(None), 10)
    assert sorted(of_c.targets[of_c.mask == 1].tolist()) == list(range(2, 65))
    assert Mixture([member('b', [99])], 'repeat').validation_parts == {}


def test_what_a_run_takes_is_said_and_too_much_refused(member):
    members = [member('books', [801], 3.0), member('code', [801])]
    said = []

    def opened(exhausted, steps):
        return open_mixture(members, exhausted, DataRequest(0, 8, None, said.append, steps, 4))  # type: ignore[arg-type]

    opened('repeat', 100)
    assert said == [
        'mixture: books: 75.0% of the rows of the run, 300 rows, 3.00 epochs',
        'mixture: code: 25.0% of the rows of the run, 100 rows, 1.00 epochs',
    ]
    with pytest.raises(UserError, match=r'books used up after 133 rows(.|\n)*steps=33 or less'):
        opened('stop', 34)
    opened('stop', 33)
    with pytest.raises(UserError, match=r'books and code used up after 200 rows'):
        opened('drop', 51)
    opened('drop', 50)


def test_no_weight_at_all_is_refused():
    with pytest.raises(UserError, match=r'at step 10 all weights are 0'):
        assignment([[(0, 1.0), (10, 0.0)]])
