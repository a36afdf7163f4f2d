"""The index of a prefix in a bucket: one object names the objects below it that count.

Object stores replace one object atomically, and only if it has the version that the writer expects. They offer nothing
over several objects, and a writer that was stopped may go on at any time. So each object below the prefix has a name
that no other writer uses, and it counts while the index names it:

    {"owner": "5f2c...", "writes": 3, "entries": {"10": "10/5f2c-1", "20": null}}

An entry is the path of an object or a prefix; null: it is being removed. A process that takes over writes the index
before it relies on it, so that a later change by an earlier owner finds another version, and is refused. What an
earlier owner still writes, nobody reads; what it still removes, nobody needs.
"""

import contextlib
import json
import secrets
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pretrax.storage.bucket_path import BucketPath
from pretrax.storage.locate import AnyPath
from pretrax.system.json_file import parse_json

INDEX = 'index.json'

type Entries = dict[str, str | None]


class Index:
    """The index of a prefix, for the process that owns it.

    Args:
        confirm: makes a request to find out whether this process still has the lease that protects the prefix; raises
            an exception if it does not.
        adopt: returns the entries of files that were copied below the prefix, given all files and the entries; None:
            there is no index yet.
    """

    def __init__(
        self,
        place: BucketPath,
        confirm: Callable[[], None],
        adopt: Callable[[list[str], Entries | None], Entries],
    ):
        self.place, self._confirm, self._adopt = place, confirm, adopt
        self.entries: Entries = {}
        self._owner, self._writes, self._version = secrets.token_hex(8), 0, b''

    def claim(self) -> None:
        """Becomes the owner. Raises OSError, or what `confirm` raises if another process has taken over."""
        while True:
            content, version = (self.place / INDEX).read_version()
            entries = parsed(content)
            if self._write((entries or {}) | self._adopt(self._files(), entries), version):
                break
        self._confirm()  # now all later owners have read the index after it was written

    def change(self, changes: Mapping[str, str | None]) -> None:
        """Changes entries, all at once. Raises as `claim` does."""
        while not self._version or not self._write({**self.entries, **changes}, self._version):
            self.claim()

    def remove_unlisted(self, keep: Collection[str] = ()) -> None:
        """Removes the objects that no entry names, but for those at or below the paths `keep`."""
        files = self._files()
        self._confirm()  # so what was listed belongs to this process or to earlier owners
        self.entries |= self._adopt(files, self.entries)
        listed = {*self.entries.values(), *keep}
        self.place.unlink_below([file for file in files if listed.isdisjoint(_prefixes(file))])
        used = {prefix for file in files for prefix in _prefixes(file)}
        self.entries = {name: path for name, path in self.entries.items() if path is not None or name in used}

    def _files(self) -> list[str]:
        return [file for file in self.place.files() if file != INDEX]

    def _write(self, entries: Entries, expected: bytes) -> bool:
        self._writes += 1
        content = {'owner': self._owner, 'writes': self._writes, 'entries': entries}
        version = (self.place / INDEX).write_version(json.dumps(content).encode(), expected)
        if version is None:
            return False
        self.entries, self._version = entries, version
        return True


class Guard:
    """Writes objects in place that only the holder of a lease may write.

    A write is refused if another process has written the object since this one read or wrote it.
    """

    def __init__(self, confirm: Callable[[], None]):
        self._confirm = confirm
        self._versions: dict[BucketPath, bytes] = {}

    def write(self, path: BucketPath, content: bytes) -> None:
        """Writes an object. Raises OSError, or what `confirm` raises if another process has taken over."""
        while True:
            expected = self._versions.pop(path, None)
            if expected is None:
                expected = path.read_version().version
                self._confirm()
            version = path.write_version(content, expected)
            if version is not None:
                self._versions[path] = version
                return


def read_entries(place: AnyPath) -> Entries | None:
    """The entries of the index of a prefix, or of its copy on a disk; None: there is no index. Raises OSError."""
    try:
        return parsed((place / INDEX).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None


def parsed(content: bytes | None) -> Entries | None:
    """The entries in the content of an index; None if it is not an index."""
    with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
        entries: dict[str, Any] = parse_json(content or b'')['entries']
        return {name: path for name, path in entries.items() if path is None or isinstance(path, str)}
    return None


def _prefixes(file: str) -> list[str]:
    """The file and the directories that it is in: 'a', 'a/b' and 'a/b/c' of 'a/b/c'."""
    parts = file.split('/')
    return ['/'.join(parts[:n]) for n in range(1, len(parts) + 1)]
