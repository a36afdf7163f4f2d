"""Tokenization keeps every document, reuses only tokens of the same recipe, and reports every problem."""

import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pretrax.data.corpus.corpus import Corpus, shards
from pretrax.data.corpus.files import find_files
from pretrax.data.tokenize import encode_shard, sample
from pretrax.data.tokenize import prepare as prepare_module
from pretrax.data.tokenize.engines import InProcess
from pretrax.data.tokenize.prepare import prepare
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokenizers.tokenizer_training import train_and_report, train_tokenizer
from pretrax.data.tokens.flat_tokens import open_split, splits, verify
from pretrax.errors import UserError


def prepared(path, directory, said=None, *, tokenizer=None, vocab_size=300, validation=0.0):
    corpus = Corpus(find_files(str(path)))
    say = [] if said is None else said
    return prepare(corpus, directory, say.append, tokenizer=tokenizer, vocab_size=vocab_size, validation=validation)


def texts_in(place) -> dict[str, list[str]]:
    """The decoded documents of each split; checks that each has one end-of-text token, at its end."""
    tokenizer = Tokenizer((place / 'tokenizer.json').read_bytes(), 'mine')
    found = {}
    for name in splits(place):
        split = open_split(place, name)
        documents = [split.document(index).tolist() for index in range(split.n_documents)]
        assert all(ids.index(tokenizer.end_of_text) == len(ids) - 1 for ids in documents)
        found[name] = [tokenizer.decode(ids[:-1]) for ids in documents]
    return found


def write_jsonl(path, texts) -> None:
    path.write_text(''.join(json.dumps({'text': text}) + '\n' for text in texts))


@settings(max_examples=25)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=['Cs']), max_size=60), min_size=1, max_size=60).filter(any),
    validation=st.sampled_from([0.0, 0.2, 0.5]),
)
def test_every_document_is_tokenized_once(tmp_path_factory, texts, validation):
    tmp_path = tmp_path_factory.mktemp('prepare')
    write_jsonl(tmp_path / 'a.jsonl', texts)
    kept = [text for text in texts if text]
    try:
        place = prepared(tmp_path / 'a.jsonl', tmp_path / 'data', validation=validation)
    except UserError as error:  # too little text for validation
        assume('data.validation' not in str(error))
        raise
    found = texts_in(place)
    if len(kept) * validation < 8:  # the end of each document is held out
        rest = iter(found.get('validation', []))
        for whole, beginning in zip(kept, found['train'], strict=True):
            assert whole == beginning or whole == beginning + next(rest)
        assert next(rest, None) is None
    else:
        held_out = set(found['validation'])
        assert [text for text in kept if text in held_out] == found['validation']
        assert [text for text in kept if text not in held_out] == found['train']
    counts = verify(place)
    assert sum(of.bytes for of in counts.values()) == sum(len(text.encode()) for text in kept)


def test_predicted_bytes_exclude_the_first_token_of_each_document(tmp_path):
    texts = ['ünd so weiter', 'x', 'the cat and the other'] * 5
    write_jsonl(tmp_path / 'a.jsonl', texts)
    place = prepared(tmp_path / 'a.jsonl', tmp_path / 'data')
    tokenizer = Tokenizer((place / 'tokenizer.json').read_bytes(), 'mine')
    expected = sum(sum(tokenizer.byte_length(token) for token in tokenizer.encode(text)[1:]) for text in texts)
    assert open_split(place, 'train').manifest.counts.predicted_bytes == expected


def test_empty_documents_are_counted_and_skipped(tmp_path, said):
    write_jsonl(tmp_path / 'a.jsonl', ['one', '', 'two', '', '', 'three'])
    place = prepared(tmp_path / 'a.jsonl', tmp_path / 'data', said)
    assert texts_in(place) == {'train': ['one', 'two', 'three']}
    assert '6 read = 3 kept + 3 empty' in said.text


def test_a_corpus_of_empty_documents_is_refused(tmp_path):
    write_jsonl(tmp_path / 'a.jsonl', ['', ''])
    with pytest.raises(UserError, match='no document has any text'):
        prepared(tmp_path / 'a.jsonl', tmp_path / 'data')
    assert list((tmp_path / 'data').iterdir()) == []


def test_the_split_of_a_document_depends_only_on_its_text(tmp_path):
    texts = [f'document {n}' for n in range(400)]
    write_jsonl(tmp_path / 'a.jsonl', texts)
    write_jsonl(tmp_path / 'b.jsonl', texts[::-1] + [f'more {n}' for n in range(100)])
    first = texts_in(prepared(tmp_path / 'a.jsonl', tmp_path / 'data', validation=0.1))
    second = texts_in(prepared(tmp_path / 'b.jsonl', tmp_path / 'data', validation=0.1))
    assert set(first['validation']) <= set(second['validation'])
    assert set(first['train']) <= set(second['train'])
    assert 20 < len(first['validation']) < 65


def test_few_documents_are_cut_at_a_line_end(tmp_path, said):
    (tmp_path / 'a.txt').write_text(''.join(f'line {n}\n' for n in range(100)))
    found = texts_in(prepared(tmp_path / 'a.txt', tmp_path / 'data', said, validation=0.1))
    assert found['train'][0].endswith('\n')
    assert found['validation'][0].startswith('line 9')
    assert 'the last 10.0% of each is held out' in said.text


