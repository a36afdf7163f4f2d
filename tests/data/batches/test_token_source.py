"""Every row comes once per epoch, and a step has the same rows on any number of processes, from memory or disk."""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pretrax.data.batches import block_cache, windows
from pretrax.data.batches import packing as packing_module
from pretrax.data.batches.source import DataRequest, HostBatch, Source
from pretrax.data.batches.token_source import TokenSource, open_stores, open_tokens
from pretrax.data.tokenizers.tokenizer_training import train_tokenizer
from pretrax.data.tokens.flat_tokens import TokenizerIdentity
from pretrax.data.tokens.flat_tokens_writer import create
from pretrax.errors import UserError
from token_arrays import ArrayStore, encode_documents

TOKENIZER = train_tokenizer(['a b c'], 300)
IDENTITY = TokenizerIdentity(sha256=TOKENIZER.sha256, vocab_size=5000, end_of_text=0)


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
    """prepared(lengths) writes documents of these lengths, whose ids count up through the stream."""

    def prepare(lengths: list[int], held_out: list[int] | None = None):
        directory = tmp_path_factory.mktemp('prepared') / 'tokens'
        with create(directory, IDENTITY, TOKENIZER.content, {}) as writer:
            for split, sizes in (('train', lengths), ('validation', held_out or [])):
                first = 1
                for size in sizes:
                    ids = [*range(first, first + size - 1), 0]
                    writer.append(split, *encode_documents([ids]), n_bytes=3 * size, predicted_bytes=2 * size)
                    first += size
        return directory

    return prepare


def opened(directory, sequence_length=4, seed=0, said=None) -> TokenSource:
    said = [] if said is None else said
    return open_tokens(directory, DataRequest(seed, sequence_length, directory, said.append))


def rows_of(batch: HostBatch) -> list[tuple]:
    return [tuple(map(tuple, row)) for row in zip(*(array.tolist() for array in batch), strict=True)]


def test_a_flat_tokens_directory_opens_as_a_source(prepared):
    source = opened(prepared([50]))
    assert isinstance(source, Source)
    assert source.vocab_size == 5000
    assert source.n_tokens == 50
    assert source.bytes_per_token == 100 / 49
    assert source.validation is None


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=20)
PACKINGS = st.sampled_from(['concatenate', 'whole', 'best_fit'])


def source_of(store: ArrayStore, directory, sequence_length=4, seed=0, packing='concatenate', held_out=None):
    request = DataRequest(seed, sequence_length, directory, lambda _: None)
    return open_stores(store, held_out, None, request, packing)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(lengths=LENGTHS, sequence_length=st.integers(1, 11), seed=st.integers(0, 99), packing=PACKINGS, data=st.data())
def test_an_epoch_has_every_target_once(tmp_path, lengths, sequence_length, seed, packing, data):
    """With and without a loss mask. The ids of ArrayStore are positions in the stream, from 1."""
    n_tokens, wanted = sum(lengths), None
    if data.draw(st.booleans()):
        wanted = np.array(data.draw(st.lists(st.booleans(), min_size=n_tokens, max_size=n_tokens)))
    store = ArrayStore(lengths, wanted)
    first = {start + 1 for start in store.starts.tolist()}
    expected = [at for at in range(1, n_tokens + 1) if at not in first and (wanted is None or wanted[at - 1])]
    if n_tokens - (1 if packing == 'concatenate' else len(lengths)) < sequence_length:
        with pytest.raises(UserError, match='more text'):
            source_of(store, tmp_path, sequence_length, seed, packing)
        return
    source = source_of(store, tmp_path, sequence_length, seed, packing)
    n = source.train.n
    for epoch in range(2):
        batch = source.batch(epoch, slice(None), n)
        counted = batch.mask == 1
        assert sorted(batch.targets[counted].tolist()) == expected
        assert (batch.targets[counted] == batch.tokens[counted] + 1).all()
    for row in zip(batch.tokens.tolist(), batch.segments.tolist(), batch.positions.tolist(), strict=True):
        for (token, segment, position), (next_token, next_segment, next_position) in itertools.pairwise(
            zip(*row, strict=True)
        ):
            if next_segment == segment and next_token:
                assert (next_token, next_position) == (token + 1, position + 1), 'one document, in order'
                assert next_token not in first
            elif next_segment != segment:
                assert (next_segment, next_position) == (segment + 1, 0), 'a new document'
    assert int(batch.segments.max()) <= source.documents_per_row
    assert source.documents_per_row == int(batch.segments.max()), 'a tight bound, for the kernels'


