"""Whatever a config.json says, it is read, or refused in at most ten lines."""

import json
import random
from pathlib import Path

import pytest

from pretrax.errors import MOST_LINES, UserError
from pretrax.huggingface.configs import DEFAULTS, table_of
from pretrax.huggingface.files import HuggingFaceCheckpoint
from pretrax.huggingface.model import read_model

RELEASED = json.loads((Path(__file__).parent / 'released_configs.json').read_text())
CONFIGS = {table_of(one['config']).model_type: one['config'] for one in RELEASED.values()}  # one of each family
CONFIGS['gemma3'] = RELEASED['gemma3-4b']['config']  # with a vision tower
WRONG = (
    None, True, False, 0, 1, -1, 7, 1.5, -0.5, float('nan'), float('inf'), 10**30, 10**400, 1e308, 1e-200, 2**31 - 1,
    '', 'x', '4', [], [0], ['x'],
    [None], [[]], {}, {'a': 1}, {'rope_type': 'llama3'}, {'rope_type': 'linear', 'factor': '2'}, {'type': []},
    {'rope_type': 'linear', 'factor': 0}, {'rope_type': 'linear', 'factor': -1}, {'rope_theta': None},
    {'rope_type': 'llama3', 'factor': 8, 'low_freq_factor': 4, 'high_freq_factor': 1,
    'original_max_position_embeddings': 0},
    {'full_attention': 1}, {'full_attention': {'rope_type': 7}, 'sliding_attention': []}, 'x' * 5000, ['x'] * 5000,
)  # fmt: skip


def read(config):
    """Whether it was read. Fails if it was refused in another way than by a UserError that is shown whole."""
    try:
        arch, said = read_model(HuggingFaceCheckpoint(Path('DIR'), config, {})).arch, ''
    except UserError as error:
        arch, said = None, str(error)
    assert arch is None or arch.n_layers > 0
    assert bool(said) == (arch is None)
    assert len(said.splitlines()) <= MOST_LINES
    assert len(said) < 2000
    return arch is not None


def fields_of(config):
    inner = config.get('text_config', config)
    table = table_of(config)
    known = {name for field in table.fields for name in field.fields}
    return sorted(
        {*config, *inner, *known, *DEFAULTS[table.model_type], 'model_type', 'architectures', 'quantization_config'}
    )


@pytest.mark.parametrize('family', CONFIGS)
def test_each_field_may_have_any_value(family):
    config = CONFIGS[family]
    assert read(config)
    refused = 0
    for name in fields_of(config):
        for value in WRONG:
            changed = dict(config)
            if 'text_config' in config and name not in config:
                changed['text_config'] = config['text_config'] | {name: value}
            else:
                changed[name] = value
            refused += not read(changed)
    assert refused > 300  # most of these values are wrong


@pytest.mark.parametrize('family', CONFIGS)
def test_several_fields_may_have_any_values(family):
    draw = random.Random(f'{family}, several fields')
    config = CONFIGS[family]
    names = fields_of(config)
    for _ in range(150):
        changed = {name: value for name, value in config.items() if draw.random() > 0.1}
        changed |= {name: draw.choice(WRONG) for name in draw.sample(names, 3)}
        read(changed)


@pytest.mark.parametrize(
    ('family', 'fields', 'message'),
    [
        (
            'llama',
            {'rope_scaling': {'rope_type': 'linear', 'factor': '2'}},
            "rope_scaling.factor is '2'; expected a number",
        ),
        (
            'llama',
            {'rope_scaling': {'rope_type': 'linear', 'factor': 0}},
            'rope_scaling.factor is 0; expected a number of at',
        ),
        ('llama', {'rope_parameters': 7}, 'rope_parameters is 7; expected an object or null'),
        ('llama', {'rope_theta': None}, 'rope_theta is null; expected a number above 0'),
        ('llama', {'model_type': ['llama']}, r"model_type is '\['llama'\]'"),
        ('smollm3', {'no_rope_layers': 4}, 'no_rope_layers is 4; expected a list of 36'),
        ('llama', {'quantization_config': {}}, 'quantized weights cannot be trained'),
        (
            'qwen2',
            {'layer_types': ['sliding_attention'] * 80},
            'layer_types has sliding_attention, but use_sliding_window is',
        ),
        ('mistral', {'sliding_window': 0}, 'sliding_window is 0; expected an integer from 1'),
        ('qwen3_moe', {'num_local_experts': 7}, 'num_local_experts is 7; expected the value of num_experts, 128'),
    ],
)
def test_a_wrong_value_is_named_with_what_is_expected(family, fields, message):
    with pytest.raises(UserError, match=message):
        read_model(HuggingFaceCheckpoint(Path('DIR'), CONFIGS[family] | fields, {}))


def test_no_quantization_is_said_by_null():
    assert read(CONFIGS['llama'] | {'quantization_config': None})
