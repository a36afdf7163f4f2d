"""Finds out which processes of a run are there, before JAX connects them and even if JAX cannot.

JAX's own start cannot serve for that: if one process is missing, `jax.distributed.initialize` aborts all others after
its time limit, and names none. Here process 0 listens at the address of JAX's coordinator, every other process connects
to it, and they exchange JSON objects, one per line. A process that does not arrive, does not answer or ends is
reported, and the others continue. The port is free again before JAX takes it; the connections stay.
"""

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from pretrax.errors import Report
from pretrax.system.process_hosts import described

_PATIENCE = 10.0  # seconds without a process before a line names it; from line to line it doubles
_RETRY = 0.1  # seconds between two attempts to connect
# A process waits for process 0 this many times as long as process 0 waits for one process: process 0 waits for all of
# them, and for their checks of the devices.
_SHARES = 12
_OCCUPIED = 30.0  # seconds for the port to become free
_PINGS = 8  # round trips per process, of which the fastest counts
_LONGEST = 1 << 24  # bytes of a line


class AbsentError(Exception):
    """Process 0 does not answer."""


class Rendezvous:
    """The connections of all processes to process 0.

    Args:
        coordinator: HOST:PORT of process 0; not used if there is one process.
        seconds: for each process to arrive, and for each answer.
        hosts: where processes should be, by index, as far as it is known.
        needs_all: whether process 0 waits for no other once one that had come has ended.
    """

    def __init__(
        self,
        coordinator: str,
        index: int,
        count: int,
        seconds: float,
        hosts: Mapping[int, str] | None = None,
        needs_all: bool = False,
        say: Report = lambda line: None,
    ):
        self.index, self.count, self.seconds = index, count, seconds
        self.lost: dict[int, str] = {}  # why a process is missing, by its index
        self._coordinator, self._hosts, self._needs_all, self._say = coordinator, hosts or {}, needs_all, say
        self._began, self._next_line = time.monotonic(), _PATIENCE
        self._lines: dict[int, Line] = {}

    def assemble(self) -> None:
        """Connects the processes; in process 0, `lost` then names those that did not arrive.

        Raises:
            AbsentError: this is another process, and process 0 cannot be reached; the message says why.
        """
        if self.count == 1:
            return
        if self.index == 0:
            self._listen()
        else:
            line = Line(self._open(), _host_and_port(self._coordinator)[0])
            line.send({'process': self.index})
            self._lines[0] = line

    def gather(self, value: Any, seconds: float | None = None) -> dict[int, Any]:
        """Gathers values: in process 0 those of all processes that answer, by index; in others, only their own.

        Args:
            value: value of this process; JSON.
            seconds: to wait for each process; None: the patience of this object.
        """
        found = {self.index: value}
        if self.index:
            self._lines[0].send(value)
            return found
        limit = self.seconds if seconds is None else seconds
        until = time.monotonic() + limit
        for index, line in list(self._lines.items()):
            try:
                found[index] = line.receive(max(0.05, until - time.monotonic()))
            except TimeoutError:
                self._lose(index, f'did not answer within {limit:.0f} s')
            except OSError:
                self._lose(index, 'has ended')
        return found

    def share(self, value: Any = None, seconds: float | None = None) -> Any:
        """The value of process 0, in all processes.

        Args:
            value: value of process 0; JSON.
            seconds: in the others, to wait for it; None: long enough for everything that process 0 may wait for.

        Raises:
            AbsentError: process 0 has ended.
        """
        if self.index:
            try:
                return self._lines[0].receive(_SHARES * self.seconds if seconds is None else seconds)
            except TimeoutError as error:
                raise AbsentError('process 0 does not answer any more') from error
            except OSError as error:
                raise AbsentError('process 0 has ended') from error
        for index, line in list(self._lines.items()):
            try:
                line.send(value)
            except OSError:
                self._lose(index, 'has ended')
        return value

    def clocks(self) -> dict[int, tuple[float, float]]:
        """How far the clock of each process is ahead of that of process 0, and the uncertainty, in seconds.

        Half of the fastest round trip bounds the error, as in Cristian 1989, Probabilistic clock synchronization. Call
        it in all processes; the others return nothing.
        """
        if self.index:
            with contextlib.suppress(OSError):
                while self._lines[0].receive(_SHARES * self.seconds) == 'time':
                    self._lines[0].send(time.time())
            return {}
        found = {}
        for index, line in list(self._lines.items()):
            try:
                trips = [_round_trip(line, self.seconds) for _ in range(_PINGS)]
                line.send('thanks')
                length, ahead = min(trips)
                found[index] = ahead, length / 2
            except OSError:
                self._lose(index, 'did not answer')
        return found

    def addresses(self) -> dict[int, str]:
        """The address from which each process has connected to process 0."""
        return {index: line.address for index, line in self._lines.items()}

    def wait_for_port(self) -> None:
        """Waits until another program of process 0 listens at the port: JAX would wait a second between attempts.

        Raises:
            AbsentError: none does.
        """
        self._lines.pop(0).close()
        self._open().close()

    def close(self) -> None:
        """Ends the connections."""
        for line in self._lines.values():
            line.close()

    def _lose(self, index: int, why: str) -> None:
        self.lost[index] = why
        self._lines.pop(index).close()

    def problem(self) -> str:
        """Who is lost and why: 'processes 2 (node7) and 5 (node9) did not connect within 300 s'; '' if nobody is."""
        reasons = dict.fromkeys(self.lost.values())
        groups = {why: [index for index, its in self.lost.items() if its == why] for why in reasons}
        return '; '.join(f'{described(group, self._hosts)} {why}' for why, group in groups.items())

    def _listen(self) -> None:
        host, port = _host_and_port(os.environ.get('JAX_COORDINATOR_BIND_ADDRESS') or f'[::]:{self._port}')
        until, every = self._began + self.seconds, set(range(1, self.count))
        with self._listener(host, port) as listener, selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            while (missing := every - {*self._lines, *self.lost}) and (left := until - time.monotonic()) > 0:
                if self.lost and self._needs_all:
                    return
                self._mention(lambda missing=missing: f'waits for {described(missing, self._hosts)}')
                for key, _ in selector.select(min(left, 1.0)):
                    if key.fileobj is listener:
                        self._accept(listener, selector, left)
                        continue
                    selector.unregister(key.fileobj)  # it has ended, or has something to say later
                    line = self._lines.get(key.data)
                    if line is not None and line.connection is key.fileobj and line.has_ended():
                        self._lose(key.data, 'has ended')
        self.lost |= dict.fromkeys(missing, f'did not connect within {self.seconds:.0f} s')

    def _accept(self, listener: socket.socket, selector: selectors.BaseSelector, left: float) -> None:
        connection, peer = listener.accept()
        line = Line(connection, str(peer[0]))
        try:
            index = line.receive(min(5.0, max(0.1, left)))['process']
        except (OSError, TypeError, KeyError):  # not one of ours
            line.close()
            return
        self._lines[index] = line
        self.lost.pop(index, None)  # it was started again
        selector.register(connection, selectors.EVENT_READ, index)

    def _listener(self, host: str, port: int) -> socket.socket:
        """Listens at the port, once a process that has just ended has left it."""
        until = time.monotonic() + min(self.seconds, _OCCUPIED)
        while True:
            try:
                return listener(host, port, self.count)
            except OSError as error:
                if time.monotonic() > until:
                    raise AbsentError(f'port {port} of this machine cannot be used: {error.strerror}') from error
            time.sleep(_RETRY)

    def _open(self) -> socket.socket:
        until = time.monotonic() + self.seconds
        while True:
            try:
                return socket.create_connection(_host_and_port(self._coordinator), timeout=5)
            except OSError as error:
                why = error.strerror or str(error)
            if time.monotonic() > until:
                raise AbsentError(f'{self._coordinator} does not answer within {self.seconds:.0f} s: {why}')
            self._mention(lambda why=why: f'waits for {described([0], self._hosts)} at {self._coordinator}: {why}')
            time.sleep(_RETRY)

    def _mention(self, what: Callable[[], str]) -> None:
        if time.monotonic() - self._began > self._next_line:
            self._next_line *= 2
            self._say(f'process {self.index} of {self.count} {what()}')

    @property
    def _port(self) -> str:
        return self._coordinator.rpartition(':')[2]


