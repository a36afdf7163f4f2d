"""Every verb is found from its file, explains itself without JAX, and says what was meant after a mistake."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretrax.cli import _verbs, main

VERBS = [words for words in _verbs._commands(_verbs.ROOT) if not (_verbs.ROOT.joinpath(*words)).is_dir()]
SLOW_TO_IMPORT = {'jax', 'jaxlib', 'optax', 'orbax', 'zarr', 'tokenizers', 'numpy', 'omegaconf'}


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(arguments))
    return int(stopped.value.code or 0)


def run_module(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, '-m', 'pretrax', *arguments]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)


def test_help_lists_every_file_with_its_first_line(capsys):
    assert {('train',), ('import',), ('data', 'train-tokenizer'), ('launch', 'local')} <= set(VERBS)
    for group in [(), ('data',), ('checkpoint',), ('launch',), ('config',)]:
        assert run(*group, '--help') == 0
        printed = ' '.join(capsys.readouterr().out.split())
        for verb in (words for words in VERBS if words[:-1] == group):
            path = _verbs._paths(_verbs.ROOT.joinpath(*group))[verb[-1]]
            assert f'{verb[-1]} {_verbs._docstring(path).splitlines()[0]}' in printed


def test_no_verb_imports_slow_modules_for_its_help():
    program = (
        'import sys\nfrom pretrax.cli import main\n'
        f'for words in {VERBS!r}:\n    try:\n        main([*words, "--help"])\n'
        '    except SystemExit as end:\n        assert not end.code, words\n'
        f'    assert not set(sys.modules) & {SLOW_TO_IMPORT!r}, words'
    )
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('Usage: pretrax ') == len(VERBS)


def test_help_takes_less_than_a_second_of_cpu_time():
    before = os.times()
    assert run_module('--help').returncode == 0
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    assert seconds < 1


@pytest.mark.parametrize(
    ('arguments', 'answer'),
    [
        ('trian configs/quickstart.yaml', 'did you mean: pretrax train configs/quickstart.yaml'),
        ('tokenize a.yaml', 'did you mean: pretrax data tokenize a.yaml'),
        ('data tokenise a.yaml', 'did you mean: pretrax data tokenize a.yaml'),
        ('configs/quickstart.yaml steps=5', 'did you mean: pretrax train configs/quickstart.yaml steps=5'),
        ('what', 'verbs: bench, checkpoint, compare, compile'),
        ('train a.yaml --steps 5', 'KEY=VALUE: steps=5'),
        ('train a.yaml --steps=5', 'KEY=VALUE: steps=5'),
        ('train a.yaml --steps', 'KEY=VALUE: steps=VALUE'),
        ('train a.yaml --mesh.d 4', 'KEY=VALUE: mesh.d=4'),
        ('train a.yaml --learning-rate 0.1', 'KEY=VALUE: optimizer.learning_rate=0.1'),
        ('train a.yaml --d-model 64', 'KEY=VALUE: model.d_model=64'),
        ('train a.yaml --sequence-lenght 64', 'KEY=VALUE: batch.sequence_length=64'),
        ('train a.yaml --allow-change', 'did you mean --allow-changes?'),
        ('train a.yaml compiled=a.step', 'write: --compiled a.step'),
        ('train a.yaml dry_run=true', 'write: --dry-run'),
        ('compile a.yaml topology=v5e-256 slices=2', 'write: --topology v5e-256'),
        ('compile a.yaml slices=2', 'write: --slices 2'),
        ('compile a.yaml save=a.step', 'write: --save a.step'),
        ('plan a.yaml topology=h200', 'write: --topology h200'),
    ],
)
def test_a_mistake_is_answered_with_what_was_meant(arguments, answer, capsys):
    assert run(*arguments.split()) == 2
    printed = capsys.readouterr().err
    assert answer in printed
    assert len(printed.splitlines()) <= 10


def test_keys_of_the_configuration_are_never_taken_for_flags(tmp_path, capsys):
    """`processes` is both a section and an option of `launch local`."""
    assert run('launch', 'local', str(tmp_path / 'a.yaml'), '-n', '1', 'processes=2') == 2
    assert 'a.yaml does not exist' in capsys.readouterr().err


def test_the_shell_completes_verbs_and_options():
    def completions(words: str) -> list[str]:
        variables = {'_PRETRAX_COMPLETE': 'complete_bash', 'COMP_WORDS': words}
        return run_module(**variables, COMP_CWORD=str(len(words.split()) - 1)).stdout.split()

    assert completions('pretrax t') == ['trace', 'train']
    assert completions('pretrax data t') == ['tokenize', 'train-tokenizer']
    assert completions('pretrax train --comp') == ['--compiled']


def test_completion_can_be_shown_and_installed(tmp_path):
    home = {'HOME': str(tmp_path), 'SHELL': '/bin/bash', '_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION': '1'}
    shown = run_module('--show-completion', 'bash', **home)
    assert 'complete -o default -F _pretrax_completion pretrax' in shown.stdout
    installed = run_module('--install-completion', 'bash', **home)
    assert installed.returncode == 0, installed.stderr
    assert (tmp_path / '.bash_completions' / 'pretrax.sh').is_file()


def test_python_m_pretrax_is_pretrax():
    done = run_module('--version')
    assert (done.returncode, done.stdout.split()[0]) == (0, 'pretrax')
    assert run_module('trian').returncode == 2


def test_verbs_and_groups_have_help():
    for path in Path(_verbs.ROOT).rglob('*.py'):
        assert _verbs._docstring(path), path
