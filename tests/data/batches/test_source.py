"""The defaults of a data source, and `pack_rows` compared with a plain loop over each row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from pretrax.data.batches.source import HostBatch, Source, check_source, pack_rows
from pretrax.errors import UserError


def pack_row_by_row(tokens: np.ndarray, starts: np.ndarray, wanted: np.ndarray) -> HostBatch:
    """The definition of each array, token by token."""
    rows = []
    for row_tokens, row_starts, row_wanted in zip(tokens.tolist(), starts.tolist(), wanted.tolist(), strict=True):
        row = []
        segment, position = 0, 0
        for at in range(len(row_tokens) - 1):
            if at == 0 or row_starts[at]:
                segment, position = segment + 1, 0
            counts = 0.0 if row_starts[at + 1] or not row_wanted[at + 1] else 1.0
            row.append((row_tokens[at], row_tokens[at + 1], segment, position, counts))
            position += 1
        rows.append(row)
    packed = np.array(rows)
    dtypes = (np.int32, np.int32, np.int32, np.int32, np.float32)
    return HostBatch(*(packed[:, :, column].astype(dtype) for column, dtype in enumerate(dtypes)))


@given(st.data(), array_shapes(min_dims=2, max_dims=2, max_side=9))
def test_pack_rows_equals_the_definition(data, shape):
    shape = (shape[0], shape[1] + 1)
    tokens = data.draw(arrays(np.uint32, shape, elements=st.integers(0, 2**31 - 1)))
    starts = data.draw(arrays(np.bool_, shape))
    wanted = data.draw(arrays(np.bool_, shape))
    everything = np.ones(shape, bool)
    for mask, meaning in ((None, everything), (wanted, wanted)):
        for got, expected in zip(
            pack_rows(tokens, starts, mask), pack_row_by_row(tokens, starts, meaning), strict=True
        ):
            assert got.dtype == expected.dtype
            np.testing.assert_array_equal(got, expected)


def test_attention_never_crosses_documents():
    batch = pack_rows(np.array([[5, 0, 7, 8, 0, 9]]), np.array([[False, False, True, False, False, True]]))
    assert batch.segments.tolist() == [[1, 1, 2, 2, 2]]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 2]]
    assert batch.mask.tolist() == [[1, 0, 1, 1, 0]]


class Counting(Source):
    """The smallest possible plugin."""

    vocab_size = 9

    def batch(self, step: int, rows: slice, batch_rows: int) -> HostBatch:
        return pack_rows(np.array([[1, 2, 3]] * batch_rows)[rows], np.zeros((batch_rows, 3), bool)[rows])


def test_a_source_needs_only_vocab_size_and_batch():
    source = check_source(Counting(), 'counting')
    assert source.batch(0, slice(None), 2).tokens.tolist() == [[1, 2]] * 2
    assert source.tokenizer is source.fingerprint is source.documents_per_row is source.reading is None
    assert source.validation_parts == {}
    assert source.tokenizer_sha256 is None
    with pytest.raises(TypeError, match='batch'):
        type('Empty', (Source,), {'vocab_size': 9})()


def test_a_plugin_writes_validation_as_a_method():
    class Validated(Counting):
        def validation(self, index: int, rows: slice, batch_rows: int) -> HostBatch:
            return self.batch(index, rows, batch_rows)

    [(name, (weight, batch))] = Validated().validation_parts.items()
    assert (name, weight) == ('', 1.0)
    assert batch(0, slice(None), 1).targets.tolist() == [[2, 3]]


@pytest.mark.parametrize(
    ('built', 'message'),
    [
        (object(), r'data\.name=mine: the component returned object(.|\n)*derive object from .*Source'),
        (type('Mine', (Source,), {'batch': Counting.batch})(), 'Mine has no vocab_size'),
    ],
)
def test_a_component_that_is_no_source_is_refused(built, message):
    with pytest.raises(UserError, match=message):
        check_source(built, 'mine')


def test_pack_rows_refuses_wrong_shapes():
    with pytest.raises(ValueError, match=r'\[R, L \+ 1\]'):
        pack_rows(np.zeros((2, 5), int), np.zeros((2, 4), bool))
    with pytest.raises(ValueError, match=r'mask \(2, 4\)'):
        pack_rows(np.zeros((2, 5), int), np.zeros((2, 5), bool), np.zeros((2, 4), bool))
