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

FAST = ('gpt2', 'llama3', 'gemma3', 'mixtral', 'olmo2', 'qwen3')
FLIPPED = {
    'gpt2': [{'norm_eps': 1e-3}, {'activation': 'swiglu'}, {'qkv_bias': False}, {'query_pre_attn_scalar': 5}],
    'llama2': [{'rope_base': 20000.0}, {'activation': 'geglu'}, {'norm': 'layernorm'}, {'norm_offset': 1.0},
               {'norm_eps': 1e-3}],
    'llama3': [{'rope_scaling': {'kind': 'none'}}, {'rope_base': 400.0}]
              + [{'rope_scaling': LLAMA3 | {name: value}} for name, value in
                 {'factor': 9.0, 'low_freq_factor': 1.2, 'high_freq_factor': 5.0, 'original_length': 52}.items()],
    'llama-linear': [{'rope_scaling': {'kind': 'none'}}, {'rope_scaling': {'kind': 'linear', 'factor': 4.5}}],
    'smollm3': [{'nope_every': 0}, {'nope_every': 3}, {'rope_base': 10000.0}],
    'mistral': [{'window': 6}, {'window': 8}, {'window': 0}],
    'qwen2': [{'qkv_bias': False}, {'rope_base': 10000.0}],
    'qwen3': [{'qk_norm': 'none'}, {'rope_base': 10000.0}],
    'mixtral': [{'experts_per_token': 1}, {'experts_per_token': 3}, {'normalize_router': False}, {'capacity': 0.5},
                {'activation': 'geglu'}],
    'qwen2-moe': [{'normalize_router': True}, {'experts_per_token': 2}, {'shared_gate': False}, {'d_shared': 0},
                  {'capacity': 0.5}],
    'qwen3-moe': [{'normalize_router': False}, {'experts_per_token': 2}, {'experts_per_token': 4}, {'qk_norm': 'none'}],
    'gemma': [{'norm_offset': 0.0}, {'scale_embedding': False}, {'activation': 'swiglu'}],
    'gemma2': [{'window': 6}, {'window': 8}, {'global_every': 0}, {'global_every': 3}, {'attention_softcap': 0},
               {'attention_softcap': 2.1}, {'final_softcap': 0}, {'final_softcap': 3.1}, {'query_pre_attn_scalar': 8},
               {'block_norms': 'pre'}, {'block_norms': 'post'}],
    'gemma3': [{'window': 6}, {'window': 8}, {'global_every': 2}, {'local_rope_base': 5000.0}, {'rope_base': 1e4},
               {'rope_scaling': {'kind': 'none'}}, {'query_pre_attn_scalar': 8}, {'qk_norm': 'none'}],
    'olmo2': [{'qk_norm': 'none'}, {'block_norms': 'sandwich'}],
    'phi3': [{'window': 8}, {'window': 10}, {'window': 0}],
}  # fmt: skip


def forced(model, weights):
    """Weights for another architecture: those of the same name, and ones or zeros that do nothing in place of others."""
    known = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(weights)}

    def take(path, like):
        found = known.get(jax.tree_util.keystr(path))
        if found is None and path[-1].name == 'gate':
            found = known[jax.tree_util.keystr(path).replace('gate', 'up')]
        return np.full(like.shape, 1 - model.arch.norm_offset, np.float32) if found is None else found

    return jax.tree_util.tree_map_with_path(take, model.abstract())


@pytest.mark.parametrize(
    ('case', 'flip'),
    [
        pytest.param(case, flip, marks=[pytest.mark.slow] * (case not in FAST))
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
