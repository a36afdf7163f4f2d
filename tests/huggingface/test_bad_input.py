"""What cannot be imported is refused in at most ten lines that name it and the way out, before anything is written."""

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pretrax.cli import main
from pretrax.errors import UserError
from pretrax.huggingface.configs import read_options

GOLDEN = Path(__file__).parents[1] / 'goldens' / 'llama2'
Q = 'model.layers.0.self_attn.q_proj.weight'


@pytest.fixture
def source(tmp_path):
    directory = tmp_path / 'source'
    directory.mkdir()
    for name in ('config.json', 'model.safetensors'):
        shutil.copyfile(GOLDEN / name, directory / name)
    return directory


def refused(source, capsys):
    with pytest.raises(SystemExit) as ended:
        main(['import', str(source), '--out', str(source.parent / 'run')])
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert len(said.splitlines()) <= 10
    assert not (source.parent / 'run').exists()
    return said


def with_config(source, **fields):
    path = source / 'config.json'
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def with_tensors(source, change):
    tensors = load_file(source / 'model.safetensors')
    change(tensors)
    save_file(tensors, source / 'model.safetensors')


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        ({'model_type': 'mamba', 'architectures': ['MambaForCausalLM']}, "model_type is 'mamba' (architectures: Mamba"),
        ({'alibi_slopes': 8}, 'does not know for llama: alibi_slopes (8)'),
        ({'hidden_act': 'relu'}, "hidden_act is 'relu'; expected 'silu'"),
        ({'quantization_config': {'bits': 4}}, 'quantized weights cannot be trained'),
        ({'hidden_size': None}, 'hidden_size is null; expected an integer'),
        (
            {'rope_scaling': {'rope_type': 'dynamic', 'factor': 2}, 'rope_parameters': None},
            "'dynamic' is not supported",
        ),
        ({'num_attention_heads': 5}, 'n_heads = 5'),
        ({'num_attention_heads': 'four'}, "num_attention_heads is 'four'; expected an integer"),
        ({'intermediate_size': 44}, 'gate_proj.weight has shape [40, 24], but config.json implies [44, 24]'),
    ],
)
def test_unsupported_config_is_rejected(source, capsys, fields, message):
    with_config(source, **fields)
    assert message in refused(source, capsys)


@pytest.mark.parametrize(
    ('counted', 'behind', 'tensor'),
    [(0, 0, 'input_layernorm'), (0, 0, 'enorm'), (1, 1, 'enorm'), (2, 2, 'input_layernorm')],
)
def test_layers_after_the_last_one_are_refused_unless_config_json_counts_them(
    tmp_path, capsys, counted, behind, tensor
):
    """A config.json with fewer layers than the files belongs to another model."""
    source = tmp_path / 'source'
    shutil.copytree(GOLDEN.parent / 'deepseek-v3', source)
    with_config(source, num_nextn_predict_layers=counted)
    n_layers = json.loads((source / 'config.json').read_text())['num_hidden_layers']
    allowed = {f'model.layers.{n_layers + i}.{tensor}.weight': np.zeros(4, np.float32) for i in range(counted)}
    strange = f'model.layers.{n_layers + behind}.{tensor}.weight'
    with_tensors(source, lambda tensors: tensors.update(allowed | {strange: np.zeros(4, np.float32)}))
    assert f'1 tensors do not belong to this architecture:\n  {strange}' in refused(source, capsys)


@pytest.mark.parametrize(
    'fields', [{'layer_types': ['linear_attention'] * 4}, {'full_attention_interval': 9, 'layer_types': None}]
)
def test_a_qwen3_next_without_attention_is_refused_in_the_words_of_the_file(fields):
    config = json.loads((GOLDEN.parent / 'qwen3-next' / 'config.json').read_text()) | fields
    with pytest.raises(UserError, match=r'config\.json: all 4 layers have linear_attention') as error:
        read_options(config)
    assert 'model.' not in str(error.value)


