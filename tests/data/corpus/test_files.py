"""Each kind of path finds its files, and every problem with them has a clear message."""

import gzip
import json
import os

import pytest
import zstandard

from pretrax.data.corpus.corpus import Corpus
from pretrax.data.corpus.listing import find_files
from pretrax.data.corpus.selection import RowCounts, Selection
from pretrax.errors import UserError


def documents(path, field: str = 'text', empty: int = 0) -> list[str]:
    counts = RowCounts()
    found = [document.text for document in Corpus(find_files(str(path)), Selection(field=field)).documents(counts)]
    assert counts.left_out == ({'empty': empty} if empty else {})
    assert counts.read == counts.kept + empty == len(found) + empty
    return found


def refusal(path, field: str = 'text') -> str:
    with pytest.raises(UserError) as caught:
        documents(path, field)
    assert len(str(caught.value).splitlines()) <= 10
    return str(caught.value)


def names(spec) -> list[str]:
    return [file.path.name for file in find_files(str(spec))]


@pytest.fixture
def shelf(tmp_path):
    """A directory with text files, other files and hidden files."""
    for name in ('b.txt', 'a.md', 'sub/c.py', 'sub/d.txt.gz', 'e.jsonl.zst', 'f.csv', 'g.json', '.h.txt', '.git/i.txt'):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text('x')
    return tmp_path


def test_a_directory_is_searched_for_text(shelf):
    assert names(shelf) == ['a.md', 'b.txt', 'e.jsonl.zst', 'f.csv', 'c.py', 'd.txt.gz']


def test_a_glob_takes_every_file_it_matches(shelf):
    assert names(shelf / '*.txt') == ['b.txt']
    assert names(shelf / '**' / '*.*') == ['a.md', 'b.txt', 'e.jsonl.zst', 'f.csv', 'g.json', 'c.py', 'd.txt.gz']


def test_a_named_file_may_have_any_name(shelf):
    (shelf / 'odd[1].name').write_text('text')
    assert documents(shelf / 'odd[1].name') == ['text']


def test_text_is_unchanged(tmp_path):
    content = 'a\r\nb\n\n  c\x00\ufeff é\n\u2028漢'
    (tmp_path / 'a.txt').write_bytes(content.encode())
    assert documents(tmp_path / 'a.txt') == [content]


@pytest.mark.parametrize('suffix', ['', '.gz', '.zst'])
def test_jsonl_has_one_document_per_line(tmp_path, suffix):
    texts = ['one\ntwo', '', 'é漢\U0001f600', ' ', 'x' * 3_000_000, 'last']
    raw = '\n'.join(json.dumps({'text': text, 'id': n}) for n, text in enumerate(texts)).encode()
    pack = {'': bytes, '.gz': gzip.compress, '.zst': zstandard.ZstdCompressor().compress}[suffix]
    path = tmp_path / f'a.jsonl{suffix}'
    path.write_bytes(pack(raw))
    kept = [text for text in texts if text]
    assert documents(path, empty=1) == kept
    path.write_bytes(pack(raw + b'\r\n\r\n'))
    assert documents(path, empty=2) == kept, 'a blank line counts as an empty document'


@pytest.mark.parametrize(('suffix', 'pack'), [('.gz', gzip.compress), ('.zst', zstandard.ZstdCompressor().compress)])
def test_several_compressed_frames_are_one_text(tmp_path, suffix, pack):
    path = tmp_path / f'a.txt{suffix}'
    path.write_bytes(pack(b'one ') + pack(b'two'))
    assert documents(path) == ['one two']