def test_each_epoch_and_seed_has_its_own_order(prepared):
    directory = prepared([401])
    orders = [
        opened(directory, seed=seed).batch(epoch, slice(None), 100).tokens[:, 0].tolist()
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


@given(st.integers(0, 10**9), st.integers(1, 40), st.data())
def test_rows_do_not_depend_on_the_process_that_reads_them(prepared_once, step, batch_rows, data):
    whole = rows_of(prepared_once.batch(step, slice(0, batch_rows), batch_rows))
    cuts = sorted(data.draw(st.lists(st.integers(0, batch_rows), max_size=3)))
    parts = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, batch_rows], strict=True)]
    assert [row for part in parts for row in rows_of(prepared_once.batch(step, part, batch_rows))] == whole
    assert rows_of(prepared_once.batch(0, slice(step % 7, step % 7 + 1), 7)) == rows_of(
        prepared_once.batch(step % 7, slice(None), 1)
    ), 'only the row number in the run matters'


@pytest.fixture(scope='module')
def prepared_once(prepared) -> TokenSource:
    return opened(prepared([30, 1, 40, 7]))


def test_rows_from_disk_equal_rows_from_memory(prepared, monkeypatch):
    directory = prepared([200, 1, 300])
    said = []
    memory = opened(directory, said=said)
    monkeypatch.setattr(block_cache, 'MEMORY', 1000)
    disk = opened(directory, said=said)
    assert 'held in memory' in said[0]
    assert 'read in blocks' in said[2]
    for step in (0, 1, 1000):
        assert rows_of(memory.batch(step, slice(None), 50)) == rows_of(disk.batch(step, slice(None), 50))


def test_validation_gives_each_window_once_for_any_seed(prepared):
    directory = prepared([100], [41])
    batches = []
    for seed in (0, 1):
        validation = opened(directory, seed=seed).validation
        assert validation is not None
        batches.append([rows_of(validation(index, slice(None), 4)) for index in range(4)])
    assert batches[0] == batches[1]
    rows = [row for batch in batches[0] for row in batch]
    counted = [row for row in rows if any(row[4])]
    assert len(rows) == 16
    assert sorted(row[0][0] for row in counted) == list(range(1, 41, 4)), '10 windows'


def test_the_last_window_is_padded(prepared):
    said = []
    source = opened(prepared([23]), sequence_length=4, said=said)
    assert 'an epoch is 6 windows of the token stream, the last one with 2 tokens of padding' in said[0]
    batch = source.batch(0, slice(None), 6)
    [last] = np.flatnonzero(batch.mask.min(axis=1) == 0)
    assert [array[last].tolist() for array in batch] == [
        [21, 22, 0, 0], [22, 0, 0, 0], [1, 1, 1, 2], [0, 1, 2, 0], [1, 1, 0, 0],
    ]  # fmt: skip


@pytest.mark.parametrize('packing', ['concatenate', 'whole', 'best_fit'])
def test_blocks_are_read_once_and_small_shares_read_only_their_rows(tmp_path, monkeypatch, packing):
    monkeypatch.setattr(block_cache, 'MEMORY', 4 * 20_000)
    monkeypatch.setattr(windows, 'BLOCK', 256)
    monkeypatch.setattr(packing_module, 'PLANNED_TOKENS', 128)
    monkeypatch.setattr(packing_module, 'PLANNED_ROWS', 4)
    lengths = np.random.default_rng(0).integers(1, 40, size=3000).tolist()
    store = ArrayStore(lengths)
    source = source_of(store, tmp_path, 16, packing=packing)
    batch_rows = 32
    n_steps = source.train.n // batch_rows
    everything = [rows_of(source.batch(step, slice(None), batch_rows)) for step in range(n_steps)]
    n_read = sum(stop - start for start, stop in store.ranges)
    assert n_read < (1.01 if packing == 'concatenate' else 3) * store.n_tokens

    store.ranges.clear()
    apart = source_of(store, tmp_path, 16, packing=packing)
    part = slice(5, 8)  # a small share of the batch
    got = [rows_of(apart.batch(step, part, batch_rows)) for step in range(n_steps)]
    assert got == [rows[part] for rows in everything]
    of_part = sum(len(row[0]) for step in got for row in step)
    assert sum(stop - start for start, stop in store.ranges) <= 1.2 * of_part, 'reads only its rows'


def test_too_little_text_is_refused_with_a_fix(prepared):
    with pytest.raises(
        UserError, match=r'train split has 4 tokens(.|\n)*batch.sequence_length=3 or less, or give more text'
    ):
        opened(prepared([4]), sequence_length=4)
    with pytest.raises(UserError, match=r'validation split has 3 tokens(.|\n)*larger data.validation'):
        opened(prepared([40], [3]), sequence_length=4)
    assert opened(prepared([5]), sequence_length=4).batch(0, slice(None), 3).tokens.tolist() == [[1, 2, 3, 4]] * 3
