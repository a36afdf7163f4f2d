"""A wheel built from the repository works outside of it without any extra, and its extras are complete."""

import os
import subprocess
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_wheel_without_extras_is_small_and_runs_the_verbs_of_a_first_hour(tmp_path):
    variables = {key: value for key, value in os.environ.items() if key not in ('PYTHONPATH', 'VIRTUAL_ENV')}

    def run(*command: str, cwd: Path = REPOSITORY, **more: str) -> str:
        done = subprocess.run(
            command, cwd=cwd, env=variables | more, stdin=subprocess.DEVNULL, capture_output=True, text=True
        )
        assert done.returncode == 0, f'{command}\n{done.stdout}{done.stderr}'
        return done.stdout

    environment = tmp_path / 'environment'
    run('uv', 'build', '--wheel', '--quiet', '--offline', '--out-dir', f'{tmp_path}/dist')
    [wheel] = (tmp_path / 'dist').glob('pretrax-*.whl')
    # The packages of README's first command
    sync = ('uv', 'sync', '--quiet', '--locked', '--no-dev', '--no-install-project')
    run(*sync, UV_PROJECT_ENVIRONMENT=str(environment))
    run('uv', 'pip', 'install', '--quiet', '--offline', '--no-deps', '--python', f'{environment}', f'{wheel}')
    (tmp_path / 'small_install.py').write_text((REPOSITORY / 'tests' / 'small_install.py').read_text())
    run(f'{environment}/bin/python', f'{tmp_path}/small_install.py', cwd=tmp_path)
    shown = run(f'{environment}/bin/pretrax', 'config', 'show', 'quickstart', cwd=tmp_path)
    assert f'{environment}/lib' in shown  # the packaged file, not that of the repository
    run(f'{environment}/bin/pretrax', 'init', 'mine', cwd=tmp_path)
    assert (tmp_path / 'pretrax-schema.json').is_file()


def test_the_extra_all_has_every_extra_but_the_accelerators_and_the_empty_one():
    project = tomllib.loads((REPOSITORY / 'pyproject.toml').read_text())['project']
    extras = project['optional-dependencies']
    [everything] = extras['all']
    named = everything.removeprefix('pretrax[').removesuffix(']').split(',')
    assert set(named) == set(extras) - {'all', 'cuda', 'cuda-local', 'tpu', 'serve'}
