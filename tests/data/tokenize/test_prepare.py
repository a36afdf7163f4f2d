"""Tokenization keeps every document, reuses only tokens of the same recipe, and reports every problem."""

import json
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pretrax.data.corpus.corpus import Corpus, shards
from pretrax.data.corpus.listing import find_files
from pretrax.data.tokenize import encode_shard, sample
from pretrax.data.tokenize import prepare as prepare_module
from pretrax.data.tokenize.engines import InProcess
from pretrax.data.tokenize.prepare import Work, prepare
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokenizers.tokenizer_files import bytes_tokenizer
from pretrax.data.tokenizers.tokenizer_training import train_and_report, train_tokenizer
from pretrax.data.tokens.flat_tokens import TokenizerIdentity, open_split, splits
from pretrax.data.tokens.flat_tokens_check import verify
from pretrax.data.tokens.flat_tokens_writer import create
from pretrax.data.tokens.token_files import is_flat_tokens
from pretrax.errors import UserError
from pretrax.storage import BucketPath, StorageSettings, use_settings
from token_arrays import encode_documents


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
    expected = sum(sum(tokenizer.byte_lengths[token] for token in tokenizer.encode(text)[1:]) for text in texts)
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


def _keys(server) -> list[str]:
    """The keys of all objects in the bucket of a server."""
    return server.keys()


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    return tmp_path / 'cache'


def test_tokens_are_written_to_a_bucket_and_reused(tmp_path, own_cache, bucket, said):
    write_jsonl(tmp_path / 'a.jsonl', [f'text number {number}' for number in range(300)])
    near = prepared(tmp_path / 'a.jsonl', tmp_path / 'data', validation=0.1)
    far = prepared(tmp_path / 'a.jsonl', BucketPath(f'{bucket.url}/run/data'), said, validation=0.1)
    assert str(far) == f'{bucket.url}/run/data/{near.name}'
    assert verify(far) == verify(near)
    written = {'/'.join(key.split('/')[4:]): bucket.content(key) for key in _keys(bucket)}
    assert written.pop('')  # the index
    assert written == {str(file.relative_to(near)): file.read_bytes() for file in near.rglob('*') if file.is_file()}
    assert prepared(tmp_path / 'a.jsonl', BucketPath(f'{bucket.url}/run/data'), said, validation=0.1) == far
    assert f'tokens: reused from {far}' in said.text
    assert not list(own_cache.rglob('*.pieces'))


def test_what_was_interrupted_is_removed_and_a_copy_on_a_disk_is_read(tmp_path, own_cache, s3, said):
    write_jsonl(tmp_path / 'a.jsonl', [f'text number {number}' for number in range(300)])
    out = BucketPath(f'{s3.url}/tokens')

    def tokenize():
        return prepare(
            Corpus(find_files(str(tmp_path / 'a.jsonl'))), tmp_path, said.append, tokenizer=None, vocab_size=300,
            validation=0.1, out=out,
        )  # fmt: skip

    left = 'tokens/written-0123456789abcdef/train/encoded_tokens/c/7'
    s3.put(left, b'left over')
    with pytest.raises(UserError, match='its tokens are not complete'):
        splits(out)
    assert verify(tokenize())['train'].documents > 0
    everything = _keys(s3)
    assert left not in everything
    s3.put(left, b'of a process that goes on')
    tokenize()
    assert _keys(s3) == everything
    for key in everything:
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(s3.content(key))
    assert verify(tmp_path / 'tokens') == verify(out)
    assert is_flat_tokens(tmp_path / 'tokens')


def test_other_objects_are_never_removed(tmp_path, own_cache, s3, said):
    write_jsonl(tmp_path / 'a.jsonl', ['text'] * 9)
    s3.put('tokens/precious', b'1')
    with pytest.raises(UserError, match=rf'{s3.url}/tokens: already exists, with other objects: precious'):
        prepare(
            Corpus(find_files(str(tmp_path / 'a.jsonl'))), tmp_path, said.append, tokenizer=None, vocab_size=300,
            validation=0.0, out=BucketPath(f'{s3.url}/tokens'),
        )  # fmt: skip
    assert _keys(s3) == ['tokens/precious']


PROGRAM = """
import sys
from pathlib import Path
from pretrax.data.corpus.corpus import Corpus
from pretrax.data.corpus.listing import find_files
from pretrax.data.tokenize import prepare
from pretrax.data.tokens import flat_tokens_writer
from pretrax.storage import BucketPath, StorageSettings, use_settings
flat_tokens_writer.SHARD_LENGTH['encoded_tokens'] = 1 << 14
prepare.SHARD_BYTES = 1 << 15
prepare.prepare(Corpus(find_files(sys.argv[1])), Path(), print, tokenizer=None, vocab_size=300, validation=0.1,
                out=BucketPath(sys.argv[2]))
"""


