"""`pretrax checkpoint ...` on a run of six steps with three checkpoints."""

import json
import re
import shutil
import subprocess
import sys

import pytest

from checkpoint_verbs import edit_manifest, said
from pretrax import config_from_values, pretrain
from pretrax.cli import main
from pretrax.errors import UserError
from runs import BIGRAM, Quiet, small_values, write_documents


def test_no_verb_imports_a_plugin_that_only_a_checkpoint_names(run, tmp_path, capsys):
    mark = tmp_path / 'imported'
    plugin = tmp_path / 'plugin.py'
    plugin.write_text(f'import pathlib; pathlib.Path({str(mark)!r}).touch()')
    edit_manifest(run, 8, lambda m: m['description']['config'].update(plugins=[str(plugin)]))
    config = json.loads((run / 'checkpoints' / '8' / 'manifest.json').read_text())['description']['config']
    for number, arguments in enumerate([
        ['generate', run, '--tokens', '2'],
        ['export', run, tmp_path / 'hf'],
        *(['checkpoint', verb, run] for verb in ('list', 'inspect', 'verify')),
        ['checkpoint', 'diff', run, run],
        ['checkpoint', 'export-weights', run, tmp_path / 'weights'],
        ['checkpoint', 'average', run, '--last', '2', '--out', tmp_path / 'mean'],
    ]):  # fmt: skip
        with pytest.raises(SystemExit) as end:
            main(list(map(str, arguments)))
        assert end.value.code in (0, None), (number, capsys.readouterr().err)
    warm = config | {'plugins': [], 'run_dir': str(tmp_path / 'warm'), 'init_from': str(run), 'steps': 2}
    pretrain(config_from_values(warm), progress=Quiet())
    with pytest.raises(UserError, match='plugins'):
        pretrain(config_from_values(config | {'plugins': [], 'run_dir': str(run)}), progress=Quiet())
    assert not mark.exists()
    with pytest.raises(SystemExit):
        main(['generate', str(run), '--tokens', '2', '--plugin', str(plugin)])
    assert mark.exists()


def test_no_verb_sends_control_characters_to_the_terminal(run, tmp_path, capsys):
    evil = 'a\x1b[2J\x9b31m\x07\r\u202ebc\u2066\u2028'

    def change(manifest):
        description = manifest['description']
        description[evil] = description['config']['name'] = description['config'][evil] = description['jax'] = evil
        description['config']['checkpoint']['keep'] = 1
        manifest['arrays'][f'weights.{evil}'] = {'shape': [1], 'dtype': evil}
        manifest['files'][evil] = {'size': 1, 'xxh3': evil}

    other = shutil.copytree(run, tmp_path / evil)
    edit_manifest(other, 8, lambda m: m['description']['config'].update(name='other'))
    edit_manifest(run, 8, change)
    said(capsys, 'list', other)
    for arguments in (['list', run], ['inspect', run], ['inspect', run, '--files'], ['verify', run], ['verify', other],
                      ['diff', run, other], ['diff', other, run], ['export-weights', run, tmp_path / 'out'],
                      ['list', tmp_path / 'no\x1b[2J']):  # fmt: skip
        _, out, err = said(capsys, *arguments)
        assert not re.search('[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e\u2066\u2028]', out + err), arguments
        assert '\ufffd[2J' in out + err, arguments


def test_a_run_of_a_plugins_component_asks_for_the_plugin(run, capsys):
    def change(manifest):
        manifest['description']['config']['optimizer']['name'] = 'of-a-plugin'
        manifest['description']['config']['plugins'] = ['plugin.py']

    edit_manifest(run, 8, change)
    with pytest.raises(SystemExit) as end:
        main(['generate', str(run)])
    assert end.value.code == 2
    assert 'imported only if you name them: ["plugin.py"]' in capsys.readouterr().err


def test_looking_at_checkpoints_costs_no_jax(run):
    program = (
        'import sys\nfrom pretrax.cli import main\n'
        f'for verb in ("list", "inspect", "verify"):\n    try:\n        main(["checkpoint", verb, {str(run)!r}])\n'
        '    except SystemExit as end:\n        assert not end.code\n'
        'print(*({"jax", "orbax", "tensorstore"} & set(sys.modules)), file=sys.stderr)'
    )
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
    assert done.stderr.split() == []


def test_a_model_that_transformers_does_not_have_is_exported_by_the_names_of_its_weights(tmp_path, capsys):
    values = small_values(write_documents(tmp_path), tmp_path) | {'model': BIGRAM, 'steps': 2}
    pretrain(config_from_values(values), progress=Quiet())
    with pytest.raises(SystemExit) as end:
        main(['export', str(tmp_path / 'run'), str(tmp_path / 'out')])
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert 'no class of transformers computes its model, Bigram' in error
    assert f'pretrax checkpoint export-weights {tmp_path / "run"} {tmp_path / "out"}' in ''.join(error.split('\n'))
