"""What a config.json leaves out has the value that transformers gives it (tests/goldens/make_defaults.py)."""

import json
from pathlib import Path

import pytest

from decoders import decoder_options
from pretrax.huggingface.configs import BY_TYPE, DEFAULTS, read_options
from pretrax.model.architecture import resolve

THEIRS = json.loads((Path(__file__).parents[1] / 'goldens' / 'defaults.json').read_text())
# Not defaults of the class, but of a function that it calls
RULES = {
    'gemma3_text': {'sliding_window_pattern': 6},
    'cohere2': {'sliding_window_pattern': 4},
    'gpt_neox': {'rotary_emb_base': 10000.0, 'rotary_pct': 0.25},
    'phi': {'partial_rotary_factor': 0.5},
    'phi3': {'partial_rotary_factor': 1.0},
    'stablelm': {'partial_rotary_factor': 0.25},
    'nemotron': {'partial_rotary_factor': 0.5},
    'qwen3_next': {'partial_rotary_factor': 0.25},
    'qwen3_5_text': {'partial_rotary_factor': 0.25},
    'qwen3_5_moe_text': {'partial_rotary_factor': 0.25},
    'glm4_moe': {'partial_rotary_factor': 0.5},
    'minimax_m2': {'partial_rotary_factor': None},  # 1, or as rotary_dim says
}
# Fields that classes do not declare, but take from a file
UNDECLARED = {('head_dim', None), ('global_head_dim', 512), ('num_global_key_value_heads', None)}


def test_every_family_has_defaults():
    assert DEFAULTS.keys() == BY_TYPE.keys() == THEIRS['fields'].keys()


@pytest.mark.parametrize('model_type', BY_TYPE)
def test_defaults_are_those_of_transformers(model_type):
    theirs = THEIRS['fields'][model_type] | RULES.get(model_type, {})
    known = {name for field in BY_TYPE[model_type].fields for name in field.fields}
    ours = {name: value for name, value in DEFAULTS[model_type].items() if name in known}
    assert {(name, value) for name, value in ours.items() if name not in theirs} <= UNDECLARED
    for name in set(ours) & set(theirs):
        if not (name == 'num_key_value_heads' and ours[name] == theirs['num_attention_heads']):
            assert (ours[name], type(ours[name])) == (theirs[name], type(theirs[name])), name


def architecture(config):
    options, _ = read_options(config)
    return resolve(decoder_options(**options), options['vocab_size'], 64)


@pytest.mark.parametrize(
    'case', [pytest.param(case, id=f'{case["model_type"]}-{number}') for number, case in enumerate(THEIRS['resolved'])]
)
def test_what_is_left_out_is_derived_as_transformers_does(case):
    """The sizes, the layers with a window and the bases and scalings of RoPE."""
    given, said = {'model_type': case['model_type'], **case['given']}, case['resolved']
    if case['model_type'] == 'gpt2':
        arch = architecture(given)
        assert (arch.d_model, arch.attention.n_heads, arch.n_layers) == (
            said['n_embd'],
            said['n_head'],
            said['n_layer'],
        )
        assert (arch.feed_forward.d_ff, arch.norm.eps) == (4 * said['n_embd'], said['layer_norm_epsilon'])
        return
    has_window = windows_of(said, case['model_type'])
    arch = architecture(given)
    assert (arch.d_model, arch.attention.n_heads) == (said['hidden_size'], said['num_attention_heads'])
    assert arch.attention.n_kv_heads == said.get('num_key_value_heads', arch.attention.n_heads)
    assert arch.attention.d_head == (said.get('head_dim') or said['hidden_size'] // said['num_attention_heads'])
    norm_eps = next(said[name] for name in ('rms_norm_eps', 'layer_norm_eps', 'norm_eps') if name in said)
    assert (arch.n_layers, arch.norm.eps, arch.embedding.tied) == (
        said['num_hidden_layers'], norm_eps, said['tie_word_embeddings'],
    )  # fmt: skip
    assert arch.vocab_size == said['vocab_size']
    assert list(map(bool, arch.windows)) == has_window
    assert not any(has_window) or arch.attention.window == said.get('sliding_window', said.get('attention_chunk_size'))
    rope = said['rope_parameters']
    full, local = (rope.get(kind, rope) for kind in ('full_attention', 'sliding_attention'))
    assert arch.rope.base == full['rope_theta']
    fraction = arch.rope.scaling.fraction if full['rope_type'] == 'proportional' else arch.rope.fraction
    assert fraction == full.get('partial_rotary_factor', 1.0)
    assert arch.rope.local_base == (local['rope_theta'] if 'sliding_attention' in rope else None)
    assert (arch.rope.scaling.kind if arch.rope.scaling else 'default') == full['rope_type']
    if arch.rope.scaling:
        assert arch.rope.scaling.factor == full.get('factor', 1.0)
    for layer, sizes in said.get('per_layer_config', {}).items():
        heads = arch.heads(arch.kinds[int(layer)])
        assert heads.d_query == sizes['head_dim']
        assert heads.n_kv == sizes.get('num_key_value_heads', said['num_key_value_heads'])
    if full['rope_type'] == 'llama3':
        assert arch.rope.scaling.original_length == full['original_max_position_embeddings']
    if 'no_rope_layers' in said:
        assert [int(arch.kinds[i % len(arch.kinds)].rope_base is not None) for i in range(arch.n_layers)] == said[
            'no_rope_layers'
        ]
    assert arch.experts.n_experts == (
        said.get('num_experts') or said.get('num_local_experts') or said.get('n_routed_experts') or 0
    )


def windows_of(said, model_type):
    """The layers with a window, as the model class of transformers applies them (modeling_*.py)."""
    if model_type == 'llama4_text':
        return [kind == 'chunked_attention' for kind in said['layer_types']]
    count, window = said['num_hidden_layers'], said.get('sliding_window')
    if window in (None, 0):
        return [False] * count
    if model_type in ('mistral', 'mixtral', 'phi3', 'qwen3_moe'):  # one mask for every layer
        return [True] * count
    return [kind == 'sliding_attention' for kind in said.get('layer_types', [])] or [False] * count
