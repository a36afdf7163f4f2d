"""Texts that name paths: local ones, buckets, and schemes that are refused."""

from pathlib import Path

import pytest

from pretrax.errors import UserError
from pretrax.storage import BucketPath, locate, locate_local, locate_run


@pytest.mark.parametrize(
    ('text', 'path'),
    [
        ('runs/a', Path('runs/a')),
        ('/runs/a', Path('/runs/a')),
        ('~/a', Path.home() / 'a'),
        ('file:///runs/a', Path('/runs/a')),
        ('file://localhost/runs/a', Path('/runs/a')),
        ('a:b/c', Path('a:b/c')),
        ('./a//b/./', Path('a/b')),
        ('//runs//a', Path('/runs/a')),
        ('a/../b', Path('b')),
        ('/a/../b', Path('/b')),
        ('file:///a/../b', Path('/b')),
        ('file:///a%20b/%E8%AA%9E%25', Path('/a b/語%')),
        ('/a%20b?c#d*[e]', Path('/a%20b?c#d*[e]')),
        ('gs://bucket/a%20b #?[1]/語', BucketPath('gs://bucket/a%20b #?[1]/語')),
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
        ('file:///a%00b', r'NUL'),
        ('~nobody-of-that-name/a', 'no such home directory'),
        ('C:/runs/a', 'a path of Windows'),
        ('runs\\a', 'write runs/a'),
        ('gs://bucket/a/../b', "no '..'"),
    ],
)
def test_other_schemes_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        locate(text)


def test_what_is_above_is_absolute_and_links_lead_where_the_system_says(tmp_path, monkeypatch):
    """TensorStore refuses `..`; `link/..` is the parent of what the link names, not of the link."""
    (tmp_path / 'here').mkdir()
    (tmp_path / 'far' / 'away').mkdir(parents=True)
    (tmp_path / 'here' / 'link').symlink_to('../far/away')
    monkeypatch.chdir(tmp_path / 'here')
    assert locate('../run') == tmp_path / 'run'
    assert locate('link/../run') == tmp_path / 'far' / 'run'
    assert locate('link/run') == Path('link/run'), 'a link is kept'
    assert locate('../run', tmp_path / 'far' / 'away') == tmp_path / 'far' / 'run'
    assert locate('/run', tmp_path) == Path('/run')
    with pytest.raises(UserError, match='gs://b/a is in a bucket; expected a local path'):
        locate_local('gs://b/a')


def test_a_name_is_that_of_a_run_below_runs_unless_it_exists_here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'runs' / 'quickstart').mkdir(parents=True)
    assert locate_run('quickstart') == Path('runs/quickstart')
    assert locate_run('other') == Path('other')
    assert locate_run('./runs/quickstart') == Path('runs/quickstart')
    assert locate_run('a/quickstart') == Path('a/quickstart')
    (tmp_path / 'quickstart').mkdir()
    assert locate_run('quickstart') == Path('quickstart')
