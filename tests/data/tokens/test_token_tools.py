"""convert, merge, split and shuffle keep every document, token and loss mask, and leave no partial output."""

import itertools
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from data import foreign_files as write
from pretrax.data.tokenizers.tokenizer import Tokenizer
from pretrax.data.tokenizers.tokenizer_training import train_tokenizer
from pretrax.data.tokens import flat_tokens_check, token_copy, token_tools
from pretrax.data.tokens.flat_tokens import TokenizerIdentity, open_split, splits
from pretrax.data.tokens.flat_tokens_writer import create
from pretrax.data.tokens.token_copy import Documents
from pretrax.data.tokens.token_files import open_token_files
from pretrax.errors import UserError
from token_arrays import encode_documents

TOKENIZER = train_tokenizer(['the text of a few small documents, one after another'], 290)
IDENTITY = TokenizerIdentity(sha256=TOKENIZER.sha256, vocab_size=TOKENIZER.vocab_size, end_of_text=0)


def make(directory: Path, texts: dict[str, list[str]], masked: bool = False) -> Path:
    """flat-tokens of texts; if masked, only tokens with an even id count."""
    with create(directory, IDENTITY, TOKENIZER.content, {'made': 'here'}) as writer:
        for split, of in texts.items():
            for batch in itertools.batched(of, 3):
                ids = [[*TOKENIZER.encode(text), 0] for text in batch]
                masks = [[token % 2 == 0 for token in document] for document in ids] if masked else None
                counted = [
                    sum(int(TOKENIZER.byte_lengths[token]) for token in document[1:-1] if not masked or token % 2 == 0)
                    for document in ids
                ]
                n_bytes = sum(len(text.encode()) for text in batch)
                writer.append(split, *encode_documents(ids, masks), n_bytes=n_bytes, predicted_bytes=sum(counted))
    return directory


def contents(directory: Path) -> dict[str, list[tuple[tuple[int, ...], tuple[bool, ...]]]]:
    """The (ids, mask) of every document of every split, after `verify`."""
    flat_tokens_check.verify(directory)
    found = {}
    for name in splits(directory):
        store = open_split(directory, name)
        starts = store.read_starts(0, store.n_documents + 1).tolist()
        ranges = list(itertools.pairwise(starts))
        ids = [tuple((part >> 1).tolist()) for part in store.read(ranges)]
        found[name] = list(zip(ids, [tuple(part.tolist()) for part in store.read_mask(ranges)], strict=True))
    return found


def counts(directory: Path, split: str):
    return open_split(directory, split).manifest.counts


def texts(n: int, first: int = 0) -> list[str]:
    return [f'document {number} ' + 'word ' * (number % 7) for number in range(first, first + n)]


def silent(_: str) -> None:
    pass


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(token_copy, 'AT_ONCE', 40)
    monkeypatch.setattr(token_copy, '_STARTS_AT_ONCE', 5)
    monkeypatch.setattr(token_tools, 'BUCKET', 150)


@pytest.mark.parametrize('masked', [False, True])
@pytest.mark.usefixtures('small')
def test_shuffle_keeps_every_document_and_its_mask(tmp_path, masked):
    source = make(tmp_path / 'a', {'train': texts(60), 'validation': texts(5)}, masked)
    for seed in (1, 2):
        token_tools.shuffle(source, tmp_path / f'b{seed}', silent, seed=seed)
    token_tools.shuffle(source, tmp_path / 'again', silent, seed=1)
    before, one, two = contents(source), contents(tmp_path / 'b1'), contents(tmp_path / 'b2')
    assert contents(tmp_path / 'again') == one
    assert len({str(of['train']) for of in (before, one, two)}) == 3
    assert all(Counter(of[name]) == Counter(before[name]) for of in (one, two) for name in before)
    assert counts(tmp_path / 'b1', 'train') == counts(source, 'train')
    made_of = open_split(tmp_path / 'b1', 'train').manifest.source
    assert (made_of['tool'], made_of['seed']) == ('shuffle', 1)
    assert made_of['inputs'][0]['documents'] == 60
    assert sorted(path.name for path in tmp_path.iterdir()) == ['a', 'again', 'b1', 'b2']


