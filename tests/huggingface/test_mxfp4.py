"""Weights in MXFP4 are read as the numbers that they are; other quantizations stay refused."""

import json
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from decoders import decoder_options
from pretrax.errors import UserError
from pretrax.huggingface.model import open_model
from pretrax.huggingface.quantized import dequantized
from pretrax.model.request import ModelRequest
from pretrax.model.transformer import Transformer
from small import mesh_of

GOLDENS = Path(__file__).parents[1] / 'goldens'
QUANTIZED = {'quant_method': 'mxfp4', 'modules_to_not_convert': ['model.layers.*.self_attn', 'lm_head']}
EXPERTS = 'model.layers.0.mlp.experts.'


def test_numbers_are_those_of_transformers_and_of_the_specification():
    """tests/goldens/make_mxfp4.py; E2M1 times 2^(scale - 127)."""
    expected = load_file(GOLDENS / 'mxfp4.safetensors')
    values = dequantized(expected['blocks'], expected['scales'])
    np.testing.assert_array_equal(values.swapaxes(1, 2), expected['values'])
    byte = np.zeros((1, 16), np.uint8)
    byte[0, 0] = 0xE7  # 6, then -4
    assert dequantized(byte, np.array([128], np.uint8))[:3].tolist() == [12.0, -8.0, 0.0]


@pytest.fixture
def checkpoint(tmp_path):
    """A gpt-oss whose experts are in MXFP4: the golden, with wider experts."""
    config = json.loads((GOLDENS / 'gpt-oss' / 'config.json').read_text())
    config |= {'hidden_size': 32, 'intermediate_size': 32, 'num_hidden_layers': 1, 'layer_types': ['full_attention']}
    config |= {'num_local_experts': 2, 'quantization_config': QUANTIZED}
    golden, random = load_file(GOLDENS / 'gpt-oss' / 'model.safetensors'), np.random.default_rng(0)
    sizes = {16: 32, 12: 32, 24: 64, 6: 2}
    tensors = {}
    for name, x in golden.items():
        if name.startswith('model.layers.') and not name.startswith('model.layers.0.'):
            continue
        heads = 'self_attn' in name  # their sizes stay
        shape = [
            32
            if size == 16 and 'o_proj' in name
            else size
            if heads and (n == 0 or 'o_proj' in name)
            else sizes.get(size, size)
            for n, size in enumerate(x.shape)
        ]
        tensors[name] = random.normal(size=shape).astype(np.float32)
    for name, outputs in (('gate_up_proj', 64), ('down_proj', 32)):
        tensors[f'{EXPERTS}{name}_blocks'] = random.integers(0, 256, (2, outputs, 1, 16), dtype=np.uint8)
        tensors[f'{EXPERTS}{name}_scales'] = random.integers(120, 130, (2, outputs, 1), dtype=np.uint8)
        del tensors[EXPERTS + name]
    (tmp_path / 'config.json').write_text(json.dumps(config))
    save_file(tensors, tmp_path / 'model.safetensors')
    return tmp_path, tensors


def pieces_of(directory, path):
    model = open_model(str(directory))
    with jax.set_mesh(mesh_of()):
        sizes = dict(mesh_of().shape)
        request = ModelRequest(96, 8, 1, np.float32, 'cpu', sizes)
        like = Transformer(request, options=decoder_options(**model.options)).abstract()
        return [piece for _, piece in model.weights(like).pieces(path)]


def test_experts_in_mxfp4_are_read(checkpoint):
    directory, tensors = checkpoint
    for path, name, cut in (
        ('layers.expert_gate', 'gate_up_proj', slice(0, None, 2)),
        ('layers.expert_up', 'gate_up_proj', slice(1, None, 2)),
        ('layers.expert_down', 'down_proj', slice(None)),
    ):
        pieces = pieces_of(directory, path)  # one for each expert, so that no more are in memory
        blocks, scales = (tensors[f'{EXPERTS}{name}{end}'] for end in ('_blocks', '_scales'))
        expected = dequantized(blocks, scales).swapaxes(1, 2)[..., cut]
        assert len(pieces) == 2
        np.testing.assert_array_equal(np.stack(pieces), expected)
        np.testing.assert_array_equal(expected, expected.astype(ml_dtypes.bfloat16))  # an export in BF16 loses nothing
    assert open_model(str(directory)).checkpoint.tensors[EXPERTS + 'down_proj'].dtype == 'BF16'


def test_blocks_without_scales_and_other_quantizations_are_refused(checkpoint):
    directory, tensors = checkpoint
    config = json.loads((directory / 'config.json').read_text())
    save_file({n: x for n, x in tensors.items() if not n.endswith('down_proj_scales')}, directory / 'model.safetensors')
    with pytest.raises(UserError, match=r'down_proj_blocks U8\[2, 32, 1, 16\] does not fit .* \(missing\)'):
        pieces_of(directory, 'layers.expert_down')
    save_file(tensors, directory / 'model.safetensors')
    (directory / 'config.json').write_text(json.dumps(config | {'quantization_config': None}))
    with pytest.raises(UserError, match='is U8; expected F32, BF16, F16'):
        pieces_of(directory, 'layers.expert_down')
    (directory / 'config.json').write_text(json.dumps(config | {'quantization_config': {'quant_method': 'gptq'}}))
    with pytest.raises(UserError, match='quantized weights cannot be trained'):
        open_model(str(directory))
