"""Tokens behind a URL read like those of a directory, from memory:// and from a local HTTP server."""

import functools
import http.server
import threading
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts

from pretrax.data.tokenizers.tokenizer_training import train_tokenizer
from pretrax.data.tokens.flat_tokens import TokenizerIdentity, open_split, verify
from pretrax.data.tokens.flat_tokens_writer import create
from pretrax.data.tokens.remote_path import CONTEXT, RemotePath, token_path
from pretrax.errors import UserError


@pytest.fixture
def directory(tmp_path) -> Path:
    tokenizer = train_tokenizer(['a b c'], 300)
    identity = TokenizerIdentity(sha256=tokenizer.sha256, vocab_size=tokenizer.vocab_size, end_of_text=0)
    with create(tmp_path / 'tokens', identity, tokenizer.content, {}) as writer:
        for split in ('train', 'validation'):
            writer.append(split, [[n % 200 + 1] * (n % 90) + [0] for n in range(2000)], n_bytes=1, predicted_bytes=1)
    return tmp_path / 'tokens'


@pytest.fixture
def memory(directory) -> RemotePath:
    store = ts.KvStore.open('memory://tokens/', context=CONTEXT).result()
    for path in directory.rglob('*'):
        if path.is_file():
            store.write(str(path.relative_to(directory)), path.read_bytes()).result()
    return RemotePath('memory://tokens/')


class Server(http.server.SimpleHTTPRequestHandler):
    """Serves a directory with range requests, which TensorStore needs and the base class does not support."""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        path = Path(self.translate_path(self.path))
        if not path.is_file():
            self.send_error(404)
            return
        content, asked = path.read_bytes(), self.headers.get('Range')
        total = len(content)
        if asked:
            first, _, last = asked.removeprefix('bytes=').partition('-')
            start = int(first) if first else total - int(last)
            stop = int(last) + 1 if first and last else total
            content = content[start:stop]
            self.send_response(206)
            self.send_header('Content-Range', f'bytes {start}-{start + len(content) - 1}/{total}')
        else:
            self.send_response(200)
        self.send_header('Content-Length', str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def over_http(directory):
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), functools.partial(Server, directory=str(directory)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield RemotePath(f'http://127.0.0.1:{server.server_port}/')
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize('where', ['memory', 'over_http'])
def test_remote_tokens_equal_local_tokens(directory, where, request):
    remote = request.getfixturevalue(where)
    near, far = open_split(directory, 'train'), open_split(remote, 'train')
    assert far.manifest == near.manifest
    ranges = [(0, 5), (40_000, 60_000), (near.n_tokens - 3, near.n_tokens)]
    for ours, theirs in zip(far.read(ranges), near.read(ranges), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert verify(remote) == verify(directory)


def test_damaged_remote_files_are_refused(memory):
    store = ts.KvStore.open('memory://tokens/', context=CONTEXT).result()
    whole = bytes(store.read('train/encoded_tokens/c/0').result().value)
    store.write('train/encoded_tokens/c/0', whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]).result()
    with pytest.raises(UserError, match='memory://tokens/train/encoded_tokens'):
        verify(memory)


def test_a_missing_or_unreachable_url_is_reported(memory):
    with pytest.raises(UserError, match='memory://elsewhere: not a flat-tokens directory'):
        open_split(RemotePath('memory://elsewhere'), 'train')
    with pytest.raises(UserError, match=r'http://127\.0\.0\.1:9/zarr\.json: '):
        RemotePath('http://127.0.0.1:9/zarr.json').read_bytes()
    with pytest.raises(UserError, match='nosuch://x'):
        open_split(RemotePath('nosuch://x'), 'train')
    assert token_path('file:///x/y') == Path('/x/y')


def test_a_url_opens_as_a_source(memory, open_source, directory):
    near, far = open_source(tokens=str(directory)), open_source(tokens=str(memory))
    np.testing.assert_array_equal(far.batch(3, slice(0, 4), 4).tokens, near.batch(3, slice(0, 4), 4).tokens)
    assert far.tokenizer.end_of_text == 0
