"""How buckets are reached: endpoint, region, profile and retries."""

import dataclasses
import os
from typing import Any, NamedTuple

# Without these, TensorStore waits forever for a server that accepts a connection and sends nothing.
_TIMEOUTS = {
    'TENSORSTORE_CURL_CONNECT_TIMEOUT_SECONDS': '15',
    'TENSORSTORE_CURL_LOW_SPEED_TIME_SECONDS': '30',
    'TENSORSTORE_CURL_LOW_SPEED_LIMIT_BYTES': '1024',
}
RETRY_SECONDS = 'PRETRAX_STORAGE_RETRY_SECONDS'


@dataclasses.dataclass(frozen=True)
class StorageSettings:
    """How buckets are reached. What is None is taken from the environment.

    Attributes:
        endpoint: URL of an S3-compatible service; else AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, or Amazon.
        region: region of the S3 bucket; else AWS_REGION, AWS_DEFAULT_REGION, or what the service reports.
        profile: profile of `~/.aws/credentials` and `~/.aws/config`; else AWS_PROFILE.
        retry_seconds: for how long a failing request is repeated, with growing pauses; else
            PRETRAX_STORAGE_RETRY_SECONDS, or 60.
    """

    endpoint: str | None = None
    region: str | None = None
    profile: str | None = None
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


def set_timeouts() -> None:
    """Sets TensorStore's time limits, unless the environment does. Must be called before its first request."""
    for name, value in _TIMEOUTS.items():
        os.environ.setdefault(name, value)


def retry_seconds() -> float:
    """For how long a failing request is repeated."""
    if _settings.retry_seconds is not None:
        return _settings.retry_seconds
    return float(os.environ.get(RETRY_SECONDS, 60))
