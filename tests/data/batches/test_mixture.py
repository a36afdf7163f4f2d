"""A mixture gives the rows of its sources, validates each separately, and prints what a run uses."""

import numpy as np
import pytest

from pretrax.data.batches.mixture import Member, Mixture, open_mixture
from pretrax.data.batches.source import DataRequest
from pretrax.data.batches.token_source import open_stores
from pretrax.errors import UserError
from token_arrays import ArrayStore


@pytest.fixture
def member(tmp_path):
    def opened(name, lengths, weight=1.0, packing='concatenate', held_out=None, length=8):
        request = DataRequest(0, length, tmp_path, lambda _: None)
        held_out = held_out and ArrayStore(held_out)
        return Member(name, [(0, weight)], open_stores(ArrayStore(lengths), held_out, None, request, packing))

    return opened


def test_rows_equal_those_of_the_members_in_order(member):
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


def test_weights_count_tokens_without_padding(member):
    lengths = [6] * 300  # 5 targets in rows of 8: density 5/8
    padded, full = member('padded', lengths, packing='whole'), member('full', [2001])
    assert padded.source.train.density == 5 / 8
    batch = Mixture([padded, full], 'repeat').batch(0, slice(None), 130)
    is_padded = batch.segments[:, -1] == 2
    assert is_padded.sum() == 80
    assert batch.mask[is_padded].sum() == batch.mask[~is_padded].sum() == 400


def test_each_member_is_validated_separately(member):
    found = Mixture(
        [member('a', [99], 3.0, held_out=[40]), member('b', [99]), member('c', [99], 1.0, held_out=[64])], 'repeat'
    )
    assert {name: share for name, (share, _) in found.validation_parts.items()} == {'a': 0.75, 'c': 0.25}
    of_c = found.validation_parts['c'][1](0, slice(None), 10)
    assert sorted(of_c.targets[of_c.mask == 1].tolist()) == list(range(2, 65))
    assert Mixture([member('b', [99])], 'repeat').validation_parts == {}


def test_epochs_are_printed_and_a_run_that_is_too_long_is_refused(member):
    members = [member('books', [801], 3.0), member('code', [801])]
    said = []

    def opened(exhausted, steps):
        return open_mixture(members, exhausted, DataRequest(0, 8, None, said.append, steps, (4).__mul__))  # type: ignore[arg-type]

    opened('repeat', 100)
    assert said == [
        'mixture: books: 75.0% of the rows, 300 rows, 3.00 epochs',
        'mixture: code: 25.0% of the rows, 100 rows, 1.00 epochs',
    ]
    with pytest.raises(UserError, match=r'books used up after 133 rows(.|\n)*steps=33 or less'):
        opened('stop', 34)
    opened('stop', 33)
    with pytest.raises(UserError, match=r'books and code used up after 200 rows'):
        opened('drop', 51)
    opened('drop', 50)
