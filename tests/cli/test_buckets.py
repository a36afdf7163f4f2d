"""Every verb that takes a path takes one in a bucket, and does there what it does on a disk."""

import json
import re

import pytest

from pretrax import config_from_values, pretrain
from pretrax.checkpoint import CheckpointWeights
from pretrax.cli import main
from pretrax.storage import locate
from pretrax.storage.staging import written_directory
from runs import Quiet, small_values, write_documents, write_yaml


@pytest.fixture(scope='module')
def disk(tmp_path_factory):
    """A directory with a run, `run`, of one checkpoint."""
    directory = tmp_path_factory.mktemp('disk')
    values = small_values(write_documents(directory), directory)
    values |= {'mesh': {'r': 8, 'd': 1, 't': 1}, 'checkpoint': {'every': 6}}
    pretrain(config_from_values(values), progress=Quiet())
    write_yaml(values, directory / 'run.yaml')
    return directory


@pytest.fixture
def place(s3, disk):
    """The same in a bucket."""
    place = locate(f'{s3.url}/place')
    with written_directory(place) as local:
        local.symlink_to(disk)
    return place


def said(capsys, *arguments, code=0):
    with pytest.raises(SystemExit) as end:
        main(list(map(str, arguments)))
    out, err = capsys.readouterr()
    assert (end.value.code or 0) == code, err
    return out + err


def untimed(text):
    """Text without what differs between two runs of a command: ages and the line on its speed."""
    return re.sub(r' (-|\d+ (s|min) ago) |^\d+ tokens in .* prompt tokens/s$', ' ', text, flags=re.MULTILINE)


@pytest.mark.slow
def test_verbs_that_read_print_what_they_print_for_a_run_on_a_disk(place, disk, capsys):
    for command in ('generate {}/run --prompt abc --tokens 6', 'generate {}/run/checkpoints/6 --tokens 4',
                    'checkpoint list {}/run', 'checkpoint inspect {}/run --files', 'checkpoint verify {}/run',
                    'checkpoint diff {}/run/checkpoints/6 {}/run', 'plot {}/run', 'config show {}/run/config.yaml',
                    'config diff {}/run.yaml {}/run/config.yaml'):  # fmt: skip
        there, here = (said(capsys, *command.replace('{}', str(root)).split()) for root in (place, disk))
        texts = (untimed(text).replace(str(place), '').replace(str(disk), '').split() for text in (there, here))
        assert next(texts) == next(texts), command


@pytest.mark.slow
def test_verbs_that_write_write_the_same_files(place, disk, s3, tmp_path, capsys):
    for command in ('export {}/run OUT/hf', 'checkpoint export-weights {}/run OUT/weights',
                    'plot {}/run --out OUT/loss.svg'):  # fmt: skip
        for root, out in ((place, f'{s3.url}/out'), (disk, tmp_path)):
            said(capsys, *command.replace('{}', str(root)).replace('OUT', str(out)).split())
    files = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob('*') if path.is_file())
    assert [key.removeprefix('out/') for key in s3.keys('out/')] == files
    for name in files:
        assert s3.content(f'out/{name}') == (tmp_path / name).read_bytes(), name
    again = said(capsys, 'export', place / 'run', f'{s3.url}/out/hf', code=2)
    assert 'exists and is not empty' in again


@pytest.mark.slow
def test_runs_that_are_made_in_a_bucket_can_be_read_there(place, s3, capsys):
    mean = locate(f'{s3.url}/mean')
    said(capsys, 'checkpoint', 'average', place / 'run', place / 'run', '--out', mean)
    said(capsys, 'checkpoint', 'verify', mean)
    text = said(capsys, 'generate', mean, '--prompt', 'abc', '--tokens', '4')
    assert text.startswith('abc')
    said(capsys, 'export', mean, f'{s3.url}/hf')
    said(capsys, 'import', f'{s3.url}/hf', '--out', f'{s3.url}/imported')
    assert json.loads(s3.content('imported/checkpoints/0/manifest.json'))['description']['config']['run_dir'] == (
        f'{s3.url}/imported'
    )
    before, after = (CheckpointWeights(locate(f'{s3.url}/{run}') / 'checkpoints', 0) for run in ('mean', 'imported'))
    assert before.shapes == after.shapes
    for name in before.shapes.keys() - {
        'embed',
        'unembed',
    }:  # an import fills their rows without tokens with zeros
        assert before.read(name).tobytes() == after.read(name).tobytes()
    assert untimed(said(capsys, 'generate', f'{s3.url}/imported', '--prompt', 'abc', '--tokens', '4')) == untimed(text)


@pytest.mark.slow
def test_a_run_starts_from_weights_in_a_bucket(place, disk, tmp_path):
    values = json.loads((disk / 'run.yaml').read_text()) | {'steps': 2, 'schedule': {}, 'model': {}}
    states = [
        pretrain(
            config_from_values(values | {'run_dir': str(tmp_path / name), 'init_from': f'{root}/run'}), progress=Quiet()
        )
        for name, root in (('there', place), ('here', disk))
    ]
    losses = [(tmp_path / name / 'metrics.jsonl').read_text().partition('"grad_norm"')[0] for name in ('there', 'here')]
    assert losses[0] == losses[1]
    assert len(states) == 2


@pytest.mark.parametrize('scheme', ['ftp://host', 'http://host', 'gs:', 'gcs://bucket', 'S4://bucket'])
@pytest.mark.parametrize('command', [
    'generate {}/run', 'export {}/run out', 'checkpoint list {}/run', 'checkpoint inspect {}/run',
    'checkpoint verify {}/run', 'checkpoint diff {}/a {}/b', 'checkpoint average {}/run --out x',
    'checkpoint export-weights {}/run x', 'plot {}/run', 'config show {}/x.yaml', 'train {}/x.yaml',
    'train quickstart run_dir={}/run', 'train quickstart init_from={}/run', 'import {}/hf', 'bench {}/x.yaml',
    'init {}/mine', 'train quickstart --compiled {}/step', 'compile quickstart --save {}/step',
    'launch local quickstart -n 2 run_dir={}/run',
])  # fmt: skip
def test_other_schemes_are_refused(command, scheme, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = said(capsys, *command.replace('{}', f'{scheme}/x').split(), code=2)
    assert 'is not supported here' in text or 'two slashes' in text
    assert not list(tmp_path.iterdir())


def test_a_configuration_is_begun_in_a_bucket(bucket, capsys):
    assert 'next: pretrax train' in said(capsys, 'init', f'{bucket.url}/configs/mine')
    assert said(capsys, 'config', 'show', f'{bucket.url}/configs/mine.yaml')
    assert 'not overwritten' in said(capsys, 'init', f'{bucket.url}/configs/mine', code=2)


def test_what_a_bucket_refuses_is_told_in_a_line(bucket, capsys):
    bucket.fault(status=403, times=9)
    refused = said(capsys, 'checkpoint', 'list', f'{bucket.url}/run', code=2)
    assert refused.startswith(f'{bucket.url}/run: ')
    assert len(refused.splitlines()) == 1
    bucket.faults.clear()
    assert 'no such run' in said(capsys, 'checkpoint', 'list', f'{bucket.url}/run', code=2)
    with bucket.down():
        assert 'does not answer' in said(capsys, 'checkpoint', 'list', f'{bucket.url}/run', code=75)
