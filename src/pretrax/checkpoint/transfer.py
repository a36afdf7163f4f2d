"""Pieces of memory checkpoints between hosts. Imports no JAX.

A piece is a directory `<process>/<step>/` with a manifest and the files that it lists. Each training process runs a
`PieceServer`, which receives pieces into the memory of its host and serves what is there.

Connections are plain TCP. Both sides prove that they know the secret of the attempt, without sending it. What follows
is neither encrypted nor signed, as the collectives of the training are not; digests find damage. Nothing is unpickled.
"""

import contextlib
import hashlib
import hmac
import pathlib
import re
import secrets
import shutil
import socket
import threading
from typing import Any

from pretrax.checkpoint.manifest import MANIFEST, PARTIAL, digests_of, parse_manifest, steps_in
from pretrax.checkpoint.memory_pieces import remove_piece
from pretrax.system.digest import BLOCK
from pretrax.system.rendezvous import Line, listener

PATIENCE = 30.0  # seconds without a byte, after which the other side is lost
_GREETING = 5.0  # seconds for the other side to prove that it belongs to the run
_LONGEST = 256  # bytes of a line before that
_CONNECTIONS = 64  # that a process serves at a time; the others wait
_IDLE = 2.0  # seconds for a further request: kept connections leave room for others before these give up
# A stranger, a torn connection, a request that is none, or a piece that cannot be received.
REFUSED = (OSError, ValueError, KeyError, TypeError, AttributeError)
_PIECE = re.compile('(0|[1-9][0-9]{0,8})/(0|[1-9][0-9]{0,17})')


class TransferError(OSError):
    """A piece could not be sent or read: `filename` is the address of the other side, `strerror` the reason."""

    def __init__(self, address: str, reason: str):
        super().__init__(None, reason, address)


