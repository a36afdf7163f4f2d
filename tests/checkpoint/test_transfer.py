"""Pieces of memory checkpoints over TCP between two directories, and clients that are not ours."""

import json
import os
import shutil
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash

from pretrax.checkpoint import peers, transfer
from pretrax.checkpoint.files import File
from pretrax.checkpoint.manifest import MANIFEST, Array, Manifest, manifest_content, parse_manifest
from pretrax.checkpoint.memory_pieces import piece_facts
from pretrax.checkpoint.state_files import HostFiles
from pretrax.checkpoint.transfer import Peer, PieceServer, TransferError
from pretrax.system.rendezvous import Line

SECRET = 'of this attempt'
NAME = '3/8'
GET = {'piece': NAME, 'file': 'state/w/0.0', 'start': 0, 'size': 1}


def write_piece(directory, name=NAME, many=3, rows=3 << 20):
    """Writes a piece with a file of several blocks, some small ones, and an empty one."""
    place = directory / name
    random = np.random.default_rng(7)
    files = [('state/w/0.0', random.integers(0, 256, rows, np.uint8)), ('state/none/0', np.zeros(0, np.uint8))]
    files += [(f'state/small/{i}', np.full(40, i % 256, np.uint8)) for i in range(many)]

    def write(path, content):
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_bytes(content)

    written = HostFiles(files).write(write)
    step = int(name.partition('/')[2])
    (place / MANIFEST).write_bytes(manifest_content(step, {}, {'w': Array(shape=(rows,), dtype='uint8')}, written))
    return place


def content(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob('*') if path.is_file()}


@pytest.fixture
def there(tmp_path):
    """The memory of another host."""
    directory = tmp_path / 'there'
    directory.mkdir()
    return directory


@pytest.fixture
def server(there):
    started = PieceServer(there, SECRET, '127.0.0.1', 1 << 30)
    yield started
    started.close()


def connect(server, secret=SECRET):
    return Peer(f'127.0.0.1:{server.port}', secret)


def send(server, directory, name=NAME):
    with connect(server) as peer:
        peer.send_piece(directory, name)


def read(server, file, start=0, size=1 << 60):
    with connect(server) as peer:
        return peer.read(NAME, file, start, size)


@pytest.mark.parametrize('many', [3, 300])  # 300 small files are packed
def test_a_piece_arrives_whole_and_is_read_again(tmp_path, there, server, many):
    place = write_piece(tmp_path / 'here', many=many, rows=3 * transfer.BLOCK + 5)
    send(server, tmp_path / 'here')
    assert [path.name for path in there.rglob('*') if path.is_dir()].count('8') == 1
    assert content(there / NAME) == content(place)
    file, expected = 'state/w/0.0', (place / 'state/w/0.0').read_bytes()
    with connect(server) as peer:
        assert peer.read(NAME, file) == expected
        assert peer.read(NAME, file, 7, 993) == expected[7:1000]
        assert peer.read(NAME, file, len(expected) - 3, 6) == expected[-3:]
        assert peer.read(NAME, file, len(expected) + 9, 1) == b''
        with pytest.raises(TransferError, match='No such file'):
            peer.read('3/9', file)
        assert peer.read(NAME, file, 0, 5) == expected[:5], 'the connection is still of use'


def test_files_of_a_piece_share_connections_and_an_ended_one_is_replaced(tmp_path, there, server, monkeypatch):
    opened, idle = [], []

    def opening(*arguments):
        opened.append(Peer(*arguments))
        return opened[-1]

    place = write_piece(there)
    content = manifest_content(
        8, piece_facts('line', 3), {}, parse_manifest((place / MANIFEST).read_bytes(), place).files
    )
    (place / MANIFEST).write_bytes(content)
    monkeypatch.setattr(peers, 'Peer', opening)
    piece = peers._PeerPiece(f'127.0.0.1:{server.port}', SECRET, NAME, 'there', idle)
    expected = (place / 'state/w/0.0').read_bytes()
    for _ in range(3):
        assert piece.open('state/w/0.0').read() == expected
    assert len(opened) == len(idle) == 1
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: piece.open('state/w/0.0').read() == expected, range(40))) == {True}
    assert len(opened) == len(idle) <= 4
    for connection in idle:
        connection._line.connection.shutdown(socket.SHUT_RDWR)
    assert piece.open('state/w/0.0').read() == expected
    with pytest.raises(OSError, match='No such file'):
        piece._read('state/none/1')
    for connection in opened:
        connection.close()


def test_a_second_copy_replaces_the_first(tmp_path, there, server):
    write_piece(tmp_path / 'one')
    second = write_piece(tmp_path / 'two', rows=5)
    send(server, tmp_path / 'one')
    send(server, tmp_path / 'two')
    assert content(there) == {f'{NAME}/{name}': value for name, value in content(second).items()}


@pytest.mark.parametrize('many', [3, 300])
def test_a_damaged_file_does_not_arrive(tmp_path, there, server, many):
    place = write_piece(tmp_path / 'here', many=many)
    path = place / ('state/w/0.0' if many == 3 else 'state/packed.0.0')
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
    with pytest.raises(TransferError, match='differs from what was written'):
        send(server, tmp_path / 'here')
    assert not content(there)


def test_a_piece_that_ends_early_does_not_arrive(tmp_path, there, server):
    place = write_piece(tmp_path / 'here')
    os.truncate(place / 'state/w/0.0', 1000)
    with pytest.raises(TransferError, match='has 1000 bytes'):
        send(server, tmp_path / 'here')
    until_empty(there)


def until_empty(directory):
    """Waits until the server has noticed that a client is gone."""
    until = time.monotonic() + 60
    while left := [path for path in directory.rglob('*') if path.is_file()]:
        assert time.monotonic() < until, left
        time.sleep(0.01)


