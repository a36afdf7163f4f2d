"""How buckets are reached: endpoint, region, profile and retries. Opens them, and turns errors into OSErrors."""

import dataclasses
import errno
import functools
import os
import re
from typing import Any, NamedTuple

from pretrax.errors import UnavailableError, UserError
from pretrax.system.software import need_extra

_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 8.0  # seconds; TensorStore doubles the first one before it uses it

# TensorStore's Python errors have no codes: the status is the first word of the text.
_STATUS = re.compile(r'^([A-Z_]+): ')
_OF_A_DISK = re.compile(r"os_error_code='(\d+)'")
_HTTP = re.compile(r"\[http_response_code='(\d+)'\]")
_NOISE = re.compile(r'^[A-Z_]+: (All \d+ retry attempts failed: )?(CURL error )?')
_NO_CONNECTION = re.compile(r"\[curl_code='(5|6|7|35|60)'\]")  # no proxy, no host, refused, TLS, certificate
_TEMPORARY = ('UNAVAILABLE', 'DEADLINE_EXCEEDED', 'ABORTED', 'RESOURCE_EXHAUSTED')


class BucketError(OSError):
    """A request to a bucket failed. `strerror` is the reason, `filename` the URL.

    Attributes:
        is_temporary: the service could not be reached, failed or was overloaded: the same request may succeed later.
    """

    def __init__(self, number: int, reason: str, url: str, is_temporary: bool):
        super().__init__(number, reason, url)
        self.is_temporary = is_temporary


def kind_of_error(error: OSError) -> type[UserError]:
    """UnavailableError if the same command may succeed later, because a bucket did not answer; otherwise UserError."""
    return UnavailableError if isinstance(error, BucketError) and error.is_temporary else UserError


@functools.lru_cache
def open_bucket(scheme: str, bucket: str) -> Any:
    """The TensorStore KvStore of a whole bucket; raises what TensorStore raises, or UserError if it is not installed.

    The first contact is brief: an address that nothing listens at, such as a misspelt endpoint, is reported within
    seconds.
    """
    need_extra('cloud', f'{scheme}://{bucket}', 'tensorstore')
    import tensorstore as ts

    for name, value in _TIMEOUTS.items():  # before the first request
        os.environ.setdefault(name, value)
    spec = gcs_spec(bucket) if scheme == 'gs' else s3_spec(bucket)

    def connect(retries: int) -> Any:
        pauses = {'initial_delay': f'{_FIRST_PAUSE}s', 'max_delay': f'{_LONGEST_PAUSE}s', 'max_retries': retries}
        context = ts.Context({f'{spec["driver"]}_request_retries': pauses})
        return ts.KvStore.open(spec, context=context).result()

    try:
        connect(min(2, _retries())).read('-').result()
    except Exception as error:  # the drivers share no base class
        if _NO_CONNECTION.search(str(error)):
            raise
    return connect(_retries())


def disk_error(text: str) -> OSError | None:
    """The error of the operating system that TensorStore quotes in a text; None: it quotes none."""
    found = _OF_A_DISK.search(text)
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else None


def as_os_error(error: Exception, url: str) -> OSError:
    """The OSError for an exception of TensorStore."""
    text = ' '.join(str(error).split())
    if of_disk := disk_error(text):
        of_disk.filename = url
        return of_disk
    status = found[1] if (found := _STATUS.match(text)) else ''
    reason = _NOISE.sub('', text.split(' [http_')[0].split(' [curl_')[0])[:300] or type(error).__name__
    if code := _HTTP.search(text):
        reason = f'HTTP {code[1]}' if reason == 'Unknown' else f'HTTP {code[1]}, {reason}'
    if status == 'NOT_FOUND':
        return FileNotFoundError(errno.ENOENT, f'No such bucket or object ({reason})', url)
    if status in ('PERMISSION_DENIED', 'UNAUTHENTICATED'):
        return PermissionError(errno.EACCES, f'Access denied ({reason})', url)
    is_temporary = status in _TEMPORARY
    return BucketError(
        errno.EIO, f'The service does not answer ({reason})' if is_temporary else reason, url, is_temporary
    )


