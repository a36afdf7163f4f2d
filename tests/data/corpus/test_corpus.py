"""The shards of a corpus have all its documents once and in order, for any number of shards."""

import json
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretrax.data.corpus.corpus import Corpus, shards
from pretrax.data.corpus.listing import find_files
from pretrax.data.corpus.selection import RowCounts, Selection
from pretrax.errors import UserError

TEXTS = st.text(st.characters(exclude_categories=['Cs']), max_size=40)


@settings(max_examples=60)
@given(
    files=st.lists(st.lists(TEXTS, max_size=20), min_size=1, max_size=4),
    n=st.integers(1, 30),
    deduplicate=st.booleans(),
    ends=st.sampled_from([b'\n', b'\r\n']),
)
def test_shards_together_are_the_corpus(tmp_path_factory, files, n, deduplicate, ends):
    root = tmp_path_factory.mktemp('shards')
    for number, texts in enumerate(files):
        lines = [json.dumps({'text': text}, ensure_ascii=False).encode() for text in texts]
        (root / f'{number}.jsonl').write_bytes(ends.join(lines) + ends * (number % 2))
    everything = [text for texts in files for text in texts]
    expected = [text for text in everything if text]
    if deduplicate:
        expected = list(dict.fromkeys(expected))
    corpus = Corpus(find_files(str(root)), Selection(deduplicate=deduplicate))
    counts = [RowCounts() for _ in range(n)]
    parts = [pickle.loads(pickle.dumps(shard)) for shard in shards(corpus, n)]
    assert len(parts) <= n
    found = [d.text for shard, of in zip(parts, counts, strict=False) for d in shard.documents(of)]
    assert found == expected == [d.text for d in corpus.documents()]
    total = sum(counts, RowCounts())
    assert total.kept == len(expected)
    blank = sum(1 for number in range(len(files)) if number % 2 and not files[number])
    assert total.read == len(everything) + blank == total.kept + total.left_out.total()
    assert sum(shard.size for shard in parts) == sum(max(1, file.size) for file in corpus.files)


@pytest.mark.parametrize(
    ('name', 'first', 'what'),
    [
        ('a.pdf', b'%PDF-1.7\n%\xe2\xe3\xcf\xd3\n', 'a PDF document, not text'),
        ('a.png', b'\x89PNG\r\n\x1a\n', 'an image .PNG., not text'),
        ('a.jpg', b'\xff\xd8\xff\xe0\x00\x10JFIF', 'an image .JPEG., not text'),
        ('a.docx', b'PK\x03\x04\x14\x00\xff', 'a ZIP archive'),
        ('a.txt', b'\x28\xb5\x2f\xfd\x04\x00\xff', 'compressed by zstd'),
        ('b.txt', b'\x1f\x8b\x08\x00', 'compressed by gzip'),
    ],
)
def test_the_message_names_a_file_that_is_not_text(name, first, what, tmp_path):
    (tmp_path / name).write_bytes(first * 9)
    with pytest.raises(UserError, match=f'{name}.*: {what}'):
        list(Corpus(find_files(str(tmp_path / name))).documents(RowCounts()))
