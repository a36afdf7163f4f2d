"""Text that is tokenized while it is trained on: every document once per epoch, and any batch at any time."""

import json
import time

import numpy as np
import pytest

from data_options import data_options
from pretrax.data.batches.source import DataRequest
from pretrax.data.stream import blocks, places
from pretrax.data.text import open_text
from pretrax.errors import UserError

N = 100
LENGTH = 8


def text_of(number: int) -> str:
    return f'[{number:03d}' + 'x' * (number % 7) + ']'


@pytest.fixture
def corpus(tmp_path):
    """Three files of documents that show their number."""
    for name, numbers in (('a', range(40)), ('b', range(40, 45)), ('c', range(45, N))):
        rows = ''.join(json.dumps({'text': text_of(number)}) + '\n\n' for number in numbers)
        (tmp_path / f'{name}.jsonl').write_text(rows)
    return str(tmp_path / '*.jsonl')


@pytest.fixture
def opened(tmp_path, said):
    """opened(seed=0, directory='data', length=LENGTH, **options)"""
    sources = []

    def open_source(seed=0, directory='data', length=LENGTH, **options):
        request = DataRequest(seed, length, tmp_path / directory, said.append)
        given = {'streaming': True, 'tokenizer': 'bytes', 'shuffle_buffer': 10, 'validation_documents': 6} | options
        source = open_text(request, options=data_options(given))
        sources.append(source)
        return source

    yield open_source
    for source in sources:
        source.close()


def whole(source, step, batch_rows=4):
    return source.batch(step, slice(None), batch_rows)


def stream(source, n_tokens) -> str:
    """The first tokens as text, with | for the end of a document."""
    n = n_tokens // LENGTH
    tokens = source.batch(0, slice(None), n).tokens.ravel().tolist()
    return ''.join('|' if token == 256 else chr(token) for token in tokens)


def numbers(text: str) -> list[int]:
    return [int(part[1:4]) for part in text.split('|')[:-1]]


EPOCH = sum(len(text_of(number)) + 1 for number in range(6, N))


def test_an_epoch_has_every_document_once_except_those_held_out(corpus, opened):
    found = numbers(stream(opened(text=corpus), 2 * EPOCH + LENGTH))
    first, second = found[: N - 6], found[N - 6 : 2 * (N - 6)]
    assert sorted(first) == sorted(second) == list(range(6, N))
    assert first != second
    assert first != sorted(first)
    assert found == numbers(stream(opened(text=corpus, directory='other'), 2 * EPOCH + LENGTH))
    assert found != numbers(stream(opened(text=corpus, seed=1), 2 * EPOCH + LENGTH))


def test_documents_keep_their_order_without_a_buffer(corpus, opened):
    found = numbers(stream(opened(text=corpus, shuffle_buffer=1), 2 * EPOCH + LENGTH))
    assert found[: 2 * (N - 6)] == [*range(6, N)] * 2


def test_the_first_documents_are_for_validation_and_copies_of_them_are_not_trained_on(corpus, opened, tmp_path):
    (tmp_path / 'd.jsonl').write_text(''.join(json.dumps({'text': text_of(number)}) + '\n' for number in range(8)))
    source = opened(text=corpus, length=80)  # one row
    batch = source.validation(0, slice(None), 8)
    held_out = ''.join('|' if token == 256 else chr(token) for token in batch.targets.ravel().tolist())
    assert all(text_of(number)[1:] in held_out for number in range(6))
    assert batch.mask.sum() == sum(len(text_of(number)) for number in range(6))
    assert not set(range(6)) & set(numbers(stream(source, EPOCH)))
    assert source.validation_bytes_per_token == pytest.approx(
        sum(len(text_of(number)) - 1 for number in range(6)) / batch.mask.sum()
    )


@pytest.mark.parametrize('kept', [True, False])
def test_any_batch_is_the_same_whatever_was_read_before(corpus, opened, said, monkeypatch, kept):
    monkeypatch.setattr(places, '_PAUSE', -1 if kept else 1e9)
    source = opened(text=corpus)
    every = [whole(source, step) for step in range(120)]  # three epochs
    rows = np.random.default_rng(0)
    again = opened(text=corpus)
    for step in rows.integers(0, 120, 60).tolist():  # forwards and backwards
        reader = again if step % 3 else opened(text=corpus)
        found = whole(reader, step)
        assert all(np.array_equal(a, b) for a, b in zip(found, every[step], strict=True)), step
    assert not any('cannot be used' in line for line in said)