class PieceServer:
    """Receives and serves pieces in threads of this process, until it is closed.

    Args:
        directory: the memory of this host, which has the pieces.
        address: address of this machine at which it listens; '': all of them.

    Attributes:
        largest: bytes of a piece that it receives, at most.
        port: where it listens.
    """

    def __init__(self, directory: pathlib.Path, secret: str, address: str, largest: int = 0):
        self._directory, self._secret, self.largest = directory, secret, largest
        self._listener = listener(address, 0, _CONNECTIONS)
        self._free = threading.Semaphore(_CONNECTIONS)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, name='pieces', daemon=True).start()

    def close(self) -> None:
        """Ends the service: no further connection is accepted."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for a connection
        self._listener.close()

    def _listen(self) -> None:
        while True:
            self._free.acquire()
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0:
                    return
                self._free.release()
                continue
            threading.Thread(target=self._serve, args=(connection,), name='piece', daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with contextlib.closing(Line(connection, '')) as line, contextlib.suppress(*REFUSED):
                _greet(line, self._secret, 'server')
                while True:
                    self._answer(line, line.receive(_IDLE))
        finally:
            self._free.release()

    def _answer(self, line: Line, request: Any) -> None:
        name = str(request['piece'])
        if not _PIECE.fullmatch(name):
            raise ValueError('it is not the name of a piece')
        if 'manifest' in request:
            place = self._directory / f'{name}.{secrets.token_hex(4)}{PARTIAL}'
            try:
                self._receive(line, place, request['manifest'].encode())
                remove_piece(self._directory / name)  # of an attempt before, which came as far
                place.rename(self._directory / name)
                line.send({})
            except REFUSED as error:
                remove_piece(place)
                line.send({'problem': str(error)[:300]})
                raise
            return
        file, start, size = request['file'], request['start'], request['size']
        if file.startswith('/') or '..' in file.split('/') or start < 0:
            raise ValueError('the file is outside of its piece')
        try:
            with (self._directory / name / file).open('rb') as stream:
                size = max(0, min(size, stream.seek(0, 2) - start))
                line.send({'size': size})
                if size:
                    line.connection.sendfile(stream, start, size)
        except FileNotFoundError as error:
            line.send({'problem': str(error.strerror)})

    def _receive(self, line: Line, place: pathlib.Path, content: bytes) -> None:
        """Receives a piece with this manifest. Raises ValueError if it is too large, not whole or damaged.

        It replaces all pieces of its writer but the newest one, which stays until this one is whole in all processes.
        """
        manifest = parse_manifest(content, place)
        total = sum(manifest.sizes.values())
        if place.name.partition('.')[0] != str(manifest.step):
            raise ValueError('it is not the name of this piece')
        if total > self.largest:
            raise ValueError(f'the piece has {total} bytes, and at most {self.largest} are expected')
        steps = steps_in(place.parent)
        for step in [step for step in steps if step < manifest.step][:-1] + [s for s in steps if s > manifest.step]:
            remove_piece(place.parent / str(step))
        if total > shutil.disk_usage(self._directory).free:
            raise ValueError(f'there is no room for {total} bytes in {self._directory}')
        line.send({})
        place.mkdir(parents=True)
        for path, size in manifest.sizes.items():
            (place / path).parent.mkdir(parents=True, exist_ok=True)
            block = memoryview(bytearray(min(size, BLOCK)))
            with (place / path).open('xb', buffering=0) as stream:
                for start in range(0, size, BLOCK):
                    line.receive_into(block[: size - start], PATIENCE)
                    stream.write(block[: size - start])
        for name, digest in digests_of(place, manifest.files).items():
            if digest != manifest.files[name].xxh3:
                raise ValueError(f'{name} differs from what was written')
        (place / MANIFEST).write_bytes(content)


class Peer(contextlib.AbstractContextManager['Peer']):
    """Requests to the server of another process, from one thread at a time.

    Every method raises OSError if the other side cannot be reached, does not answer or refuses; the connection is then
    of no more use.

    Args:
        address: HOST:PORT of the server.
    """

    def __init__(self, address: str, secret: str):
        host, _, port = address.rpartition(':')
        connection = socket.create_connection((host.strip('[]'), int(port)), timeout=_GREETING)
        self._line = Line(connection, address)
        try:
            _greet(self._line, secret, 'client')
        except BaseException:
            self.close()
            raise

    def send_piece(self, directory: pathlib.Path, name: str) -> None:
        """Copies the piece `<directory>/<name>` to the memory of the other host. Returns when it is whole there."""
        content = (directory / name / MANIFEST).read_bytes()
        self._ask(piece=name, manifest=content.decode())
        try:
            for path, size in parse_manifest(content, directory / name).sizes.items():
                with (directory / name / path).open('rb') as stream:
                    sent = self._line.connection.sendfile(stream, 0, size) if size else 0
                if sent != size:
                    raise TransferError(self._line.address, f'{path} has {sent} bytes, not {size}')
        except ConnectionError:
            pass  # the other side has refused a file, and may say why
        self._answer()

    def read(self, name: str, file: str, start: int = 0, size: int = 1 << 60) -> bytearray:
        """Reads a file of a piece from `start` on: `size` bytes, fewer if it ends before them."""
        content = bytearray(self._ask(piece=name, file=file, start=start, size=size)['size'])
        self._line.receive_into(memoryview(content), PATIENCE)
        return content

    def close(self) -> None:
        """Ends the connection."""
        self._line.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _ask(self, **request: Any) -> dict[str, Any]:
        self._line.send(request)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        answer = self._line.receive(PATIENCE)
        if 'problem' in answer:
            raise TransferError(self._line.address, answer['problem'])
        return answer


def _greet(line: Line, secret: str, side: str) -> None:
    """Proves to the other side that this one knows the secret, and checks that the other one does.

    Raises ConnectionAbortedError if it does not, and OSError if it does not answer.
    """
    own = secrets.token_hex(16)
    line.send(own)
    other = str(line.receive(_GREETING, _LONGEST))

    def proof(side: str, first: str, second: str) -> str:
        return hmac.new(secret.encode(), f'{side} {first} {second}'.encode(), hashlib.sha256).hexdigest()

    line.send(proof(side, own, other))
    expected = proof({'client': 'server', 'server': 'client'}[side], other, own)
    if not hmac.compare_digest(expected.encode(), str(line.receive(_GREETING, _LONGEST)).encode()):
        raise ConnectionAbortedError('the other side does not belong to this run')
