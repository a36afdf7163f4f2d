"""Standbys: training processes that have imported everything and wait until they are needed.

A launcher starts each training with a socket as its standard input. The training says there that its first step is
done. Then the launcher starts a standby: the same command, which waits at the place where a process learns its number.
When a process is lost, the launcher sends the standby the number and the output streams of its new place.
"""

import contextlib
import io
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pretrax.system.children import Child, prepare_training

_VARIABLE, _WAITS, _TRAINS = 'PRETRAX_STANDBY', 'waits', 'trains'
_PATIENCE = 10.0  # seconds for a standby to end
_SIZE = 8  # bytes of the length of a message
_launcher: list[socket.socket] = []  # of this process


class Training(Child):
    """A training process, or a standby for one.

    Args:
        waits: it is a standby, whose output is discarded until it begins.
        streams: see `Child`; without `stdin`.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], *, waits: bool = False, **streams: Any):
        self._channel, its_end = socket.socketpair()
        with its_end:
            role = {_VARIABLE: _WAITS if waits else _TRAINS}
            super().__init__(command, {**environment, **role}, prepare_training, stdin=its_end, **streams)
        self._channel.setblocking(False)
        self._has_stepped = False

    def begin(self, environment: Mapping[str, str], output: int, errors: int) -> bool:
        """Lets a standby train, with these variables and file descriptors. Returns whether it is alive."""
        message = json.dumps(dict(environment)).encode()
        with contextlib.suppress(OSError):
            if self.poll() is None:
                socket.send_fds(self._channel, [len(message).to_bytes(_SIZE) + message], [output, errors])
                return True
        return False

    def has_stepped(self) -> bool:
        """Whether its first step is done."""
        with contextlib.suppress(OSError):  # nothing to read yet
            self._has_stepped = self._has_stepped or bool(self._channel.recv(1))
        return self._has_stepped

    def end(self, seconds: float) -> None:
        super().end(seconds)
        self._channel.close()


class Trainings:
    """Starts the trainings of some places, and keeps a standby for each place.

    Args:
        environment: returns the variables of a place that never change.
        standbys: False: there are no standbys.
    """

    def __init__(self, command: Sequence[str], environment: Callable[[int], Mapping[str, str]], standbys: bool = True):
        self._command, self._environment, self._standbys = command, environment, standbys
        self._waiting: dict[int, Training] = {}

    def start(self, place: int, variables: Mapping[str, str], output: int, errors: int) -> Training:
        """The standby of a place, which now begins, or else a new process. `variables`: those of this attempt."""
        standby = self._waiting.pop(place, None)
        if standby is not None:
            if standby.begin(variables, output, errors):
                return standby
            standby.end(_PATIENCE)
        return Training(self._command, {**self._environment(place), **variables}, stdout=output, stderr=errors)

    def prepare(self, places: Iterable[int]) -> None:
        """Starts a standby for each of these places that has none. Call it from a thread that lasts."""
        for place in places:
            if self._standbys and place not in self._waiting:
                streams = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.DEVNULL}
                self._waiting[place] = Training(self._command, self._environment(place), waits=True, **streams)

    def close(self) -> None:
        """Ends the standbys."""
        while self._waiting:
            self._waiting.popitem()[1].end(_PATIENCE)


def wait_until_needed(uses_devices: bool = False) -> None:
    """Connects to the launcher of this process, if it has one. A standby waits, and ends when its launcher ends.

    `uses_devices`: whether this process uses some already. Then a standby ends: they belong to the training.
    """
    role = os.environ.pop(_VARIABLE, None)
    if role is None:
        return
    launcher = socket.socket(fileno=os.dup(0))
    _redirect(os.open(os.devnull, os.O_RDONLY), 0)  # what this process starts has no part in it
    _launcher.append(launcher)
    if role == _TRAINS:
        return
    if uses_devices:
        os._exit(0)
    message, streams, _, _ = socket.recv_fds(launcher, _SIZE, 2)
    if not message:
        os._exit(0)
    with launcher.makefile('rb') as rest:
        os.environ.update(json.loads(rest.read(int.from_bytes(message))))
    for stream, number in zip(streams, (1, 2), strict=True):
        _redirect(stream, number)
    if isinstance(sys.__stdout__, io.TextIOWrapper):
        sys.__stdout__.reconfigure(line_buffering=sys.__stdout__.isatty())


def tell_stepped() -> None:
    """Tells the launcher of this process that the first step is done."""
    while _launcher:
        with contextlib.suppress(OSError), _launcher.pop() as launcher:  # the launcher has ended
            launcher.send(b'.')


def _redirect(descriptor: int, number: int) -> None:
    os.dup2(descriptor, number)
    os.close(descriptor)
