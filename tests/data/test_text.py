"""The data component `text`, as a configuration uses it."""

import json

import numpy as np
import pytest

from pretrax.data.tokenizers.tokenizer_training import train_tokenizer
from pretrax.data.tokens.flat_tokens_check import verify
from pretrax.errors import UserError


def test_the_standard_library_trains(open_source, said):
    source = open_source(sequence_length=256)
    assert source.vocab_size == source.tokenizer.vocab_size == 4096
    assert source.n_tokens > 1_000_000
    assert 3 < source.bytes_per_token < 5
    batch = source.batch(0, slice(0, 8), 8)
    assert batch.tokens.shape == batch.mask.shape == (8, 256)
    assert batch.tokens.max() < 4096
    assert any('def ' in source.tokenizer.decode(row) for row in batch.tokens.tolist())
    assert source.validation(0, slice(0, 8), 8).tokens.shape == (8, 256)
    assert 'the standard library of Python' in said.text
    assert 'except in the directories __pycache__' in said.text
    assert 'files, ' in said.text


def test_bytes_per_token_converts_loss_to_bits_per_byte(open_source, novel):
    # By definition, a model that spends 8 bits on every byte of a target has 8 bits per byte.
    source = open_source(text=str(novel), vocab_size=300, validation=0)
    documents = [f'Chapter {n}. It was a day like {n * n} others; ünd so weiter.' for n in range(200)]
    encoded = [source.tokenizer.encode(text) for text in documents]
    first = sum(source.tokenizer.byte_lengths[ids[0]] for ids in encoded)
    targets = sum(len(ids) for ids in encoded)  # without the first token, with end-of-text
    assert source.bytes_per_token == (sum(len(text.encode()) for text in documents) - first) / targets


def test_several_paths_are_read_in_order_and_once(open_source, novel, tmp_path, said):
    (tmp_path / 'z.txt').write_text('zzz')
    source = open_source(text=[str(tmp_path / 'z.txt'), str(novel), str(tmp_path / '*')], validation=0, vocab_size=300)
    documents = source.train.tokens.n_documents
    assert documents == 201
    assert source.tokenizer.decode(source.train.tokens.document(0).tolist()) == 'zzz<|endoftext|>'
    assert 'z.txt: 1 files' in said.text


def test_a_given_tokenizer_is_used(open_source, novel, tmp_path):
    path = tmp_path / 'mine.json'
    path.write_bytes(train_tokenizer(['quite other text'], 280).content)
    source = open_source(text=str(novel), tokenizer=str(path))
    assert source.vocab_size == train_tokenizer(['quite other text'], 280).vocab_size
    open_source(text=str(novel), tokenizer=str(path), vocab_size=source.vocab_size)
    with pytest.raises(UserError, match=rf'data\.vocab_size: 300 was given(.|\n)*data\.vocab_size={source.vocab_size}'):
        open_source(text=str(novel), tokenizer=str(path), vocab_size=300)


def test_prepared_tokens_give_the_same_batches(open_source, novel, said):
    from_text = open_source(text=str(novel), vocab_size=300)
    place = str(from_text.train.tokens.path.parent)
    novel.unlink()
    from_tokens = open_source(tokens=place)
    assert from_tokens.fingerprint == from_text.fingerprint
    for a, b in zip(from_tokens.batch(3, slice(None), 20), from_text.batch(3, slice(None), 20), strict=True):
        assert a.tolist() == b.tolist()
    assert from_tokens.tokenizer.encode('Chapter') == from_text.tokenizer.encode('Chapter')
    assert f'from {place} (flat-tokens)' in said.text
    with pytest.raises(UserError, match=r'data\.vocab_size: 4,096 was given'):
        open_source(tokens=place, vocab_size=4096)


def test_validation_0_holds_nothing_out(open_source, novel, said):
    assert open_source(text=str(novel), vocab_size=300, validation=0).validation is None
    assert 'no text is held out' in said.text


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / 'mine.json'
    path.write_bytes(train_tokenizer(['quite other text'], 280).content)
    return str(path)


