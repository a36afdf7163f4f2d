"""meta.pkl of nanoGPT gives characters back without being unpickled, and our own files give back ends of documents."""

import json
import os
import pickle

import numpy as np
import pytest

from data import foreign_files as write
from pretrax.data.tokens import token_tools
from pretrax.data.tokens.flat_tokens_check import verify
from pretrax.data.tokens.token_files import open_token_files
from pretrax.errors import UserError

TEXT = 'To be, or not to be: thät is the question.\n\U0001f389 ' * 40


def shakespeare_char(directory, protocol=None) -> dict:
    """What karpathy/nanoGPT data/shakespeare_char/prepare.py does."""
    chars = sorted(set(TEXT))
    stoi = {ch: i for i, ch in enumerate(chars)}
    np.array([stoi[c] for c in TEXT], np.uint16).tofile(directory / 'train.bin')
    meta = {'vocab_size': len(chars), 'itos': dict(enumerate(chars)), 'stoi': stoi}
    (directory / 'meta.pkl').write_bytes(pickle.dumps(meta, protocol))
    return meta


@pytest.mark.parametrize('protocol', [2, 3, 4, 5])
def test_characters_come_back(tmp_path, said, protocol):
    meta = shakespeare_char(tmp_path, protocol)
    files = open_token_files(tmp_path, said.append)
    assert files.tokenizer is not None
    [encoded] = files.splits['train'].read([(0, files.splits['train'].n_tokens)])
    assert files.tokenizer.decode((encoded >> 1).tolist()) == TEXT
    assert files.tokenizer.encode(TEXT) == [meta['stoi'][c] for c in TEXT]
    assert (files.identity.vocab_size, files.identity.end_of_text) == (meta['vocab_size'], None)
    assert f'the {meta["vocab_size"]} characters of' in said.text
    with pytest.raises(UserError, match="it has no token for 'X'"):
        files.tokenizer.encode('to X')


def test_they_survive_conversion(tmp_path, said):
    shakespeare_char(tmp_path)
    token_tools.convert(open_token_files(tmp_path, said.append), tmp_path / 'flat', said.append)
    verify(tmp_path / 'flat')
    files = open_token_files(tmp_path / 'flat', said.append)
    assert files.tokenizer is not None
    assert files.tokenizer.decode(files.tokenizer.encode('the question')) == 'the question'


class Hostile:
    def __reduce__(self):
        return os.mkdir, ('here-i-was',)


@pytest.mark.parametrize(
    'meta',
    [
        Hostile(),
        {'vocab_size': 1, 'itos': {0: Hostile()}, 'stoi': {'a': 0}},
        {'vocab_size': 2, 'itos': {0: 'a', 2: 'b'}, 'stoi': {'a': 0, 'b': 2}},
        {'vocab_size': 1, 'itos': {0: 'ab'}, 'stoi': {'ab': 0}},
        {'vocab_size': 1, 'itos': {0: '\ud800'}, 'stoi': {'\ud800': 0}},
        {'vocab_size': 3, 'itos': {0: 'a'}, 'stoi': {'a': 0}},
        {'vocab_size': 1, 'itos': {0: 'a'}, 'stoi': {'a': 1}},
        {'vocab_size': 1, 'itos': ['a'], 'stoi': {'a': 0}},
        'text',
    ],
)
def test_any_other_pickle_is_neither_run_nor_used(tmp_path, said, monkeypatch, meta):
    monkeypatch.chdir(tmp_path)
    write.nanogpt(tmp_path / 'train.bin', [[0, 1, 2]] * 50)
    (tmp_path / 'meta.pkl').write_bytes(pickle.dumps(meta))
    assert open_token_files(tmp_path, said.append).tokenizer is None
    assert 'tokens: not used: ' in said.text
    assert not (tmp_path / 'here-i-was').exists()


def test_a_damaged_pickle_is_read_or_not_used(tmp_path, said):
    shakespeare_char(tmp_path)
    whole = (tmp_path / 'meta.pkl').read_bytes()
    for at in range(0, len(whole), 3):
        for damaged in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :]):
            (tmp_path / 'meta.pkl').write_bytes(damaged)
            open_token_files(tmp_path, said.append)


def test_damaged_files_of_a_conversion_are_refused(tmp_path, said):
    write.nanogpt(tmp_path / 'train.bin', [[1, 2, 0]] * 50)
    for content in ('{', '[]', json.dumps({'sha256': None, 'vocab_size': 0, 'end_of_text': 0}), '{"vocab_size": 3}'):
        (tmp_path / 'tokens.json').write_text(content)
        with pytest.raises(UserError, match=r'tokens\.json: .*\n  restore it, or convert the tokens again'):
            open_token_files(tmp_path, said.append)
