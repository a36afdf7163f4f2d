"""`pretrax init` writes a configuration that trains, whose comments are true, and overwrites nothing."""

import json
import re
from pathlib import Path

import pytest

from pretrax.cli import main
from pretrax.config import load


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize('name', ['mine', 'mine.yaml', 'folder/mine'])
def test_the_new_file_is_a_configuration_of_that_name(name, capsys):
    assert run('init', name) == 0
    file = Path(name).with_suffix('.yaml')
    schema = file.with_name('pretrax-schema.json')
    assert capsys.readouterr().out.splitlines() == [
        f'wrote {file}', f'wrote {schema}: editors complete keys with it', f'next: pretrax train {file}',
    ]  # fmt: skip
    config = load(file)
    assert (config.name, config.run_dir) == ('mine', Path('runs/mine'))
    assert f'pretrax train {file}' in file.read_text()
    assert 'starter' not in file.read_text()


def test_lines_that_are_commented_out_are_valid_too(here):
    assert run('init', 'mine') == 0
    text = (here / 'mine.yaml').read_text()
    optional = re.findall(r'^( *)# ([a-z_]+: .*)$', text, re.MULTILINE)
    assert len(optional) >= 6
    for space, line in optional:
        (here / 'changed.yaml').write_text(text.replace(f'{space}# {line}', space + line))
        load('changed.yaml', ['data.vocab_size=null'] if line.startswith('tokenizer') else [])


def test_editors_find_the_schema_beside_the_file_and_a_schema_of_the_user_is_kept(here, capsys, monkeypatch):
    assert run('init', 'first') == 0
    [named] = re.findall(r'^# yaml-language-server: \$schema=(.+)$', (here / 'first.yaml').read_text(), re.MULTILINE)
    assert json.loads((here / named).read_text())['properties']['steps']['description']
    capsys.readouterr()
    assert run('init', 'second') == 0
    assert capsys.readouterr().out == 'wrote second.yaml\nnext: pretrax train second.yaml\n'
    monkeypatch.setenv('UV', 'uv')  # as in a process that `uv run` started
    assert run('init', 'by-uv') == 0
    assert capsys.readouterr().out == 'wrote by-uv.yaml\nnext: uv run pretrax train by-uv.yaml\n'
    (here / named).write_text('{}')
    assert run('init', 'third') == 0
    assert f'to renew it: pretrax config schema > {named}' in capsys.readouterr().out
    assert (here / named).read_text() == '{}'


def test_an_existing_file_is_not_overwritten(here, capsys):
    (here / 'mine.yaml').write_text('mine')
    assert run('init', 'mine') == 2
    assert 'mine.yaml already exists' in capsys.readouterr().err
    assert (here / 'mine.yaml').read_text() == 'mine'


def test_a_name_that_no_run_can_have_is_refused(here, capsys):
    assert run('init', 'a b') == 2
    assert 'expected a name of letters' in capsys.readouterr().err
    assert not list(here.iterdir())
