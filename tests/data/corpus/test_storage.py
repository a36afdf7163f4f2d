"""Remote files, files that disappear or change, and bytes that are not text."""

import asyncio
import gzip
import http.server
import json
import os
import sys
import threading

import fsspec
import pytest
import zstandard

from pretrax.data.corpus import corpus as corpus_module
from pretrax.data.corpus import storage
from pretrax.data.corpus.corpus import Corpus, shards
from pretrax.data.corpus.listing import find_files
from pretrax.errors import UserError

LINES = b''.join(json.dumps({'text': f'document {n}'}).encode() + b'\n' for n in range(100))
TEXTS = [f'document {n}' for n in range(100)]


def texts(corpus, n=1):
    return [document.text for shard in shards(corpus, n) for document in shard.documents()]


@pytest.fixture
def memory():
    """A remote storage: the one that fsspec has in memory."""
    filesystem = fsspec.filesystem('memory')
    filesystem.pipe({'/far/b.jsonl': LINES, '/far/sub/c.txt.gz': gzip.compress(b'text'), '/far/d.bin': b'x'})
    filesystem.pipe({'/far/.hidden/e.txt': b'hidden', '/far/a.csv': b'text\none\n'})
    yield filesystem
    filesystem.rm('/far', recursive=True)


def test_urls_name_files_directories_and_globs(memory):
    assert [str(file.path) for file in find_files('memory://far')] == [
        'memory:///far/a.csv', 'memory:///far/b.jsonl', 'memory:///far/sub/c.txt.gz',
    ]  # fmt: skip
    assert [file.path.name for file in find_files('memory://far/*.b*')] == ['d.bin']
    assert texts(Corpus(find_files('memory://far/b.jsonl'))) == TEXTS
    assert texts(Corpus(find_files('memory://far')), 7) == ['one', *TEXTS, 'text']
    for spec in ('memory://far/nothing.txt', 'memory://far/*.tex', 'memory://none'):
        with pytest.raises(UserError, match=r'no such file|no file matches'):
            find_files(spec)


def test_a_changed_remote_file_is_refused(memory):
    corpus = Corpus(find_files('memory://far/b.jsonl'))
    memory.pipe('/far/b.jsonl', LINES)
    with pytest.raises(UserError, match='changed since this run started'):
        texts(corpus)


def test_file_urls_are_paths(tmp_path):
    (tmp_path / 'a.txt').write_text('text')
    assert [file.path for file in find_files(f'file://{tmp_path}/*.txt')] == [tmp_path / 'a.txt']
    (tmp_path / 'b 語.txt').write_text('text')
    assert [file.path for file in find_files(f'file://{tmp_path}/b%20%E8%AA%9E.txt')] == [tmp_path / 'b 語.txt']


ODD = 'a b%20#x é e\u0301 語 🦜 [1]', 'b [1-9]', 'c?', 'd*', '-e', 'f\ng'


@pytest.mark.parametrize('name', ODD)
def test_a_path_that_exists_is_not_a_pattern(tmp_path, monkeypatch, memory, name):
    """Beside it is what it would match as a pattern."""
    monkeypatch.chdir(tmp_path)
    for folder in (name, 'b 1', 'cc', 'dd'):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f'{folder}.txt').write_text('text')
        memory.pipe(f'/far/odd/{folder}.txt', b'text')
    file = f'{name}/{name}.txt'
    for spec in (file, name, f'{tmp_path}/{name}', f'{name}/*.txt', f'{tmp_path}/{name}/**/*.txt'):
        assert [str(one.path).removeprefix(f'{tmp_path}/') for one in find_files(spec)] == [file], spec
    assert [one.path.name for one in find_files(f'memory://far/odd/{name}.txt')] == [f'{name}.txt']


