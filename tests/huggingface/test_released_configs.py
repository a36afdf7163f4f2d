"""The config.json of each released model loads, and says what its preset says.

released_configs.json has, for each preset, the name of the model, its config.json, and where that was copied from.
"""

import json
import math
from pathlib import Path

import jax
import pytest

from decoders import decoder_options
from pretrax.errors import UserError
from pretrax.huggingface.configs import compare, read_options, table_of, write_config
from pretrax.huggingface.names import TABLES
from pretrax.huggingface.weights import mapped, shapes
from pretrax.model.architecture import resolve
from pretrax.model.families import PRESET_NAMES
from pretrax.model.weights import abstract_weights
from published import ABOUT, PUBLISHED
from small import mesh_of

RELEASED = json.loads((Path(__file__).parent / 'released_configs.json').read_text())
UNRELEASED = {'llama3-405b'}  # only in version 3.1


def test_every_preset_of_a_released_model_has_its_config():
    assert RELEASED.keys() == {name for name in PRESET_NAMES if not name.startswith('seqax-')} - UNRELEASED
    assert all(one['source'] and '/' in one['model'] for one in RELEASED.values())


@pytest.mark.parametrize('preset', RELEASED)
def test_a_released_config_is_the_architecture_of_its_preset(preset):
    config = RELEASED[preset]['config']
    options, _ = read_options(config)
    of_file = resolve(decoder_options(**options), options['vocab_size'], 1)
    of_preset = resolve(decoder_options(preset=preset), options['vocab_size'], options.get('max_sequence_length', 1))
    assert not compare(of_file, of_preset, 'in the file', 'in the preset')
    assert not compare(of_preset, of_file, 'in the preset', 'in the file')


@pytest.mark.parametrize('preset', RELEASED)
def test_the_files_of_a_released_config_have_the_published_number_of_parameters(preset):
    """Counted over the names and shapes of tensors that an import expects."""
    config = RELEASED[preset]['config']
    options, _ = read_options(config)
    arch = resolve(decoder_options(**options), options['vocab_size'], 1)
    with jax.set_mesh(mesh_of()):
        present = set(shapes(abstract_weights(arch)))
    sizes = arch.sizes | {'V': arch.vocab_size}
    files = mapped(TABLES[table_of(config).names], arch, present)
    assert len({tensor.name for tensor in files}) == len(files)
    count = sum(math.prod(tensor.row.shape(sizes)) for tensor in files)
    if preset in ABOUT:
        expected, tolerance = ABOUT[preset]
        assert count == pytest.approx(expected, rel=tolerance)
    else:
        assert count == PUBLISHED[preset]


def test_a_file_of_cohere2_without_a_window_is_refused():
    """No layer of the class would have positions: `Cohere2Attention.forward` rotates where there is a window."""
    with pytest.raises(UserError, match='sliding_window is null'):
        read_options(RELEASED['command-r7b']['config'] | {'sliding_window': None})


@pytest.mark.parametrize('scores', [None, 96.0, 100.0, 120.0])
@pytest.mark.parametrize('logits', [0.3, 1 / 7, 3.0])
def test_multipliers_of_granite_are_written_as_its_class_stores_them(scores, logits):
    """`attention_multiplier` multiplies scores, and logits are divided by `logits_scaling`."""
    said = {'family': 'granite', 'n_layers': 1, 'd_model': 48, 'n_heads': 4, 'logit_multiplier': logits}
    arch = resolve(decoder_options(**said, query_pre_attn_scalar=scores), 64, 16)
    config, table = write_config(arch, 'granite')
    assert table.model_type == 'granite'
    assert config['attention_multiplier'] == pytest.approx((scores or 12) ** -0.5, rel=1e-15)
    assert config['logits_scaling'] == pytest.approx(1 / logits, rel=1e-15)
    other = resolve(decoder_options(**said, query_pre_attn_scalar=(scores or 12) * (1 + 1e-9)), 64, 16)
    assert 'attention.query_pre_attn_scalar' in compare(arch, other, 'here', 'there')


@pytest.mark.parametrize(
    ('preset', 'fields'),
    [
        ('smollm2-135m', {'rope_interleaved': True}),
        ('gemma2-9b', {'sliding_window_size': 2048}),
        ('gemma2-9b', {'hidden_act': 'silu'}),
        ('gpt2-355m', {'n_special': 3}),
        ('gemma3-4b', {'text_config': {'model_type': 'llama'}}),
        ('gemma3-4b', {'tie_word_embeddings': False, 'text_config': {'tie_word_embeddings': True}}),
        ('gemma3-4b', {'audio_config': {}}),
        ('llama3.1-8b', {'is_encoder_decoder': True}),
    ],
)
def test_a_harmless_field_is_harmless_at_its_released_value_alone(preset, fields):
    with pytest.raises(UserError, match=next(iter(fields))):
        read_options(RELEASED[preset]['config'] | fields)


def test_an_export_of_kimi_k2_is_the_class_that_its_file_names():
    """The released files come with code, since `transformers` has no type kimi_k2. An export needs none."""
    released = RELEASED['kimi-k2']['config']
    options, _ = read_options(released)
    config, _ = write_config(resolve(decoder_options(**options), options['vocab_size'], 1), 'deepseek-v3')
    assert released['model_type'] == 'kimi_k2'
    assert config['model_type'] == 'deepseek_v3'
    assert config['architectures'] == released['architectures'] == ['DeepseekV3ForCausalLM']