def test_a_process_killed_while_it_writes_to_a_bucket_leaves_nothing_that_looks_whole(tmp_path, own_cache, s3):
    write_jsonl(tmp_path / 'a.jsonl', [f'text number {number} ' + 'word ' * 30 for number in range(400)])
    command = [sys.executable, '-c', PROGRAM, str(tmp_path / 'a.jsonl'), f'{s3.url}/tokens']
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        s3.fault(method='PUT', match='train/encoded_tokens/c/0', act=lambda *_: process.kill())
        process.wait()
    assert process.returncode == -signal.SIGKILL, process.stderr
    left = _keys(s3)
    assert left
    assert 'tokens/index.json' not in left
    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert 'were finished by an earlier run' in again.stdout
    assert verify(BucketPath(f'{s3.url}/tokens'))['train'].documents > 300
    assert not set(left) & set(_keys(s3))


def test_the_second_of_two_writers_on_a_disk_is_told_unless_both_write_the_same(tmp_path, monkeypatch):
    """The second process has another number, and so another partial directory."""
    identity = TokenizerIdentity(sha256=None, vocab_size=9, end_of_text=None)

    def write(document, pid):
        with monkeypatch.context() as patched:
            patched.setattr('os.getpid', lambda: pid)
            with create(tmp_path / 'tokens', identity, None, {'document': document}) as writer:
                writer.append('train', *encode_documents([document]), n_bytes=None, predicted_bytes=None)
                if pid == 1:
                    write([3], 2)
                    patched.setattr('os.getpid', lambda: pid)

    write([3], 1)
    shutil.rmtree(tmp_path / 'tokens')
    with pytest.raises(UserError, match='another process has written it in the meantime'):
        write([1, 2], 1)
    assert open_split(tmp_path / 'tokens', 'train').document(0).tolist() == [3]
    assert [path.name for path in tmp_path.iterdir()] == ['tokens']


@pytest.mark.parametrize('match', ['index.json', 'train/zarr.json'])
@pytest.mark.parametrize('same', [True, False])
def test_two_machines_that_tokenize_to_one_place(tmp_path, own_cache, s3, said, monkeypatch, same, match):
    """The first machine waits while the second tokenizes; with the same text, both have what they want."""
    for name in ('first', 'second'):
        text = 'a text' if same else name
        write_jsonl(tmp_path / f'{name}.jsonl', [f'{text} of number {number}' for number in range(20)])
    near = prepared(tmp_path / 'second.jsonl', tmp_path / 'data')

    def tokenize(name):
        corpus, out = Corpus(find_files(str(tmp_path / f'{name}.jsonl'))), BucketPath(f'{s3.url}/tokens')
        return prepare(corpus, tmp_path, said.append, tokenizer=None, vocab_size=300, validation=0.0, out=out)

    def meanwhile(*_):
        monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'other machine'))
        tokenize('second')

    s3.fault(method='PUT', match=match, act=meanwhile)
    if same:
        tokenize('first')
        assert said[-1].startswith(('prepared:', 'tokens: reused from'))
    else:
        with pytest.raises(
            UserError, match=r'exists, and has another text|another process has written it in the meantime'
        ):
            tokenize('first')
    written = {'/'.join(key.split('/')[2:]): s3.content(key) for key in _keys(s3)}
    del written['']  # the index
    assert written == {str(file.relative_to(near)): file.read_bytes() for file in near.rglob('*') if file.is_file()}


def test_faults_while_writing_are_retried_and_a_bucket_that_stays_away_is_named(
    tmp_path, own_cache, bucket, monkeypatch
):
    identity = TokenizerIdentity(sha256=None, vocab_size=9, end_of_text=None)
    monkeypatch.setenv('PRETRAX_STORAGE_RETRY_SECONDS', '1')
    bucket.fault(match='encoded_tokens', times=1, status=500)
    bucket.fault(match='seq_starts', times=1, lose_answer=True)
    with create(BucketPath(f'{bucket.url}/tokens'), identity, None, {}) as writer:
        writer.append('train', *encode_documents([[1, 2]]), n_bytes=None, predicted_bytes=None)
    verify(BucketPath(f'{bucket.url}/tokens'))
    with (
        pytest.raises(UserError, match=rf'{bucket.url}/other: cannot write the tokens: The service does not answer'),
        create(BucketPath(f'{bucket.url}/other'), identity, None, {}) as writer,
    ):
        writer.append('train', *encode_documents([[1, 2]]), n_bytes=None, predicted_bytes=None)
        bucket.fault(times=float('inf'), status=503)


def test_text_in_a_bucket_is_tokenized_with_the_settings_of_the_configuration(
    tmp_path, own_cache, s3, said, monkeypatch
):
    pytest.importorskip('s3fs')
    monkeypatch.delenv('AWS_ENDPOINT_URL')
    monkeypatch.delenv('AWS_REGION', raising=False)
    use_settings(StorageSettings(endpoint=s3.environment['AWS_ENDPOINT_URL']))
    write_jsonl(tmp_path / 'a.jsonl', [f'text number {number}' for number in range(100)])
    s3.put('text/a.jsonl', (tmp_path / 'a.jsonl').read_bytes())
    near, far = (
        prepare(
            Corpus(find_files(text)), tmp_path / name, said.append, tokenizer=bytes_tokenizer(), vocab_size=257,
            validation=0.0, work=Work('local', 2),
        )
        for name, text in (('near', str(tmp_path / '*.jsonl')), ('far', f'{s3.url}/text/*.jsonl'))
    )  # fmt: skip
    assert verify(near) == verify(far)
