"""Islands read every row of the one global order once, whatever their batches, processes and data."""

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_options import data_options
from pretrax.config.batch import rows_before, rows_of
from pretrax.config.schema import Batch
from pretrax.data.batches import block_cache
from pretrax.data.batches.mixture import Member, Mixture
from pretrax.data.batches.sequences import check_row_order, read_sequences, sources_of_sequences
from pretrax.data.batches.share import Share
from pretrax.data.batches.source import DataRequest, HostBatch, Source, pack_rows
from pretrax.data.batches.synthetic import SyntheticSource
from pretrax.data.batches.token_source import open_stores
from pretrax.data.batches.windows import BLOCK
from pretrax.data.text import open_text
from pretrax.errors import UserError
from token_arrays import ArrayStore

LENGTH = 16
LENGTHS = [5, 40, 1, 9, 130, 3, 3, 60, 71] * 9
ROWS = 120  # of the global order that are compared
GROWING = Batch(tokens=((0, 32), (3, 48), (5, 128)), sequence_length=((0, 4), (4, 16)))


class Own(Source):
    """A source of a user, which knows only slices without a step, and whose rows have their number as token."""

    vocab_size = 10_000
    fingerprint = 'own'
    source_names = ('even', 'odd')
    tokenizer_sha256, reading = 'of the tokenizer', 'slowly'

    def batch(self, step, rows, batch_rows):
        assert rows.step in (None, 1)
        numbers = np.array([step * batch_rows + row for row in range(rows.start or 0, min(rows.stop, batch_rows))])
        tokens = np.repeat(numbers[:, None], LENGTH + 1, axis=1)
        return pack_rows(tokens, np.zeros(tokens.shape, bool))

    def row_sources(self, step, rows, batch_rows):
        return self.batch(step, rows, batch_rows).tokens[:, 0] % 2


def stores(tmp_path, packing='concatenate', lengths=LENGTHS, held_out=None):
    request = DataRequest(3, LENGTH, tmp_path, lambda _: None)
    return open_stores(ArrayStore(lengths), held_out and ArrayStore(held_out), None, request, packing)


def mixed(tmp_path):
    weights = [(0, 1.0), (2, 3.0), (7, 0.5)], [(0, 1.0)]
    members = [
        Member(name, weight, stores(tmp_path, packing, lengths))
        for name, weight, packing, lengths in zip(
            'ab', weights, ('best_fit', 'concatenate'), (LENGTHS, [2000]), strict=True
        )
    ]
    return Mixture(members, 'repeat', lambda step: 7 * step)


def streamed(tmp_path):
    rows = ''.join(json.dumps({'text': 'word ' * (n % 13 + 1)}) + '\n' for n in range(200))
    (tmp_path / 'a.jsonl').write_text(rows)
    values = {'streaming': True, 'tokenizer': 'bytes', 'shuffle_buffer': 10, 'validation_documents': 0}
    values |= {'text': str(tmp_path / 'a.jsonl')}
    return open_text(DataRequest(3, LENGTH, tmp_path / 'data', lambda _: None), options=data_options(values))


SOURCES = {
    'windows': stores,
    'whole documents': lambda path: stores(path, 'whole'),
    'best fit': lambda path: stores(path, 'best_fit'),
    'mixture': mixed,
    'stream': streamed,
    'synthetic': lambda path: SyntheticSource(DataRequest(3, LENGTH, path, lambda _: None), 50, 7),
    'own': lambda path: Own(),
}


@pytest.fixture(scope='module', params=SOURCES)
def source(request, tmp_path_factory):
    return SOURCES[request.param](tmp_path_factory.mktemp('data'))


@pytest.fixture(scope='module')
def order(source):
    """The rows of the global order, read one at a time."""
    rows = [source.batch(number, slice(0, 1), 1) for number in range(ROWS)]
    return HostBatch(*map(np.concatenate, zip(*rows, strict=True)))


