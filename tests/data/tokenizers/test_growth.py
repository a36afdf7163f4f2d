"""A tokenizer.json that makes a text much longer, or fails on it, is refused in two lines; common ones are accepted."""

import base64
import json
import os
import random
import struct
import subprocess
import sys

import pytest
from tokenizers import Tokenizer as Backend

from pretrax.data.tokenizers import text_bounds
from pretrax.data.tokenizers.text_bounds import refuse_growth
from pretrax.data.tokenizers.tokenizer import Tokenizer, is_native_error
from pretrax.data.tokenizers.tokenizer_files import bytes_tokenizer
from pretrax.errors import UserError
from tokenizer_families import FAMILIES, family


def replace(pattern: dict[str, str], content: str) -> dict[str, object]:
    return {'type': 'Replace', 'pattern': pattern, 'content': content}


def sequence(*steps: object, key: str = 'normalizers') -> dict[str, object]:
    return {'type': 'Sequence', key: list(steps)}


def bound(settings: dict[str, object]) -> float:
    """The growth that is said when any growth is refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_bounds, 'LARGEST_GROWTH', 0.0)
        with pytest.raises(UserError, match=r'a text (\S+) times as long') as refused:
            refuse_growth(settings, 'x')
    return float(str(refused.value).partition(' a text ')[2].partition(' ')[0])


def test_the_bound_holds_for_what_the_library_does():
    rng = random.Random(0)
    letters = 'abc'
    tight = 0
    for _ in range(300):
        steps = []
        for _ in range(rng.randrange(1, 5)):
            content = ''.join(rng.choices(letters, k=rng.randrange(4)))
            pattern = ''.join(rng.choices(letters, k=rng.randrange(1, 3)))
            kind = rng.choice(['String', 'String', 'Regex', 'prepend', 'lower'])
            steps.append(
                {'type': 'Prepend', 'prepend': content or 'a'} if kind == 'prepend'
                else {'type': 'Lowercase'} if kind == 'lower'
                else replace({kind: rng.choice([pattern, '[ab]', 'a*', '(?=c)']) if kind == 'Regex' else pattern},
                content)
            )  # fmt: skip
        made = sequence(*steps)
        backend = json.loads(bytes_tokenizer().content) | {'normalizer': made}
        normalizer = Backend.from_str(json.dumps(backend)).normalizer
        limit = bound({'normalizer': made})
        try:
            grown = [
                len(normalizer.normalize_str(text)) / (len(text) + 1)
                for text in ('a', 'abc', 'ab' * 9, 'cab' * 9, 'c' * 20)
            ]
        except BaseException as error:  # it panics where a replacement of nothing is changed again
            if is_native_error(error):
                continue
            raise
        assert max(grown) <= limit * 1.005, steps  # it is printed with three digits
        tight += max(grown) > limit / 2
    assert tight > 50


@pytest.mark.parametrize(
    ('settings', 'what'),
    [
        ({'normalizer': sequence(*[replace({'String': 'a'}, 'a' * 30)] * 9)}, 'normalizer'),
        ({'normalizer': sequence(*[replace({'Regex': '.'}, 'aa')] * 9)}, 'normalizer'),
        ({'normalizer': sequence(*[sequence({'type': 'NFC'}, replace({'String': 'a'}, 'aa'))] * 9)}, 'normalizer'),
        ({'normalizer': sequence(replace({'String': 'a'}, 'bbb'), *[replace({'String': c}, d * 4) for c, d in ('bc',
        'cd', 'de', 'ef')])}, 'normalizer'),
        ({'pre_tokenizer': sequence(*[{'type': 'ByteLevel'}] * 9, key='pretokenizers')}, 'normalizer'),
        ({'decoder': sequence(*[replace({'String': 'a'}, 'aaaa')] * 9, key='decoders')}, 'decoder'),
        ({'normalizer': {'type': 'Precompiled', 'precompiled_charsmap': base64.b64encode(struct.pack('<I',
        4) + bytes(4) + b'x' * 1000 + b'\0').decode()}}, 'normalizer'),
    ],
)  # fmt: skip
def test_growth_is_refused_before_a_text_is_encoded(settings, what):
    content = json.dumps(json.loads(bytes_tokenizer().content) | settings).encode()
    with pytest.raises(
        UserError, match=rf'^mine: its {what} may make a text \S+ times as long\n  expected at most 100'
    ):
        Tokenizer(content, 'mine')


def test_common_tokenizers_are_accepted():
    for name in FAMILIES:
        assert bound(family(name).settings) <= 8
    names = [replace({'String': chr(0x1F600 + n)}, f'<face {n}>') for n in range(70)]  # one after the other, not on top
    assert bound({'normalizer': sequence(*names)}) <= 9
    llama = sequence({'type': 'Prepend', 'prepend': '▁'}, replace({'String': ' '}, '▁'))
    clip = sequence({'type': 'NFC'}, replace({'Regex': r'\s+'}, ' '), {'type': 'Lowercase'})
    longest = struct.pack('<I', 4) + bytes(4) + 'صلى الله عليه وسلم'.encode() + b'\0'
    albert = sequence(
        replace({'String': '``'}, '"'), {'type': 'NFKD'}, {'type': 'StripAccents'}, {'type': 'Lowercase'},
        {'type': 'Precompiled', 'precompiled_charsmap': base64.b64encode(longest).decode()}, replace({'Regex': ' {2,}'},
        ' '),
    )  # fmt: skip
    for normalizer in (llama, clip, albert):
        assert bound({'normalizer': normalizer, 'pre_tokenizer': {'type': 'Metaspace'}}) <= 40


BACKTRACKS = {'type': 'Split', 'pattern': {'Regex': '(a+)+$'}, 'behavior': 'Isolated', 'invert': False}


@pytest.mark.slow
def test_a_panic_names_the_tokenizer_and_the_document(tmp_path):
    """In a process of its own, since the library also prints what happened."""
    settings = json.loads(bytes_tokenizer().content)
    settings['pre_tokenizer'] = sequence(BACKTRACKS, settings['pre_tokenizer'], key='pretokenizers')
    (tmp_path / 'mine.json').write_text(json.dumps(settings))
    rows = [*(f'document {n}' for n in range(5)), 'a' * 40 + '!']
    (tmp_path / 'a.jsonl').write_text(''.join(json.dumps({'text': row}) + '\n' for row in rows))
    result = subprocess.run(
        [sys.executable, '-m', 'pretrax', 'data', 'tokenize', 'a.jsonl', 'data.tokenizer=mine.json', 'data.workers=1',
        'data.validation=0',
         '--out', 'out'],
        cwd=tmp_path, capture_output=True, text=True, env=os.environ | {'RUST_BACKTRACE': '0'}, check=False,
    )  # fmt: skip
    assert result.returncode == 2
    first, second = result.stderr.splitlines()[-2:]
    assert first.startswith(f"a.jsonl:6: mine.json: cannot encode '{'a' * 40}': ")
    assert 'retry-limit' in first
    assert second == '  use another tokenizer, or other text'


@pytest.mark.parametrize('name', ['tokenizer.json', 'tokenizer_config.json'])
def test_deep_nesting_and_huge_ids_are_refused(tmp_path, name):
    from pretrax.data.tokenizers.tokenizer_files import load_tokenizer

    (tmp_path / 'tokenizer.json').write_bytes(bytes_tokenizer().content)
    (tmp_path / name).write_text('{"x": ' + '[' * 100_000)
    with pytest.raises(UserError, match=name) as refused:
        load_tokenizer(tmp_path)
    assert str(refused.value).count('\n') <= 1
    settings = json.loads(bytes_tokenizer().content)
    settings['model']['vocab']['zz'] = 2_000_000_000
    with pytest.raises(UserError, match=r'the id 2,000,000,000, of 258 tokens\n'):
        Tokenizer(json.dumps(settings).encode(), 'mine')


def test_a_panic_of_a_decoder_names_the_tokenizer():
    settings = json.loads(bytes_tokenizer().content)
    settings['model']['vocab']['a' * 40 + '!'] = 300
    settings['decoder'] = sequence(replace({'Regex': '(a+)+$'}, 'b'), key='decoders')
    tokenizer = Tokenizer(json.dumps(settings).encode(), 'mine')
    for decode in (tokenizer.decode, tokenizer.decoding().push, lambda ids: tokenizer.token_bytes(ids[0])):
        with pytest.raises(UserError, match=r'^mine: cannot decode tokens: Onig.*\n  use another tokenizer'):
            decode([300])