def test_an_empty_split_is_refused(tmp_path):
    write_jsonl(tmp_path / 'a.jsonl', ['the same'] * 100)
    with pytest.raises(UserError, match=r'0\.2 of 100 documents leaves .* empty\n.*data\.validation=0'):
        prepared(tmp_path / 'a.jsonl', tmp_path / 'data', validation=0.2)
    assert list((tmp_path / 'data').iterdir()) == []


def test_tokens_are_reused_only_for_the_same_recipe(tmp_path, said):
    path = tmp_path / 'a.jsonl'
    texts = [f'one {n} three' for n in range(100)]
    write_jsonl(path, texts)
    first = prepared(path, tmp_path / 'data', said)
    stamp = (first / 'zarr.json').stat().st_mtime_ns
    said.clear()
    assert prepared(path, tmp_path / 'data', said) == first
    assert (first / 'zarr.json').stat().st_mtime_ns == stamp
    assert said == [f'tokens: reused from {first}: same text, tokenizer and validation']

    for change, expected in (
        ({'vocab_size': 299}, 'another tokenizer'),
        ({'validation': 0.5}, 'another validation'),
        ({'tokenizer': train_tokenizer(['x'], 299)}, 'another tokenizer'),
    ):
        said.clear()
        assert prepared(path, tmp_path / 'data', said, **change) != first
        assert f'{first} has {expected}; it is kept' in said.text

    write_jsonl(path, [*texts, 'five'])
    said.clear()
    changed = prepared(path, tmp_path / 'data', said)
    assert f'{first} has another text; it is kept' in said.text
    assert texts_in(changed)['train'][-1] == 'five'
    assert texts_in(first)['train'] == texts


def test_tokenizing_twice_gives_equal_files(tmp_path):
    write_jsonl(tmp_path / 'a.jsonl', [f'one {n} three' for n in range(300)])
    places = [prepared(tmp_path / 'a.jsonl', tmp_path / name, validation=0.1) for name in ('a', 'b')]
    files = [sorted(path.relative_to(place) for path in place.rglob('*') if path.is_file()) for place in places]
    assert files[0] == files[1]
    assert all((places[0] / name).read_bytes() == (places[1] / name).read_bytes() for name in files[0])


def test_the_result_does_not_depend_on_the_encoding_batch(tmp_path, monkeypatch):
    write_jsonl(tmp_path / 'a.jsonl', [f'one {n} three' for n in range(300)])
    read = []
    for size in (1, 50, 10**6):
        monkeypatch.setattr(encode_shard, '_ENCODED_AT_ONCE', size)
        place = prepared(tmp_path / 'a.jsonl', tmp_path / str(size), validation=0.1)
        read.append({name: open_split(place, name).manifest for name in splits(place)})
    assert read[0] == read[1] == read[2]


def test_a_tokenizer_is_trained_on_a_bounded_sample_of_all_documents(tmp_path, monkeypatch, said):
    monkeypatch.setattr(sample, 'SAMPLE_CHARACTERS', 5_000)
    monkeypatch.setattr(sample, 'EXCERPT', 100)
    rng = np.random.default_rng(0)
    write_jsonl(tmp_path / 'a.jsonl', [''.join(map(chr, rng.integers(97, 123, size=1000))) for _ in range(50)])
    corpus = Corpus(find_files(str(tmp_path / 'a.jsonl')))
    rows, n_bytes, chosen = sample.sample(InProcess(), shards(corpus, 1), lambda *_: None)
    assert (rows.kept, n_bytes) == (50, 50_000)
    assert 4_900 <= sum(map(len, chosen)) <= 5_000
    documents = [document.text for document in corpus.documents()]
    assert len({n for excerpt in chosen for n, text in enumerate(documents) if excerpt in text}) > 20
    for n in (2, 7):  # for any number of shards
        assert sorted(sample.sample(InProcess(), shards(corpus, n), lambda *_: None)[2]) == sorted(chosen)
    prepared(tmp_path / 'a.jsonl', tmp_path / 'data', said)
    assert 'trained on 0.0 M characters' in said.text


def test_text_that_changes_during_tokenization_is_refused(tmp_path, monkeypatch):
    path = tmp_path / 'a.jsonl'
    write_jsonl(path, ['one', 'two'])

    def train_and_change(chosen, vocab_size, say, model):
        write_jsonl(path, ['one', 'two', 'three'])
        return train_and_report(chosen, vocab_size, say, model)

    monkeypatch.setattr(prepare_module, 'train_and_report', train_and_change)
    with pytest.raises(UserError, match='the file has changed since this run started'):
        prepared(path, tmp_path / 'data')
    assert list((tmp_path / 'data').iterdir()) == []


def test_a_damaged_earlier_result_is_reported_and_ignored(tmp_path, said):
    write_jsonl(tmp_path / 'a.jsonl', ['one', 'two'])
    first = prepared(tmp_path / 'a.jsonl', tmp_path / 'data')
    (first / 'train' / 'zarr.json').unlink()
    prepared(tmp_path / 'a.jsonl', tmp_path / 'data', said, vocab_size=299)
    assert f'{first} cannot be used' in said.text