def read_by_processes(source, first, count, cuts):
    """The rows of a batch, each part read by itself, as the processes of an island do; and their sources."""
    edges = sorted({0, *(cut % count for cut in cuts), count})
    places = [slice(*edge) for edge in itertools.pairwise(edges)]
    parts = [read_sequences(source, first, count, 1, place) for place in places]
    names = [sources_of_sequences(source, first, count, 1, place) for place in places]
    return HostBatch(*map(np.concatenate, zip(*parts, strict=True))), np.concatenate(names)


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_the_shares_of_all_islands_are_the_global_order(source, order, data):
    n = data.draw(st.integers(1, 6), label='islands')
    seen = np.zeros(ROWS, int)
    for index in range(n):
        share, first = Share(source, index, n), 0
        size = data.draw(st.integers(1, 9), label='rows of a batch')
        while (stop := first + size) * n <= ROWS:
            cuts = data.draw(st.lists(st.integers(0, 8), max_size=3), label='where processes part it')
            batch, names = read_by_processes(share, first, size, cuts)
            numbers = np.arange(first, stop) * n + index
            for one, other in zip(batch, order, strict=True):
                assert one.dtype == other.dtype
                assert np.array_equal(one, other[numbers])
            one_by_one = [source.row_sources(number, slice(0, 1), 1) for number in numbers.tolist()]
            assert names.tolist() == np.concatenate(one_by_one).tolist()
            seen[numbers] += 1
            first = stop
    assert set(seen.tolist()) <= {0, 1}
    assert seen[: ROWS - 9 * n].all()


def test_the_share_of_the_only_island_is_everything(source):
    share = Share(source, 0, 1)
    for step in range(3):
        for one, other in zip(share.batch(step, slice(2, 9), 10), source.batch(step, slice(2, 9), 10), strict=True):
            assert np.array_equal(one, other)


def test_batches_that_grow_are_those_of_the_global_order(tmp_path):
    source = stores(tmp_path)
    batches = {
        (index, step): read_sequences(Share(source, index, 3), *rows_of(GROWING, step), slice(None))
        for index in range(3)
        for step in range(7)
    }
    for index in range(3):
        read = np.concatenate([batches[index, step].tokens.ravel() for step in range(7)])
        rows = source.batch(0, slice(index, None, 3), 3 * rows_before(GROWING, 7))
        assert read.tolist() == rows.tokens.ravel().tolist()


def test_everything_but_the_rows_is_that_of_the_source(tmp_path):
    whole = stores(tmp_path, held_out=[70])
    share = Share(whole, 1, 4)
    for name in ('vocab_size', 'n_tokens', 'fingerprint', 'documents_per_row', 'largest_token', 'bytes_per_token'):
        assert getattr(share, name) == getattr(whole, name)
    ((_, held_out),) = share.validation_parts.values()
    assert np.array_equal(held_out(0, slice(None), 5).tokens, whole.validation(0, slice(None), 5).tokens)
    own = Share(Own(), 0, 2)
    assert (own.source_names, own.tokenizer_sha256, own.reading) == (('even', 'odd'), 'of the tokenizer', 'slowly')


@pytest.mark.parametrize(('islands', 'n_rows'), [(16, 1), (4, BLOCK // LENGTH)])
def test_an_island_reads_blocks_if_it_needs_enough_of_each_and_else_its_rows(islands, n_rows, tmp_path, monkeypatch):
    monkeypatch.setattr(block_cache, 'MEMORY', 4 * BLOCK)
    store = ArrayStore([4 * BLOCK])
    source = open_stores(store, None, None, DataRequest(0, LENGTH, tmp_path, lambda _: None))
    store.ranges.clear()
    Share(source, 2, islands).batch(5, slice(0, 8), 8)
    assert {stop - start for start, stop in store.ranges} <= {n_rows * LENGTH, n_rows * LENGTH + 1}


class ByBatch(Own):
    """Rows that depend on the number of their batch, not on their own."""

    def batch(self, step, rows, batch_rows):
        tokens = np.random.default_rng(step).integers(100, size=(batch_rows, LENGTH + 1))[rows]
        return pack_rows(tokens, np.zeros(tokens.shape, bool))


def test_a_source_that_numbers_rows_by_batch_is_refused_as_islands_may_have_other_batches():
    check_row_order(ByBatch(), 'mine', [(0, 4)])
    check_row_order(Share(Own(), 1, 3), 'mine', [(0, 4)])
    check_row_order(Share(ByBatch(), 0, 1), 'mine', [(0, 4)])
    with pytest.raises(UserError, match=r'data\.name=mine: islands may have batches of any size, but ByBatch') as error:
        check_row_order(Share(ByBatch(), 1, 3), 'mine', [(0, 4)])
    assert 'batch.tokens' not in str(error.value)
