"""Fields of Llama 4 that its released files do not vary, and its language model beside a vision tower."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from decoders import decoder_options
from pretrax.errors import UserError
from pretrax.huggingface.configs import read_options, write_config
from pretrax.huggingface.model import open_model
from pretrax.model.architecture import resolve
from pretrax.model.weights import layers_with

GOLDEN = Path(__file__).parents[1] / 'goldens' / 'llama4'
CONFIG = json.loads((GOLDEN / 'config.json').read_text())


def arch_of(**fields):
    options, _ = read_options(CONFIG | fields)
    return resolve(decoder_options(**options), options['vocab_size'], options['max_sequence_length'])


@pytest.mark.parametrize(
    ('layers', 'step', 'expected'),
    [(None, 2, (1, 3)), (None, 1, (0, 1, 2, 3)), ([1, 3, 17], 1, (1, 3)), ([0, 3], 2, (0, 3)), ([], 1, ())],
)
def test_layers_with_experts(layers, step, expected):
    """`layer_idx in config.moe_layers`; without them, every n-th layer."""
    arch = arch_of(moe_layers=layers, interleave_moe_layer_step=step)
    assert layers_with(arch, 'router') == (expected if arch.experts.n_experts else ())
    assert (arch.experts.n_experts > 0) == bool(expected)
    assert (arch.sizes['F'] if len(expected) < 4 else 20) == 20  # intermediate_size_mlp, where there is a dense layer
    config, table = write_config(arch, 'llama4')
    assert (config['moe_layers'], table.model_type) == (list(expected), 'llama4_text')


@pytest.mark.parametrize(
    'fields',
    [
        {'no_rope_layers': [1] * 4}, {'attn_temperature_tuning': False}, {'attn_scale': 0.0},
        {'layer_types': ['full_attention'] * 4},
        {'layer_types': ['full_attention', 'chunked_attention'] * 2}, {'attention_bias': True},
        {'tie_word_embeddings': True},
    ],
)  # fmt: skip
def test_each_variant_is_written_as_it_was_read(fields):
    arch = arch_of(**fields)
    config, table = write_config(arch, 'llama4')
    assert table.model_type == 'llama4_text'
    options, _ = read_options(config)
    assert resolve(decoder_options(**options), arch.vocab_size, arch.max_sequence_length) == arch
    assert arch != arch_of()


def test_an_empty_list_of_layers_without_positions_is_none_and_a_longer_one_is_cut():
    assert [kind.rope_base is None for kind in arch_of(no_rope_layers=[]).kinds] == [False, False, True, False]
    assert arch_of(no_rope_layers=[1, 1, 0, 1, 1, 0]) == arch_of()


@pytest.mark.parametrize(
    'fields',
    [
        {'attention_chunk_size': None}, {'attn_temperature_tuning': 4}, {'moe_layers': 3}, {'moe_layers': [-1]},
        {'no_rope_layers': [1, 0]}, {'interleave_moe_layer_step': 0}, {'floor_scale': 0},
        {'layer_types': ['sliding_attention'] * 4}, {'no_rope_layers': [0, 1, 1, 1]},
    ],
)  # fmt: skip
def test_what_the_class_does_not_have_is_refused(fields):
    with pytest.raises(UserError, match=next(iter(fields))):
        arch_of(**fields)


def test_the_language_model_is_read_from_a_checkpoint_with_a_vision_tower(tmp_path):
    tensors = {f'language_model.{name}': x for name, x in load_file(GOLDEN / 'model.safetensors').items()}
    vision = {
        'vision_model.class_embedding': np.ones(3, np.float32),
        'multi_modal_projector.linear_1.weight': np.ones((2, 2), np.float32),
    }
    save_file(tensors | vision, tmp_path / 'model.safetensors')
    (tmp_path / 'config.json').write_text(
        json.dumps({'model_type': 'llama4', 'text_config': CONFIG, 'vision_config': {}})
    )
    opened, alone = open_model(str(tmp_path)), open_model(str(GOLDEN))
    assert opened.arch == alone.arch
    assert opened.checkpoint.tensors.keys() == alone.checkpoint.tensors.keys()
    assert 'vision_model' in opened.notes[0]