def test_a_mixture_takes_text_and_tokens(open_source, novel, tmp_path, mine, said):
    (tmp_path / 'z.txt').write_text('zzz ' * 500)
    alone = open_source(text=str(tmp_path / 'z.txt'), tokenizer=mine, packing='whole')
    items = [
        {'name': 'novel', 'weight': 3, 'text': str(novel), 'validation': 0.2},
        {'name': 'z', 'weight': [[0, 0], [10, 1]], 'tokens': str(alone.train.tokens.path.parent)},
    ]
    source = open_source(tokenizer=mine, packing='whole', mixture=items)
    assert source.tokenizer.sha256 == alone.tokenizer.sha256
    assert source.validation_parts.keys() == {'novel', 'z'}
    assert source.bytes_per_token is None, 'depends on the weights of the step'
    assert 3 < source.validation_bytes_per_token < 5 or source.validation_bytes_per_token > 0
    zzz = alone.batch(0, slice(None), alone.train.n).tokens.tolist()
    assert all(row not in zzz for row in source.batch(0, slice(None), 8).tokens.tolist())
    assert sum(row in zzz for row in source.batch(10, slice(None), 80).tokens.tolist()) in (19, 20, 21)
    assert 'novel: text: ' in said.text
    assert (tmp_path / 'data' / 'novel').is_dir()

    again = open_source(tokenizer=mine, packing='whole', mixture=[items[0] | {'weight': 1}, items[1]])
    assert again.fingerprint == source.fingerprint
    assert 'novel: tokens: reused' in said.text, 'other weights use the same tokens'


def test_a_mixture_with_two_tokenizers_is_refused(open_source, novel, mine):
    other = open_source(text=str(novel), vocab_size=300)
    with pytest.raises(UserError, match='a and b were tokenized by different tokenizers'):
        open_source(
            tokenizer=mine,
            mixture=[
                {'name': 'a', 'weight': 1, 'text': str(novel)},
                {'name': 'b', 'weight': 1, 'tokens': str(other.train.tokens.path.parent)},
            ],
        )


def test_a_file_in_two_sources_of_a_mixture_is_read_by_both_and_said(open_source, novel, tmp_path, said):
    (tmp_path / 'more').mkdir()
    (tmp_path / 'more/link.jsonl').symlink_to(novel)
    parts = [{'name': 'a', 'weight': 1, 'text': str(novel)}, {'name': 'b', 'weight': 1, 'text': str(tmp_path / 'more')}]
    mixture = open_source(tokenizer='bytes', mixture=parts)
    first, second = (member.source.train.tokens for member in mixture.members)
    assert first.fingerprint == second.fingerprint
    assert said[-1] == 'mixture: a and b have 1 files in common; each reads them'
    said.clear()
    open_source(tokenizer='bytes', mixture=[parts[0] | {'validation': 0}, parts[1]])
    assert 'trains on documents that the other holds out' in said.text
    said.clear()
    (tmp_path / 'more/link.jsonl').unlink()
    (tmp_path / 'more/copy.jsonl').write_text(novel.read_text() + novel.read_text())
    open_source(tokenizer='bytes', mixture=parts)
    assert 'in common' not in said.text


def test_validation_on_the_tokens_to_train_on_is_said(open_source, tmp_path, said):
    (np.arange(3000) % 200).astype('<u2').tofile(tmp_path / 'train.bin')
    (tmp_path / 'val.bin').symlink_to('train.bin')
    open_source(tokens=str(tmp_path / 'train.bin'))
    assert 'validation: the same tokens as those to train on' in said.text
    said.clear()
    (tmp_path / 'val.bin').unlink()
    (np.arange(3000) % 190).astype('<u2').tofile(tmp_path / 'val.bin')
    open_source(tokens=str(tmp_path / 'train.bin'))
    assert 'the same tokens' not in said.text


def test_the_files_left_out_are_printed_and_recorded(open_source, novel, tmp_path, said):
    (tmp_path / 'text/page.html').parent.mkdir()
    (tmp_path / 'text/page.html').touch()
    (tmp_path / 'text/a.jsonl').symlink_to(novel)
    (tmp_path / 'text/b.jsonl').symlink_to(novel)
    open_source(text=str(tmp_path / 'text'), tokenizer='bytes')
    assert (
        f'text: {tmp_path}/text: 3 found = 1 files + 1 the same file again + 1 with another suffix (.html)' in said.text
    )
    [tokens] = (tmp_path / 'data').glob('tokens-*')
    documents = json.loads((tokens / 'zarr.json').read_text())['attributes']['documents']
    assert documents['read'] == 200
    assert documents['files'] == {'read': 1, 'left_out': {'the same file again': 1, 'with another suffix': 1}}
    verify(tokens)