def test_the_saved_places_save_reading(corpus, opened, monkeypatch):
    monkeypatch.setattr(places, '_PAUSE', -1)
    source = opened(text=corpus)
    expected = [whole(source, step) for step in range(60)][-1]
    read = []
    original = blocks.Blocks._block
    monkeypatch.setattr(blocks.Blocks, '_block', lambda self, *rest: read.append(rest[1]) or original(self, *rest))
    found = whole(opened(text=corpus), 59)
    assert np.array_equal(found.tokens, expected.tokens)
    assert read[0].epoch >= 1
    assert read[0].token > EPOCH


def test_a_block_is_limited_by_its_characters(corpus, opened, monkeypatch):
    monkeypatch.setattr(blocks, 'MOST_CHARACTERS', 30)
    sizes = []
    original = blocks.Blocks._block
    monkeypatch.setattr(
        blocks.Blocks, '_block', lambda self, *rest: sizes.append(len(rest[0])) or original(self, *rest)
    )
    found = numbers(stream(opened(text=corpus, shuffle_buffer=1000), EPOCH + LENGTH))
    assert sorted(found[: N - 6]) == list(range(6, N))
    assert max(sizes) <= 6


def test_rows_depend_neither_on_the_processes_nor_on_the_batch(corpus, opened):
    every = whole(opened(text=corpus), 3, 8)
    for share in (slice(0, 4), slice(4, 8), slice(6, 7)):
        part = opened(text=corpus).batch(3, share, 8)
        assert all(np.array_equal(a, b[share]) for a, b in zip(part, every, strict=True))
    halves = [whole(opened(text=corpus), step, 4) for step in (6, 7)]
    assert np.array_equal(np.concatenate([half.tokens for half in halves]), every.tokens)


def test_any_source_of_text_gives_the_same_documents(corpus, opened, tmp_path):
    pq = pytest.importorskip('pyarrow.parquet')
    import pyarrow as pa

    expected = stream(opened(text=corpus, shuffle_buffer=1), EPOCH)
    (tmp_path / 'set').mkdir()
    rows = [{'text': text_of(number)} for number in range(N)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / 'set' / 'all.parquet', row_group_size=7)
    assert stream(opened(text=str(tmp_path / 'set'), shuffle_buffer=1), EPOCH) == expected
    (tmp_path / 'texts').mkdir()
    for number in range(N):
        (tmp_path / 'texts' / f'{number:03d}.txt').write_text(text_of(number))
    assert stream(opened(text=str(tmp_path / 'texts'), shuffle_buffer=1), EPOCH) == expected


@pytest.mark.filterwarnings('default')
@pytest.mark.parametrize('kind', ['jsonl', 'parquet', 'saved'])
def test_a_hugging_face_dataset_is_streamed_and_resumed(opened, tmp_path, monkeypatch, kind):
    datasets = pytest.importorskip('datasets')
    monkeypatch.setattr(datasets.config, 'HF_DATASETS_CACHE', tmp_path / 'cache')
    monkeypatch.setattr(datasets.config, 'HF_HUB_OFFLINE', True)
    monkeypatch.setattr(places, '_PAUSE', -1)
    rows = datasets.Dataset.from_list([{'text': text_of(number)} for number in range(N)])
    root = tmp_path / 'set'
    if kind == 'saved':
        datasets.DatasetDict({'train': rows, 'test': rows.select(range(5))}).save_to_disk(
            root, num_shards={'train': 3, 'test': 1}
        )
    else:
        for shard in range(3):
            part = rows.shard(3, shard)
            part.to_parquet(root / f'train-{shard}.parquet') if kind == 'parquet' else part.to_json(
                root / f'train-{shard}.jsonl'
            )
        part = rows.select(range(5))
        part.to_parquet(root / 'test.parquet') if kind == 'parquet' else part.to_json(root / 'test.jsonl')
    source = opened(text=f'hf:{root}', validation_split='test')
    every = [whole(source, step) for step in range(60)]
    found = numbers(stream(source, EPOCH + 6 * 8))
    assert len(set(found)) == len(found) >= N - 10  # nothing is left out of the split train
    assert source.validation(0, slice(None), 8).mask.sum() == sum(len(text_of(number)) for number in range(5))
    for step in (59, 3, 31):
        again = whole(opened(text=f'hf:{root}', validation_split='test'), step)
        assert all(np.array_equal(a, b) for a, b in zip(again, every[step], strict=True))


