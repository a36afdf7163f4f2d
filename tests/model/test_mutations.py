"""A family with one choice flipped is another model: its logits leave those of `transformers` by more than is allowed.

Without this the goldens might agree whatever a choice says. (What a family leaves no choice in has no row here.)
"""

import jax
import numpy as np
import pytest

from goldens.golden import (
    LOGITS,
    QUICK,
    batch,
    captured_logits,
    config,
    golden,
    model_of,
    options,
    ours,
    relative,
    tensors,
)
from pretrax.model.loss import Batch
from pretrax.model.weights import Weights
from pretrax.shardlib import num, typed_shard_map
from small import mesh_of
from small import transformer as decoder

LLAMA3 = {'kind': 'llama3', 'factor': 8.0, 'low_freq_factor': 1.0, 'high_freq_factor': 4.0, 'original_length': 48}
YARN = {'kind': 'yarn', 'factor': 8.0, 'original_length': 40, 'beta_fast': 2.0, 'beta_slow': 0.5}
MSCALE = YARN | {'truncate': False, 'mscale': 0.7, 'mscale_all_dim': 0.3}
LONGROPE = {
    'kind': 'longrope', 'factor': 32.0, 'original_length': 4,
    'short_factor': (1.0, 1.3, 1.7), 'long_factor': (1.5, 4.0, 9.0),
}  # fmt: skip
DEEPSEEK_YARN = {
    'kind': 'yarn',
    'factor': 4.0,
    'original_length': 16,
    'beta_fast': 2.0,
    'mscale': 0.7,
    'mscale_all_dim': 1.1,
}
KIMI_YARN = DEEPSEEK_YARN | {
    'factor': 32.0,
    'original_length': 40,
    'beta_fast': 1.0,
    'mscale': 1.0,
    'mscale_all_dim': 1.0,
}

