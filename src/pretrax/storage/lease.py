"""A lease of a path in a bucket, or in a directory that machines share: one process at a time may write there.

The lease is an object that is only written if no other process has written it in the meantime. Its holder renews it.
Another process may take it over once the holder has released it, has ended on the same machine, or has not renewed it
for the time that the object states. That time is measured by the clock of the process that watches: clocks are never
compared.

    {"holder": "process 71 on node-3", "since": "2026-11-22 12:00:05 UTC", "seconds": 60, "released": false,
     "token": "5f2c...", "renewals": 17, "process": {"host": "node-3", "pid": "71", ...}}

`token` is another one for each holder.
"""

import contextlib
import json
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from pretrax.errors import UserError
from pretrax.storage.bucket_path import BucketPath
from pretrax.storage.connection import kind_of_error
from pretrax.storage.shared_path import ConditionalPath
from pretrax.system.launchers import has_ended, identity

FILE = 'lock'  # the lease of a run directory
_RENEWALS = 4  # per duration of a lease


class HeldError(Exception):
    """Another process has the lease. The message says which one, and since when."""


class LostError(Exception):
    """Another process has taken over the lease."""


class Lease:
    """A lease that this process has or waits for.

    Args:
        seconds: for how long it is valid after each renewal.

    Attributes:
        token: another one for each holder.
        previous: the token of the holder before this one; '' if it is not known.
    """

    def __init__(
        self,
        path: ConditionalPath,
        seconds: float,
        report: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._path, self._seconds, self._report, self._clock = path, seconds, report, clock
        self.token, self.previous, self._process = secrets.token_hex(8), '', identity()
        self._since = time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())
        self._renewals, self._version, self._valid_until = 0, b'', 0.0
        self._lost = ''  # who has taken it over
        self._writing = threading.Lock()
        self._over = threading.Event()

    @contextlib.contextmanager
    def held(self) -> Iterator['Lease']:
        """Takes the lease, renews it in a thread, and releases it at the end.

        Raises:
            HeldError: another process has it.
            OSError: the bucket cannot be reached.
        """
        self._take()
        thread = threading.Thread(target=self._keep_renewing, name='lease', daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._over.set()
            thread.join()
            self._release()

    def check(self) -> None:
        """Call it before anything is written. Makes no request while the lease is known to be valid.

        Raises:
            LostError: another process has taken it over.
            OSError: the lease may have expired, and the bucket cannot be reached.
        """
        if not self._lost and self._clock() >= self._valid_until:
            self._renew()
        self.check_not_lost()

    def confirm(self) -> None:
        """Finds out by a request that this process has the lease, whatever its clock says: it may have been suspended.

        Raises:
            LostError: another process has taken it over.
            OSError: the bucket cannot be reached.
        """
        began = self._clock()
        while self._valid_until < began + self._seconds:
            self.check_not_lost()
            self._renew()
        self.check_not_lost()

    def check_not_lost(self) -> None:
        """Raises LostError if it is known that another process has taken over. Makes no request."""
        if self._lost:
            raise LostError(self._lost)

    def _take(self) -> None:
        watched, since = b'', 0.0
        while True:
            content, version = self._path.read_version()
            found = _parsed(content)
            seconds = _seconds_of(found, self._seconds)
            is_expired = version == watched and self._clock() - since >= seconds
            if found.get('token') == self.token:  # written, although the answer was lost
                self._version = version
                return
            if content is None or found.get('released') is True or _has_ended(found) or is_expired:
                self.previous = str(found.get('token', ''))
                if self._write(version):
                    return
            elif not watched:
                watched, since = version, self._clock()
                self._report(
                    f'{_described(self._path, found)}; waiting up to {seconds:.0f} s to see whether it still runs'
                )
            elif version != watched:
                raise HeldError(f'{_described(self._path, found)}, and still renews its lease of {seconds:.0f} s')
            time.sleep(min(1.0, seconds / 20))

    def _keep_renewing(self) -> None:
        is_failing = False
        while not self._over.wait(self._seconds / _RENEWALS) and not self._lost:
            try:
                self._renew()
                is_failing = False
            except OSError as error:
                if not is_failing:
                    self._report(
                        f'WARNING: the lease {self._path} cannot be renewed: {error.strerror}. It is tried again'
                    )
                is_failing = True

    def _renew(self) -> None:
        with self._writing:
            if self._write(self._version) or self._lost:
                return
            content, version = self._path.read_version()
            found = _parsed(content)
            if found.get('token') == self.token:  # an earlier write, whose answer was lost
                self._version = version
                self._write(version)
            elif content is None:  # it was removed; whoever creates it first has it
                self._write(version)
            else:
                self._lost = _described(self._path, found)

    def _write(self, expected: bytes, released: bool = False) -> bool:
        """Writes the lease if it has the expected version. Returns whether it did."""
        began = self._clock()
        self._renewals += 1
        lease = {
            'holder': f'process {self._process["pid"]} on {self._process["host"]}',
            'since': self._since,
            'seconds': self._seconds,
            'released': released,
            'token': self.token,
            'renewals': self._renewals,
            'process': self._process,
        }
        version = self._path.write_version(json.dumps(lease, indent=1).encode(), expected)
        if version is None:
            return False
        self._version, self._valid_until = version, began + self._seconds
        return True

    def _release(self) -> None:
        if self._lost:
            return
        with self._writing:
            try:
                self._write(self._version, released=True)
            except OSError as error:
                self._report(
                    f'WARNING: the lease {self._path} cannot be released: {error.strerror}. '
                    f'Another machine has to wait {self._seconds:.0f} s for it'
                )


@contextlib.contextmanager
def held_for(out: BucketPath, seconds: float, report: Callable[[str], None]) -> Iterator[Callable[[], None]]:
    """Holds the lease of the directory that a verb writes, the value of its `--out`.

    Yields:
        A function that raises UserError if another process has taken over, which it finds out by a request.

    Raises:
        UserError: another process writes the directory, or the bucket cannot be reached.
    """
    lease = Lease(out / FILE, seconds, report)

    def confirm() -> None:
        with _user_errors(out):
            lease.confirm()

    with contextlib.ExitStack() as stack:
        with _user_errors(out):
            stack.enter_context(lease.held())
        yield confirm


@contextlib.contextmanager
def _user_errors(out: BucketPath) -> Iterator[None]:
    try:
        yield
    except (HeldError, LostError) as error:
        raise UserError(f'--out: {error}\nuse another directory, or wait for it') from error
    except OSError as error:
        raise kind_of_error(error)(f'--out {out}: {error.strerror}\nrun the same command again') from error


def holder_of(path: ConditionalPath) -> str:
    """What a lease says about its holder; '': none, released, or its process has ended. Raises OSError."""
    return renewal_of(path).holder


class Renewal(NamedTuple):
    """What a lease says about its holder, as `holder_of`; its version, which each renewal changes; for how long it is
    valid after a renewal."""

    holder: str
    version: bytes
    seconds: float


def renewal_of(path: ConditionalPath) -> Renewal:
    """The newest renewal of a lease. Raises OSError."""
    content, version = path.read_version()
    found = _parsed(content)
    is_free = content is None or found.get('released') is True or _has_ended(found)
    return Renewal('' if is_free else _described(path, found), version, _seconds_of(found))


def _parsed(content: bytes | None) -> dict[str, Any]:
    """The lease; {} if there is none, or if it was not written by a lease."""
    try:
        found = json.loads(content or b'')
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _seconds_of(found: dict[str, Any], otherwise: float = 60.0) -> float:
    seconds = found.get('seconds')
    return seconds if isinstance(seconds, int | float) and 0 < seconds < 1e6 else otherwise


def _has_ended(found: dict[str, Any]) -> bool:
    process = found.get('process')
    return isinstance(process, dict) and has_ended(process)


def _described(path: ConditionalPath, found: dict[str, Any]) -> str:
    holder, since = str(found.get('holder', 'another process'))[:100], str(found.get('since', 'an unknown time'))[:100]
    return f'{path.parent} is held by {holder} since {since}'
