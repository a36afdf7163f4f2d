"""The memory of the other hosts: copies of this process's pieces go there, and missing pieces are read from there.

Every process listens at an address and with a secret of its own (`transfer.py`). JAX's coordination service tells them
to the processes that need them.
"""

import collections
import contextlib
import io
import json
import os
import pathlib
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from pretrax.checkpoint.agreement import first_problem, gather, offer, scatter
from pretrax.checkpoint.manifest import MANIFEST, parse_manifest
from pretrax.checkpoint.memory_pieces import Piece, PiecedState, pieces_in, states_of
from pretrax.checkpoint.placement import Location, describe_copies, place_copies
from pretrax.checkpoint.transfer import REFUSED, Peer, PieceServer
from pretrax.jax_compat import coordinator_address
from pretrax.system.launchers import identity
from pretrax.system.process_hosts import expected_hosts
from pretrax.system.rendezvous import own_address


class Peers:
    """The memory of all hosts of a run. All processes create it together.

    Args:
        directory: for the pieces on this host; None: there is none.
        copies: of each piece on other hosts; None: 1.

    Attributes:
        copies: as many as there are; 0 on one host.
        description: where the copies are, for the start-up report; in process 0.
    """

    def __init__(self, directory: pathlib.Path | None, copies: int | None):
        self._directory, self._server, self._targets = directory, None, []
        self._known: dict[tuple[int, str], bool] = {}  # by step and line: whether a host has the piece of process 0
        self._table: Callable[[], str] = lambda: '[]'
        self._idle = collections.defaultdict[str, list[Peer]](list)  # connections that pieces are read from, by address
        self.copies, self.description = 0, ''
        if jax.process_count() > 1:
            self._exchange(1 if copies is None else copies)

    def _exchange(self, copies: int) -> None:
        own: dict[str, Any] = {'place': ('', '', '', '')}
        try:
            own = self._listen() if self._directory is not None else own
        except OSError as error:  # training goes on without copies
            own['problem'] = str(error.strerror or error)
        said: list[dict[str, Any]] = [json.loads(text) for text in gather('peers', json.dumps(own))]
        places = [Location(*each['place']) for each in said]
        hosts = {place.host for place in places}
        copies = 0 if '' in hosts else min(copies, len(hosts) - 1)
        targets = place_copies(places, copies)
        self.description = describe_copies(targets, [each.get('name', '') for each in said]) if copies > 0 else ''
        if problem := first_problem([each.get('problem', '') for each in said]):
            self.description = f'none: {problem}'
        held = {(step, line, writer == 0) for each in said for writer, step, line in each.get('held', ())}
        answers = [json.dumps([copies, sorted(held), [said[target]['address'] for target in to]]) for to in targets]
        self.copies, known, self._targets = json.loads(scatter('peers', answers))
        self._known = {(step, line): has_first for step, line, has_first in known}  # of two, the latter is True
        first = {place.host: each for place, each in reversed(list(zip(places, said, strict=True))) if place.host}
        self._table = offer('peers', json.dumps(list(first.values())))

    def _listen(self) -> dict[str, Any]:
        """Starts the service of this process. Returns what the others have to know."""
        assert self._directory is not None
        index, coordinator, secret = jax.process_index(), coordinator_address(), secrets.token_hex(16)
        address, names = own_address(coordinator, index), expected_hosts(jax.process_count(), index, coordinator)
        self._server = PieceServer(self._directory, secret, '' if index == 0 else address)
        machine, place = identity()['boot'], self._directory.stat()
        tpu_slice = str(getattr(jax.local_devices()[0], 'slice_index', ''))
        self._host = f'{machine}:{place.st_dev}:{place.st_ino}'
        return {
            'place': (rack_of(os.environ), tpu_slice, machine, self._host),
            'name': names[index] if names else socket.gethostname(),
            'address': [f'{address}:{self._server.port}', secret],
            'held': [(piece.writer, piece.step, piece.line) for piece in pieces_in(self._directory)],
        }

    def states(self) -> list[PiecedState]:
        """The states in memory, in all processes the same ones, the oldest first. Other hosts' pieces are read last."""
        pieces = pieces_in(self._directory)
        if jax.process_count() == 1:
            return states_of(pieces)
        pieces = [piece for piece in pieces if (piece.step, piece.line) in self._known]
        return states_of(pieces, jax.process_index(), self._known, self._further)

    def _further(self, step: int, line: str) -> Iterator[Piece] | None:
        return self._elsewhere(step, line) if self._known[step, line] else None

    def _elsewhere(self, step: int, line: str) -> Iterator[Piece]:
        """The pieces of a state in the memory of other hosts, that of this process's own number first."""
        found = [
            (writer != jax.process_index(), writer, each)
            for each in json.loads(self._table())
            if self._server is None or each['place'][3] != self._host
            for writer, *key in each['held']
            if key == [step, line]
        ]
        for _, writer, each in sorted(found, key=lambda found: found[:2]):
            with contextlib.suppress(*REFUSED):  # it may have been removed, or its host is out of reach
                address, secret = each['address']
                yield _PeerPiece(address, secret, f'{writer}/{step}', each['name'], self._idle[address])

    def begin(self, largest: int) -> None:
        """Receives pieces of at most `largest` bytes from now on. Nothing more is read from others."""
        self._hang_up()
        if self._server is not None:
            self._server.largest = largest

    def copy(self, name: str) -> str:
        """Copies a piece of this process to other hosts. Returns why one has no copy; '': all have."""
        problem = ''
        for address, secret in self._targets:
            assert self._directory is not None
            try:
                with Peer(address, secret) as peer:
                    peer.send_piece(self._directory, name)
            except REFUSED as error:
                problem = f'{address}: {getattr(error, "strerror", None) or error}'
        return problem

    def close(self) -> None:
        """Ends the service of this process."""
        self._hang_up()
        if self._server is not None:
            self._server.close()

    def _hang_up(self) -> None:
        for idle in self._idle.values():
            while idle:
                idle.pop().close()


def rack_of(variables: Mapping[str, str]) -> str:
    """The rack of this machine: `PRETRAX_RACK`, or the switches above it in Slurm's topology; '' if it is not known."""
    return variables.get('PRETRAX_RACK') or variables.get('SLURM_TOPOLOGY_ADDR', '').rpartition('.')[0]


class _PeerPiece(Piece):
    """A piece in the memory of another host. Raises OSError or ValueError if it cannot be read.

    Args:
        idle: connections to the other host that no thread uses; those of this piece are added when they are idle.
    """

    def __init__(self, address: str, secret: str, name: str, host: str, idle: list[Peer]):
        self._address, self._secret, self._name, self._idle = address, secret, name, idle
        super().__init__(parse_manifest(bytes(self._read(MANIFEST)), pathlib.Path(name)))
        self.where = f'memory of {host}'

    def _read(self, file: str, *part: int) -> bytearray:
        with contextlib.suppress(IndexError, *REFUSED):  # none is idle, or the other side has ended it meanwhile
            return self._ask(self._idle.pop(), file, *part)
        return self._ask(Peer(self._address, self._secret), file, *part)

    def _ask(self, peer: Peer, file: str, *part: int) -> bytearray:
        with contextlib.ExitStack() as stack:
            stack.enter_context(peer)
            content = peer.read(self._name, file, *part)
            stack.pop_all()
        self._idle.append(peer)
        return content

    def open(self, name: str) -> io.BytesIO:
        file = self.manifest.files[name]
        return io.BytesIO(self._read(file.pack or name, file.offset, file.size))
