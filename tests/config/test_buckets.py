"""Configurations in buckets, and how a configuration says how buckets are reached."""

import json

import pytest

from config.smallest import VALUES
from pretrax.config import from_manifest, from_values, load
from pretrax.errors import UserError
from pretrax.storage import BucketPath, locate
from pretrax.storage.connection import open_bucket, s3_spec


def test_a_configuration_and_its_bases_are_read_from_a_bucket(bucket):
    bucket.put('configs/base.yaml', json.dumps(VALUES).encode())
    bucket.put('configs/sizes/small.yaml', b'extends: ../base.yaml\nmodel: {d_model: 32}\n')
    bucket.put('run.yaml', f'extends: [configs/sizes/small.yaml, "{bucket.url}/configs/more.yaml"]\n'.encode())
    bucket.put('configs/more.yaml', b'steps: 7\n')
    config = load(f'{bucket.url}/run.yaml', ['seed=3'])
    assert (config.model.model_dump()['d_model'], config.steps, config.seed) == (32, 7, 3)
    assert config.origins['steps',] == f'{bucket.url}/configs/more.yaml:1'
    bucket.put('circle.yaml', b'extends: circle.yaml')
    for name, message in (('circle', 'circular'), ('none', 'does not exist')):
        with pytest.raises(UserError, match=message):
            load(f'{bucket.url}/{name}.yaml')


def test_a_plugin_in_a_bucket_is_not_imported(bucket):
    bucket.put('plugin.py', b'raise SystemExit')
    bucket.put('run.yaml', json.dumps(VALUES | {'plugins': ['plugin.py']}).encode())
    with pytest.raises(UserError, match=r'plugin\.py is in a bucket; expected a local file'):
        load(f'{bucket.url}/run.yaml')


@pytest.mark.parametrize('url', ['ftp://host/x', 'gs:/bucket/run', 'http://host/x.yaml', 'gcs://b/x', 's3a://b/x'])
def test_other_schemes_are_refused(url):
    for use in (lambda: load(url), lambda: from_values(VALUES | {'run_dir': url})):
        with pytest.raises(UserError, match=r'expected a local path|two slashes|write '):
            use()


def test_a_file_url_is_a_path(tmp_path):
    (tmp_path / 'run.yaml').write_text(json.dumps(VALUES | {'run_dir': f'file://{tmp_path}/run'}))
    assert load(f'file://{tmp_path}/run.yaml').run_dir == tmp_path / 'run'


@pytest.mark.parametrize(
    ('directory', 'text', 'expected'),
    [
        ('s3://b/a/c', 'x.yaml', 's3://b/a/c/x.yaml'),
        ('s3://b/a/c', '../x.yaml', 's3://b/a/x.yaml'),
        ('s3://b', '../../x.yaml', 's3://b/x.yaml'),
        ('s3://b/a', '/x.yaml', '/x.yaml'),
        ('s3://b/a', 'gs://c/x.yaml', 'gs://c/x.yaml'),
        ('a/b', 'gs://c/x.yaml', 'gs://c/x.yaml'),
        ('a/b', '../x.yaml', 'a/x.yaml'),
    ],
)
def test_a_path_is_relative_to_the_file_that_names_it(directory, text, expected):
    assert locate(text, locate(directory)) == locate(expected)


def test_the_section_storage_says_how_buckets_are_reached(monkeypatch):
    for name in ('AWS_ENDPOINT_URL', 'AWS_REGION', 'AWS_ACCESS_KEY_ID'):
        monkeypatch.delenv(name, raising=False)
    given = {'endpoint': 'http://127.0.0.1:9000', 'region': 'eu-west-1', 'profile': 'minio', 'retry_seconds': 5}
    config = from_values(VALUES | {'storage': given})
    spec = s3_spec('b')
    assert (spec['endpoint'], spec['aws_region']) == ('http://127.0.0.1:9000', 'eu-west-1')
    assert spec['aws_credentials'] == {'type': 'default', 'profile': 'minio'}
    assert config.storage.model_dump() == given
    with pytest.raises(UserError, match=r'storage\.endpoint'):
        from_values(VALUES | {'storage': {'endpoint': 'minio:9000'}})
    from_manifest(VALUES | {'storage': {'endpoint': 'http://theirs'}})
    assert s3_spec('b')['endpoint'] == 'http://127.0.0.1:9000'  # a manifest changes nothing


def test_weights_to_start_from_are_read_with_the_settings_of_the_same_configuration(s3, monkeypatch):
    monkeypatch.delenv('AWS_ENDPOINT_URL')
    open_bucket.cache_clear()
    s3.put('x', b'1')
    from_values(VALUES | {'storage': {'endpoint': s3.environment['AWS_ENDPOINT_URL']}})
    assert BucketPath(f'{s3.url}/x').read_bytes() == b'1'
