"""Finds and opens local files and objects behind fsspec URLs.

Every error of a storage becomes a UserError that names the path or the URL.
"""

import contextlib
import datetime
import http
import logging
import os
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import quote, unquote, urlsplit

from pretrax import storage
from pretrax.errors import UserError, install_extra, system_errors
from pretrax.storage.connection import s3_access
from pretrax.tables import read_table

# Protocols of the extra `cloud`. For any other protocol, the error names the package that fsspec needs.
_CLOUD = ('gs', 'gcs', 's3', 's3a', 'http', 'https')

_FIRST_SECONDS = 15
_contacted: set[tuple[Any, str]] = set()
# Causes by the names of exceptions and of their bases, since the packages are optional; and fixes.
_ERRORS = read_table(Path(__file__).with_suffix('.yaml'))


@dataclass(frozen=True)
class Url:
    """An object behind an fsspec URL, with the attributes of `Path` that readers use."""

    url: str

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.partition('?')[0].rstrip('/').rpartition('/')[2] if self.is_http else Path(self.url).name

    @property
    def suffix(self) -> str:
        return Path(self.name).suffix

    @property
    def is_http(self) -> bool:
        return self.url.startswith(('http://', 'https://'))


type Location = Path | Url


class State(NamedTuple):
    """Identifies a version of a file."""

    size: int | None  # bytes; None if the storage does not report it
    stamp: str  # the kind and value of a modification time or an entity tag; '' if the storage reports neither

    @classmethod
    def from_stat(cls, stat: os.stat_result) -> 'State':
        """The state of a local file."""
        return cls(stat.st_size, f'mtime {stat.st_mtime_ns}')

    def is_of(self, other: 'State') -> bool:
        """Whether both may be the same version.

        Some storage reports a time in listings and a tag for single files; these cannot be compared.
        """
        comparable = self.stamp.partition(' ')[0] == other.stamp.partition(' ')[0]
        return self.size == other.size and (self.stamp == other.stamp or not comparable)


def locate(spec: str) -> Location:
    """The Url if the text starts with a protocol, otherwise the path; file:// and local:// are paths."""
    if local := re.match(r'(?:file|local)://(?:localhost(?=/))?', spec):  # of fsspec; it may be relative
        return storage.locate_local(unquote(spec[local.end() :]))
    return Url(spec) if re.match(r'[A-Za-z][\w+.-]*://', spec) else storage.locate_local(spec)


def state(location: Location) -> State:
    """The current state of a file."""
    if isinstance(location, Path):
        with system_errors(str(location)):
            return State.from_stat(location.stat())
    filesystem, path = connect(location)
    with storage_errors(location):
        filesystem.invalidate_cache()  # cached listings would hide a change
        return state_of(filesystem.info(path))


def state_of(info: dict[str, Any]) -> State:
    """The state in the metadata of an fsspec filesystem."""
    names = ('ETag', 'etag', 'md5Hash', 'mtime', 'LastModified', 'last_modified', 'updated', 'created')
    name = next((name for name in names if info.get(name)), None)
    if name is None:
        return State(info.get('size'), '')
    value = info[name]
    value = value.timestamp() if isinstance(value, datetime.datetime) else str(value).removeprefix('W/').strip('"')
    return State(info.get('size'), f'{name.lower()} {value}')


def opened(location: Location) -> BinaryIO:
    """Opens a file for reading bytes."""
    if isinstance(location, Path):
        with system_errors(str(location)):
            return location.open('rb')
    filesystem, path = connect(location)
    with storage_errors(location):
        return filesystem.open(path, 'rb')