SLOW = ('llama3', 'gemma3', 'mixtral')  # the others are nightly
FLIPPED = {
    'gpt2': [{'norm_eps': 1e-3}, {'activation': 'swiglu'}, {'qkv_bias': False}, {'query_pre_attn_scalar': 5}],
    'llama2': [{'rope_base': 20000.0}, {'activation': 'geglu'}, {'norm': 'layernorm'}, {'norm_offset': 1.0},
               {'norm_eps': 1e-3}],
    'llama3': [{'rope_scaling': {'kind': 'none'}}, {'rope_base': 400.0}]
              + [{'rope_scaling': LLAMA3 | {name: value}} for name, value in
                 {'factor': 9.0, 'low_freq_factor': 1.2, 'high_freq_factor': 5.0, 'original_length': 52}.items()],
    'llama-linear': [{'rope_scaling': {'kind': 'none'}}, {'rope_scaling': {'kind': 'linear', 'factor': 4.5}}],
    'llama-yarn': [{'rope_scaling': {'kind': 'none'}}]
                  + [{'rope_scaling': YARN | {name: value}} for name, value in
                     {'factor': 9.0, 'original_length': 30, 'beta_fast': 4.0, 'beta_slow': 1.0, 'truncate': False,
                      'attention_factor': 1.0}.items()],
    'qwen2-yarn': [{'rope_scaling': MSCALE | {name: value}} for name, value in
                   {'truncate': True, 'mscale': None, 'mscale_all_dim': 0.6, 'beta_fast': 1.8,
                   'beta_slow': 0.6}.items()],
    'phi3-longrope': [{'rope_scaling': LONGROPE | {name: value}} for name, value in
                      {'factor': 1.0, 'original_length': 48, 'long_factor': (1.5, 4.0, 8.0)}.items()],
    'phi4-mini': [{'rotary_fraction': 1.0, 'rope_scaling': {'kind': 'none'}}, {'rope_scaling': {'kind': 'none'}}],
    'phi3-longrope-short': [{'rope_scaling': LONGROPE | {'factor': 2.0, 'original_length': 64} | {name: value}}
                            for name, value in {'original_length': 47, 'short_factor': (1.0, 1.3, 1.6)}.items()],
    'smollm3': [{'nope_every': 0}, {'nope_every': 3}, {'rope_base': 10000.0}],
    'mistral': [{'window': 6}, {'window': 8}, {'window': 0}],
    'qwen2': [{'qkv_bias': False}, {'rope_base': 10000.0}],
    'qwen3': [{'qk_norm': 'none'}, {'rope_base': 10000.0}],
    'gpt-oss': [{'attention_sinks': False}, {'window': 6}, {'window': 8}, {'global_every': 0}, {'activation': 'swiglu'},
                {'swiglu_limit': 1.1}, {'experts_per_token': 3}, {'normalize_router': False}, {'mlp_bias': False},
                {'qkv_bias': False}, {'o_bias': False}, {'rope_scaling': {'kind': 'none'}}],
    'mixtral': [{'experts_per_token': 1}, {'experts_per_token': 3}, {'normalize_router': False}, {'capacity': 0.5},
                {'activation': 'geglu'}],
    'qwen2-moe': [{'normalize_router': True}, {'experts_per_token': 2}, {'shared_gate': False}, {'d_shared': 0},
                  {'capacity': 0.5}],
    'qwen2-moe-mixed': [{'dense_layers': (1,)}, {'dense_layers': (5,)}],
    'deepseek-v2': [{'groups_per_token': 4}, {'n_expert_groups': 2}, {'group_scores': 'top2'}, {'router_scale': 1.0},
                    {'normalize_router': True}, {'router_scores': 'sigmoid'}, {'norm_eps': 1e-6}, {'rope_base': 1e3},
                    {'query_pre_attn_scalar': 6}],
    'deepseek-v2-lite': [{'n_expert_groups': 4, 'groups_per_token': 2}, {'norm_eps': 1e-6}]
                        + [{'rope_scaling': DEEPSEEK_YARN | one} for one in
                           ({'kind': 'none'}, {'mscale': 1.1}, {'mscale_all_dim': 0.7}, {'factor': 5.0},
                           {'original_length': 200})],
    'deepseek-v3': [{'router_bias': False}, {'group_scores': 'max'}, {'groups_per_token': 3}, {'router_scale': 1.0},
                    {'normalize_router': False}, {'router_scores': 'softmax'}, {'norm_eps': 1e-6}],
    'kimi-k2': [{'n_expert_groups': 4, 'groups_per_token': 2}, {'router_bias': False}, {'router_scale': 1.0},
                {'normalize_router': False}, {'router_scores': 'softmax'}, {'rope_base': 1e4}]
               + [{'rope_scaling': KIMI_YARN | one} for one in
                  ({'kind': 'none'}, {'factor': 16.0}, {'mscale_all_dim': 0.5}, {'mscale': 0.5})],
    'glm4-moe': [{'router_bias': False}, {'router_scale': 1.0}, {'normalize_router': False},
    {'router_scores': 'softmax'},
                 {'qkv_bias': False}, {'qk_norm': 'none'}, {'rotary_fraction': 1.0}, {'experts_per_token': 2}],
    'glm4-moe-air': [{'groups_per_token': 3}, {'group_scores': 'max'}, {'normalize_router': True},
    {'rotary_fraction': 0.5}],
    'minimax-m2': [{'router_bias': False}, {'router_scores': 'softmax'}, {'normalize_router': False},
    {'qk_norm': 'none'},
                   {'qk_norm': 'each_head'}, {'rotary_fraction': 1.0}, {'experts_per_token': 2}],
    'llama4': [{'window_type': 'sliding'}, {'window': 6}, {'window': 8}, {'global_every': 0}, {'nope_every': 2},
               {'attention_temperature': 0.5}, {'temperature_length': 6}, {'attention_temperature': 0.0,
               'temperature_length': None},
               {'qk_norm': 'none'}, {'qk_norm': 'head'}, {'weigh_inputs': False}, {'router_scores': 'softmax'},
               {'normalize_router': True}, {'experts_per_token': 1}, {'d_shared': 0}, {'norm_eps': 1e-5},
               {'rope_scaling': {'kind': 'none'}}],
    'llama4-mixed': [{'window_type': 'sliding'}, {'layer_types': ('full', 'window', 'window')}, {'qk_norm': 'l2'},
                     {'nope_every': 0}, {'attention_temperature': 0.1, 'temperature_length': 4}, {'qkv_bias': False},
                     {'o_bias': False},
                     {'weigh_inputs': False}],
    'qwen3-moe': [{'normalize_router': False}, {'experts_per_token': 2}, {'experts_per_token': 4}, {'qk_norm': 'none'}],
    'gemma': [{'norm_offset': 0.0}, {'scale_embedding': False}, {'activation': 'swiglu'}],
    'gemma2': [{'window': 6}, {'window': 8}, {'global_every': 0}, {'global_every': 3}, {'attention_softcap': 0},
               {'attention_softcap': 2.1}, {'final_softcap': 0}, {'final_softcap': 3.1}, {'query_pre_attn_scalar': 8},
               {'block_norms': 'pre'}, {'block_norms': 'post'}],
    'gemma3': [{'window': 6}, {'window': 8}, {'global_every': 2}, {'local_rope_base': 5000.0}, {'rope_base': 1e4},
               {'rope_scaling': {'kind': 'none'}}, {'query_pre_attn_scalar': 8}, {'qk_norm': 'none'}],
    'gemma4': [{'window': 6}, {'window': 8}, {'attention.v_norm': False}, {'attention.global_k_as_v': False},
               {'block.layer_scale': False}, {'qk_norm': 'none'}, {'query_pre_attn_scalar': 2.0}, {'final_softcap': 0},
               {'local_rope_base': 5000.0}, {'rope_base': 1e4}, {'block_norms': 'pre'}]
              + [{'rope_scaling': {'kind': 'proportional', 'fraction': 0.25} | one} for one in
                 ({'kind': 'none'}, {'fraction': 0.5}, {'factor': 2.0})],
    'gemma4-values': [{'attention.global_k_as_v': True}, {'attention.v_norm': False}],
    'olmo2': [{'qk_norm': 'none'}, {'block_norms': 'sandwich'}],
    'qwen3-next': [{'attention_gate': False}, {'norm_offset': 0.0}, {'rotary_fraction': 1.0}, {'shared_gate': False},
                   {'rope_base': 1000.0}],
    'qwen3.5': [{'attention_gate': False}, {'norm_offset': 0.0}, {'rotary_fraction': 1.0}, {'qk_norm': 'none'},
    {'rope_base': 1000.0}],
    'qwen3.5-moe': [{'shared_gate': False}, {'experts_per_token': 1}, {'normalize_router': False},
    {'rotary_fraction': 0.5},
                    {'layer_types': ('delta', 'full')}],
    'mamba2': [{'conv_bias': False}, {'norm_eps': 1e-3}, {'layer_types': ('delta',)}],
    'phi3': [{'window': 8}, {'window': 10}, {'window': 0}],
    'olmoe': [{'qk_norm': 'none'}, {'qk_norm': 'each_head'}, {'normalize_router': True}, {'experts_per_token': 2}],
    'olmo3': [{'window': 6}, {'layer_types': ('window', 'window', 'full')}, {'rope_scaling': {'kind': 'none'}},
              {'local_rope_base': None}, {'block_norms': 'sandwich'}],
    'gpt-neox': [{'rotary_fraction': 0.25}, {'rotary_fraction': 0.75}, {'parallel_block': False},
                 {'shared_norm': True}, {'activation': 'relu2'}, {'norm_bias': False}, {'mlp_bias': False},
                 {'o_bias': False}, {'norm': 'rmsnorm'}],
    'gpt-neox-sequential': [{'parallel_block': True}, {'rotary_fraction': 0.5}],
    'phi': [{'rotary_fraction': 1.0}, {'parallel_block': False, 'shared_norm': False}, {'activation': 'relu2'},
            {'unembed_bias': False}, {'qkv_bias': False}],
    'stablelm': [{'rotary_fraction': 0.5}, {'qkv_bias': False}, {'norm_bias': False}, {'parallel_block': True}],
    'stablelm-parallel': [{'qk_norm': 'none'}, {'qk_norm': 'full'}, {'rotary_fraction': 1.0},
                          {'parallel_block': False, 'shared_norm': False}],
    'granite': [{'embedding_multiplier': 2.9}, {'residual_multiplier': 0.31}, {'logit_multiplier': 0.39},
                {'query_pre_attn_scalar': 15.0}, {'qkv_bias': False}, {'o_bias': False}, {'mlp_bias': False}],
    'cohere2': [{'nope_global': False}, {'window': 6}, {'global_every': 3}, {'logit_multiplier': 0.29},
                {'parallel_block': False, 'shared_norm': False}, {'norm': 'rmsnorm'}, {'rope_base': 1200.0}],
    'nemotron': [{'activation': 'gelu_erf'}, {'norm_offset': 0.0}, {'rotary_fraction': 0.75}, {'norm_bias': False}],
    'exaone4': [{'nope_global': False}, {'window': 8}, {'qk_norm': 'none'}, {'block_norms': 'sandwich'}],
}  # fmt: skip


