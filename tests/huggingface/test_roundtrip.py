"""Checkpoints that transformers wrote (tests/goldens) come in and go out again, to the bit,
through the command line.
"""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from decoders import decoder_options
from pretrax.cli import main
from pretrax.errors import UserError
from pretrax.huggingface import tensor_files
from pretrax.huggingface.configs import BY_TYPE, read_options, write_config
from pretrax.huggingface.files import open_checkpoint
from pretrax.model.architecture import resolve

GOLDENS = Path(__file__).parents[1] / 'goldens'
LOADED_BY_TRANSFORMERS = json.loads((GOLDENS / 'exports.json').read_text())
CASES = sorted(
    path.parent.name for path in GOLDENS.glob('*/config.json') if json.loads(path.read_text())['model_type'] in BY_TYPE
)


def command(*arguments):
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return ended.value.code


def there_and_back(source, directory, *flags):
    """Imports a checkpoint and exports it again; the directory of the export."""
    assert command('import', source, '--out', directory / 'run') in (0, None)
    assert command('export', directory / 'run', directory / 'export', *flags) in (0, None)
    return directory / 'export'


@pytest.mark.parametrize('case', CASES)
def test_every_tensor_round_trips_bit_exactly(case, tmp_path):
    before, after = open_checkpoint(GOLDENS / case), open_checkpoint(there_and_back(GOLDENS / case, tmp_path))
    assert set(after.tensors) == set(before.tensors)
    for name, tensor in before.tensors.items():
        assert after.tensors[name].dtype == tensor.dtype
        np.testing.assert_array_equal(after.tensors[name].read(), tensor.read(), err_msg=name)
    assert after.config['architectures'] == before.config['architectures']
    assert after.config == LOADED_BY_TRANSFORMERS[case], (
        'run tests/goldens/check_exports.py and see that it still loads'
    )


@pytest.mark.parametrize('case', CASES)
def test_every_table_writes_an_architecture_or_refuses_it(case):
    """No class has both an embedding multiplier and a soft cap of the logits,
    so write_config tries the tables of all.
    """
    arch = resolve(decoder_options(**read_options(json.loads((GOLDENS / case / 'config.json').read_text()))[0]), 32, 8)
    with pytest.raises(UserError, match='no class of transformers computes this architecture'):
        write_config(arch.replace({'embedding.multiplier': 1.5, 'head.softcap': 7.0}))


@pytest.mark.parametrize('dtype', [ml_dtypes.bfloat16, np.float16])
def test_bf16_and_f16_shards_round_trip_bit_exactly(dtype, tmp_path, monkeypatch):
    """As many files as it takes, an index that lists every tensor, and the dtype that was imported."""
    source = tmp_path / 'source'
    source.mkdir()
    (source / 'config.json').write_text((GOLDENS / 'gpt2' / 'config.json').read_text())
    tensors = {name: x.astype(dtype) for name, x in load_file(GOLDENS / 'gpt2' / 'model.safetensors').items()}
    save_file(tensors, source / 'model.safetensors')
    monkeypatch.setattr(tensor_files, 'LARGEST_FILE', 8000)
    out = there_and_back(source, tmp_path)
    files = sorted(out.glob('*.safetensors'))
    assert len(files) > 2
    index = json.loads((out / 'model.safetensors.index.json').read_text())
    assert set(index['weight_map']) == set(tensors)
    assert index['metadata']['total_size'] == sum(x.nbytes for x in tensors.values())
    found = {name: x for path in files for name, x in load_file(path).items()}  # by the library, not by our reader
    for name, x in tensors.items():
        assert found[name].dtype == x.dtype
        assert found[name].tobytes() == x.tobytes(), name


def test_tied_head_may_be_stored_and_names_may_lack_their_prefix(tmp_path):
    """The files of gpt2 on the hub: saved without the head's class, with the masks of old versions."""
    source = tmp_path / 'source'
    source.mkdir()
    (source / 'config.json').write_text((GOLDENS / 'gpt2' / 'config.json').read_text())
    whole = load_file(GOLDENS / 'gpt2' / 'model.safetensors')
    tensors = {name.removeprefix('transformer.'): x for name, x in whole.items()}
    masks = {f'h.{i}.attn.bias': np.tril(np.ones((1, 1, 64, 64), np.float32)) for i in range(2)}
    save_file(tensors | masks | {'lm_head.weight': tensors['wte.weight']}, source / 'model.safetensors')
    found = load_file(there_and_back(source, tmp_path) / 'model.safetensors')
    assert found.keys() == whole.keys()
    assert all(np.array_equal(found[name], x) for name, x in whole.items())


def test_tied_head_that_differs_from_the_embedding_is_rejected(tmp_path, capsys):
    (tmp_path / 'config.json').write_text((GOLDENS / 'gpt2' / 'config.json').read_text())
    tensors = load_file(GOLDENS / 'gpt2' / 'model.safetensors')
    head = tensors['transformer.wte.weight'] + 1
    save_file(tensors | {'lm_head.weight': head}, tmp_path / 'model.safetensors')
    assert command('import', tmp_path, '--out', tmp_path / 'run') == 2
    assert 'ties lm_head.weight to the embedding, but they differ' in capsys.readouterr().err


def test_the_default_dtype_is_that_of_most_weights_and_biases_that_choose_experts_stay_in_f32(tmp_path, capsys):
    """The files of DeepSeek V3: BF16, but for e_score_correction_bias;
    and a layer for multi-token prediction behind the others.
    """
    case, source = GOLDENS / 'deepseek-v3', tmp_path / 'source'
    source.mkdir()
    config = json.loads((case / 'config.json').read_text())
    extra, bias = config['num_hidden_layers'], 'e_score_correction_bias'
    (source / 'config.json').write_text(json.dumps(config | {'num_nextn_predict_layers': 2}))
    tensors = {
        name: x if name.endswith(bias) else x.astype(ml_dtypes.bfloat16)
        for name, x in load_file(case / 'model.safetensors').items()
    }
    behind = {f'model.layers.{extra + i}.enorm.weight': np.ones(4, ml_dtypes.bfloat16) for i in range(2)}
    save_file(tensors | behind, source / 'model.safetensors')
    found = load_file(there_and_back(source, tmp_path) / 'model.safetensors')
    assert 'num_nextn_predict_layers = 2 of config.json: 2 more layers' in capsys.readouterr().out
    assert found.keys() == tensors.keys()
    assert any(name.endswith(bias) for name in found)
    for name, x in tensors.items():
        assert found[name].dtype == x.dtype, name
        assert found[name].tobytes() == x.tobytes(), name