def test_a_client_without_the_secret_is_refused_and_gets_nothing(tmp_path, there, server):
    write_piece(there)
    with pytest.raises(ConnectionError):
        connect(server, 'another')
    for words in (
        [b''],
        [b'\x80' * 1000],
        [b'"x"\n', b'"y"\n'],
        [b'"x"\n', b'\xff\n'],
        [b'{' * 200 + b'\n'],
        [b'7\n', b'[]\n'],
    ):
        with socket.create_connection(('127.0.0.1', server.port), 10) as stranger:
            for word in words:
                stranger.sendall(word)
            stranger.shutdown(socket.SHUT_WR)
            said = b''
            try:
                while piece := stranger.recv(1000):
                    said += piece
            except ConnectionError:
                pass
        assert len(said.splitlines()) <= 2, 'a nonce, and a proof of it'
    assert read(server, 'state/w/0.0', 0, 1)


def test_a_server_that_does_not_know_the_secret_gets_no_piece(tmp_path):
    """A program that took over the port of a process that ended."""
    with socket.create_server(('127.0.0.1', 0)) as other:

        def serve():
            line = Line(other.accept()[0], '')
            line.send('nonce')
            line.receive(10)
            line.send('0' * 64)
            line.receive(10)
            line.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(ConnectionAbortedError, match='does not belong to this run'):
            Peer(f'127.0.0.1:{other.getsockname()[1]}', SECRET)
        thread.join()


def hostile(server, request, *more):
    """What the server answers to a request of a client that knows the secret; None: it ends the connection."""
    with connect(server) as peer:
        try:
            peer._line.send(request)
            for each in more:
                peer._line.connection.sendall(each)
            return peer._line.receive(30)
        except ConnectionError:
            return None


def forged(name=NAME, file='state/w/0', size=3):
    """A request to receive a piece with this file, whose manifest has the right digest."""
    manifest = Manifest.model_construct(
        format='pretrax-checkpoint',
        version=1,
        step=8,
        description={},
        arrays={},
        files={file: File(size=size, xxh3='0')},
    )
    text = manifest.model_dump_json()
    whole = json.loads(text) | {'manifest_xxh3': xxhash.xxh3_128_hexdigest(text.encode())}
    return {'piece': name, 'manifest': json.dumps(whole)}


@pytest.mark.parametrize(
    'name', ['8', '8/../..', '/8/3', '8/3/../4', '../8/3', '8/x', '08/3', '9/3', '', '8/3\n', '٣/3']
)
def test_a_piece_outside_of_the_memory_is_refused(tmp_path, there, server, name):
    answer = hostile(server, forged(name), b'abc')
    assert answer is None or 'problem' in answer
    assert not content(there)
    assert not content(tmp_path)


@pytest.mark.parametrize('file', ['../../../x', '{}/x', 'state/../../../../x', 'a\0b'])
def test_a_file_outside_of_its_piece_is_neither_written_nor_read(tmp_path, there, server, file):
    file = file.format(tmp_path)
    answer = hostile(server, forged(file=file), b'abc')
    assert answer is None or 'problem' in answer
    assert not content(tmp_path)
    (tmp_path / 'x').write_text('secret')
    write_piece(there)
    answer = hostile(server, GET | {'file': file})
    assert answer is None or 'problem' in answer


@pytest.mark.parametrize(
    'request_',
    [{'piece': NAME}, {'piece': NAME, 'manifest': '{}'}, {'piece': 7, 'manifest': 7}, {'piece': NAME, 'manifest': 7},
     {}, [], None, 7, 'piece', GET | {'file': 7}, GET | {'start': -5}, GET | {'start': 'x'}, GET | {'file': 'state'},
     GET | {'piece': '../there/3/8'}],
)  # fmt: skip
def test_a_request_that_is_none_ends_the_connection_only(there, server, request_):
    write_piece(there)
    before = content(there)
    answer = hostile(server, request_)
    assert answer is None or 'problem' in answer
    assert content(there) == before
    assert read(server, 'state/small/1') == bytes([1]) * 40


def test_a_piece_that_is_too_large_is_refused_before_it_comes(tmp_path, there):
    write_piece(tmp_path / 'here')
    small = PieceServer(there, SECRET, '127.0.0.1', 1000)
    with pytest.raises(TransferError, match='at most 1000 are expected'):
        send(small, tmp_path / 'here')
    small.close()
    assert not content(there)
    free = shutil.disk_usage(there).free
    large = PieceServer(there, SECRET, '127.0.0.1', 1 << 60)
    answer = hostile(large, forged(size=free + (1 << 30)))
    assert 'there is no room' in answer['problem']
    large.close()
    assert not content(there)


def test_a_sender_that_ends_in_the_middle_leaves_nothing(tmp_path, there, server):
    place = write_piece(tmp_path / 'here')
    with connect(server) as peer:
        peer._ask(piece=NAME, manifest=(place / MANIFEST).read_text())
        peer._line.connection.sendall(bytes(1000))
    until_empty(there)
    assert not (there / NAME).exists()


def test_a_closed_server_accepts_no_connection(server):
    server.close()
    with pytest.raises(ConnectionRefusedError):
        connect(server)


def test_it_listens_on_ipv6(tmp_path, there):
    if not socket.has_dualstack_ipv6():
        pytest.skip('needs IPv6')
    write_piece(tmp_path / 'here')
    server = PieceServer(there, SECRET, '::1', 1 << 30)
    with Peer(f'[::1]:{server.port}', SECRET) as peer:
        peer.send_piece(tmp_path / 'here', NAME)
    server.close()
    assert (there / NAME / MANIFEST).exists()
