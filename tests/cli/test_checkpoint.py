"""`pretrax checkpoint ...` on a run of six steps with three checkpoints."""

import json
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

from pretrax import config_from_values, pretrain
from pretrax.checkpoint import CheckpointWeights, steps_in, verify
from pretrax.cli import main
from pretrax.errors import UserError
from pretrax.huggingface import tensor_files
from runs import BIGRAM, Quiet, small_values, write_documents


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """A run, its configuration, and how it ended."""
    directory = tmp_path_factory.mktemp('checkpoints')
    values = small_values(write_documents(directory), directory)
    values |= {
        'mesh': {'r': 8, 'd': 1, 't': 1}, 'checkpoint': {'every': 2, 'keep': 2, 'keep_best': 1},
        'eval': {'every': 2, 'batches': 1}, 'optimizer': {'learning_rate': 0.1},
    }  # fmt: skip
    pretrain(config_from_values(values | {'steps': 8}), progress=Quiet())
    return directory / 'run'


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / 'copy')


def said(capsys, *arguments):
    with pytest.raises(SystemExit) as end:
        main(['checkpoint', *map(str, arguments)])
    out, err = capsys.readouterr()
    return end.value.code, out, err


def arrays(run, step):
    weights = CheckpointWeights(run / 'checkpoints', step)
    return {name: weights.read(name) for name in weights.shapes}


def test_list_tells_why_each_is_kept_and_what_is_missing(run, capsys):
    steps = steps_in(run / 'checkpoints')
    assert steps[-2:] == [6, 8]
    array = next((run / 'checkpoints' / '6' / 'state' / 'weights.embed').glob('[0-9]*'))
    array.write_bytes(array.read_bytes()[:-1])
    (run / 'checkpoints' / '9.partial').mkdir()
    code, out, _ = said(capsys, 'list', run)
    assert code in (0, None)
    lines = {line.split()[0]: line for line in out.splitlines()}
    assert 'newest' in lines['8']
    assert lines['8'].endswith(', all present')
    assert f'DAMAGED: state/weights.embed/{array.name} has' in lines['6']
    assert lines['9.partial:'].endswith('the run removes it')
    losses = {
        line['step']: line['val_loss']
        for line in map(json.loads, (run / 'metrics.jsonl').read_text().splitlines())
        if 'val_loss' in line
    }
    assert f'{losses[8]:.4f}' in lines['8']


def test_inspect_adds_up_and_shows_the_configuration(run, capsys):
    _, out, _ = said(capsys, 'inspect', run / 'checkpoints' / '8', '--files')
    assert 'learning_rate: 0.1' in out
    assert f'weights: {len(arrays(run, 8))} arrays, {sum(a.size for a in arrays(run, 8).values()):,} numbers' in out
    manifest = json.loads((run / 'checkpoints' / '8' / 'manifest.json').read_text())
    for name, file in manifest['files'].items():
        assert any(
            line.split()[0] == file['xxh3'] and line.endswith(name)
            for line in out.splitlines()[-len(manifest['files']) :]
        )


def test_verify_reads_every_byte_and_names_the_file(run, capsys):
    code, out, err = said(capsys, 'verify', run)
    assert (code or 0, err) == (0, '')
    assert out.count('all as they were written') == len(steps_in(run / 'checkpoints'))
    array = next((run / 'checkpoints' / '6' / 'state' / 'weights.embed').glob('[0-9]*'))
    content = bytearray(array.read_bytes())
    content[7] ^= 1
    array.write_bytes(content)
    code, out, err = said(capsys, 'verify', run)
    assert code == 2
    assert f'state/weights.embed/{array.name} differs from what was written' in err
    assert out.count('all as they were written') == len(steps_in(run / 'checkpoints')) - 1
    assert said(capsys, 'verify', run / 'checkpoints' / '8')[0] in (0, None)


def test_diff_orders_arrays_by_how_far_they_lie_apart(run, capsys):
    """Against NumPy, and against itself."""
    _, out, _ = said(capsys, 'diff', run / 'checkpoints' / '6', run, '--most', '3')
    a, b = arrays(run, 6), arrays(run, 8)
    apart = {name: np.linalg.norm(b[name].astype(np.float64) - a[name]) for name in a}
    first = sorted(apart, key=lambda name: -apart[name])[:3]
    shown = [line.split() for line in out.splitlines() if line.split()[-1] in a]
    assert [line[-1] for line in shown] == first
    for norm, relative, *_, name in shown:
        assert float(norm) == pytest.approx(apart[name], rel=1e-3)
        assert float(relative) == pytest.approx(apart[name] / np.linalg.norm(a[name]), rel=1e-2)
    assert 'configuration: 0 values differ' in out
    _, out, _ = said(capsys, 'diff', run, run, '--optimizer')
    assert f'weights: {len(a)} of {len(a)} arrays of one shape are equal' in out
    assert 'optimizer: 0 arrays differ in shape' in out


def test_diff_of_two_models_names_keys_and_shapes(run, tmp_path, capsys):
    other = shutil.copytree(run, tmp_path / 'other')
    edit_manifest(other, 8, lambda m: m['description']['config']['model'].update(d_model=32))
    _, out, _ = said(capsys, 'diff', run, other)
    assert 'configuration: 1 values differ\n  model.d_model: 16 -> 32' in out