def test_missing_and_unknown_tensors_are_listed(source, capsys):
    with_tensors(source, lambda tensors: tensors.pop(Q))
    assert f'the files lack 1 of 21 tensors:\n  {Q}' in refused(source, capsys)
    with_tensors(source, lambda tensors: tensors.update({Q: np.zeros((24, 24), np.float32)}))
    with_tensors(source, lambda tensors: tensors.update({f'extra.{i}': np.zeros(1, np.float32) for i in range(9)}))
    said = refused(source, capsys)
    assert '9 tensors do not belong to this architecture:\n  extra.0' in said
    assert 'and 3 more' in said


def test_truncated_missing_and_quantized_files_are_rejected(source, capsys):
    path = source / 'model.safetensors'
    whole = path.read_bytes()
    for cut in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert 'model.safetensors: damaged or truncated' in refused(source, capsys)
    path.write_bytes(whole)
    with_tensors(source, lambda tensors: tensors.update({Q: np.zeros((24, 24), np.int8)}))
    assert f'{Q} is I8; expected F32, BF16, F16' in refused(source, capsys)
    path.unlink()
    assert 'no .safetensors file' in refused(source, capsys)
    (source / 'config.json').write_text('{"model_type": ')
    assert 'config.json: not readable as JSON' in refused(source, capsys)
    (source / 'config.json').unlink()
    assert 'no config.json' in refused(source, capsys)


def test_index_must_match_its_files(source, capsys):
    tensors = load_file(source / 'model.safetensors')
    index = source / 'model.safetensors.index.json'
    first = dict(list(tensors.items())[:5])
    rest = {name: x for name, x in tensors.items() if name not in first}
    (source / 'model.safetensors').unlink()
    names = ('model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors')
    index.write_text(json.dumps({'weight_map': dict.fromkeys(first, names[0]) | dict.fromkeys(rest, names[1])}))
    save_file(first, source / names[0])
    assert f'1 of 2 files are missing: {names[1]}' in refused(source, capsys)
    save_file(rest | {'more': np.zeros(1, np.float32)}, source / names[1])
    assert '1 tensors do not belong to this architecture:\n  more' in refused(source, capsys)
    save_file(dict(list(rest.items())[1:]), source / names[1])
    assert f'the files lack 1 of 21 tensors:\n  {next(iter(rest))}' in refused(source, capsys)
    index.write_text(json.dumps({'weight_map': {'a': '../elsewhere.safetensors'}}))
    assert "names '../elsewhere.safetensors'" in refused(source, capsys)


class Bomb:
    """What runs when it is unpickled."""

    def __reduce__(self):
        return (Path.touch, (Path('exploded'),))


@pytest.mark.parametrize('name', ['pytorch_model.bin', 'model.pt', 'consolidated.00.pth'])
def test_pickles_are_never_opened(source, capsys, name, monkeypatch):
    monkeypatch.chdir(source)
    (source / 'model.safetensors').unlink()
    (source / name).write_bytes(pickle.dumps(Bomb()))
    said = refused(source, capsys)
    assert f'the weights are pickled in {name}' in said
    assert 'save_pretrained' in said
    assert not (source / 'exploded').exists()


def test_paths_without_a_checkpoint_are_rejected(source, capsys, monkeypatch):
    monkeypatch.setenv('HF_HUB_OFFLINE', '1')
    assert 'neither a directory nor the id of a hub repository' in refused(source.parent / 'no such place', capsys)
    assert 'is a file' in refused(source / 'config.json', capsys)


def test_existing_run_is_not_overwritten(source, capsys):
    (source.parent / 'run' / 'checkpoints' / '3').mkdir(parents=True)
    with pytest.raises(SystemExit):
        main(['import', str(source), '--out', str(source.parent / 'run')])
    assert 'already has checkpoints' in capsys.readouterr().err