@pytest.mark.parametrize(('suffix', 'pack'), [('.gz', gzip.compress), ('.zst', zstandard.ZstdCompressor().compress)])
def test_a_compressed_file_truncated_anywhere_is_refused(tmp_path, suffix, pack):
    path = tmp_path / f'a.jsonl{suffix}'
    whole = pack(b''.join(b'{"text": "%d"}\n' % n for n in range(2000)))
    for size in (3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert refusal(path).startswith(f'{path}: the compressed data is truncated')


@pytest.mark.parametrize('suffix', ['.gz', '.zst'])
def test_a_file_that_is_not_compressed_is_refused(tmp_path, suffix):
    path = tmp_path / f'a.txt{suffix}'
    path.write_text('not compressed at all')
    assert f'{path}: not readable as {suffix}' in refusal(path)


def test_a_damaged_gzip_is_refused(tmp_path):
    path = tmp_path / 'a.txt.gz'
    whole = bytearray(gzip.compress(os.urandom(5000)))
    whole[2000] ^= 1
    path.write_bytes(whole)
    assert f'{path}: not readable as .gz' in refusal(path)


def test_a_broken_link_and_a_pipe_are_not_called_missing(tmp_path):
    (tmp_path / 'link.txt').symlink_to('nowhere')
    os.mkfifo(tmp_path / 'pipe.txt')
    for name in ('link.txt', 'pipe.txt'):
        with pytest.raises(UserError, match=f'{name}: neither a file nor a directory'):
            find_files(str(tmp_path / name))


def test_a_missing_path_suggests_the_nearest(shelf):
    assert f'did you mean {shelf / "b.txt"}?' in refusal(shelf / 'bb.txt')
    assert f'did you mean {shelf / "sub"}?' in refusal(shelf / 'subb' / 'c.py')
    assert 'has .git/, .h.txt, a.md' in refusal(shelf / 'zzzzzzzzz')


def test_an_empty_match_lists_the_files(shelf):
    assert 'no file matches' in refusal(shelf / '*.tex')
    assert 'a.md' in refusal(shelf / '*.tex')
    (shelf / 'empty').mkdir()
    assert 'it has nothing' in refusal(shelf / 'empty')


def test_an_empty_file_is_refused_if_named_and_skipped_if_found(tmp_path):
    (tmp_path / 'a.txt').touch()
    assert 'the file is empty' in refusal(tmp_path / 'a.txt')
    (tmp_path / 'b.txt').write_text('b')
    assert documents(tmp_path, empty=1) == ['b']


def test_the_error_names_the_byte_of_invalid_utf8(tmp_path):
    (tmp_path / 'a.txt').write_bytes(b'good \xff\xfe bad')
    assert f'{tmp_path / "a.txt"}: not utf-8 at byte 5: ff fe 20 62' in refusal(tmp_path / 'a.txt')
    (tmp_path / 'a.jsonl').write_bytes(b'{"text": "a"}\n{"text": "\xff"}\n')
    assert f'{tmp_path / "a.jsonl"}:2: not utf-8 at byte 10' in refusal(tmp_path / 'a.jsonl')


@pytest.mark.parametrize(
    ('line', 'expected'),
    [
        ('{"text": "b"', ':2: not JSON'),
        ('["b"]', ':2: a JSON list'),
        (
            '{"content": "b", "id": 1}',
            ":2: no field 'text'\n  fields found: 'content', 'id'\n  to read 'content': data.field",
        ),
        ('{"texts": 7}', 'data.field=texts'),
        ('{}', 'fields found: none'),
        ('{"text": 7}', ":2: field 'text' is 7\n  expected a string"),
        ('{"text": null}', ":2: field 'text' is null"),
        ('{"text": "\\ud800"}', 'an unpaired surrogate at character 0'),
    ],
)
def test_the_error_names_the_bad_line(tmp_path, line, expected):
    path = tmp_path / 'a.jsonl'
    path.write_text(f'{{"text": "a"}}\n{line}\n{{"text": "c"}}\n')
    message = refusal(path)
    assert message.startswith(str(path))
    assert expected in message


def test_the_text_may_be_in_another_field(tmp_path):
    (tmp_path / 'a.jsonl').write_text('{"content": "b", "text": 1}\n')
    assert documents(tmp_path / 'a.jsonl', 'content') == ['b']


def test_the_fingerprint_depends_on_content_kind_order_and_field_but_not_names(tmp_path):
    def fingerprint(spec, field='text'):
        return Corpus(find_files(str(tmp_path / spec)), Selection(field=field)).fingerprint()

    (tmp_path / 'a.txt').write_text('1')
    (tmp_path / 'b.txt').write_text('22')
    original = fingerprint('*.txt')
    (tmp_path / 'b.txt').rename(tmp_path / 'c.txt')
    assert fingerprint('*.txt') == original
    (tmp_path / 'a.txt').rename(tmp_path / 'd.txt')
    assert fingerprint('*.txt') != original, 'the order of the documents changed'
    (tmp_path / 'e.jsonl').write_text('1')
    assert fingerprint('e.jsonl') != fingerprint('d.txt')
    assert fingerprint('e.jsonl') != fingerprint('e.jsonl', 'content')
    assert fingerprint('d.txt') == fingerprint('d.txt', 'content')