class Line:
    """A connection on which each line is a JSON value; bytes may follow a line that announces them."""

    def __init__(self, connection: socket.socket, address: str):
        self.connection, self.address = connection, address.removeprefix('::ffff:')
        self._read = b''
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, value: Any) -> None:
        """Sends a value. Raises OSError."""
        self.connection.settimeout(60)
        self.connection.sendall(json.dumps(value).encode() + b'\n')

    def receive(self, seconds: float | None, longest: int = _LONGEST) -> Any:
        """The next value, of at most `longest` bytes. Raises TimeoutError, and OSError if the other side has ended."""
        until = None if seconds is None else time.monotonic() + seconds
        while b'\n' not in self._read:
            self.connection.settimeout(None if until is None else max(0.01, until - time.monotonic()))
            piece = self.connection.recv(1 << 16)
            if not piece or len(self._read) > longest:
                raise ConnectionResetError('the other side has ended')
            self._read += piece
        line, _, self._read = self._read.partition(b'\n')
        try:
            return json.loads(line)
        except ValueError as error:
            raise ConnectionAbortedError('the other side is not pretrax') from error

    def receive_into(self, content: memoryview, seconds: float) -> None:
        """Fills a buffer with the bytes that follow. Raises as `receive`, if none come for `seconds`."""
        self.connection.settimeout(seconds)
        done = min(len(content), len(self._read))
        content[:done], self._read = self._read[:done], self._read[done:]
        while done < len(content):
            if not (n := self.connection.recv_into(content[done:])):
                raise ConnectionResetError('the other side has ended')
            done += n

    def has_ended(self) -> bool:
        """Whether the other side has ended. Call it if there is something to read."""
        try:
            return not self._read and not self.connection.recv(1, socket.MSG_PEEK)
        except OSError:
            return True

    def close(self) -> None:
        """Ends the connection."""
        self.connection.close()


def _round_trip(line: Line, seconds: float) -> tuple[float, float]:
    """Seconds of a round trip, and how far the other clock is ahead."""
    began, sent = time.monotonic(), time.time()  # in this order: a pause between them lengthens the trip
    line.send('time')
    there = line.receive(seconds)
    length = time.monotonic() - began
    return length, there - (sent + length / 2)


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(':')
    return host.strip('[]'), int(port)


def own_address(coordinator: str, index: int) -> str:
    """The address at which the other processes reach this one: that from which it reaches process 0.

    Raises OSError if there is no way to process 0.
    """
    host, port = _host_and_port(coordinator)
    if index == 0:
        return host  # as the others know it; names of this machine may have another address here
    for family, *_, address in (infos := socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)):
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    raise OSError(None, f'there is no route to {len(infos)} addresses of {host}')


def listener(host: str, port: int, count: int) -> socket.socket:
    """Listens at an address of this machine ('': all of them) and port (0: a free one) for `count` others."""
    if host in ('', '::', '0.0.0.0'):
        if socket.has_dualstack_ipv6():
            with contextlib.suppress(OSError):  # no IPv6 in this container
                return socket.create_server(
                    ('', port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=max(128, count)
                )
        host = ''
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=max(128, count))