@pytest.mark.parametrize('bucket', [1 << 20, 5])
def test_a_shuffle_is_uniform_over_all_orders(tmp_path, monkeypatch, bucket):
    monkeypatch.setattr(token_tools, 'BUCKET', bucket)
    store = open_split(make(tmp_path / 'a', {'train': ['a', 'b', 'c', 'd']}), 'train')
    random = np.random.default_rng(0)
    seen = Counter()
    for n in range(480):
        parts = token_tools._shuffled(store, tmp_path / f'x{n}', random, silent)
        seen[tuple(tuple(ids.tolist()) for part in parts for ids in part.ids())] += 1
    assert len(seen) == 24
    assert sum((n - 20) ** 2 / 20 for n in seen.values()) < 49.7  # chi-square, 23 degrees of freedom, p = 0.001


@pytest.mark.usefixtures('small')
def test_merge_concatenates_each_split_in_the_given_order(tmp_path):
    a = make(tmp_path / 'a', {'train': texts(20), 'validation': texts(3)})
    b = make(tmp_path / 'b', {'train': texts(7, 100)}, masked=True)
    token_tools.merge([a, b], tmp_path / 'ab', silent)
    of_a, of_b, both = contents(a), contents(b), contents(tmp_path / 'ab')
    assert both == {'train': of_a['train'] + of_b['train'], 'validation': of_a['validation']}
    merged = counts(tmp_path / 'ab', 'train')
    for what in ('documents', 'tokens', 'targets', 'bytes', 'predicted_bytes'):
        assert getattr(merged, what) == getattr(counts(a, 'train'), what) + getattr(counts(b, 'train'), what)
    assert (tmp_path / 'ab' / 'tokenizer.json').read_bytes() == TOKENIZER.content


def test_merge_refuses_another_tokenizer(tmp_path):
    a = make(tmp_path / 'a', {'train': texts(3)})
    with create(tmp_path / 'b', IDENTITY.model_copy(update={'sha256': None}), None, {}) as writer:
        writer.append('train', *encode_documents([[1, 0]]), n_bytes=None, predicted_bytes=None)
    with pytest.raises(UserError, match='made by another tokenizer'):
        token_tools.merge([a, tmp_path / 'b'], tmp_path / 'c', silent)
    assert not (tmp_path / 'c').exists()


@pytest.mark.usefixtures('small')
def test_split_by_fraction_depends_only_on_the_document(tmp_path):
    some = texts(200)
    source = make(tmp_path / 'a', {'train': some + some[:50]}, masked=True)
    token_tools.split(source, tmp_path / 'b', silent, fraction=0.2, count=None)
    before, after = contents(source), contents(tmp_path / 'b')
    assert Counter(before['train']) == Counter(after['train'] + after['validation'])
    assert not set(after['train']) & set(after['validation']), 'copies are in the same split'
    assert 25 < len(after['validation']) < 80
    reverse = make(tmp_path / 'c', {'validation': some[::-1][:100], 'train': some[::-1][100:]}, masked=True)
    said = []
    token_tools.split(reverse, tmp_path / 'd', said.append, fraction=0.2, count=None)
    assert set(contents(tmp_path / 'd')['validation']) == set(after['validation'])
    assert 'divided again' in ' '.join(said)
    token_tools.split(source, tmp_path / 'e', silent, fraction=0.2, count=None, seed=1)
    assert set(contents(tmp_path / 'e')['validation']) != set(after['validation'])
    parts = [counts(tmp_path / 'b', name) for name in ('train', 'validation')]
    whole = counts(source, 'train')
    for what in ('documents', 'tokens', 'targets', 'bytes', 'predicted_bytes'):
        assert sum(getattr(part, what) for part in parts) == getattr(whole, what), what


@pytest.mark.usefixtures('small')
def test_split_by_count_holds_out_that_many(tmp_path):
    source = make(tmp_path / 'a', {'train': texts(50)})
    token_tools.split(source, tmp_path / 'b', silent, fraction=None, count=7)
    after = contents(tmp_path / 'b')
    assert len(after['validation']) == 7
    assert Counter(after['train'] + after['validation']) == Counter(contents(source)['train'])
    token_tools.split(source, tmp_path / 'c', silent, fraction=None, count=8)
    assert set(contents(tmp_path / 'c')['validation']) > set(after['validation'])
    for options in (
        {'fraction': None, 'count': 50},
        {'fraction': 1e-9, 'count': None},
        {'fraction': 1.0, 'count': None},
    ):
        with pytest.raises(UserError, match=r'--count'):
            token_tools.split(source, tmp_path / 'd', silent, **options)
    assert not (tmp_path / 'd').exists()


