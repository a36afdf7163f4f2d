"""Rows of whole documents, compared with naive implementations of each packing."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrax.data.batches import packing
from pretrax.data.batches.packing import PackedDocuments, pack_best_fit, pack_in_order
from pretrax.errors import UserError
from token_arrays import ArrayStore

CHUNKS = st.integers(1, 60).flatmap(lambda room: st.tuples(st.lists(st.integers(1, room), max_size=60), st.just(room)))


def naive_best_fit(lengths, room):
    """Tries every row for every chunk."""
    rows, free = [0] * len(lengths), []
    for length, chunk in sorted((-length, chunk) for chunk, length in enumerate(lengths)):
        candidates = [(left, row) for row, left in enumerate(free) if left + length >= 0]
        if not candidates:
            free.append(room)
            candidates = [(room, len(free) - 1)]
        row = min(candidates)[1]
        rows[chunk] = row
        free[row] += length
    return rows


def naive_in_order(lengths, room):
    rows = [[]]
    for chunk, length in enumerate(lengths):
        if sum(lengths[other] for other in rows[-1]) + length > room:
            rows.append([])
        rows[-1].append(chunk)
    return [number for number, row in enumerate(rows) for _ in row]


@settings(max_examples=300)
@given(CHUNKS)
def test_packings_equal_their_definitions(chunks):
    assert pack_best_fit(*chunks) == naive_best_fit(*chunks)
    assert pack_in_order(*chunks) == naive_in_order(*chunks)


def test_best_fit_leaves_little_padding():
    lengths = np.random.default_rng(0).lognormal(5, 1, size=2000).astype(int).clip(1, 2048).tolist()
    needed = -(-sum(lengths) // 2048)
    assert max(pack_best_fit(lengths, 2048)) + 1 <= 1.01 * needed + 1
    assert max(pack_in_order(lengths, 2048)) + 1 > 1.05 * needed


@pytest.fixture
def small_groups(monkeypatch):
    monkeypatch.setattr(packing, 'PLANNED_TOKENS', 50)
    monkeypatch.setattr(packing, 'PLANNED_ROWS', 2)
    monkeypatch.setattr(packing, '_STARTS_AT_ONCE', 7)


def chunks_of(batch):
    """The counted targets of each row, by segment."""
    return [
        [targets[(segments == number) & (mask == 1)].tolist() for number in range(1, segments.max() + 1)]
        for targets, segments, mask in zip(batch.targets, batch.segments, batch.mask, strict=True)
    ]


@pytest.mark.parametrize('kind', ['whole', 'best_fit'])
def test_rows_hold_whole_documents_of_one_group(tmp_path, small_groups, kind):
    lengths = np.random.default_rng(1).integers(1, 25, size=200).tolist()
    rows = PackedDocuments(ArrayStore(lengths), 10, kind, tmp_path, lambda _: None)
    got = chunks_of(rows.read(np.arange(rows.n), True))

    # The definition: groups of documents with at least 50 tokens, cut in chunks of 10, packed naively.
    expected = []
    starts = np.concatenate([[0], np.cumsum(lengths)])
    edges = [0]
    for number in range(1, len(lengths)):
        if starts[number] - starts[edges[-1]] >= 50:
            edges.append(number)
    for begin, end in zip(edges, [*edges[1:], len(lengths)], strict=True):
        chunks = []
        for number in range(begin, end):
            targets = list(range(starts[number] + 2, starts[number + 1] + 1))
            chunks += [targets[at : at + 10] for at in range(0, len(targets), 10)]
        naive = naive_best_fit if kind == 'best_fit' else naive_in_order
        rows_of = naive([len(chunk) for chunk in chunks], 10)
        expected += [
            [chunk for chunk, its_row in zip(chunks, rows_of, strict=True) if its_row == row]
            for row in range(max(rows_of, default=-1) + 1)
        ]
    assert [[chunk for chunk in row if chunk] for row in got] == expected


def test_padding_is_a_separate_segment_with_mask_0(tmp_path):
    rows = PackedDocuments(ArrayStore([4, 1, 3, 9]), 8, 'whole', tmp_path, lambda _: None)
    batch = rows.read(np.array([0, 1]), True)
    assert batch.tokens.tolist() == [[1, 2, 3, 6, 7, 0, 0, 0], [9, 10, 11, 12, 13, 14, 15, 16]]
    assert batch.targets.tolist() == [[2, 3, 4, 7, 8, 0, 0, 0], [10, 11, 12, 13, 14, 15, 16, 17]]
    assert batch.segments.tolist() == [[1, 1, 1, 2, 2, 3, 3, 3], [1] * 8]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2], list(range(8))]
    assert batch.mask.tolist() == [[1, 1, 1, 1, 1, 0, 0, 0], [1] * 8]
    assert rows.documents_per_row == 3
    assert rows.density == 13 / 16


def test_the_index_is_saved_reused_and_refused_when_damaged(tmp_path, monkeypatch, small_groups):
    said = []
    lengths = [3, 30, 7, 40] * 20
    first = PackedDocuments(ArrayStore(lengths), 10, 'best_fit', tmp_path / 'data', said.append)
    assert 'planned 80 documents' in said[0]
    assert '40 longer ones cut' in str(first)
    [index] = (tmp_path / 'data').iterdir()
    monkeypatch.setattr(PackedDocuments, '_make_index', None)
    again = PackedDocuments(ArrayStore(lengths), 10, 'best_fit', tmp_path / 'data', said.append)
    assert str(again) == str(first)
    assert chunks_of(again.read(np.arange(9), True)) == chunks_of(first.read(np.arange(9), True))
    assert len(said) == 1

    index.write_bytes(index.read_bytes()[:100])
    with pytest.raises(UserError, match=rf'{re.escape(str(index))}: damaged(.|\n)*remove the file'):
        PackedDocuments(ArrayStore(lengths), 10, 'best_fit', tmp_path / 'data', said.append)
