"""`pretrax data inspect|verify|convert|merge|shuffle|split`: what they print is true, and every mistake ends with exit
code 2 and at most ten lines."""

import json
import os
import re
import subprocess
import xml.etree.ElementTree as ET

import pytest

from data import foreign_files as write
from pretrax.cli import main
from pretrax.data.tokenizers.tokenizer_training import train_tokenizer
from pretrax.data.tokens import token_array
from pretrax.data.tokens.flat_tokens import TokenizerIdentity, open_split
from pretrax.data.tokens.flat_tokens_check import verify
from pretrax.data.tokens.flat_tokens_writer import create
from pretrax.storage import BucketPath
from pretrax.view.charts.text import bars_text
from token_arrays import encode_documents

TOKENIZER = train_tokenizer(['chapter one and chapter two'], 280)
OTHER = train_tokenizer(['Quite another text, 42 times.'], 280)
TEXTS = [f'chapter {n} and ' * (1 + n % 9) for n in range(50)]


class Letters:
    """A tokenizer with the same ids that joins nothing."""

    def encode(self, text: str) -> list[int]:
        return [TOKENIZER.encode(letter)[0] for letter in text]


@pytest.fixture
def run(capsys):
    """run(*arguments) -> (exit code, stdout, stderr) of `pretrax data`."""

    def ran(*arguments) -> tuple[int, str, str]:
        code: object = 0
        try:
            main(['data', *map(str, arguments)])
        except SystemExit as exit_:
            code = exit_.code or 0
        printed = capsys.readouterr()
        assert isinstance(code, int)
        return code, printed.out, printed.err

    return ran


def flat(directory, tokenizer=TOKENIZER, made_by=TOKENIZER):
    identity = TokenizerIdentity(sha256=tokenizer.sha256, vocab_size=tokenizer.vocab_size, end_of_text=0)
    with create(directory, identity, tokenizer.content, {'text': 'abc'}) as writer:
        for split, texts in (('train', TEXTS), ('validation', TEXTS[:4])):
            ids = [[*made_by.encode(text), 0] for text in texts]
            n_bytes, predicted = (
                sum(int(tokenizer.byte_lengths[token]) for document in ids for token in document[first:-1])
                for first in (0, 1)
            )
            writer.append(split, *encode_documents(ids), n_bytes=n_bytes, predicted_bytes=predicted)
    return directory


def test_inspect_shows_counts_lengths_and_text(run, tmp_path):
    path = flat(tmp_path / 'a')
    code, out, _ = run('inspect', path, '--documents', 2, '--plot', tmp_path / 'deep' / 'a.svg')
    assert code == 0
    train = open_split(path, 'train').manifest
    assert f'{train.counts.tokens:,} tokens, 50 documents' in out
    assert train.sha256['encoded_tokens'][:16] in out
    assert f'sha256 {TOKENIZER.sha256[:16]}' in out
    assert "document 1: 'chapter 1 and chapter 1 and <|endoftext|>'" in out
    bars = [int(found) for found in re.findall(r'\|#* +(\d+)$', out, re.MULTILINE)]
    assert sum(bars) == 54
    image = ET.parse(tmp_path / 'deep' / 'a.svg').getroot()
    drawn = [element.text for element in image.iter('{http://www.w3.org/2000/svg}text')]
    assert all(f'{count:,}' in drawn for count in bars)
    assert {'train', 'validation'} <= set(drawn)


def test_the_smallest_bar_can_be_seen():
    lines = bars_text(['1', '2-3', '4'], [1, 100_000, 0], width=40)
    assert [line.count('#') for line in lines] == [1, 26, 0]


def test_inspect_of_another_tool(run, tmp_path):
    path = write.megatron(tmp_path / 'a', [[[*TOKENIZER.encode(text), 0]] for text in TEXTS])
    code, out, _ = run('inspect', path)
    assert code == 0
    assert 'Megatron .bin/.idx' in out
    assert 'tokenizer: unknown' in out
    (tmp_path / 't.json').write_bytes(TOKENIZER.content)
    code, out, _ = run('inspect', path, '--tokenizer', tmp_path / 't.json')
    assert "document 0: 'chapter 0 and <|endoftext|>'" in out