FOREIGN = {
    'nanogpt': lambda path, docs: write.nanogpt(path / 'train.bin', docs),
    'pbin': lambda path, docs: write.pbin(path / 'a.pbin', docs),
    'megatron': lambda path, docs: write.megatron(path / 'a', [[doc] for doc in docs]),
    'seqax': lambda path, docs: write.seqax(path / 'a.zarr', {'train': docs}),
}


@pytest.mark.parametrize('name', FOREIGN)
@pytest.mark.usefixtures('small')
def test_convert_from_every_format(tmp_path, name):
    ids = [[*TOKENIZER.encode(text), 0] for text in texts(30)]
    path = FOREIGN[name](tmp_path, ids)
    files = open_token_files(path, silent, tokenizer=TOKENIZER)
    token_tools.convert(files, tmp_path / 'flat', silent)
    assert [document for document, _ in contents(tmp_path / 'flat')['train']] == [tuple(document) for document in ids]
    made = open_split(tmp_path / 'flat', 'train')
    assert made.manifest.tokenizer == IDENTITY
    assert made.fingerprint == files.splits['train'].fingerprint, 'a run can resume with the converted file'
    assert made.manifest.counts == counts(make(tmp_path / 'same', {'train': texts(30)}), 'train')
    token_tools.convert(
        open_token_files(path, silent, end_of_text=0 if name == 'nanogpt' else None), tmp_path / 'bare', silent
    )
    assert contents(tmp_path / 'bare') == contents(tmp_path / 'flat')
    assert (made.manifest.source['tool'], made.manifest.source['inputs'][0]['tokens']) == (
        'convert',
        sum(map(len, ids)),
    )
    bare = open_split(tmp_path / 'bare', 'train').manifest
    assert (bare.tokenizer.sha256, bare.counts.bytes) == (None, None)


def test_conversion_to_nanogpt_and_back_is_exact(tmp_path):
    source = make(tmp_path / 'a', {'train': texts(20), 'validation': texts(4)})
    token_tools.convert_to_nanogpt(open_token_files(source, silent), tmp_path / 'b', silent)
    ids = [token for document, _ in contents(source)['train'] for token in document]
    assert np.fromfile(tmp_path / 'b' / 'train.bin', np.uint16).tolist() == ids
    token_tools.convert(open_token_files(tmp_path / 'b', silent, tokenizer=TOKENIZER), tmp_path / 'c', silent)
    assert contents(tmp_path / 'c') == contents(source)
    assert counts(tmp_path / 'c', 'validation') == counts(source, 'validation')
    masked = make(tmp_path / 'd', {'train': texts(2)}, masked=True)
    with pytest.raises(UserError, match='has a loss mask'):
        token_tools.convert_to_nanogpt(open_token_files(masked, silent), tmp_path / 'e', silent)
    path = write.pbin(tmp_path / 'a.pbin', [[1, 70000]], 4)
    with pytest.raises(UserError, match=r'uint16, up to 65,535'):
        token_tools.convert_to_nanogpt(open_token_files(path, silent), tmp_path / 'e', silent)
    assert not (tmp_path / 'e').exists()


def test_a_conversion_to_nanogpt_keeps_the_ends_of_documents_without_being_told(tmp_path):
    source = make(tmp_path / 'a', {'train': texts(20), 'validation': texts(4)})
    token_tools.convert_to_nanogpt(open_token_files(source, silent), tmp_path / 'b', silent)
    token_tools.convert(open_token_files(tmp_path / 'b', silent), tmp_path / 'c', silent)
    assert contents(tmp_path / 'c') == contents(source)
    assert open_token_files(tmp_path / 'b', silent).identity == open_token_files(source, silent).identity


def test_documents_without_an_end_are_converted_to_nanogpt_only_with_one(tmp_path):
    path = write.seqax(tmp_path / 'a.zarr', {'train': [[5, 6], [7], [8, 9]]})
    files = open_token_files(path, silent)
    with pytest.raises(UserError, match=r'no token ends its documents.*\n.*--add-end-of-text ID'):
        token_tools.convert_to_nanogpt(files, tmp_path / 'b', silent)
    assert not (tmp_path / 'b').exists()
    token_tools.convert_to_nanogpt(files, tmp_path / 'b', silent, added_end=10)
    assert np.fromfile(tmp_path / 'b' / 'train.bin', np.uint16).tolist() == [5, 6, 10, 7, 10, 8, 9, 10]
    again = open_token_files(tmp_path / 'b', silent)
    assert (again.splits['train'].n_documents, again.identity.vocab_size) == (3, 11)
    with pytest.raises(UserError, match='remove --add-end-of-text 3'):
        token_tools.convert_to_nanogpt(again, tmp_path / 'c', silent, added_end=3)


