"""Texts that name paths: local ones, buckets, and schemes that are refused."""

from pathlib import Path

import pytest

from pretrax.errors import UserError
from pretrax.storage import BucketPath, locate


@pytest.mark.parametrize(
    ('text', 'path'),
    [
        ('runs/a', Path('runs/a')),
        ('/runs/a', Path('/runs/a')),
        ('~/a', Path.home() / 'a'),
        ('file:///runs/a', Path('/runs/a')),
        ('file://localhost/runs/a', Path('/runs/a')),
        ('a:b/c', Path('a:b/c')),
        ('gs://bucket/a', BucketPath('gs://bucket/a')),
        ('S3://bucket/a', BucketPath('s3://bucket/a')),
    ],
)
def test_a_text_names_a_path(text, path):
    assert locate(text) == path


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('ftp://host/a', r'ftp:// is not supported here\n.*gs://, s3://, file://'),
        ('gcs://bucket/a', r'did you mean gs://\?'),
        ('gs:/bucket/a', r'two slashes after the scheme\nwrite gs://bucket/a'),
        ('file://a/b', r'absolute path'),
        ('gs://', r'expected gs://BUCKET/PATH'),
        ('a\0b', r'NUL'),
    ],
)
def test_other_schemes_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        locate(text)
