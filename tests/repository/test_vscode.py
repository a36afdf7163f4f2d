"""The files of .vscode/ are valid, and what they start exists."""

import json

import pytest

from pretrax.config import load
from repository.commands import REPOSITORY, check_line, check_words

FOLDER = REPOSITORY / '.vscode'


def read(name):
    return json.loads((FOLDER / f'{name}.json').read_text())


TASKS = {task['label']: task for task in read('tasks')['tasks']}
LAUNCHES = {launch['name']: launch for launch in read('launch')['configurations']}


@pytest.mark.slow
@pytest.mark.parametrize('label', TASKS)
def test_the_command_of_a_task_exists(label):
    assert TASKS[label]['type'] == 'shell'
    check_line(TASKS[label]['command'].replace('${file}', 'tests/test_house.py'))


@pytest.mark.parametrize('name', [name for name, launch in LAUNCHES.items() if launch['request'] == 'launch'])
def test_what_is_debugged_trains_a_valid_configuration_from_the_start(name):
    launch, words = LAUNCHES[name], words_of(LAUNCHES[name])
    assert launch.get('preLaunchTask') in {None, *TASKS}
    if launch['module'] == 'pretrax':
        config = load(words[1], words[2:])
        assert str(config.run_dir) in TASKS[launch['preLaunchTask']]['command']  # else a second session only resumes


@pytest.mark.slow
@pytest.mark.parametrize('name', [name for name, launch in LAUNCHES.items() if launch['request'] == 'launch'])
def test_what_is_debugged_exists(name):
    check_words(['python', '-m', LAUNCHES[name]['module'], *words_of(LAUNCHES[name])])


def words_of(launch):
    file = 'tests/test_house.py' if launch['module'] == 'pytest' else 'quickstart'
    return [word.replace('${file}', file) for word in launch['args']]


def test_the_port_to_attach_to_is_that_of_the_page():
    [attach] = [launch for launch in LAUNCHES.values() if launch['request'] == 'attach']
    assert f'--listen {attach["connect"]["port"]} ' in (REPOSITORY / 'docs' / 'editors.md').read_text()


def test_the_settings_name_files_that_exist():
    for schema, patterns in read('settings')['yaml.schemas'].items():
        assert (REPOSITORY / schema).is_file()
        for pattern in patterns:
            assert list(REPOSITORY.glob(pattern.removeprefix('!'))), pattern
    assert read('extensions')['recommendations']
