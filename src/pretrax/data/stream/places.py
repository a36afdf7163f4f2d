"""The places where the blocks of a stream start, in a file, so that a run that resumes need not read from the start.

The file only saves time: without it, or with an older one, the stream is read from an earlier place, and gives the same
tokens.
"""

import bisect
import itertools
import json
import time
import zlib

import numpy as np

from pretrax.data.stream.blocks import START, BlockStart
from pretrax.errors import Report, first_line
from pretrax.storage import AnyPath
from pretrax.storage.locate import write_whole
from pretrax.system.json_file import parse_json

_MOST = 1 << 13  # places; of more, every second one is dropped
_PAUSE = 30.0  # seconds between two writes


class Places:
    """Known places of a stream, in order.

    Args:
        path: the file, for one stream.
    """

    def __init__(self, path: AnyPath, report: Report):
        self._path, self._report = path, report
        self._places = _read(path, report)
        self._saved = self._places[-1]
        self._written = time.monotonic()

    @property
    def newest(self) -> BlockStart:
        """The last known place."""
        return self._places[-1]

    def before(self, token: int) -> BlockStart:
        """The last known place that does not lie after a token."""
        return self._places[bisect.bisect_right(self._places, token, key=lambda place: place.token) - 1]

    def add(self, place: BlockStart) -> None:
        """Adds a place if it lies after all others, and writes the file if it is time."""
        if place.token > self._places[-1].token:
            self._places.append(place)
            if len(self._places) > _MOST:
                self._places = self._places[::2]
        if self._places[-1] != self._saved and time.monotonic() - self._written > _PAUSE:
            self.save()

    def save(self) -> None:
        """Writes the file. An error is reported; training does not need the file."""
        self._written = time.monotonic()
        places = [list(place) for place in self._places]
        content = json.dumps({'places': places, 'crc32': _crc32(places)}).encode()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._path, content)
        except OSError as error:
            self._report(f'stream: {self._path} cannot be written ({error.strerror}); resuming will take longer')
            return
        self._saved = self._places[-1]


def _read(path: AnyPath, report: Report) -> list[BlockStart]:
    try:
        found = parse_json(path.read_bytes())
        places = [BlockStart(*place) for place in found['places']]
        is_whole = found['crc32'] == _crc32(found['places']) and places[0] == START
        if is_whole and all(a.token < b.token for a, b in itertools.pairwise(places)):
            return places
        reason = 'damaged'
    except FileNotFoundError:
        return [START]
    except (OSError, ValueError, TypeError, KeyError, IndexError) as error:
        reason = first_line(error)
    report(f'stream: {path} cannot be used ({reason}); the text is read from the start')
    return [START]


def _crc32(places: list[list[int]]) -> int:
    return zlib.crc32(np.array(places, '<i8').tobytes())
