"""A wheel built from the repository works outside of it, and its extras are complete."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_wheel_trains_the_quickstart_outside_the_repository(tmp_path):
    def run(*command: str, **variables: str) -> str:
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | variables, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run('uv', 'build', '--wheel', '--quiet', '--offline', '--out-dir', str(tmp_path / 'dist'), str(REPOSITORY))
    [wheel] = (tmp_path / 'dist').glob('pretrax-*.whl')
    run('uv', 'pip', 'install', '--quiet', '--offline', '--no-deps', '--target', str(tmp_path / 'site'), str(wheel))

    def pretrax(*arguments: str) -> str:
        return run(sys.executable, '-m', 'pretrax', *arguments, PYTHONPATH=str(tmp_path / 'site'))

    assert str(tmp_path / 'site' / 'pretrax' / 'configs' / 'quickstart.yaml') in pretrax('config', 'show', 'quickstart')
    overrides = [
        'steps=2',
        'schedule.warmup=1',
        'model.n_layers=1',
        'data={name: synthetic, vocab_size: 64}',
        'mesh.r=8',
    ]
    assert 'Done: 2 steps' in pretrax('train', 'quickstart', *overrides)
    pretrax('init', 'mine')
    assert 'name: mine' in pretrax('config', 'show', 'mine.yaml')
    assert (tmp_path / 'pretrax-schema.json').is_file()


def test_the_extra_all_has_every_extra_but_the_accelerators_and_the_empty_one():
    project = tomllib.loads((REPOSITORY / 'pyproject.toml').read_text())['project']
    extras = project['optional-dependencies']
    [everything] = extras['all']
    named = everything.removeprefix('pretrax[').removesuffix(']').split(',')
    assert set(named) == set(extras) - {'all', 'cuda', 'cuda-local', 'tpu', 'serve'}
