"""The command line around configurations: verbs, exit codes, and what importing it costs."""

import subprocess
import sys
from pathlib import Path

import pytest

from pretrax.cli import main
from pretrax.errors import UserError

VALID = """\
name: test
steps: 10
model: {n_layers: 2, d_model: 64, attention: {n_heads: 2}}
data: {text: stdlib}
batch: {tokens: 1024, sequence_length: 128}
optimizer: {learning_rate: 0.1}
"""


@pytest.fixture
def valid(tmp_path: Path) -> Path:
    path = tmp_path / 'valid.yaml'
    path.write_text(VALID)
    return path


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return int(stopped.value.code or 0)


def test_show_prints_what_loads_again(valid: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run('config', 'show', valid, 'steps=20') == 0
    shown = capsys.readouterr().out
    assert 'steps: 20' in shown
    valid.with_name('again.yaml').write_text(shown)
    assert run('config', 'diff', valid, valid.with_name('again.yaml')) == 0
    assert capsys.readouterr().out == 'steps: 10 -> 20\n'
    assert run('config', 'diff', valid, valid) == 0
    assert capsys.readouterr().out == 'no differences\n'


def test_schema_is_json_and_takes_plugins(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plugin = tmp_path / 'schema_plugin.py'
    plugin.write_text("from pretrax.config import register\n@register('schedule', 'from-plugin')\ndef f(s): ...\n")
    assert run('config', 'schema', '--plugin', plugin) == 0
    assert '"const": "from-plugin"' in capsys.readouterr().out


@pytest.mark.parametrize(
    'arguments',
    [
        ['trian'],
        ['train'],
        ['train', '--what'],
        ['config', 'shwo'],
        ['config', 'show'],
        ['generate', 'x', '--tokens=0'],
    ],
)
def test_a_wrong_command_line_exits_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*arguments) == 2
    assert 1 <= len(capsys.readouterr().err.splitlines()) <= 10


def test_a_long_message_is_cut_to_ten_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise UserError('\n'.join(f'line {i}' for i in range(30)))

    monkeypatch.setattr('pretrax.config.load', fail)
    assert run('config', 'show', 'x') == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[-1] == '(21 more lines)'


def test_a_bug_in_pretrax_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError('ours')

    monkeypatch.setattr('pretrax.config.load', fail)
    with pytest.raises(RuntimeError, match='ours'):
        main(['config', 'show', 'x'])


class ReachedError(Exception):
    """The verb got as far as its work."""


def test_train_passes_on_its_options(valid: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def train(config, *, allow_changes, verbose, **_):
        calls.append((config.steps, config.mesh.d, allow_changes, verbose))
        raise ReachedError

    monkeypatch.setattr('pretrax.run.loop.train', train)
    with pytest.raises(ReachedError):
        main(['train', str(valid), 'mesh.d=4', '--allow-changes', 'steps=7', '--verbose'])
    assert calls == [(7, 4, True, True)]


@pytest.mark.parametrize('arguments', [['--help'], ['--version'], ['config', '--help'], ['train', '--help']])
def test_help_needs_no_jax(arguments: list[str]) -> None:
    script = (
        'import sys, pretrax, pretrax.cli\n'
        'try: pretrax.cli.main(sys.argv[1:])\n'
        'finally: print("jax" in sys.modules, "omegaconf" in sys.modules, file=sys.stderr)\n'
    )
    done = subprocess.run([sys.executable, '-c', script, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert done.stderr.split() == ['False', 'False']


def test_importing_the_configuration_needs_no_jax() -> None:
    script = 'import sys, pretrax.config; print("jax" in sys.modules)'
    done = subprocess.run([sys.executable, '-c', script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == 'False'
