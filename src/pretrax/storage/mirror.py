"""Copies a directory on a disk to a bucket while a program writes there.

A thread uploads what has changed. Logs are uploaded in parts (`parts.py`), other files whole. A failed upload is a
warning, and is tried again. Objects whose files are gone stay. A process that lost the lease overwrites nothing of its
successor (`index.py`).
"""

import contextlib
import hashlib
import heapq
import json
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from pretrax.storage.bucket_path import BucketPath
from pretrax.storage.index import Entries, Guard, Index
from pretrax.storage.lease import Lease
from pretrax.storage.parts import PART, parts_of
from pretrax.system.atomic import new_file, write_file
from pretrax.system.line_files import read_lines

EVERY = 10.0  # seconds between uploads
LARGE = 4 << 20  # bytes; larger files that are not logs are only uploaded at the end and on request
_FETCHED = re.compile(r'[^/]*\.jsonl|[^/]*-run-id|[^/]*\.yaml|[^/]*\.txt|data/stream-\w+\.json')
_OWN_LOGS = re.compile(r'(output|stacks)/.*')  # logs of this machine: others have their own parts
_LEFT_OUT = re.compile(
    r'lock|newest_checkpoint|(.*/)?\..*|checkpoints/.*|data/(?!(.*/)?(tokenizer|stream-\w+)\.json$).*'
)
_STATE = '.mirror.json'  # {"birth": name for the parts of own logs, "token": of the lease that last wrote here}


class _Uploaded(NamedTuple):
    """A file as it was uploaded. `parts`: a digest of each."""

    status: tuple[int, int, int]
    parts: list[bytes]