def test_verify_passes_what_is_whole(run, tmp_path):
    path = flat(tmp_path / 'a')
    code, out, _ = run('verify', path)
    assert code == 0
    assert 'every checksum is right' in out
    assert 'train: 50 of 50 documents give the same tokens' in out
    code, out, _ = run('verify', write.pbin(tmp_path / 'a.pbin', [[1, 0]] * 9))
    assert (code, 'no checksums' in out, 'not tokenized again' in out) == (0, True, True)


def test_verify_refuses_what_is_damaged_or_of_another_tokenizer(run, tmp_path):
    path = flat(tmp_path / 'a')
    chunk = path / 'train' / 'encoded_tokens' / 'c' / '0'
    raw = bytearray(chunk.read_bytes())
    raw[len(raw) // 2] ^= 1
    chunk.write_bytes(raw)
    code, _, err = run('verify', path)
    assert (code, 'damaged token file' in err, str(chunk) in err) == (2, True, True)
    code, _, err = run('verify', flat(tmp_path / 'b', made_by=Letters()))
    assert code == 2
    assert 'another tokenizer made these tokens' in err
    (tmp_path / 'c').mkdir()
    code, _, err = run('verify', tmp_path / 'c')
    assert (code, 'not a token file that pretrax can read' in err) == (2, True)


def test_verify_finds_the_text_among_the_tokens(run, tmp_path):
    path, rows = flat(tmp_path / 'a'), tmp_path / 'a.jsonl'
    rows.write_text(''.join(json.dumps({'content': text}) + '\n' for text in ['not there', *TEXTS]))
    code, out, _ = run('verify', path, '--text', rows, '--field', 'content')
    assert code == 0
    assert f'50 of its first 51 documents are among the tokens; {rows}:1 is not' in out
    rows.write_text('{"text": "something else"}\n')
    code, _, err = run('verify', path, '--text', rows)
    assert (code, 'holds none of the first 1 documents' in err) == (2, True)
    code, _, err = run('verify', write.pbin(tmp_path / 'a.pbin', [[1, 0]]), '--text', rows)
    assert (code, 'name it: --tokenizer' in err) == (2, True)


def test_tools_one_after_another(run, tmp_path):
    a, b = flat(tmp_path / 'a'), tmp_path / 'b'
    steps = [
        ('merge', a, a, '--out', b),
        ('shuffle', b, '--out', tmp_path / 'c', '--seed', 3),
        ('split', tmp_path / 'c', '--out', tmp_path / 'd', '--count', 10),
        ('convert', tmp_path / 'd', '--out', tmp_path / 'e', '--to', 'nanogpt'),
        ('convert', tmp_path / 'e', '--out', tmp_path / 'f', '--end-of-text', 0, '--vocab-size', 280),
        ('verify', tmp_path / 'f'),
    ]
    for step in steps:
        code, out, err = run(*step)
        assert code == 0, err
    assert (
        'all 108 documents of the inputs are in the output' in run('merge', tmp_path / 'f', '--out', tmp_path / 'g')[1]
    )
    counts = verify(tmp_path / 'f')
    assert (counts['validation'].documents, counts['train'].documents) == (10, 98)
    assert open_split(tmp_path / 'f', 'train').fingerprint == open_split(tmp_path / 'd', 'train').fingerprint
    assert out.count('no tokenizer is known') == 2
    code, out, _ = run('inspect', tmp_path / 'd')
    assert f'made of: {tmp_path / "c"}' in out


@pytest.mark.parametrize(
    ('arguments', 'expected'),
    [
        (('inspect', '{tmp}/x'), 'no such file or directory'),
        (('inspect', '{a}', '--plot', 'a.png'), 'ends in .svg'),
        (('inspect', '{a}', '--tokenizer', '{tmp}/x.json'), 'no such tokenizer.json'),
        (('inspect', '{a}/train'), 'use the directory of all splits'),
        (('verify', '{bin}', '--vocab-size', '5'), 'does not exist in a vocabulary of 5'),
        (('verify', '{a}', '--end-of-text', '5'), 'flat-tokens store document boundaries'),
        (('convert', '{bin}', '--out', '{a}'), 'already exists'),
        (('convert', '{bin}', '--out', '{tmp}/x', '--to', 'arrow'), 'expected flat-tokens or nanogpt'),
        (('convert', '{bin}', '--out', '{bin}/x'), 'cannot be created'),
        (('convert', '{text}', '--out', '{tmp}/x'), 'data.text'),
        (('merge', '{a}', '{bin}', '--out', '{tmp}/x'), 'convert it first'),
        (('merge', '{a}', '{other}', '--out', '{tmp}/x'), 'made by another tokenizer'),
        (('shuffle', '{bin}', '--out', '{tmp}/x'), 'convert it first'),
        (('shuffle', '{a}', '--out', '{tmp}/x', '--seed', '-1'), '--seed'),
        (('split', '{a}', '--out', '{tmp}/x'), 'either --fraction or --count'),
        (('split', '{a}', '--out', '{tmp}/x', '--fraction', '0.5', '--count', '3'), 'either --fraction or --count'),
        (('split', '{a}', '--out', '{tmp}/x', '--count', '54'), '54 documents, so 54 cannot be held out'),
        (('split', '{a}', '--out', '{tmp}/x', '--fraction', '0'), 'leaves validation empty'),
        (('split', '{a}'), '--out'),
    ],
)
def test_mistakes_are_told(run, tmp_path, arguments, expected):
    places = {
        'tmp': tmp_path,
        'a': flat(tmp_path / 'a'),
        'other': flat(tmp_path / 'other', OTHER, OTHER),
        'bin': write.nanogpt(tmp_path / 'a.bin', [[1, 2, 50256], [3, 50256]]),
        'text': tmp_path / 'a.jsonl',
    }
    places['text'].write_text('{}')
    before = sorted(tmp_path.iterdir())
    code, _, err = run(*(argument.format(**places) for argument in arguments))
    assert code == 2
    assert expected in err
    assert len(err.splitlines()) <= 10
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.slow
def test_tools_work_in_buckets(run, tmp_path, s3, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    near = flat(tmp_path / 'near')
    code, _, err = run('convert', near, '--out', f'{s3.url}/a')
    assert code == 0, err
    assert verify(BucketPath(f'{s3.url}/a')) == verify(near)
    assert 'chapter 0 and' in run('inspect', f'{s3.url}/a')[1]
    assert run('split', f'{s3.url}/a', '--count', 5, '--out', tmp_path / 'b')[0] == 0
    assert verify(tmp_path / 'b')['validation'].documents == 5
    for command, expected in (
        (('convert', near, '--out', f'{s3.url}/a'), 'already exists, with tokens'),
        (('convert', near, '--to', 'nanogpt', '--out', f'{s3.url}/e'), 'a nanoGPT .bin is written to a disk'),
        (('convert', near, '--out', 's4://bucket/a'), 's4:// is not supported here'),
        (('merge', near, '--out', 'https://host/a'), 'https:// is not supported here'),
        (('shuffle', near, '--out', 's3:/bucket/a'), 'a URL has two slashes'),
        (('split', near, '--count', 5, '--out', 'ftp://x/a'), 'ftp:// is not supported here'),
        (('inspect', 'nosuch://a'), 'nosuch:// is not supported here'),
        (('inspect', f'{s3.url}/nothing'), 'not a flat-tokens directory'),
    ):
        code, _, err = run(*command)
        assert (code, expected in err) == (2, True), err
    assert not [path for path in tmp_path.iterdir() if ':' in path.name]
    monkeypatch.setattr(token_array, 'PATIENCE', 0)
    s3.fault(match='encoded_tokens/c', times=float('inf'), status=503)
    code, _, err = run('verify', f'{s3.url}/a')
    assert code == 75, err
    assert re.match(rf'{s3.url}/a/written-\w+/train/encoded_tokens/c/0: cannot be read', err), err


def test_a_full_disk_is_named(run, tmp_path):
    """TensorStore, NumPy and the writes of Python report it in three ways."""
    flat(tmp_path / 'tokens')
    disk = tmp_path / 'disk'
    disk.mkdir()
    mount = ['mount', '-t', 'tmpfs', '-o', 'size=32k', 'tmpfs', disk]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip('only root can mount a file system')
    try:
        with (disk / 'filler').open('wb', buffering=0) as filler, pytest.raises(OSError, match='No space left'):
            while True:
                filler.write(bytes(1 << 12))
        for verb in (['split', '--fraction', '0.5'], ['shuffle'], ['convert', '--to', 'nanogpt']):
            code, _, said = run(verb[0], tmp_path / 'tokens', *verb[1:], '--out', disk / 'out')
            assert (code, said.strip()) == (2, f'{disk}/out: cannot write the tokens: No space left on device')
        assert os.listdir(disk) == ['filler']
    finally:
        subprocess.run(['umount', '-l', disk], check=True)