def connect(url: Url) -> tuple[Any, str]:
    """The fsspec filesystem of a URL, and the path inside it."""
    import fsspec

    protocol = url.url.partition('://')[0]
    logging.getLogger('gcsfs').setLevel(logging.CRITICAL)  # it logs what it raises
    try:
        filesystem, path = fsspec.url_to_fs(url.url, **(_s3_options() if protocol in ('s3', 's3a') else {}))
        if protocol in _CLOUD:
            _first_contact(filesystem, urlsplit(url.url).netloc, path)
        return filesystem, path
    except ImportError as error:
        install = install_extra('cloud') if protocol in _CLOUD else str(error)
        raise UserError(f'{url}: reading {protocol}:// needs a package that is not installed\n  {install}') from None
    except ValueError as error:
        if 'Protocol not known' not in str(error):
            raise refusal(url, error) from error
        known = ', '.join(sorted({'file', 'memory', *_CLOUD}))
        raise UserError(
            f'{url}: {protocol}:// is not a protocol that fsspec knows\n  expected for example {known}'
        ) from None
    except Exception as error:
        raise refusal(url, error) from error


def _first_contact(filesystem: Any, bucket: str, path: str) -> None:
    """Asks once for a path of each bucket or server, briefly: later requests are repeated for minutes."""
    import fsspec.asyn

    if (filesystem, bucket) in _contacted:
        return
    with contextlib.suppress(FileNotFoundError):  # the path may be a pattern
        fsspec.asyn.sync(filesystem.loop, filesystem._info, path, timeout=_FIRST_SECONDS)
    _contacted.add((filesystem, bucket))


def canonical_url(url: Url) -> str:
    """One URL for all spellings of the URL of an object, such as s3:// and s3a://, or a default port."""
    if not url.is_http:
        filesystem, path = connect(url)
        return filesystem.unstrip_protocol(path)
    parts = urlsplit(url.url)
    default = {'http': 80, 'https': 443}[parts.scheme]
    host = (parts.hostname or '') + ('' if parts.port in (None, default) else f':{parts.port}')
    place = posixpath.normpath(quote(unquote(parts.path or '/'), safe="/:@!$&'()*+,;=~"))
    return f'{parts.scheme}://{host}{place}' + (f'?{parts.query}' if parts.query else '')


def _s3_options() -> dict[str, Any]:
    """How S3 is reached, for s3fs."""
    access = s3_access()
    client = {'region_name': access.region} if access.region else None
    options = {'endpoint_url': access.endpoint, 'client_kwargs': client, 'profile': access.profile}
    return {name: value for name, value in options.items() if value}


@contextlib.contextmanager
def storage_errors(location: object) -> Iterator[None]:
    """Makes what a backend of a storage or of a dataset raises a UserError; they share no base class."""
    try:
        yield
    except (MemoryError, UserError):
        raise
    except Exception as error:
        raise refusal(location, error) from error


def refusal(location: object, error: Exception) -> UserError:
    """The UserError for an exception of a storage backend."""
    if isinstance(error, FileNotFoundError) and isinstance(location, Path | Url):
        # fsspec also raises this when a web server answers with another error than 404; that error is the cause.
        status = getattr(error.__cause__, 'status', None)
        if error.__cause__ is None or status == http.HTTPStatus.NOT_FOUND:
            return UserError(f'{location}: no such file or directory')
        if status is None:
            return (
                refusal(location, error.__cause__) if isinstance(error.__cause__, Exception) else _said(location, error)
            )
        denied = '\n  the server may need credentials, or a signed URL may have expired' if status in (401, 403) else ''
        phrase = f' {http.HTTPStatus(status).phrase}' if status in set(http.HTTPStatus) else ''
        return UserError(f'{location}: the server answered {status}{phrase}{denied}')
    return _said(location, error)


def _said(location: object, error: Exception) -> UserError:
    bases = {base.__name__ for base in type(error).__mro__}
    for known in _ERRORS['causes']:
        if isinstance(location, Url) and bases & {*known['errors']}:
            scheme = {'s3': 's3', 'gs': 'gs', 'gc': 'gs'}.get(location.url[:2], 'http')
            cause, fix = known['cause'], known['fix'].format(credentials=_ERRORS['credentials'][scheme])
            return UserError(f'{location}: {cause.format(seconds=_FIRST_SECONDS)}\n  {fix}')
    said = getattr(error, 'strerror', None) or ' '.join(str(error).split())[:400] or 'no reason given'
    return UserError(f'{location}: {said} ({type(error).__name__})')