class Mirror:
    """Uploads a directory.

    Args:
        remote: where it is uploaded.
        lease: lease of the remote directory; None: nothing protects it, and only logs of this machine may be written.
    """

    def __init__(self, local: Path, remote: BucketPath, lease: Lease | None, report: Callable[[str], None]):
        self._local, self._remote, self._lease, self._report = local, remote, lease, report
        self._confirm = lease.confirm if lease is not None else lambda: None
        self._guard, self._indices = Guard(self._confirm), dict[str, Index]()
        self._uploaded: dict[str, _Uploaded] = {}
        self._copied: set[str] = set()  # logs that were copied from a disk, each an object of its own
        self._working = threading.Lock()
        self._wake, self._over = threading.Event(), False
        state = self._local / _STATE
        birth = f'{time.strftime("%Y%m%dT%H%M%S", time.gmtime())}-{secrets.token_hex(3)}'  # sorts by time
        self._state = json.loads(state.read_bytes()) if state.is_file() else {'birth': birth}
        self._write_state()

    def fetch(self, lease: Lease) -> None:
        """Makes the logs and small files of the local directory those of the bucket.

        They are newer than the bucket if this directory was written under the lease before this one. Lines of
        `attempts.jsonl` that are only here stay.

        Raises:
            LostError: another process has taken over.
            OSError: the bucket cannot be read, or the directory cannot be written.
        """
        names = self._remote.files()
        logs = {name.rpartition('/')[0] for name in names if '.jsonl/' in name}
        self._copied = {name for name in names if name.endswith('.jsonl')}
        for log in sorted(logs):
            has_parts = any(self._index(log).entries.values())
            if log in self._copied and has_parts:
                self._remove_copied(log)
            elif log in self._copied:  # a process was killed before it had uploaded the first part
                logs.remove(log)
        if not lease.previous or self._state.get('token') != lease.previous:
            for log in logs:
                self._fetch_log(log)
            for name in names:
                if name not in logs and '.jsonl/' not in name and _FETCHED.fullmatch(name):
                    write_file(self._local / name, (self._remote / name).read_bytes())
        self._state['token'] = lease.token
        self._write_state()

    def _fetch_log(self, log: str) -> None:
        here, digests = self._local / log, list[bytes]()

        def contents() -> Iterator[bytes]:
            for part in parts_of(self._remote / log):
                content = part.read_bytes()
                digests.append(_digest(content))
                yield content

        if log == 'attempts.jsonl' and here.is_file():
            write_file(here, merged(b''.join(contents()), here.read_bytes()))
        else:
            with new_file(here) as file:
                file.writelines(contents())
        self._uploaded[log] = _Uploaded((0, 0, 0), digests)

    def write(self, name: str, content: bytes) -> None:
        """Writes a small file in the bucket only. Raises LostError or OSError."""
        self._guard.write(self._remote / name, content)

    @contextlib.contextmanager
    def running(self) -> Iterator['Mirror']:
        """Uploads in a thread every few seconds. The end of the block does not upload: call `upload`."""
        thread = threading.Thread(target=self._run, name='upload', daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._over = True
            self._wake.set()
            thread.join()

    def upload(self, everything: bool = True, names: str = '.*') -> None:
        """Uploads what has changed.

        Args:
            everything: also large files that are not logs.
            names: regular expression of the files to upload.

        Raises:
            OSError: the bucket cannot be written.
        """
        with self._working:
            for path in sorted(self._local.rglob('*')):
                name = path.relative_to(self._local).as_posix()
                if re.fullmatch(names, name) and not _LEFT_OUT.fullmatch(name) and path.is_file():
                    with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                        self._upload_file(path, name, everything)

    def _upload_file(self, path: Path, name: str, everything: bool) -> None:
        now = path.stat()
        status = now.st_ino, now.st_size, now.st_mtime_ns
        before = self._uploaded.get(name)
        if before.status == status if before is not None else now.st_size == 0:
            return
        is_own_log = _OWN_LOGS.fullmatch(name) is not None
        if not is_own_log and not name.endswith('.jsonl'):
            if everything or now.st_size <= LARGE:
                content = path.read_bytes()
                self._guard.write(self._remote / name, content)
                self._uploaded[name] = _Uploaded(status, [])
            return
        parts = _parts(path, before, status)
        known = before.parts if before is not None else []
        changed = {number: part for number, (digest, part) in parts.items() if known[number : number + 1] != [digest]}
        if is_own_log:
            prefix = f'{name}/{self._state["birth"]}-'
            for surplus in reversed(self._surplus(prefix, len(parts), before)):  # first, so that no later line is left
                (self._remote / surplus).unlink(missing_ok=True)
            for number, content in changed.items():
                (self._remote / f'{prefix}{number:06}').write_bytes(content)
        else:
            self._write_parts(name, changed, len(parts))
        self._uploaded[name] = _Uploaded(status, [digest for digest, _ in parts.values()])

    def _write_parts(self, name: str, changed: dict[int, bytes], count: int) -> None:
        """Writes parts of a log that one process at a time writes, and makes `count` parts its content."""
        index, changes = self._index(name), dict[str, str | None]()
        for number, content in changed.items():
            part = f'{number:06}-{secrets.token_hex(6)}'
            (self._remote / name / part).write_bytes(content)
            changes[f'{number:06}'] = part
        changes |= {number: None for number, part in index.entries.items() if part and int(number) >= count}
        replaced = [part for number in changes if (part := index.entries.get(number))]
        index.change(changes)
        (self._remote / name).unlink_below(replaced)
        if name in self._copied:
            self._remove_copied(name)

    def _remove_copied(self, name: str) -> None:
        """Removes the object of a log that was copied from a disk, and has parts now."""
        (self._remote / name).unlink(missing_ok=True)
        self._copied.remove(name)

    def _index(self, name: str) -> Index:
        """The index of a log, which this process owns from now on."""
        if name not in self._indices:
            index = Index(self._remote / name, self._confirm, _without_index)
            index.claim()
            index.remove_unlisted()
            self._indices[name] = index
        return self._indices[name]

    def _surplus(self, prefix: str, count: int, before: _Uploaded | None) -> list[str]:
        """The parts of an own log that are too many for its size now."""
        if before is not None:
            return [f'{prefix}{number:06}' for number in range(count, len(before.parts))]
        directory, _, start = prefix.rpartition('/')
        names = [name for name in (self._remote / directory).files() if name.startswith(start)]
        return [f'{directory}/{name}' for name in names[count:]]

    def _write_state(self) -> None:
        write_file(self._local / _STATE, json.dumps(self._state).encode())

    def _run(self) -> None:
        is_failing = False
        while not self._over:
            self._wake.wait(EVERY)
            if self._over:
                return
            self._wake.clear()
            try:
                self.upload(everything=False)
            except OSError as error:
                if not is_failing:
                    self._report(
                        f'WARNING: {self._remote} cannot be written: {error.strerror}. Training continues, and what it '
                        f'writes waits in {self._local}'
                    )
                is_failing = True
            except Exception as error:  # the lease is lost: the training stops by itself
                self._report(f'WARNING: {error}')
                return
            else:
                if is_failing:
                    self._report(f'{self._remote} is written again')
                is_failing = False


def _parts(path: Path, before: _Uploaded | None, status: tuple[int, int, int]) -> dict[int, tuple[bytes, bytes]]:
    """{number: (digest, content)} of the parts of a file. The content of parts that cannot have changed is not read."""
    is_appended = before is not None and before.status[0] == status[0] and before.status[1] <= status[1]
    first = max(0, len(before.parts) - 1) if before is not None and is_appended else 0
    with path.open('rb') as file:
        file.seek(first * PART)
        content = file.read()
    parts = {number: (digest, b'') for number, digest in enumerate(before.parts[:first] if before is not None else [])}
    for start in range(0, len(content), PART):
        part = content[start : start + PART]
        parts[first + start // PART] = _digest(part), part
    return parts


def _without_index(files: list[str], entries: Entries | None) -> Entries:
    """The parts that an earlier version has written: 000000, 000001 and so on."""
    return {name: name for name in files if name.isdigit()} if entries is None else {}


def merged(there: bytes, here: bytes) -> bytes:
    """The lines of both files, by their `time`, each once. Lines of the same file keep their order."""
    known = set(there.splitlines())
    own = [line for line in here.splitlines() if line not in known]
    return b''.join(line + b'\n' for line in heapq.merge(there.splitlines(), own, key=_time))


def _time(line: bytes) -> float:
    """When an event happened; 0 for a line without a time."""
    record = next(read_lines([line], is_record=lambda record: isinstance(record.get('time'), int | float)), None)
    return record.record['time'] if record is not None and record.record is not None else 0.0


def _digest(part: bytes) -> bytes:
    return hashlib.blake2b(part, digest_size=16).digest()
