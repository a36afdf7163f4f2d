"""Tables, and a property of all formats: the written documents are read in order, in any number of shards."""

import csv
import gzip
import io
import json
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pretrax.data.corpus import content as content_module
from pretrax.data.corpus import tables
from pretrax.data.corpus import tables as tables_module
from pretrax.data.corpus.corpus import Corpus, shards
from pretrax.data.corpus.listing import find_files
from pretrax.data.corpus.selection import RowCounts, Selection
from pretrax.errors import UserError

TEXT = st.text(st.characters(exclude_categories=['Cs']), max_size=30)
COMPRESS = {'': bytes, '.gz': gzip.compress, '.zst': zstandard.ZstdCompressor().compress}


@pytest.fixture(autouse=True, scope='module')
def small_batches():
    """Small files are read in several batches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, '_ROWS_AT_ONCE', 2)
        yield


def as_csv(texts, delimiter):
    out = io.StringIO(newline='')
    writer = csv.writer(out, delimiter=delimiter)
    writer.writerows([['id', 'text'], *([n, text] for n, text in enumerate(texts))])
    return out.getvalue().encode()


def as_parquet(texts, codec, group):
    out = io.BytesIO()
    table = pa.table({'id': range(len(texts)), 'text': pa.array(texts, pa.string())})
    pq.write_table(table, out, compression=codec, row_group_size=group)
    return out.getvalue()


def write_files(root, kind, texts, compression, codec, group):
    """Writes the texts to two files, or each to its own .txt file."""
    if kind == 'txt':
        for number, text in enumerate(texts):
            (root / f'{number:03}.txt{compression}').write_bytes(COMPRESS[compression](text.encode()))
        return
    for number, half in enumerate((texts[::2], texts[1::2])):
        if kind == 'parquet':
            (root / f'{number}.parquet').write_bytes(as_parquet(half, codec, group))
            continue
        raw = (
            b''.join(json.dumps({'text': text}, ensure_ascii=bool(number)).encode() + b'\n' for text in half)
            if kind == 'jsonl'
            else as_csv(half, ',' if kind == 'csv' else '\t')
        )
        (root / f'{number}.{kind}{compression}').write_bytes(COMPRESS[compression](raw))


@settings(max_examples=80)
@given(
    kind=st.sampled_from(['txt', 'jsonl', 'csv', 'tsv', 'parquet']),
    texts=st.lists(TEXT.filter(lambda text: not text.startswith('\ufeff')), min_size=1, max_size=12),
    compression=st.sampled_from(sorted(COMPRESS)),
    codec=st.sampled_from(['none', 'snappy', 'gzip', 'zstd']),
    group=st.integers(1, 5),
    n=st.integers(1, 9),
)
@example(kind='csv', texts=['a\r\nb', '"', ',', '\n', '\0', ' ', '\r'], compression='', codec='none', group=1, n=3)
def test_documents_are_read_exactly_and_in_order_in_any_shards(
    tmp_path_factory, kind, texts, compression, codec, group, n
):
    root = tmp_path_factory.mktemp(kind)
    write_files(root, kind, texts, compression, codec, group)
    written = texts if kind == 'txt' else [*texts[::2], *texts[1::2]]
    corpus = Corpus(find_files(str(root)))
    counts = RowCounts()
    whole = list(corpus.documents(counts))
    assert [document.text for document in whole] == [text for text in written if text]
    assert (counts.read, counts.left_out['empty']) == (len(texts), texts.count(''))
    parts = pickle.loads(pickle.dumps(shards(corpus, n)))
    assert [document.text for part in parts for document in part.documents()] == [d.text for d in whole]
    for start in (1, 3):
        rows = [text for text in written[start:] if text]
        assert [document.text for document in corpus.documents(start=start)] == rows


def test_origins_are_line_and_row_numbers(tmp_path):
    (tmp_path / 'a.csv').write_text('text,n\none,1\n"two\ntwo",2\nthree,3\n')
    (tmp_path / 'b.parquet').write_bytes(as_parquet(['one', 'two', 'three'], 'none', 2))
    (tmp_path / 'c.jsonl').write_text('{"text": "one"}\n\n{"text": "three"}\n')
    (tmp_path / 'd.txt').write_text('one')
    found = {document.origin.removeprefix(f'{tmp_path}/'): document.text for document in documents(tmp_path)}
    assert found == {
        'a.csv:2': 'one', 'a.csv:3': 'two\ntwo', 'a.csv:5': 'three',
        'b.parquet:1': 'one', 'b.parquet:2': 'two', 'b.parquet:3': 'three',
        'c.jsonl:1': 'one', 'c.jsonl:3': 'three', 'd.txt': 'one',
    }  # fmt: skip


def documents(path, n=1, counts=None, **selection):
    corpus = Corpus(find_files(str(path)), Selection(**selection))
    return [document for shard in shards(corpus, n) for document in shard.documents(counts)]


def refusal(path, **selection):
    with pytest.raises(UserError) as caught:
        documents(path, **selection)
    assert len(str(caught.value).splitlines()) <= 10
    return str(caught.value)


@pytest.mark.parametrize(
    ('content', 'expected'),
    [
        (b'', None),
        (b'\n\n', 'a.csv:1: no header'),
        (b'text,text\na,b\n', "a.csv:1: the header names 'text' twice"),
        (b'content,n\na,1\n', "a.csv:2: no field 'text'\n  fields found: 'content', 'n'\n  to read 'content'"),
        (b'text,n\na,1\nb\n', 'a.csv:3: 1 fields\n  the header has 2: text, n'),
        (b'text,n\na,1\nb,2,3\n', 'a.csv:3: 3 fields'),
        (b'text\na\n"b\nc\n', 'a.csv:3: a quote in this row is never closed'),
        (b'text\na\n"b" c\n', 'a.csv:3: '),
        (b'text\na\n\xff\xfe\n', "a.csv:3: field 'text' is not utf-8"),
        (b'text\ra\rb', 'a.csv:1: '),
    ],
)
def test_the_error_names_the_bad_line_of_a_csv(tmp_path, content, expected):
    (tmp_path / 'a.csv').write_bytes(content)
    if expected is None:
        assert documents(tmp_path) == []
    else:
        assert expected in refusal(tmp_path)


def test_byte_order_marks_and_blank_lines_of_a_csv_are_ignored(tmp_path):
    (tmp_path / 'a.csv').write_bytes('\ufefftext\r\none\r\n\r\n"two"\r\nünd'.encode())
    counts = RowCounts()
    assert [document.text for document in documents(tmp_path, counts=counts)] == ['one', 'two', 'ünd']
    assert counts.left_out == {'empty': 1}


def test_csv_fields_may_be_longer_than_the_limit_of_the_csv_library(tmp_path):
    (tmp_path / 'a.csv').write_bytes(as_csv(['x' * 300_000, 'y'], ','))
    assert [len(document.text) for document in documents(tmp_path)] == [300_000, 1]


def test_a_bad_row_of_a_table_can_be_skipped(tmp_path):
    (tmp_path / 'a.csv').write_bytes(b'text,n\none,1\ntwo\n\xff,3\n"four" x,4\nfive,5\n')
    counts = RowCounts()
    found = documents(tmp_path, counts=counts, on_error='skip')
    assert [document.text for document in found] == ['one', 'five']
    assert counts.left_out == {'bad': 3}
    assert [error.splitlines()[0].removeprefix(f'{tmp_path}/')[:9] for error in counts.errors] == [
        'a.csv:3: ', 'a.csv:4: ', 'a.csv:5: ',
    ]  # fmt: skip


def test_a_damaged_parquet_is_refused(tmp_path):
    path = tmp_path / 'a.parquet'
    whole = as_parquet(['one', 'two' * 100], 'none', 1)
    for size in (3, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert f'{path}: not readable as .parquet' in refusal(path)
    path.write_bytes(whole)
    assert "a.parquet:1: no field 'content'\n  fields found: 'id', 'text'" in refusal(path, field='content')
    assert "a.parquet:1: field 'id' is 0\n  expected a string" in refusal(path, field='id')
    (tmp_path / 'b.parquet.gz').write_bytes(gzip.compress(whole))
    assert 'has its own compression' in refusal(tmp_path / 'b.parquet.gz')


def test_the_error_names_the_parquet_row_that_is_not_text(tmp_path):
    raw = pa.Array.from_buffers(pa.string(), 4, pa.array([b'one', b'\xff', b'three', None], pa.binary()).buffers())
    pq.write_table(pa.table({'text': raw}), tmp_path / 'a.parquet')
    assert 'a.parquet:2: not utf-8' in refusal(tmp_path)
    counts = RowCounts()
    found = documents(tmp_path, counts=counts, on_error='skip')
    assert [document.origin.rpartition('/')[2] for document in found] == ['a.parquet:1', 'a.parquet:3']
    assert [error.splitlines()[0].rpartition('/')[2] for error in counts.errors] == [
        'a.parquet:2: not utf-8 at byte 0 (invalid start byte)', "a.parquet:4: field 'text' is null",
    ]  # fmt: skip


def test_only_the_needed_columns_are_read(tmp_path, monkeypatch):
    table = {'text': ['one'], 'meta': [{'lang': 'en', 'n': 1}], 'huge': ['x' * 1000]}
    pq.write_table(pa.table(table), tmp_path / 'a.parquet')
    read = []
    iter_batches = pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile, 'iter_batches', lambda *a, columns, **k: read.append(columns) or iter_batches(*a,
        columns=columns, **k)
    )  # fmt: skip
    assert [document.text for document in documents(tmp_path, field='meta.lang')] == ['en']
    assert read == [['meta']]


def test_an_endless_line_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(content_module, 'LONGEST_LINE', 1000)
    monkeypatch.setattr(tables_module, 'LONGEST_ROW', 1000)
    monkeypatch.setattr(content_module, '_BLOCK', 100)
    for name, content, expected in (
        ('a.jsonl', b'[' * 2000, 'a.jsonl: a line is longer than'),
        ('b.csv', b'text\n"' + b'x\n' * 2000, 'b.csv:2: a row of more than 0 MiB: a quote is never closed?'),
    ):
        (tmp_path / name).write_bytes(content)
        assert expected in refusal(tmp_path / name)
    (tmp_path / 'c.jsonl').write_text(json.dumps({'text': 'x' * 900}) + '\n')
    assert len(documents(tmp_path / 'c.jsonl')[0].text) == 900
