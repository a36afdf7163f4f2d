"""Batches: every window once an epoch, the same rows for any split of the work, from memory or from disk."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pretrax.data import windows
from pretrax.data.flat_tokens import TokenizerIdentity, open_split
from pretrax.data.flat_tokens_writer import create
from pretrax.data.source import DataRequest, HostBatch, Source
from pretrax.data.tokenizer_training import train_tokenizer
from pretrax.data.windows import TokenSource, open_tokens
from pretrax.errors import UserError

TOKENIZER = train_tokenizer(['a b c'], 300)
IDENTITY = TokenizerIdentity(sha256=TOKENIZER.sha256, vocab_size=5000, end_of_text=0)


@pytest.fixture(scope='module')
def prepared(tmp_path_factory):
    """prepared(lengths) is a directory with documents of those lengths, whose ids count up through the stream."""

    def prepare(lengths: list[int], held_out: list[int] | None = None):
        directory = tmp_path_factory.mktemp('prepared') / 'tokens'
        with create(directory, IDENTITY, TOKENIZER.content, {}) as writer:
            for split, sizes in (('train', lengths), ('validation', held_out or [])):
                first = 1
                for size in sizes:
                    ids = [*range(first, first + size - 1), 0]
                    writer.append(split, [ids], n_bytes=3 * size, predicted_bytes=2 * size)
                    first += size
        return directory

    return prepare


def opened(directory, sequence_length=4, seed=0, said=None) -> TokenSource:
    said = [] if said is None else said
    return open_tokens(directory, DataRequest(seed, sequence_length, directory, said.append))


def rows_of(batch: HostBatch) -> list[tuple]:
    return [tuple(map(tuple, row)) for row in zip(*(array.tolist() for array in batch), strict=True)]


def test_is_a_source(prepared):
    source = opened(prepared([50]))
    assert isinstance(source, Source)
    assert source.vocab_size == 5000
    assert source.n_tokens == 50
    assert source.bytes_per_token == 100 / 49
    assert source.validation is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20).filter(lambda sizes: sum(sizes) > 12),
    sequence_length=st.integers(1, 11),
    seed=st.integers(0, 100),
)
def test_an_epoch_covers_the_stream_exactly_once(prepared, lengths, sequence_length, seed):
    directory = prepared(lengths)
    split = open_split(directory, 'train')
    stream = np.concatenate([split.document(index) for index in range(split.n_documents)])
    n = (len(stream) - 1) // sequence_length
    epochs = []
    for epoch in range(2):
        rows = [opened(directory, sequence_length, seed).batch(epoch * n + i, slice(None), 1) for i in range(n)]
        got = sorted((batch.tokens[0].tolist(), batch.targets[0].tolist()) for batch in rows)
        expected = sorted(
            (
                stream[i * sequence_length : (i + 1) * sequence_length].tolist(),
                stream[i * sequence_length + 1 : (i + 1) * sequence_length + 1].tolist(),
            )
            for i in range(n)
        )
        assert got == expected
        epochs.append([batch.tokens.tolist() for batch in rows])
    counted = sum(batch.mask.sum() for batch in rows)
    starts = set(split.read_starts(0, split.n_documents).tolist())
    assert counted == sum(at not in starts for at in range(1, n * sequence_length + 1))


def test_each_epoch_and_seed_has_its_own_order(prepared):
    directory = prepared([400])
    orders = [
        opened(directory, seed=seed).batch(epoch, slice(None), 99).tokens[:, 0].tolist()
        for seed in (0, 1)
        for epoch in (0, 1)
    ]
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


@given(st.integers(0, 10**9), st.integers(1, 40), st.data())
def test_rows_do_not_depend_on_who_asks_for_which(prepared_once, step, batch_rows, data):
    whole = rows_of(prepared_once.batch(step, slice(0, batch_rows), batch_rows))
    cuts = sorted(data.draw(st.lists(st.integers(0, batch_rows), max_size=3)))
    parts = [slice(a, b) for a, b in zip([0, *cuts], [*cuts, batch_rows], strict=True)]
    assert [row for part in parts for row in rows_of(prepared_once.batch(step, part, batch_rows))] == whole
    assert rows_of(prepared_once.batch(0, slice(step % 7, step % 7 + 1), 7)) == rows_of(
        prepared_once.batch(step % 7, slice(None), 1)
    ), 'only the number of the row in the run counts'


@pytest.fixture(scope='module')
def prepared_once(prepared) -> TokenSource:
    return opened(prepared([30, 1, 40, 7]))


def test_disk_and_memory_give_the_same(prepared, monkeypatch):
    directory = prepared([200, 1, 300])
    said = []
    memory = opened(directory, said=said)
    monkeypatch.setattr(windows, 'HELD_IN_MEMORY', 1000)
    disk = opened(directory, said=said)
    assert 'held in memory' in said[0]
    assert 'read from disk' in said[2]
    for step in (0, 1, 1000):
        assert rows_of(memory.batch(step, slice(None), 50)) == rows_of(disk.batch(step, slice(None), 50))


def test_validation_gives_each_window_once_whatever_the_seed(prepared):
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


def test_the_end_of_the_stream_is_said(prepared):
    said = []
    opened(prepared([23]), sequence_length=4, said=said)
    assert '5 windows of 4 targets an epoch' in said[0]
    assert '2 tokens at the end do not fill one' in said[0]


def test_too_little_text_says_what_to_change(prepared):
    with pytest.raises(
        UserError, match=r'train split has 4 tokens(.|\n)*batch.sequence_length=3 or less, or give more text'
    ):
        opened(prepared([4]), sequence_length=4)
    with pytest.raises(UserError, match=r'validation split has 3 tokens(.|\n)*larger data.validation'):
        opened(prepared([40], [3]), sequence_length=4)
    assert opened(prepared([5]), sequence_length=4).batch(0, slice(None), 3).tokens.tolist() == [[1, 2, 3, 4]] * 3
