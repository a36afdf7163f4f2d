"""Batches that grow have every token once, and the sequences of a row are those of shorter windows."""

import numpy as np
import pytest

from pretrax.config.batch import rows_of
from pretrax.config.schema import Batch
from pretrax.data.batches.mixture import Member, Mixture
from pretrax.data.batches.sequences import check_row_order, read_sequences, sources_of_sequences
from pretrax.data.batches.source import DataRequest, HostBatch, Source, pack_rows
from pretrax.data.batches.token_source import open_stores
from pretrax.data.batches.windows import Windows
from pretrax.errors import UserError
from token_arrays import ArrayStore

LENGTHS = [5, 40, 1, 9, 130, 3, 3, 60, 71]  # 322 tokens
GROWING = Batch(tokens=((0, 32), (3, 48), (5, 128)), sequence_length=((0, 4), (4, 16)))


def opened(tmp_path, packing='concatenate', length=16, mask=None):
    return open_stores(ArrayStore(LENGTHS, mask), None, None, DataRequest(0, length, tmp_path, lambda _: None), packing)


def whole(source, number):
    return read_sequences(source, *rows_of(GROWING, number), slice(None))


@pytest.mark.parametrize('packing', ['concatenate', 'whole', 'best_fit'])
def test_every_target_of_an_epoch_comes_once_and_in_the_order_of_the_rows(packing, tmp_path):
    source = opened(tmp_path, packing)
    batches = [whole(source, number) for number in range(8)]
    assert [batch.tokens.shape for batch in batches] == [(8, 4)] * 3 + [(12, 4), (3, 16)] + [(8, 16)] * 3
    rows = [source.batch(number, slice(None), 1) for number in range(2 * 3 + 3 * 2 + 8 * 3)]
    for name in ('tokens', 'targets', 'mask'):
        read = np.concatenate([getattr(batch, name).ravel() for batch in batches])
        assert read.tolist() == np.concatenate([getattr(row, name).ravel() for row in rows]).tolist()
    # The first tokens of documents are not targets.
    counted = np.concatenate([batch.targets[batch.mask == 1] for batch in batches])[: 322 - len(LENGTHS)]
    starts = np.cumsum([0, *LENGTHS[:-1]]) + 1
    assert sorted(counted.tolist()) == sorted({*range(1, 323)} - {*starts.tolist()})


def test_the_sequences_of_a_row_are_shorter_windows(tmp_path):
    counted = np.arange(322) % 7 != 0
    source = opened(tmp_path, mask=counted)
    order = source._order(np.arange(6))
    short = Windows(ArrayStore([*LENGTHS], counted), 4)
    expected = short.read((order[:, None] * 4 + np.arange(4)).ravel()[:-4], False)
    found = read_sequences(source, 0, 6, 4, slice(0, 20))
    for a, b in zip(found, expected, strict=True):
        assert a.tolist() == b.tolist()
        assert a.dtype == b.dtype


@pytest.mark.parametrize('packing', ['whole', 'best_fit'])
def test_the_parts_of_packed_documents_stay_apart(packing, tmp_path):
    source = opened(tmp_path, packing)
    rows, cut = source.batch(0, slice(None), 8), read_sequences(source, 0, 8, 4, slice(None))
    for r in range(8):
        for part in range(4):
            columns, segments = slice(4 * part, 4 * part + 4), cut.segments[4 * r + part]
            together = rows.segments[r, columns, None] == rows.segments[r, None, columns]
            assert (together == (segments[:, None] == segments[None])).all()
            assert segments[0] == 1
            here = cut.positions[4 * r + part]
            assert all(
                here[i] == (0 if i == 0 or segments[i] != segments[i - 1] else here[i - 1] + 1) for i in range(4)
            )


def test_any_part_of_a_batch_is_the_same_part_of_the_whole(tmp_path):
    source = opened(tmp_path)
    for number in range(8):
        batch = whole(source, number)
        n = len(batch.tokens)
        for part in (slice(0, n), slice(1, n - 1), slice(n // 2, n), slice(n - 1, n)):
            for a, b in zip(read_sequences(source, *rows_of(GROWING, number), part), batch, strict=True):
                assert a.tolist() == b[part].tolist()


def test_the_weights_of_a_mixture_change_at_their_step_and_every_member_is_read_in_order(tmp_path):
    def member(name, weights):
        store = ArrayStore([2000])
        return Member(name, weights, open_stores(store, None, None, DataRequest(0, 16, tmp_path, lambda _: None)))

    members = [member('a', [(0, 1.0), (5, 1.0), (6, 0.0)]), member('b', [(0, 0.0), (5, 0.0), (6, 1.0)])]
    mixture = Mixture(members, 'repeat', lambda step: rows_of(GROWING, step)[0])
    read = {'a': [], 'b': []}
    for number in range(8):
        where = rows_of(GROWING, number)
        sources = sources_of_sequences(mixture, *where, slice(None))
        assert set(sources.tolist()) == ({0} if number < 6 else {1})
        assert sources_of_sequences(mixture, *where, slice(1, 3)).tolist() == sources[1:3].tolist()
        tokens = read_sequences(mixture, *where, slice(None)).tokens
        for name, at in (('a', 0), ('b', 1)):
            read[name] += tokens[sources == at].ravel().tolist()
    for one in members:
        alone = one.source.batch(0, slice(None), len(read[one.name]) // 16).tokens
        assert read[one.name] == alone.ravel().tolist()


class Drawn(Source):
    """Rows of random tokens: each from its number, or all rows of a batch from the number of the batch."""

    vocab_size = 1000

    def __init__(self, by_batch):
        self.by_batch = by_batch

    def batch(self, step: int, rows: slice, batch_rows: int) -> HostBatch:
        if self.by_batch:
            tokens = np.random.default_rng(step).integers(self.vocab_size, size=(batch_rows, 9))[rows]
        else:
            numbers = range(step * batch_rows, (step + 1) * batch_rows)[rows]
            tokens = np.stack([np.random.default_rng(number).integers(self.vocab_size, size=9) for number in numbers])
        return pack_rows(tokens, np.zeros(tokens.shape, bool))


@pytest.mark.parametrize('sizes', [((0, 4), (24, 8)), ((0, 6), (6, 9)), ((0, 2), (2, 3), (8, 8))])
def test_a_source_whose_rows_depend_on_the_size_of_the_batch_is_refused_if_batches_grow(sizes):
    check_row_order(Drawn(by_batch=False), 'drawn', sizes)
    with pytest.raises(
        UserError, match=r'data\.name=drawn: batches grow, but Drawn numbers .*(.|\n)*step \* batch_rows \+ row'
    ):
        check_row_order(Drawn(by_batch=True), 'drawn', sizes)


@pytest.mark.parametrize('sizes', [((0, 4),), ((0, 4), (12, 8))])
def test_a_source_that_is_read_in_parts_of_one_size_may_number_rows_by_batch(sizes):
    check_row_order(Drawn(by_batch=True), 'drawn', sizes)
    first = [read_sequences(Drawn(by_batch=True), 4 * index, 4, 1, slice(None)).tokens for index in range(7)]
    last = read_sequences(Drawn(by_batch=True), *sizes[-1], 1, slice(None)).tokens
    at = sizes[-1][0] // 4
    assert last.tolist() == np.concatenate(first[at : at + sizes[-1][1] // 4]).tolist()