def test_bytes_are_unknown_if_tokens_depend_on_their_neighbors(tmp_path):
    """This tokenizer inserts a space between two tokens."""
    backend = tokenizers.Tokenizer(models.WordLevel({'<|endoftext|>': 0, 'a': 1, 'b': 2}, unk_token='a'))
    backend.decoder = decoders.WordPiece()
    odd = Tokenizer(backend.to_str().encode(), 'odd')
    assert odd.decode([1, 2]) == 'a b'
    path = write.pbin(tmp_path / 'a.pbin', [[1, 2, 0]] * 9)
    token_tools.convert(open_token_files(path, silent, tokenizer=odd), tmp_path / 'b', silent)
    found = counts(tmp_path / 'b', 'train')
    assert (found.bytes, found.predicted_bytes) == (None, None)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=6), min_size=1, max_size=9), st.data())
def test_documents_are_selected_and_reordered_with_their_masks(docs, data):
    encoded = np.concatenate([[2 * ids[0] + 1, *(2 * token for token in ids[1:])] for ids in docs]).astype(np.uint32)
    every = Documents(encoded, encoded % 3 == 0, np.array([len(ids) for ids in docs]))
    order = data.draw(st.permutations(range(len(docs))))
    reordered = every.reordered(np.array(order))
    assert [ids.tolist() for ids in reordered.ids()] == [docs[number] for number in order]
    assert reordered.mask is not None
    assert np.array_equal(reordered.mask, reordered.encoded % 3 == 0)
    which = np.array(data.draw(st.lists(st.booleans(), min_size=len(docs), max_size=len(docs))))
    chosen = every.chosen(which)
    assert [ids.tolist() for ids in chosen.ids()] == [ids for ids, kept in zip(docs, which, strict=True) if kept]


def test_existing_directories_are_not_overwritten(tmp_path):
    source = make(tmp_path / 'a', {'train': texts(3)})
    (tmp_path / 'b').mkdir()
    for tool in (
        lambda out: token_tools.merge([source], out, silent),
        lambda out: token_tools.shuffle(source, out, silent, seed=0),
        lambda out: token_tools.split(source, out, silent, fraction=0.5, count=None),
        lambda out: token_tools.convert(open_token_files(source, silent), out, silent),
        lambda out: token_tools.convert_to_nanogpt(open_token_files(source, silent), out, silent),
    ):
        for out in (tmp_path / 'b', source):
            with pytest.raises(UserError, match='already exists'):
                tool(out)
    path = write.pbin(tmp_path / 'a.pbin', [[1, 0]])
    with pytest.raises(UserError, match='convert it first: pretrax data convert'):
        token_tools.shuffle(path, tmp_path / 'c', silent, seed=0)


def test_a_lost_document_is_detected(tmp_path, monkeypatch):
    source = make(tmp_path / 'a', {'train': texts(20)})
    monkeypatch.setattr(
        token_tools, 'read_documents', lambda store, say=None: iter(list(token_copy.read_documents(store))[:-1])
    )
    monkeypatch.setattr(token_copy, 'AT_ONCE', 40)
    with pytest.raises(UserError, match='not written: 20 documents in the inputs'):
        token_tools.merge([source], tmp_path / 'b', silent)
    assert not (tmp_path / 'b').exists()


def test_a_killed_shuffle_leaves_no_output(tmp_path):
    source = make(tmp_path / 'a', {'train': texts(60)})
    program = f"""
import os, signal
from pathlib import Path
from pretrax.data.tokens import token_copy, token_tools
token_copy.AT_ONCE, token_tools.BUCKET = 40, 150
fromfile = token_tools.np.fromfile
def killed(path, *arguments):
    if path.name.startswith('2.'):
        os.kill(os.getpid(), signal.SIGKILL)
    return fromfile(path, *arguments)
token_tools.np.fromfile = killed
token_tools.shuffle(Path({str(source)!r}), Path({str(tmp_path / 'b')!r}), print, seed=0)
"""
    done = subprocess.run([sys.executable, '-c', program])
    assert done.returncode == -signal.SIGKILL
    assert not (tmp_path / 'b').exists()
    assert len(list(tmp_path.iterdir())) == 3, 'the source, a partial directory and buckets'
    token_tools.shuffle(source, tmp_path / 'b', silent, seed=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['a', 'b']