@pytest.mark.parametrize('damage', [b'', b'{', b'[]', b'{"places": [[5, 0, 0, 0, 0]], "crc32": 1}', None])
def test_a_damaged_file_of_places_costs_only_time(corpus, opened, said, monkeypatch, tmp_path, damage):
    monkeypatch.setattr(places, '_PAUSE', -1)
    source = opened(text=corpus)
    every = [whole(source, step) for step in range(60)]
    [file] = (tmp_path / 'data').glob('stream-*.json')
    content = file.read_bytes()
    file.write_bytes(content.replace(b'1', b'7', 2) if damage is None else damage)
    again = whole(opened(text=corpus), 59)
    assert all(np.array_equal(a, b) for a, b in zip(again, every[59], strict=True))
    assert f'{file} cannot be used' in said.text


def test_places_are_thinned_and_never_overtaken(tmp_path, monkeypatch, said):
    monkeypatch.setattr(places, '_MOST', 8)
    known = places.Places(tmp_path / 'a.json', said.append)
    for number in range(1, 50):
        known.add(blocks.BlockStart(number * 10, 0, number, 0, number))
    known.save()
    again = places.Places(tmp_path / 'a.json', said.append)
    for token in range(500):
        assert again.before(token).token <= token
        assert again.before(token).row * 10 == again.before(token).token
    assert again.before(495).token >= 300


def test_text_that_changes_or_is_bad_stops_the_run_with_its_name(corpus, opened, tmp_path):
    source = opened(text=corpus)
    (tmp_path / 'c.jsonl').write_text('not json\n')
    with pytest.raises(UserError, match=r'c\.jsonl: the file has changed'):
        whole(source, 0, 500)
    with pytest.raises(UserError, match=r'c\.jsonl:1: not JSON'):
        whole(opened(text=corpus), 0, 500)
    source = opened(text=corpus, on_error='skip')
    assert len(set(numbers(stream(source, 300)))) > 10


def test_the_fingerprint_tells_streams_apart(corpus, opened, tmp_path):
    first = opened(text=corpus)
    assert opened(text=corpus, seed=5, directory='b', length=16).fingerprint == first.fingerprint
    assert opened(text=corpus, shuffle_buffer=11).fingerprint != first.fingerprint
    assert opened(text=corpus, validation_documents=7).fingerprint != first.fingerprint
    with (tmp_path / 'c.jsonl').open('a') as stream_:
        stream_.write('{"text": "more"}\n')
    assert opened(text=corpus).fingerprint != first.fingerprint


def test_text_is_tokenized_ahead(corpus, opened):
    """While nobody asks for a batch, the reader fills its queue."""
    source = opened(text=corpus)
    whole(source, 0)
    deadline = time.monotonic() + 20
    while source._reader._ready.qsize() < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ('options', 'expected'),
    [
        ({'tokenizer': None}, 'streaming needs a tokenizer: data.tokenizer=FILE'),
        ({'deduplicate': True}, 'deduplicate cannot be used while streaming'),
        ({'validation': 0.1}, 'validation cannot be used while streaming, use validation_documents=N'),
        ({'workers': 2}, 'workers cannot be used while streaming'),
        ({'packing': 'best_fit'}, 'packing=best_fit needs tokens on a disk'),
        ({'validation_split': 'test'}, 'validation_split applies to datasets'),
        ({'streaming': False}, 'shuffle_buffer applies to streaming; set data.streaming=true'),
        ({'tokens': 'x', 'text': None}, 'is already tokenized, so streaming'),
        ({'vocab_size': 300}, '300 was given, but bytes has 257'),
        ({'text': 'nowhere.jsonl'}, 'no such file'),
        ({'validation_documents': 1000}, 'no document has any text to train on'),
    ],
)
def test_mistakes_are_reported(corpus, opened, options, expected):
    with pytest.raises(ValueError, match=expected):
        whole(opened(**{'text': corpus} | options), 0)


def test_a_source_of_a_mixture_cannot_be_streamed():
    with pytest.raises(ValueError, match="source 'a' of the mixture cannot be streamed"):
        data_options({'tokenizer': 'bytes', 'mixture': ({'name': 'a', 'weight': 1, 'text': 'a', 'streaming': True},)})


def test_validation_may_be_turned_off(corpus, opened):
    for options in ({'validation_documents': 0}, {'validation': 0, 'validation_documents': None}):
        source = opened(text=corpus, **options)
        assert source.validation is None
        assert 0 in numbers(stream(source, 2 * EPOCH))
