"""Where bytes lie: a file of this machine, or an object behind an fsspec URL. Finding, measuring and opening them.

Whatever a storage refuses becomes a UserError that names the path or the address.
"""

import datetime
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from pretrax.errors import UserError

# What the extra `cloud` installs; any other protocol that fsspec knows is named with the package fsspec asks for.
_CLOUD = ('gs', 'gcs', 's3', 's3a', 'http', 'https')


@dataclass(frozen=True)
class Url:
    """An object behind an fsspec URL, with as much of `Path` as readers ask for."""

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
    """What tells one version of a file from another. `stamp` is a time of change or an entity tag with its name, '' where
    the storage tells neither; `size` is in bytes, None where it is not told."""

    size: int | None
    stamp: str

    def is_of(self, other: 'State') -> bool:
        """Whether both may be of one version. A storage may tell the time in a listing, and a tag when asked for a file:
        those say nothing about each other."""
        comparable = self.stamp.partition(' ')[0] == other.stamp.partition(' ')[0]
        return self.size == other.size and (self.stamp == other.stamp or not comparable)


def locate(spec: str) -> Location:
    """A path, or the Url where the text begins with a protocol; file:// is a path."""
    if spec.startswith('file://'):
        return Path(spec.removeprefix('file://'))
    return Url(spec) if re.match(r'[A-Za-z][\w+.-]*://', spec) else Path(spec).expanduser()


def state(location: Location) -> State:
    """The state in which a file is now."""
    if isinstance(location, Path):
        try:
            found = location.stat()
        except OSError as error:
            raise UserError(f'{location}: {error.strerror}') from None
        return State(found.st_size, f'mtime {found.st_mtime_ns}')
    filesystem, path = connect(location)
    try:
        filesystem.invalidate_cache()  # listings are cached, and would hide a change
        return state_of(filesystem.info(path))
    except Exception as error:
        raise refusal(location, error) from error


def state_of(info: dict[str, Any]) -> State:
    """The state that an fsspec filesystem tells."""
    names = ('ETag', 'etag', 'md5Hash', 'mtime', 'LastModified', 'last_modified', 'updated', 'created')
    name = next((name for name in names if info.get(name)), None)
    if name is None:
        return State(info.get('size'), '')
    told = info[name]
    told = told.timestamp() if isinstance(told, datetime.datetime) else str(told).removeprefix('W/').strip('"')
    return State(info.get('size'), f'{name.lower()} {told}')


def opened(location: Location) -> BinaryIO:
    """The bytes of a file, to be read from the beginning."""
    if isinstance(location, Path):
        try:
            return location.open('rb')
        except OSError as error:
            raise UserError(f'{location}: {error.strerror}') from None
    filesystem, path = connect(location)
    try:
        return filesystem.open(path, 'rb')
    except Exception as error:
        raise refusal(location, error) from error


def connect(url: Url) -> tuple[Any, str]:
    """The fsspec filesystem of a URL, and the path in it."""
    import fsspec

    protocol = url.url.partition('://')[0]
    try:
        return fsspec.url_to_fs(url.url)
    except ImportError as error:
        install = "pip install 'pretrax[cloud]'" if protocol in _CLOUD else str(error)
        raise UserError(f'{url}: reading {protocol}:// takes a package that is not installed\n  {install}') from None
    except ValueError as error:
        if 'Protocol not known' not in str(error):
            raise refusal(url, error) from error
        known = ', '.join(sorted({'file', 'memory', *_CLOUD}))
        raise UserError(f'{url}: {protocol}:// is no storage that fsspec knows\n  for example {known}') from None
    except Exception as error:
        raise refusal(url, error) from error


def refusal(location: Location, error: Exception) -> UserError:
    """What a storage said, as an error of the user's. Each backend of fsspec has exceptions of its own."""
    if isinstance(error, UserError):
        return error
    if isinstance(error, FileNotFoundError):
        return UserError(f'{location}: no such file or directory')
    said = getattr(error, 'strerror', None) or ' '.join(str(error).split())[:200] or 'no reason given'
    return UserError(f'{location}: {said} ({type(error).__name__})')
