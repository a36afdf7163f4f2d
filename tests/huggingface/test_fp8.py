"""Weights in FP8 with a scale for each block are read as numbers times scales; what does not fit is refused."""

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from pretrax.errors import UserError
from pretrax.huggingface.model import open_model
from pretrax.weights.origin import shapes_of

GOLDEN = Path(__file__).parents[1] / 'goldens' / 'deepseek-v3'
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
BLOCK = (8, 16)  # of rows and columns; neither divides all sizes of the golden
QUANTIZED = {'quant_method': 'fp8', 'fmt': 'e4m3', 'activation_scheme': 'dynamic', 'weight_block_size': list(BLOCK)}


def opened_weights(directory):
    model = open_model(str(directory))
    return model.weights(shapes_of(model.arch))


def of_byte(byte):
    """The number of a byte in E4M3: sign, four bits of the exponent with bias 7, three of the mantissa.
    arXiv:2209.05433, table 1.
    """
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10))


@pytest.fixture
def checkpoint(tmp_path):
    """The golden of DeepSeek V3, whose matrices in the layers are in FP8, and the matrices that they stand for."""
    random, tensors, expected = np.random.default_rng(0), {}, {}
    for name, x in load_file(GOLDEN / 'model.safetensors').items():
        if '_proj' not in name or x.ndim != 2:
            tensors[name] = x
            continue
        numbers = random.integers(0, 256, x.shape, dtype=np.uint8)
        numbers[numbers & 127 == 127] = 0  # NaN
        scales = random.normal(size=[-(-n // size) for n, size in zip(x.shape, BLOCK, strict=True)]).astype(np.float32)
        tensors[name], tensors[name + '_scale_inv'] = numbers.view(E4M3), scales
        of_each = np.kron(scales, np.ones(BLOCK, np.float32))[: x.shape[0], : x.shape[1]]
        expected[name] = np.array([of_byte(byte) for byte in range(256)], np.float32)[numbers] * of_each
    config = json.loads((GOLDEN / 'config.json').read_text()) | {'quantization_config': QUANTIZED}
    (tmp_path / 'config.json').write_text(json.dumps(config))
    save_file(tensors, tmp_path / 'model.safetensors')
    return tmp_path, tensors, expected


def test_matrices_are_their_numbers_times_the_scales_of_their_blocks(checkpoint):
    directory, _, expected = checkpoint
    found = open_model(str(directory)).checkpoint
    assert len(expected) > 10
    assert not any(name.endswith('_scale_inv') for name in found.tensors)
    for name, x in expected.items():
        values = found.tensors[name].read()
        np.testing.assert_array_equal(values, x, err_msg=name)
        np.testing.assert_array_equal(found.tensors[name].read(9), x[9])
    assert {found.tensors[name].dtype for name in expected} == {'BF16'}


def test_what_does_not_fit_is_refused(checkpoint):
    directory, tensors, expected = checkpoint
    name = next(iter(expected))
    config = json.loads((directory / 'config.json').read_text())
    save_file({n: x for n, x in tensors.items() if n != name + '_scale_inv'}, directory / 'model.safetensors')
    with pytest.raises(UserError, match=r'in blocks of 8 x 16 does not fit .*_scale_inv \(missing\)'):
        opened_weights(directory)
    save_file(tensors, directory / 'model.safetensors')
    for block in (None, [128], [8, 0], 'all'):
        how = {'quantization_config': QUANTIZED | {'weight_block_size': block}}
        (directory / 'config.json').write_text(json.dumps(config | how))
        with pytest.raises(UserError, match=r'weight_block_size is .*expected two sizes'):
            open_model(str(directory))
    (directory / 'config.json').write_text(json.dumps(config | {'quantization_config': None}))
    with pytest.raises(UserError, match='is F8_E4M3; expected F32, BF16, F16'):
        opened_weights(directory)