def edit_manifest(run, step, change):
    """As if it had been written so."""
    import xxhash

    from pretrax.checkpoint import Manifest

    path = run / 'checkpoints' / str(step) / 'manifest.json'
    content = json.loads(path.read_text())
    del content['manifest_xxh3']
    change(content)
    digest = xxhash.xxh3_128_hexdigest(Manifest.model_validate(content).model_dump_json().encode())
    path.write_text(json.dumps(content | {'manifest_xxh3': digest}))


def test_an_average_is_the_mean_and_writes_text(run, tmp_path, capsys):
    out = tmp_path / 'mean'
    code, text, err = said(capsys, 'average', run, '--last', '2', '--out', out)
    assert code in (0, None), err
    assert 'the mean of 2 checkpoints' in text
    verify(out / 'checkpoints', 0)
    a, b, mean = arrays(run, 6), arrays(run, 8), arrays(out, 0)
    assert mean.keys() == a.keys()
    for name, values in mean.items():
        expected = ((a[name].astype(np.float64) + b[name]) / 2).astype(np.float32)
        np.testing.assert_array_equal(values, expected)
    with pytest.raises(SystemExit) as end:
        main(['generate', str(out), '--prompt', 'abc', '--tokens', '4'])
    assert end.value.code in (0, None)
    assert capsys.readouterr().out.startswith('abc')
    with pytest.raises(SystemExit):
        main(['export', str(out), str(tmp_path / 'hf')])
    assert (tmp_path / 'hf' / 'tokenizer.json').is_file()


def test_what_cannot_be_averaged_is_refused_and_leaves_nothing(run, tmp_path, capsys):
    out = tmp_path / 'mean'
    for arguments, message in [
        ([run], 'an average needs at least two'),
        ([run, '--last', '9'], 'checkpoint.keep sets how many are kept'),
        ([run, tmp_path / 'nowhere'], 'no such run or checkpoint'),
    ]:
        code, _, err = said(capsys, 'average', *arguments, '--out', out)
        assert code == 2
        assert message in err
    other = shutil.copytree(run, tmp_path / 'other')
    edit_manifest(other, 8, lambda m: m['description'].update(tokenizer='0' * 64))
    assert 'different tokenizers' in said(capsys, 'average', run, other, '--out', out)[2]
    edit_manifest(other, 8, lambda m: m['description'].update(tokenizer=None))
    edit_manifest(run, 8, lambda m: m['description'].update(tokenizer=None))
    edit_manifest(other, 8, lambda m: m['arrays'].pop('weights.embed'))
    assert 'these are different models: embed is ' in said(capsys, 'average', run, other, '--out', out)[2]
    assert not out.exists()
    assert said(capsys, 'average', run, run, '--out', run)[0] == 2  # not over a run


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


@pytest.mark.parametrize('largest', [5_000_000_000, 8000])
def test_weights_leave_as_safetensors_of_our_names(largest, run, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(tensor_files, 'LARGEST_FILE', largest)
    assert said(capsys, 'export-weights', run, tmp_path / 'out')[0] in (0, None)
    files = sorted((tmp_path / 'out').glob('*.safetensors'))
    assert (len(files) > 1) == (largest == 8000) == (tmp_path / 'out' / 'model.safetensors.index.json').exists()
    found = {name: values for file in files for name, values in load_file(file).items()}
    ours = arrays(run, 8)
    assert found.keys() == ours.keys()
    for name, values in ours.items():
        np.testing.assert_array_equal(found[name], values)
    assert said(capsys, 'export-weights', run, tmp_path / 'out')[0] == 2
    assert said(capsys, 'export-weights', run, tmp_path / 'half', '--dtype', 'int8')[0] == 2


def test_looking_at_checkpoints_costs_no_jax(run):
    program = (
        'import sys\nfrom pretrax.cli import main\n'
        f'for verb in ("list", "inspect", "verify"):\n    try:\n        main(["checkpoint", verb, {str(run)!r}])\n'
        '    except SystemExit as end:\n        assert not end.code\n'
        'print(*({"jax", "orbax", "tensorstore"} & set(sys.modules)), file=sys.stderr)'
    )
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
    assert done.stderr.split() == []


def test_a_run_of_averaged_weights_is_not_trained_on(run, tmp_path, capsys):
    said(capsys, 'average', run, '--last', '2', '--out', tmp_path / 'mean')
    config = json.loads((tmp_path / 'mean' / 'checkpoints' / '0' / 'manifest.json').read_text())['description'][
        'config'
    ]
    with pytest.raises(UserError, match='holds weights that were averaged, and no training state'):
        pretrain(config_from_values(config), progress=Quiet())


def test_a_model_that_transformers_does_not_have_is_exported_by_the_names_of_its_weights(tmp_path, capsys):
    values = small_values(write_documents(tmp_path), tmp_path) | {'model': BIGRAM, 'steps': 2}
    pretrain(config_from_values(values), progress=Quiet())
    with pytest.raises(SystemExit) as end:
        main(['export', str(tmp_path / 'run'), str(tmp_path / 'out')])
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert 'no class of transformers computes its model, Bigram' in error
    assert f'pretrax checkpoint export-weights {tmp_path / "run"} {tmp_path / "out"}' in ''.join(error.split('\n'))
