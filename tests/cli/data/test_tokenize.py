"""`pretrax data tokenize` and `pretrax data train-tokenizer`:
from a configuration or text to files, and what comes next.
"""

import json
import shlex
import sys

import pytest
import tokenizers

from pretrax.cli import main
from pretrax.config import load
from pretrax.data.tokens.flat_tokens import open_split
from pretrax.data.tokens.flat_tokens_check import verify
from pretrax.storage import BucketPath


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A directory with text and a configuration, which is the current one."""
    monkeypatch.chdir(tmp_path)
    rows = [{'text': f'Chapter {n}. It was a day like {n * n} others; ünd so weiter.'} for n in range(200)]
    (tmp_path / 'novel.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    (tmp_path / 'mine.yaml').write_text(
        'name: mine\nsteps: 2\nmodel: {family: llama, n_layers: 1, d_model: 16, attention: {n_heads: 2}}\n'
        'batch: {tokens: 64, sequence_length: 16}\noptimizer: {name: adamw, learning_rate: 1e-3}\n'
        'data: {text: novel.jsonl, vocab_size: 300, validation: 0.1}\n'
    )
    return tmp_path


def run(capsys, command: str) -> tuple[int, str, str]:
    code = 0
    try:
        main(shlex.split(command)[1:])
    except SystemExit as ended:
        code = int(ended.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_tokens_of_a_configuration_are_those_that_training_finds(here, capsys):
    code, out, _ = run(capsys, 'pretrax data tokenize mine.yaml name=first')
    assert code == 0
    [place] = (here / 'runs/first/data').iterdir()
    assert verify(place)['train'].documents + verify(place)['validation'].documents == 200
    assert out.splitlines()[-1] == 'next: pretrax train mine.yaml name=first'
    _, out, _ = run(capsys, 'pretrax data tokenize mine.yaml name=first')
    assert f'tokens: reused from {place.relative_to(here)}' in out


def test_a_directory_of_ones_own_and_the_next_command(here, capsys):
    code, out, _ = run(capsys, 'pretrax data tokenize mine.yaml --out tokens')
    assert code == 0
    [kept] = [path.name for path in here.iterdir() if path.is_dir()]
    assert kept == 'tokens'
    _, _, train, *arguments = shlex.split(out.splitlines()[-1])
    config = load(arguments[0], arguments[1:])
    assert (train, config.data.options.tokens) == ('train', 'tokens')
    assert 'reused from tokens' in run(capsys, 'pretrax data tokenize mine.yaml --out tokens')[1]
    code, _, err = run(capsys, 'pretrax data tokenize mine.yaml data.vocab_size=299 --out tokens')
    assert (code, err.splitlines()[0]) == (2, 'tokens: exists, and has another tokenizer')


@pytest.mark.parametrize('model', ['bpe', 'unigram'])
def test_a_tokenizer_is_trained_and_used(here, capsys, model):
    for source in ('novel.jsonl', 'mine.yaml'):
        code, out, err = run(
            capsys, f'pretrax data train-tokenizer {source} --out new/{source}.json --vocab-size 290 --model {model}'
        )
        assert code == 0, err
        assert f'wrote new/{source}.json' in out
        vocabulary = tokenizers.Tokenizer.from_file(f'new/{source}.json').get_vocab()
        assert 257 < len(vocabulary) <= 290
    command = 'pretrax data tokenize mine.yaml data.tokenizer=new/mine.yaml.json data.vocab_size=null --out tokens'
    code, out, err = run(capsys, command)
    assert code == 0, err
    assert f'encodes with {"fastokens" if model == "bpe" else "tokenizers: slower"}' in out
    assert open_split(here / 'tokens', 'train').vocab_size == len(vocabulary)


@pytest.mark.parametrize(
    ('command', 'expected'),
    [
        ('tokenize mine.yaml data.tokenizer=bytes data.vocab_size=300', '300 was given, but bytes has 257'),
        ('tokenize mine.yaml data.tokenizer=byte', 'expected a tokenizer.json, a directory with one'),
        ('tokenize mine.yaml data.text=nowhere.jsonl', 'nowhere.jsonl: no such file'),
        ('tokenize mine.yaml data.text=null data.tokens=x data.validation=null', 'x is already tokenized'),
        ('train-tokenizer novel.jsonl --out novel.jsonl', 'novel.jsonl: this file already exists'),
        ('train-tokenizer novel.jsonl --out a.json --model wordpiece', 'expected bpe or unigram'),
        ('train-tokenizer novel.jsonl data.field=x --out a.json', 'data.field=x: changes a configuration'),
        ('train-tokenizer empty.txt --out a.json', 'empty.txt: the file is empty'),
        ('train-tokenizer blank.jsonl --out a.json', 'no document has any text'),
    ],
)
def test_mistakes_are_told_in_words_and_leave_nothing(here, capsys, command, expected):
    (here / 'empty.txt').touch()
    (here / 'blank.jsonl').write_text('\n\n')
    before = {path.name for path in here.iterdir()}
    code, _, err = run(capsys, f'pretrax data {command}')
    assert code == 2
    assert expected in err
    assert {path.name for path in here.iterdir()} - before <= {'runs'}


def test_neither_verb_imports_jax(here, capsys):
    loaded = {'jax' in sys.modules}
    run(capsys, 'pretrax data tokenize mine.yaml')
    assert ('jax' in sys.modules) in loaded


def test_text_needs_no_training_configuration(here, capsys):
    code, out, err = run(capsys, 'pretrax data tokenize novel.jsonl data.tokenizer=bytes data.validation=0.1')
    assert code == 0, err
    assert out.splitlines()[-1] == 'next: pretrax train CONFIG data.tokens=novel-tokens'
    code, out, err = run(capsys, 'pretrax data tokenize mine.yaml data.tokenizer=bytes data.vocab_size=null --out b')
    assert code == 0, err
    first, second = (open_split(here / name, 'train') for name in ('novel-tokens', 'b'))
    assert first.fingerprint == second.fingerprint
    assert verify(here / 'novel-tokens')['validation'].documents > 0


@pytest.mark.parametrize(
    ('command', 'expected'),
    [
        ('tokenize novel.jsonl steps=3', 'steps=3: changes a training configuration, but novel.jsonl is text'),
        ('tokenize novel.jsonl data.tokenizr=bytes', 'data.tokenizr'),
        ("tokenize '*.jsonl'", '*.jsonl: expected a directory for the tokens: --out DIR'),
        ('tokenize nowhere.jsonl', 'nowhere.jsonl: no such file'),
        ('tokenize novel.jsonl data.vocab_size=65', 'expected at least 257'),
    ],
)
def test_mistakes_with_text_alone(here, capsys, command, expected):
    code, _, err = run(capsys, f'pretrax data {command}')
    assert code == 2
    assert expected in err
    assert not list(here.glob('*-tokens'))


def test_tokens_go_to_a_bucket(here, capsys, bucket, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(here / 'cache'))
    code, out, err = run(capsys, f'pretrax data tokenize mine.yaml --out {bucket.url}/tokens')
    assert code == 0, err
    _, _, train, *arguments = shlex.split(out.splitlines()[-1])
    config = load(arguments[0], arguments[1:])
    assert (train, config.data.options.tokens) == ('train', f'{bucket.url}/tokens')
    assert verify(BucketPath(f'{bucket.url}/tokens'))['validation'].documents > 0
    assert 'reused from' in run(capsys, f'pretrax data tokenize mine.yaml --out {bucket.url}/tokens')[1]
    code, _, err = run(capsys, 'pretrax data tokenize mine.yaml --out s4://bucket/tokens')
    assert (code, 's4:// is not supported here' in err) == (2, True)
    code, out, err = run(capsys, f'pretrax data train-tokenizer novel.jsonl --vocab-size 290 --out {bucket.url}/t.json')
    assert code == 0, err
    assert tokenizers.Tokenizer.from_str(bucket.content('t.json').decode()).get_vocab_size() == 290
    assert not [path for path in here.iterdir() if ':' in path.name]