def _retries() -> int:
    """How often TensorStore may repeat a request within the retry time. It waits 0.5 s, 1 s, 2 s, ... before each."""
    left, pause, count = retry_seconds(), 2 * _FIRST_PAUSE, 0
    while left > 0:
        left, pause, count = left - pause, min(2 * pause, _LONGEST_PAUSE), count + 1
    return count


# Without these, TensorStore waits forever for a server that accepts a connection and sends nothing.
_TIMEOUTS = {
    'TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS': '15',
    'TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS': '30',
    'TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES': '1024',
}
RETRY_SECONDS = 'PRETRAX_STORAGE_RETRY_SECONDS'


@dataclasses.dataclass(frozen=True)
class StorageSettings:
    """How buckets are reached. What is None is taken from the environment."""

    # URL of an S3-compatible service; else AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or Amazon
    endpoint: str | None = None
    # Region of the S3 bucket; else AWS_REGION, AWS_DEFAULT_REGION, or what the service reports
    region: str | None = None
    profile: str | None = None  # profile of `~/.aws/credentials` and `~/.aws/config`; else AWS_PROFILE
    # For how long a failing request is repeated, with growing pauses; else PRETRAX_STORAGE_RETRY_SECONDS, or 60
    retry_seconds: float | None = None


_settings = StorageSettings()


def use_settings(settings: StorageSettings) -> None:
    """Sets how this process reaches buckets. Buckets that are open already keep their settings."""
    global _settings
    _settings = settings


def s3_spec(bucket: str) -> dict[str, object]:
    """The TensorStore specification of an S3 bucket."""
    env = os.environ
    endpoint = _settings.endpoint or env.get('AWS_ENDPOINT_URL_S3') or env.get('AWS_ENDPOINT_URL')
    region = _settings.region or env.get('AWS_REGION') or env.get('AWS_DEFAULT_REGION')
    spec: dict[str, object] = {'driver': 's3', 'bucket': bucket}
    if endpoint:
        spec['endpoint'] = endpoint.rstrip('/')
        region = region or 'us-east-1'  # services that are not Amazon's rarely have regions, but a signature names one
    if region:
        spec['aws_region'] = region
    if _settings.profile:
        spec['aws_credentials'] = {'type': 'default', 'profile': _settings.profile}
    elif 'AWS_ACCESS_KEY_ID' in env and 'AWS_SECRET_ACCESS_KEY' in env and 'AWS_PROFILE' not in env:
        spec['aws_credentials'] = {'type': 'environment'}  # the default chain would warn that ~/.aws is missing
    return spec


class S3Access(NamedTuple):
    """How S3 is reached, for programs other than TensorStore; None: they decide."""

    endpoint: str | None
    region: str | None
    profile: str | None


def s3_access() -> S3Access:
    """How S3 is reached, by the settings and the environment."""
    spec: dict[str, Any] = s3_spec('-')
    return S3Access(spec.get('endpoint'), spec.get('aws_region'), spec.get('aws_credentials', {}).get('profile'))


def gcs_spec(bucket: str) -> dict[str, object]:
    """The TensorStore specification of a bucket of Google Cloud Storage."""
    emulator = os.environ.get('STORAGE_EMULATOR_HOST')
    if emulator:
        url = emulator.rstrip('/') if '://' in emulator else f'http://{emulator.rstrip("/")}'
        os.environ.setdefault('TENSORSTORE_GCS_HTTP_URL', url)
        os.environ.setdefault('GOOGLE_AUTH_TOKEN_FOR_TESTING', 'emulator')  # an emulator needs no credentials
    return {'driver': 'gcs', 'bucket': bucket}


def retry_seconds() -> float:
    """For how long a failing request is repeated."""
    if _settings.retry_seconds is not None:
        return _settings.retry_seconds
    return float(os.environ.get(RETRY_SECONDS, 60))