@pytest.fixture
def server(tmp_path):
    """A local HTTP server without range requests."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def __init__(self, *arguments):
            super().__init__(*arguments, directory=str(tmp_path))

    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Quiet) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        yield f'http://127.0.0.1:{served.server_port}'
        served.shutdown()


def test_http_works_without_range_requests(server, tmp_path):
    (tmp_path / 'a.jsonl.gz').write_bytes(gzip.compress(LINES))
    (tmp_path / 'b.jsonl').write_bytes(LINES)
    for name in ('a.jsonl.gz?download=1', 'b.jsonl'):
        corpus = Corpus(find_files(f'{server}/{name}'))
        assert corpus.files[0].kind == 'jsonl'
        assert texts(corpus) == texts(corpus, 5) == TEXTS
    with pytest.raises(UserError, match='no such file'):
        find_files(f'{server}/nothing.jsonl')


def test_a_protocol_without_its_package_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, 's3fs', None)
    with pytest.raises(UserError, match=r's3://bucket/a\.jsonl: .*\n  .*uv sync --inexact --extra cloud'):
        find_files('s3://bucket/a.jsonl')
    with pytest.raises(UserError, match='s4:// is not a protocol that fsspec knows'):
        find_files('s4://bucket/a.jsonl')


def exception(*bases):
    """As the packages of clouds raise it: only the names of the class and its bases are known."""
    classes = [Exception, *(base for base in bases if not isinstance(base, str))]
    for name in [base for base in bases if isinstance(base, str)]:
        classes.append(type(name, (classes[-1],), {}))
    return classes[-1]('from the package: Traceback')


@pytest.mark.parametrize(
    ('url', 'error', 'cause', 'fix'),
    [
        ('s3://b/a.txt', exception('BotoCoreError', 'NoCredentialsError'), 'no credentials', 'set AWS_ACCESS_KEY_ID'),
        ('s3a://b/a.txt', exception('ProfileNotFound'), 'no credentials', 'or AWS_PROFILE'),
        ('gs://b/a.txt', exception('GoogleAuthError', 'DefaultCredentialsError'), 'no credentials', 'run gcloud auth'),
        ('gcs://b/a.txt', PermissionError('x'), 'access is denied', 'GOOGLE_APPLICATION_CREDENTIALS'),
        ('s3://b/a.txt', exception('ClientError', 'NoSuchBucket'), 'there is no such bucket', 'check the name'),
        ('s3://b/a.txt', PermissionError('x'), 'access is denied', 'AWS_PROFILE'),
        ('gs://b/a.txt', exception(TimeoutError, 'FSTimeoutError'), 'no answer within 15', 'check the network'),
        ('s3://b/a.txt', exception('HTTPClientError', 'EndpointConnectionError'), 'cannot be reached', 'the network'),
        ('https://h/a.txt', exception('ClientConnectionError', 'ClientConnectorError'), 'cannot be reached', 'host'),
        ('https://h/a.txt', ConnectionRefusedError(111, 'x'), 'cannot be reached', 'copy the file'),
    ],
)
def test_an_error_of_a_bucket_names_its_cause_and_the_fix(url, error, cause, fix):
    first, second = str(storage.refusal(storage.Url(url), error)).splitlines()
    assert first.startswith(f'{url}: {cause}')
    assert fix in second


def test_a_bucket_that_does_not_answer_is_reported_in_seconds(monkeypatch):
    s3fs = pytest.importorskip('s3fs')

    async def hang(*_, **__):
        await asyncio.sleep(60)

    monkeypatch.setattr(s3fs.S3FileSystem, '_info', hang)
    monkeypatch.setattr(storage, '_FIRST_SECONDS', 0.05)
    with pytest.raises(UserError, match=r's3://silent/a\.txt: no answer within .*\n  check the network'):
        find_files('s3://silent/a.txt')


@pytest.mark.parametrize('suffix', ['', '.gz', '.zst'])
@pytest.mark.parametrize('how', ['removed', 'replaced', 'cut', 'grown'])
def test_a_file_that_disappears_or_changes_during_reading_is_refused(tmp_path, suffix, how):
    path = tmp_path / f'a.jsonl{suffix}'
    compress = {'': bytes, '.gz': gzip.compress, '.zst': zstandard.ZstdCompressor().compress}[suffix]
    whole = compress(b'\n'.join(json.dumps({'text': os.urandom(100_000).hex()}).encode() for _ in range(30)))
    path.write_bytes(whole)
    found = Corpus(find_files(str(path))).documents()
    next(found)
    if how == 'removed':
        path.unlink()
    elif how == 'replaced':
        path.unlink()
        path.write_bytes(whole[::-1])
    else:
        os.truncate(path, len(whole) - 100) if how == 'cut' else path.write_bytes(whole + whole)
    expected = 'changed since this run started|truncated|No such file|not JSON'
    with pytest.raises(UserError, match=expected) as caught:
        list(found)
    assert str(path) in str(caught.value)


def test_a_file_that_disappears_before_reading_is_refused(tmp_path):
    for name in 'ab':
        (tmp_path / f'{name}.txt').write_text(name)
    found = Corpus(find_files(str(tmp_path))).documents()
    assert next(found).text == 'a'
    (tmp_path / 'b.txt').unlink()
    with pytest.raises(UserError, match=r'b\.txt: No such file'):
        next(found)


def test_a_byte_order_mark_is_not_text(tmp_path):
    for name, content in (('a.txt', 'one\ufeff'), ('b.jsonl', '{"text": "two"}'), ('c.csv', 'text\nthree')):
        (tmp_path / name).write_bytes(('\ufeff' + content).encode())
    assert texts(Corpus(find_files(str(tmp_path)))) == ['one\ufeff', 'two', 'three']
    (tmp_path / 'd.txt').write_bytes('vier'.encode('utf-16'))
    with pytest.raises(UserError, match=r'd\.txt: not utf-8 at byte 0: ff fe(.|\n)*iconv -f utf-16'):
        texts(Corpus(find_files(str(tmp_path))))


def test_padding_and_skippable_frames_are_ignored(tmp_path):
    (tmp_path / 'a.txt.gz').write_bytes(gzip.compress(b'one ') + bytes(600) + gzip.compress(b'two') + bytes(70_000))
    skippable = b'\x50\x2a\x4d\x18\x04\x00\x00\x00abcd'
    zstd = zstandard.ZstdCompressor().compress
    (tmp_path / 'b.txt.zst').write_bytes(
        skippable + zstd(b'three ') + skippable + zstd(b'') + zstd(b'four') + skippable
    )
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    (tmp_path / 'c.txt.zst').write_bytes(stream.compress(b'five') + stream.flush())
    assert texts(Corpus(find_files(str(tmp_path)))) == ['one two', 'three four', 'five']


def test_a_large_corpus_is_identified_by_names_sizes_and_times(tmp_path, monkeypatch):
    path = tmp_path / 'a.jsonl'
    path.write_bytes(LINES)

    def fingerprint():
        corpus = Corpus(find_files(str(path)))
        return corpus.known_by, corpus.fingerprint()

    small = fingerprint()
    assert small[0] == 'content'
    os.utime(path, ns=(1, 1))
    assert fingerprint() == small, 'the content is the same'
    monkeypatch.setattr(corpus_module, 'DIGESTED', 10)
    monkeypatch.setattr(corpus_module, 'opened', None)  # fails on any read
    large = fingerprint()
    assert large[0].startswith('names, sizes and modification times')
    os.utime(path, ns=(2, 2))
    assert fingerprint() != large
    os.utime(path, ns=(1, 1))
    assert fingerprint() == large


@pytest.mark.parametrize(
    ('status', 'expected'),
    [(403, 'the server answered 403 Forbidden\n  the server may need credentials'), (404, 'no such file'),
     (410, 'the server answered 410 Gone'), (500, 'the server answered 500 Internal Server Error')],
)  # fmt: skip
def test_an_answer_of_a_web_server_is_reported_as_it_is(status, expected):
    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(status)

        def do_HEAD(self):
            self.send_error(status)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Refuses) as served:
        threading.Thread(target=served.serve_forever, daemon=True).start()
        with pytest.raises(UserError) as caught:
            find_files(f'http://127.0.0.1:{served.server_port}/a.jsonl')
        served.shutdown()
    assert f'/a.jsonl: {expected}' in str(caught.value)