def forced(model, weights):
    """Weights for another architecture: those of the same name,
    and ones or zeros that do nothing in place of others.
    """
    known = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(weights)}

    def take(path, like):
        found = known.get(jax.tree_util.keystr(path))
        if found is None and path[-1].name == 'gate':
            found = known[jax.tree_util.keystr(path).replace('gate', 'up')]
        return np.full(like.shape, 1 - model.arch.norm.offset, np.float32) if found is None else found

    return jax.tree_util.tree_map_with_path(take, model.abstract())


@pytest.mark.parametrize(
    ('case', 'flip'),
    [
        pytest.param(case, flip, marks=pytest.mark.slow if case in SLOW else pytest.mark.nightly)
        for case, flips in FLIPPED.items()
        for flip in flips
    ],
    ids=str,
)
def test_a_flipped_choice_is_detected(case, flip, monkeypatch):
    known = options(case) | {'layers': 'scan'}
    rows = batch(case)
    with jax.set_mesh(mesh_of()):
        weights = ours(case, model_of(case), tensors(case))
        model = decoder(known | flip, vocab_size=known['vocab_size'], length=rows.tokens.shape[1])
        captured_logits(monkeypatch)

        @typed_shard_map
        def run(weights: Weights, batch: Batch) -> num['B/r/d/e L/c V/t']:
            return model.loss(weights, batch)['logits']

        logits = jax.jit(run, compiler_options=QUICK)(forced(model, weights), rows)
    error = relative(np.asarray(logits)[:-1, :, : config(case)['vocab_size']], golden(case)['logits'])
    assert error > 3 * LOGITS, f'{flip} changes logits by {error:.1e}, which passes as equal'
