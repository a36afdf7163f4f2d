"""The layers of Gemma 4 without a window, in the two forms of config.json, and the variants that are refused."""

import pytest

from goldens.golden import config
from pretrax.errors import UserError
from pretrax.huggingface.configs import read_options

OVERRIDES = {'head_dim': 16, 'num_key_value_heads': 1}


def read(**fields):
    return read_options(config('gemma4') | fields)[0]


def test_released_files_and_those_that_transformers_writes_say_the_same():
    released = {'global_head_dim': 16, 'num_global_key_value_heads': 1, 'per_layer_config': None}
    assert read() == read(**released)
    assert read(**released | {'attention_k_eq_v': False})['attention.global_n_kv_heads'] == 2  # as the class does


def test_the_last_layer_has_no_window():
    windowed = ['sliding_attention'] * 4
    assert read(layer_types=windowed, per_layer_config={'3': OVERRIDES})['attention.global_every'] == 4


@pytest.mark.parametrize(
    'sizes',
    [
        {'1': OVERRIDES},
        {'1': OVERRIDES, '2': OVERRIDES},
        {'1': OVERRIDES, '3': OVERRIDES | {'head_dim': 8}},
        {'1': {'hidden_size': 8}, '3': {'hidden_size': 8}},
        [],
    ],
)
def test_other_sizes_of_single_layers_are_refused(sizes):
    with pytest.raises(UserError, match='per_layer_config'):
        read(per_layer_config=sizes)


@pytest.mark.parametrize(
    ('fields', 'why'),
    [
        ({'hidden_size_per_layer_input': 256}, 'does not support an embedding for each layer'),
        ({'num_kv_shared_layers': 2}, 'does not support layers that read the keys and values of another layer'),
        ({'enable_moe_block': True}, 'does not support a mixture of experts beside a dense feed-forward'),
        ({'use_bidirectional_attention': 'all'}, 'use_bidirectional_attention'),
        ({'layer_types': ['full_attention'] * 4}, 'a layer with sliding_attention'),
        ({'attention_bias': True}, 'attention_bias'),
    ],
)
def test_variants_that_the_decoder_does_not_compute_are_refused(fields, why):
    with pytest.raises(UserError, match=why):
        read(**fields)


def test_a_file_that_leaves_the_embedding_for_each_layer_out_has_one():
    without = {name: value for name, value in config('gemma4').items() if name != 'hidden_size_per_layer_input'}
    with pytest.raises(UserError, match='hidden_size_per_layer_input is 256'):
        read_options(without)
