"""Copies a directory on a disk to a bucket while a program writes there.

A thread uploads what has changed. Logs are uploaded in parts (`parts.py`), other files whole. A failed upload is a warning,
and is tried again. Objects whose files are gone stay.
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

from pretrax.machine.atomic import write_file
from pretrax.machine.line_files import read_lines
from pretrax.storage.bucket_path import BucketPath
from pretrax.storage.parts import PART

EVERY = 10.0  # seconds between uploads
LARGE = 4 << 20  # bytes; larger files that are not logs are only uploaded at the end and on request
_FETCHED = re.compile(r'[^/]*\.jsonl|[^/]*-run-id|[^/]*\.yaml|[^/]*\.txt|data/stream-\w+\.json')
_OWN_LOGS = re.compile(r'(output|stacks)/.*')  # logs of this machine: others have their own parts
_LEFT_OUT = re.compile(
    r'lock|newest_checkpoint|(.*/)?\..*|checkpoints/.*|data/(?!(.*/)?(tokenizer|stream-\w+)\.json$).*'
)
_STATE = '.mirror.json'  # {"birth": name for the parts of own logs, "fence": of the lease that last wrote here}


class _Uploaded(NamedTuple):
    """A file as it was uploaded. `parts`: a digest of each."""

    status: tuple[int, int, int]
    parts: list[bytes]


class Mirror:
    """Uploads a directory.

    Args:
        local: the directory.
        remote: where it is uploaded.
        may_write: called before each upload; raises an exception if another process may write there now.
        report: receives warnings.
    """

    def __init__(self, local: Path, remote: BucketPath, may_write: Callable[[], None], report: Callable[[str], None]):
        self._local, self._remote, self._may_write, self._report = local, remote, may_write, report
        self._uploaded: dict[str, _Uploaded] = {}
        self._working = threading.Lock()
        self._wake, self._over = threading.Event(), False
        state = self._local / _STATE
        self._state = json.loads(state.read_bytes()) if state.is_file() else {'birth': _birth(), 'fence': 0}
        self._write_state()

    def fetch(self, fence: int) -> None:
        """Makes the logs and small files of the local directory those of the bucket.

        They are newer than the bucket if this directory was written under the lease before this one. Lines of
        `attempts.jsonl` that are only here stay.

        Args:
            fence: that of the lease of this process.

        Raises:
            OSError: the bucket cannot be read, or the directory cannot be written.
        """
        if self._state['fence'] != fence - 1 or fence == 1:
            contents: dict[str, bytes] = {}
            for name in self._remote.files():
                file = name.rpartition('/')[0] if '.jsonl/' in name else name
                if _FETCHED.fullmatch(file):
                    contents[file] = contents.get(file, b'') + (self._remote / name).read_bytes()
            for file, content in contents.items():
                parts = [content[start : start + PART] for start in range(0, len(content), PART)]
                self._uploaded[file] = _Uploaded((0, 0, 0), [_digest(part) for part in parts])
                here = self._local / file
                if file == 'attempts.jsonl' and here.is_file():
                    content = merged(content, here.read_bytes())
                write_file(here, content)
        self._state['fence'] = fence
        self._write_state()

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
                self._may_write()
                (self._remote / name).write_bytes(content)
                self._uploaded[name] = _Uploaded(status, [])
            return
        prefix = f'{name}/{self._state["birth"]}-' if is_own_log else f'{name}/'
        self._uploaded[name] = _Uploaded(status, self._upload_parts(path, prefix, before, status))

    def _upload_parts(
        self, path: Path, prefix: str, before: _Uploaded | None, status: tuple[int, int, int]
    ) -> list[bytes]:
        is_appended = before is not None and before.status[0] == status[0] and before.status[1] <= status[1]
        first = max(0, len(before.parts) - 1) if before is not None and is_appended else 0
        with path.open('rb') as file:
            file.seek(first * PART)
            content = file.read()
        parts = [content[start : start + PART] for start in range(0, len(content), PART)]
        digests = [_digest(part) for part in parts]
        self._may_write()
        for name in reversed(self._surplus(prefix, first + len(parts), before)):  # first, so that no later line is left
            (self._remote / name).unlink(missing_ok=True)
        for number, (part, digest) in enumerate(zip(parts, digests, strict=True), first):
            known = before.parts[number : number + 1] if before is not None else []
            if known != [digest]:
                (self._remote / f'{prefix}{number:06}').write_bytes(part)
        return [*(before.parts[:first] if before is not None else []), *digests]

    def _surplus(self, prefix: str, count: int, before: _Uploaded | None) -> list[str]:
        """The parts of a file that are too many for its size now."""
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


def _birth() -> str:
    """A name for a new directory that sorts by time."""
    return f'{time.strftime("%Y%m%dT%H%M%S", time.gmtime())}-{secrets.token_hex(3)}'
