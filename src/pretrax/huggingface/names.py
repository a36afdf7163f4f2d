"""Maps tensors of Hugging Face checkpoints to pretrax weights, with one table per family.

A row has a tensor's name and its axes in the letters of `model/weights.py`: `'layers.q: (H D) M'` is a matrix whose
rows are the dimensions of all heads, head by head. If one tensor concatenates several weights along an axis, the row
lists them, as in `Fused(1, 'layers.q: M (H D)', 'layers.k: M (K D)')`. {layer}, {expert} and {q_head} or {kv_head} in a
name index the leading dimensions `layers`, `E` and `H` or `K` of the pretrax weight, which the row omits. {module}
counts on from the layers; {global_layer} is the number of a layer without a window, for a tensor that has another row
for layers with one.

Where RoPE rotates the neighbors (2i, 2i + 1) of a head, D is written as `half two`: ours rotates (i, i + D/2), and the
order of the dimensions of a head is free, as long as queries and keys have the same.

In latent attention only the last `D_rope` positions of an axis are rotated: `D_qk*` marks such an axis with neighbors.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np


@dataclass(frozen=True)
class Fused:
    """Several weights, concatenated along an axis of one tensor.

    With `each`, a letter, they take turns: those of the first head, those of the second, ...
    """

    axis: int
    parts: tuple[str, ...]
    each: str | None

    def __init__(self, axis: int, *parts: str, each: str | None = None):
        object.__setattr__(self, 'axis', axis)
        object.__setattr__(self, 'parts', parts)
        object.__setattr__(self, 'each', each)


@dataclass(frozen=True)
class NameTable:
    """The tensors of a family.

    Args:
        rows: rows by tensor name.
        prefix: prefix of tensor names, which files saved from the model without its head omit.
        ignored: patterns of tensors that are not weights: masks and tables that old versions saved.
        exact: patterns of tensors that an export writes in F32, whatever the dtype of the others is.
        stacked: rows for files that have all experts of a layer in one tensor, in the place of those for single
            experts.
        extra_layers: whether files may have layers behind the last one, for multi-token prediction. What no row maps is
            left out.
    """

    rows: Mapping[str, str | Fused]
    prefix: str = 'model.'
    ignored: tuple[str, ...] = ('*.rotary_emb.inv_freq',)
    exact: tuple[str, ...] = ()
    stacked: Mapping[str, str | Fused] = field(default_factory=dict)
    extra_layers: bool = False

    def match_tensors(self, tensors: Iterable[str]) -> 'NameTable':
        """The table for files with these tensors."""
        ends = tuple(name.rpartition('{layer}')[2] for name in self.stacked)
        if not ends or not any(name.endswith(ends) for name in tensors):
            return self
        kept = {name: row for name, row in self.rows.items() if '{expert}' not in name}
        return replace(self, rows=kept | dict(self.stacked))


GPT2 = NameTable(
    {
        'transformer.wte.weight': 'embed: V M',
        'transformer.wpe.weight': 'positions: P M',
        'transformer.h.{layer}.ln_1.weight': 'layers.norm1: M',
        'transformer.h.{layer}.ln_1.bias': 'layers.norm1_bias: M',
        # Conv1D has [input, output] weights, the transpose of Linear
        'transformer.h.{layer}.attn.c_attn.weight': Fused(
            1, 'layers.q: M (H D)', 'layers.k: M (K D)', 'layers.v: M (K D)'
        ),
        'transformer.h.{layer}.attn.c_attn.bias': Fused(
            0, 'layers.q_bias: (H D)', 'layers.k_bias: (K D)', 'layers.v_bias: (K D)'
        ),
        'transformer.h.{layer}.attn.c_proj.weight': 'layers.o: (H D) M',
        'transformer.h.{layer}.attn.c_proj.bias': 'layers.o_bias: M',
        'transformer.h.{layer}.ln_2.weight': 'layers.norm2: M',
        'transformer.h.{layer}.ln_2.bias': 'layers.norm2_bias: M',
        'transformer.h.{layer}.mlp.c_fc.weight': 'layers.up: M F',
        'transformer.h.{layer}.mlp.c_fc.bias': 'layers.up_bias: F',
        'transformer.h.{layer}.mlp.c_proj.weight': 'layers.down: F M',
        'transformer.h.{layer}.mlp.c_proj.bias': 'layers.down_bias: M',
        'transformer.ln_f.weight': 'norm: M',
        'transformer.ln_f.bias': 'norm_bias: M',
        'lm_head.weight': 'unembed: V M',
    },
    prefix='transformer.',
    ignored=('*.attn.bias', '*.attn.masked_bias'),
)

_ATTENTION = {
    'model.layers.{layer}.self_attn.q_proj.weight': 'layers.q: (H D) M',
    'model.layers.{layer}.self_attn.k_proj.weight': 'layers.k: (K D) M',
    'model.layers.{layer}.self_attn.v_proj.weight': 'layers.v: (K D) M',
    'model.layers.{layer}.self_attn.o_proj.weight': 'layers.o: M (H D)',
}
_MLP = {
    'model.layers.{layer}.mlp.gate_proj.weight': 'layers.gate: F M',
    'model.layers.{layer}.mlp.up_proj.weight': 'layers.up: F M',
    'model.layers.{layer}.mlp.down_proj.weight': 'layers.down: M F',
}
_PRE_NORMS = {
    'model.layers.{layer}.input_layernorm.weight': 'layers.norm1: M',
    'model.layers.{layer}.post_attention_layernorm.weight': 'layers.norm2: M',
}
_AROUND = {
    'model.embed_tokens.weight': 'embed: V M',
    'model.norm.weight': 'norm: M',
    'lm_head.weight': 'unembed: V M',
}

_SANDWICH_NORMS = {
    'model.layers.{layer}.input_layernorm.weight': 'layers.norm1: M',
    'model.layers.{layer}.post_attention_layernorm.weight': 'layers.norm1_after: M',
    'model.layers.{layer}.pre_feedforward_layernorm.weight': 'layers.norm2: M',
    'model.layers.{layer}.post_feedforward_layernorm.weight': 'layers.norm2_after: M',
}
_POST_NORMS = {
    'model.layers.{layer}.post_attention_layernorm.weight': 'layers.norm1_after: M',
    'model.layers.{layer}.post_feedforward_layernorm.weight': 'layers.norm2_after: M',
}
_QKV_BIASES = {
    'model.layers.{layer}.self_attn.q_proj.bias': 'layers.q_bias: (H D)',
    'model.layers.{layer}.self_attn.k_proj.bias': 'layers.k_bias: (K D)',
    'model.layers.{layer}.self_attn.v_proj.bias': 'layers.v_bias: (K D)',
}
_BIASES = {
    **_QKV_BIASES,
    'model.layers.{layer}.self_attn.o_proj.bias': 'layers.o_bias: M',
    'model.layers.{layer}.mlp.gate_proj.bias': 'layers.gate_bias: F',
    'model.layers.{layer}.mlp.up_proj.bias': 'layers.up_bias: F',
    'model.layers.{layer}.mlp.down_proj.bias': 'layers.down_bias: M',
}
_NORM_BIASES = {
    'model.layers.{layer}.input_layernorm.bias': 'layers.norm1_bias: M',
    'model.layers.{layer}.post_attention_layernorm.bias': 'layers.norm2_bias: M',
    'model.norm.bias': 'norm_bias: M',
}
_NORMS_OF_EACH_HEAD = {
    'model.layers.{layer}.self_attn.q_layernorm.norms.{q_head}.weight': 'layers.q_full_norm: D',
    'model.layers.{layer}.self_attn.k_layernorm.norms.{kv_head}.weight': 'layers.k_full_norm: D',
}
_ROTATED_NEIGHBORS = {
    'model.layers.{layer}.self_attn.q_proj.weight': 'layers.q: (H half two) M',
    'model.layers.{layer}.self_attn.k_proj.weight': 'layers.k: (K half two) M',
    'model.layers.{layer}.self_attn.q_proj.bias': 'layers.q_bias: (H half two)',
    'model.layers.{layer}.self_attn.k_proj.bias': 'layers.k_bias: (K half two)',
}
_HEAD_NORMS = {
    'model.layers.{layer}.self_attn.q_norm.weight': 'layers.q_norm: D',
    'model.layers.{layer}.self_attn.k_norm.weight': 'layers.k_norm: D',
}
# Layers without a window whose heads have sizes of their own
_GLOBAL_HEADS = {
    'model.layers.{global_layer}.self_attn.q_proj.weight': 'layers.q_global: (H D_global) M',
    'model.layers.{global_layer}.self_attn.k_proj.weight': 'layers.k_global: (K_global D_global) M',
    'model.layers.{global_layer}.self_attn.v_proj.weight': 'layers.v_global: (K_global D_global) M',
    'model.layers.{global_layer}.self_attn.o_proj.weight': 'layers.o_global: M (H D_global)',
    'model.layers.{global_layer}.self_attn.q_norm.weight': 'layers.q_norm_global: D_global',
    'model.layers.{global_layer}.self_attn.k_norm.weight': 'layers.k_norm_global: D_global',
}
_FULL_NORMS = {
    'model.layers.{layer}.self_attn.q_norm.weight': 'layers.q_full_norm: (H D)',
    'model.layers.{layer}.self_attn.k_norm.weight': 'layers.k_full_norm: (K D)',
}
_FUSED = {
    'model.layers.{layer}.self_attn.qkv_proj.weight': Fused(
        0, 'layers.q: (H D) M', 'layers.k: (K D) M', 'layers.v: (K D) M'
    ),
    'model.layers.{layer}.self_attn.o_proj.weight': 'layers.o: M (H D)',
    'model.layers.{layer}.mlp.gate_up_proj.weight': Fused(0, 'layers.gate: F M', 'layers.up: F M'),
    'model.layers.{layer}.mlp.down_proj.weight': 'layers.down: M F',
}

_MIXTRAL_EXPERTS = {
    'model.layers.{layer}.block_sparse_moe.gate.weight': 'layers.router: E M',
    'model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight': 'layers.expert_gate: F_expert M',
    'model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight': 'layers.expert_up: F_expert M',
    'model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight': 'layers.expert_down: M F_expert',
}
_QWEN_EXPERTS = {
    'model.layers.{layer}.mlp.gate.weight': 'layers.router: E M',
    'model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight': 'layers.expert_gate: F_expert M',
    'model.layers.{layer}.mlp.experts.{expert}.up_proj.weight': 'layers.expert_up: F_expert M',
    'model.layers.{layer}.mlp.experts.{expert}.down_proj.weight': 'layers.expert_down: M F_expert',
}
_STACKED_EXPERTS = {
    'model.layers.{layer}.mlp.experts.gate_up_proj': Fused(
        1, 'layers.expert_gate: E F_expert M', 'layers.expert_up: E F_expert M'
    ),
    'model.layers.{layer}.mlp.experts.down_proj': 'layers.expert_down: E M F_expert',
}
_DEEPSEEK_ATTENTION = {
    'model.layers.{layer}.self_attn.q_proj.weight': 'layers.q_direct: (H D_qk*) M',
    'model.layers.{layer}.self_attn.q_a_proj.weight': 'layers.q_a: C_q M',
    'model.layers.{layer}.self_attn.q_a_layernorm.weight': 'layers.q_a_norm: C_q',
    'model.layers.{layer}.self_attn.q_b_proj.weight': 'layers.q_b: (H D_qk*) C_q',
    'model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight': 'layers.kv_a: C_kv* M',
    'model.layers.{layer}.self_attn.kv_a_layernorm.weight': 'layers.kv_a_norm: C_latent',
    'model.layers.{layer}.self_attn.kv_b_proj.weight': 'layers.kv_b: (H D_kv) C_latent',
    'model.layers.{layer}.self_attn.o_proj.weight': 'layers.o: M (H D)',
}
_DEEPSEEK_EXPERTS = {
    'model.layers.{layer}.mlp.gate.e_score_correction_bias': 'layers.router_bias: E',
    'model.layers.{layer}.mlp.shared_experts.gate_proj.weight': 'layers.shared_gate: F_shared M',
    'model.layers.{layer}.mlp.shared_experts.up_proj.weight': 'layers.shared_up: F_shared M',
    'model.layers.{layer}.mlp.shared_experts.down_proj.weight': 'layers.shared_down: M F_shared',
}


def _with_modules(rows: dict[str, str | Fused]) -> dict[str, str | Fused]:
    """The rows of a family, and of its modules of multi-token prediction:
    those of a layer, and of what only a module has.
    """

    def moved(row: str | Fused) -> str | Fused:
        if isinstance(row, Fused):
            return Fused(row.axis, *(moved(part) for part in row.parts), each=row.each)  # pyright: ignore[reportArgumentType]
        return row.replace('layers.', 'multi_token.layer.', 1)

    of_layers = {name: row for name, row in rows.items() if '.{layer}.' in name}
    module = 'model.layers.{module}.'
    return {
        **rows,
        **{name.replace('{layer}', '{module}'): moved(row) for name, row in of_layers.items()},
        module + 'enorm.weight': 'multi_token.embedding_norm: M',
        module + 'hnorm.weight': 'multi_token.hidden_norm: M',
        module + 'eh_proj.weight': Fused(
            1, 'multi_token.from_embedding: M_next M', 'multi_token.from_hidden: M_next M'
        ),
        module + 'shared_head.norm.weight': 'multi_token.norm: M',
    }


_EXACT_BIAS = ('*.e_score_correction_bias',)  # a step changes it by 0.001, which BF16 rounds away from 0.25 on
_SHARED_EXPERT = {
    'model.layers.{layer}.mlp.shared_expert.gate_proj.weight': 'layers.shared_gate: F_shared M',
    'model.layers.{layer}.mlp.shared_expert.up_proj.weight': 'layers.shared_up: F_shared M',
    'model.layers.{layer}.mlp.shared_expert.down_proj.weight': 'layers.shared_down: M F_shared',
    'model.layers.{layer}.mlp.shared_expert_gate.weight': 'layers.shared_mix: () M',  # a matrix of one row
}
_GATED_ATTENTION = {
    **_ATTENTION,
    'model.layers.{layer}.self_attn.q_proj.weight': Fused(0, 'layers.q: (H D) M', 'layers.o_gate: (H D) M', each='H'),
}
_STATES = {
    'model.layers.{layer}.linear_attn.conv1d.weight': Fused(
        0,
        'layers.linear_q_conv: (N_key D_key) () J',
        'layers.linear_k_conv: (N_key D_key) () J',
        'layers.linear_v_conv: (N_state D_value) () J',
    ),
    'model.layers.{layer}.linear_attn.dt_bias': 'layers.linear_dt_bias: N_state',
    'model.layers.{layer}.linear_attn.A_log': 'layers.linear_log_decay: N_state',
    'model.layers.{layer}.linear_attn.norm.weight': 'layers.linear_norm: D_value',
    'model.layers.{layer}.linear_attn.out_proj.weight': 'layers.linear_o: M (N_state D_value)',
}
_DELTA_NET = {
    **_STATES,
    'model.layers.{layer}.linear_attn.in_proj_qkvz.weight': Fused(
        0,
        'layers.linear_q: (N_key D_key) M',
        'layers.linear_k: (N_key D_key) M',
        'layers.linear_v: (N_key N_shared D_value) M',
        'layers.linear_z: (N_key N_shared D_value) M',
        each='N_key',
    ),
    'model.layers.{layer}.linear_attn.in_proj_ba.weight': Fused(
        0, 'layers.linear_beta: (N_key N_shared) M', 'layers.linear_a: (N_key N_shared) M', each='N_key'
    ),
}
_DELTA_NET_OF_QWEN35 = {
    **_STATES,
    'model.layers.{layer}.linear_attn.in_proj_qkv.weight': Fused(
        0,
        'layers.linear_q: (N_key D_key) M',
        'layers.linear_k: (N_key D_key) M',
        'layers.linear_v: (N_state D_value) M',
    ),
    'model.layers.{layer}.linear_attn.in_proj_z.weight': 'layers.linear_z: (N_state D_value) M',
    'model.layers.{layer}.linear_attn.in_proj_b.weight': 'layers.linear_beta: N_state M',
    'model.layers.{layer}.linear_attn.in_proj_a.weight': 'layers.linear_a: N_state M',
}
MAMBA2 = NameTable(
    {
        'backbone.embeddings.weight': 'embed: V M',
        'backbone.layers.{layer}.norm.weight': 'layers.norm1: M',
        'backbone.layers.{layer}.mixer.in_proj.weight': Fused(
            0,
            'layers.linear_z: (N_state D_value) M',
            'layers.linear_v: (N_state D_value) M',
            'layers.linear_k: (N_key D_key) M',
            'layers.linear_q: (N_key D_key) M',
            'layers.linear_a: N_state M',
        ),
        'backbone.layers.{layer}.mixer.conv1d.weight': Fused(
            0,
            'layers.linear_v_conv: (N_state D_value) () J',
            'layers.linear_k_conv: (N_key D_key) () J',
            'layers.linear_q_conv: (N_key D_key) () J',
        ),
        'backbone.layers.{layer}.mixer.conv1d.bias': Fused(
            0,
            'layers.linear_v_conv_bias: (N_state D_value)',
            'layers.linear_k_conv_bias: (N_key D_key)',
            'layers.linear_q_conv_bias: (N_key D_key)',
        ),
        'backbone.layers.{layer}.mixer.dt_bias': 'layers.linear_dt_bias: N_state',
        'backbone.layers.{layer}.mixer.A_log': 'layers.linear_log_decay: N_state',
        'backbone.layers.{layer}.mixer.D': 'layers.linear_skip: N_state',
        'backbone.layers.{layer}.mixer.norm.weight': 'layers.linear_group_norm: (N_state D_value)',
        'backbone.layers.{layer}.mixer.out_proj.weight': 'layers.linear_o: M (N_state D_value)',
        'backbone.norm_f.weight': 'norm: M',
        'lm_head.weight': 'unembed: V M',
    },
    prefix='backbone.',
)

_QKV = 'layers.q: (H D) M', 'layers.k: (K D) M', 'layers.v: (K D) M'
GPT_NEOX = NameTable(
    {
        'gpt_neox.embed_in.weight': 'embed: V M',
        'gpt_neox.layers.{layer}.input_layernorm.weight': 'layers.norm1: M',
        'gpt_neox.layers.{layer}.input_layernorm.bias': 'layers.norm1_bias: M',
        'gpt_neox.layers.{layer}.attention.query_key_value.weight': Fused(0, *_QKV, each='H'),
        'gpt_neox.layers.{layer}.attention.query_key_value.bias': Fused(
            0, 'layers.q_bias: (H D)', 'layers.k_bias: (K D)', 'layers.v_bias: (K D)', each='H'
        ),
        'gpt_neox.layers.{layer}.attention.dense.weight': 'layers.o: M (H D)',
        'gpt_neox.layers.{layer}.attention.dense.bias': 'layers.o_bias: M',
        'gpt_neox.layers.{layer}.post_attention_layernorm.weight': 'layers.norm2: M',
        'gpt_neox.layers.{layer}.post_attention_layernorm.bias': 'layers.norm2_bias: M',
        'gpt_neox.layers.{layer}.mlp.dense_h_to_4h.weight': 'layers.up: F M',
        'gpt_neox.layers.{layer}.mlp.dense_h_to_4h.bias': 'layers.up_bias: F',
        'gpt_neox.layers.{layer}.mlp.dense_4h_to_h.weight': 'layers.down: M F',
        'gpt_neox.layers.{layer}.mlp.dense_4h_to_h.bias': 'layers.down_bias: M',
        'gpt_neox.final_layer_norm.weight': 'norm: M',
        'gpt_neox.final_layer_norm.bias': 'norm_bias: M',
        'embed_out.weight': 'unembed: V M',
    },
    prefix='gpt_neox.',
    ignored=('*.attention.bias', '*.attention.masked_bias', '*.rotary_emb.inv_freq'),
)
PHI = NameTable(
    {
        'model.embed_tokens.weight': 'embed: V M',
        'model.layers.{layer}.input_layernorm.weight': 'layers.norm1: M',
        'model.layers.{layer}.input_layernorm.bias': 'layers.norm1_bias: M',
        'model.layers.{layer}.self_attn.q_proj.weight': 'layers.q: (H D) M',
        'model.layers.{layer}.self_attn.k_proj.weight': 'layers.k: (K D) M',
        'model.layers.{layer}.self_attn.v_proj.weight': 'layers.v: (K D) M',
        **_QKV_BIASES,
        'model.layers.{layer}.self_attn.dense.weight': 'layers.o: M (H D)',
        'model.layers.{layer}.self_attn.dense.bias': 'layers.o_bias: M',
        'model.layers.{layer}.mlp.fc1.weight': 'layers.up: F M',
        'model.layers.{layer}.mlp.fc1.bias': 'layers.up_bias: F',
        'model.layers.{layer}.mlp.fc2.weight': 'layers.down: M F',
        'model.layers.{layer}.mlp.fc2.bias': 'layers.down_bias: M',
        'model.final_layernorm.weight': 'norm: M',
        'model.final_layernorm.bias': 'norm_bias: M',
        'lm_head.weight': 'unembed: V M',
        'lm_head.bias': 'unembed_bias: V',
    }
)
_GPT_OSS = {
    **_QKV_BIASES,
    'model.layers.{layer}.self_attn.o_proj.bias': 'layers.o_bias: M',
    'model.layers.{layer}.self_attn.sinks': 'layers.sinks: H',
    'model.layers.{layer}.mlp.router.weight': 'layers.router: E M',
    'model.layers.{layer}.mlp.router.bias': 'layers.router_logit_bias: E',
    'model.layers.{layer}.mlp.experts.gate_up_proj': Fused(
        2, 'layers.expert_gate: E M F_expert', 'layers.expert_up: E M F_expert', each='F_expert'
    ),
    'model.layers.{layer}.mlp.experts.gate_up_proj_bias': Fused(
        1, 'layers.expert_gate_bias: E F_expert', 'layers.expert_up_bias: E F_expert', each='F_expert'
    ),
    'model.layers.{layer}.mlp.experts.down_proj': 'layers.expert_down: E F_expert M',
    'model.layers.{layer}.mlp.experts.down_proj_bias': 'layers.expert_down_bias: E M',
}

_LLAMA4 = {
    **_QKV_BIASES,
    'model.layers.{layer}.self_attn.o_proj.bias': 'layers.o_bias: M',
    **_ROTATED_NEIGHBORS,
    **{name.replace('mlp', 'feed_forward'): row for name, row in _MLP.items()},
    'model.layers.{layer}.feed_forward.router.weight': 'layers.router: E M',
    'model.layers.{layer}.feed_forward.experts.gate_up_proj': Fused(
        2, 'layers.expert_gate: E M F_expert', 'layers.expert_up: E M F_expert'
    ),
    'model.layers.{layer}.feed_forward.experts.down_proj': 'layers.expert_down: E F_expert M',
    'model.layers.{layer}.feed_forward.shared_expert.gate_proj.weight': 'layers.shared_gate: F_shared M',
    'model.layers.{layer}.feed_forward.shared_expert.up_proj.weight': 'layers.shared_up: F_shared M',
    'model.layers.{layer}.feed_forward.shared_expert.down_proj.weight': 'layers.shared_down: M F_shared',
}

TABLES = {
    'gpt2': GPT2,
    'mamba2': MAMBA2,
    'qwen3-next': NameTable(
        {
            **_AROUND,
            **_PRE_NORMS,
            **_GATED_ATTENTION,
            **_HEAD_NORMS,
            **_DELTA_NET,
            **_MLP,
            **_QWEN_EXPERTS,
            **_SHARED_EXPERT,
        },
        ignored=('*.rotary_emb.inv_freq', 'mtp.*'),  # the class has no multi-token prediction
    ),
    'qwen3.5': NameTable(
        {
            **_AROUND,
            **_PRE_NORMS,
            **_GATED_ATTENTION,
            **_HEAD_NORMS,
            **_DELTA_NET_OF_QWEN35,
            **_MLP,
            **_QWEN_EXPERTS,
            **_SHARED_EXPERT,
        },
        ignored=('*.rotary_emb.inv_freq', 'mtp.*'),
        stacked=_STACKED_EXPERTS,
    ),
    # Mistral, Gemma, SmolLM3 and Granite too
    'llama': NameTable({**_AROUND, **_PRE_NORMS, **_ATTENTION, **_BIASES, **_MLP}),
    'qwen2': NameTable({**_AROUND, **_PRE_NORMS, **_ATTENTION, **_QKV_BIASES, **_MLP}),
    'qwen3': NameTable({**_AROUND, **_PRE_NORMS, **_ATTENTION, **_HEAD_NORMS, **_MLP}),
    'mixtral': NameTable({**_AROUND, **_PRE_NORMS, **_ATTENTION, **_MIXTRAL_EXPERTS}),
    'qwen2-moe': NameTable(
        {**_AROUND, **_PRE_NORMS, **_ATTENTION, **_QKV_BIASES, **_MLP, **_QWEN_EXPERTS, **_SHARED_EXPERT}
    ),
    'qwen3-moe': NameTable({**_AROUND, **_PRE_NORMS, **_ATTENTION, **_HEAD_NORMS, **_MLP, **_QWEN_EXPERTS}),
    'deepseek': NameTable(
        _with_modules({**_AROUND, **_PRE_NORMS, **_DEEPSEEK_ATTENTION, **_MLP, **_QWEN_EXPERTS, **_DEEPSEEK_EXPERTS}),
        exact=_EXACT_BIAS,
        extra_layers=True,
    ),
    'glm4-moe': NameTable(
        _with_modules(
            {
                **_AROUND,
                **_PRE_NORMS,
                **_ATTENTION,
                **_QKV_BIASES,
                **_HEAD_NORMS,
                **_MLP,
                **_QWEN_EXPERTS,
                **_DEEPSEEK_EXPERTS,
            }
        ),
        exact=_EXACT_BIAS,
        extra_layers=True,
    ),
    'minimax-m2': NameTable(
        {
            **_AROUND,
            **_PRE_NORMS,
            **_ATTENTION,
            **_FULL_NORMS,
            **_MIXTRAL_EXPERTS,
            'model.layers.{layer}.block_sparse_moe.e_score_correction_bias': 'layers.router_bias: E',
        },
        exact=_EXACT_BIAS,
    ),
    'gemma2': NameTable({**_AROUND, **_SANDWICH_NORMS, **_ATTENTION, **_MLP}),
    'gemma3': NameTable({**_AROUND, **_SANDWICH_NORMS, **_ATTENTION, **_HEAD_NORMS, **_MLP}),
    'gemma4': NameTable(
        {
            **_AROUND,
            **_SANDWICH_NORMS,
            **_ATTENTION,
            **_HEAD_NORMS,
            **_GLOBAL_HEADS,
            **_MLP,
            'model.layers.{layer}.layer_scalar': 'layers.layer_scale: ()',
        }
    ),
    'olmo2': NameTable({**_AROUND, **_POST_NORMS, **_ATTENTION, **_FULL_NORMS, **_MLP}),
    'gpt-oss': NameTable({**_AROUND, **_PRE_NORMS, **_ATTENTION, **_GPT_OSS}),
    'llama4': NameTable({**_AROUND, **_PRE_NORMS, **_ATTENTION, **_LLAMA4}),
    'phi3': NameTable({**_AROUND, **_PRE_NORMS, **_FUSED}),
    'olmoe': NameTable({**_AROUND, **_PRE_NORMS, **_ATTENTION, **_FULL_NORMS, **_QWEN_EXPERTS}),
    'gpt-neox': GPT_NEOX,
    'phi': PHI,
    'stablelm': NameTable(
        {**_AROUND, **_PRE_NORMS, **_NORM_BIASES, **_ATTENTION, **_QKV_BIASES, **_NORMS_OF_EACH_HEAD, **_MLP}
    ),
    'cohere2': NameTable({**_AROUND, **_PRE_NORMS, **_ATTENTION, **_BIASES, **_ROTATED_NEIGHBORS, **_MLP}),
    'nemotron': NameTable({**_AROUND, **_PRE_NORMS, **_NORM_BIASES, **_ATTENTION, **_BIASES, **_MLP}),
    'exaone4': NameTable({**_AROUND, **_POST_NORMS, **_ATTENTION, **_HEAD_NORMS, **_MLP}),
}


@dataclass(frozen=True)
class TensorPart:
    """A pretrax weight inside a tensor: its path and the letters of the tensor's axes, grouped where axes are merged.

    `paired` are the letters of axes in which rotated pairs are next to each other.
    """

    path: str
    axes: tuple[tuple[str, ...], ...]
    paired: tuple[str, ...] = ()

    @staticmethod
    def parse(text: str) -> 'TensorPart':
        path, _, axes = text.partition(':')
        groups = re.findall(r'\(([^)]*)\)|(\w+)', axes.replace('*', ''))  # '()' is an axis of size 1
        grouped = tuple(tuple((merged or single).split()) for merged, single in groups)
        return TensorPart(path.strip(), grouped, tuple(re.findall(r'(\w+)\*', axes)))

    @property
    def letters(self) -> tuple[str, ...]:
        return tuple(letter for group in self.axes for letter in group)

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of this weight inside the tensor."""
        return tuple(int(np.prod([_size(letter, sizes) for letter in group])) for group in self.axes)

    def to_ours(self, array: np.ndarray, ours: tuple[str, ...], sizes: Mapping[str, int]) -> np.ndarray:
        """Converts the tensor to the axes of the pretrax weight."""
        split = array.reshape([_size(letter, sizes) for letter in self.letters])
        for letter in self.paired:
            split = split.take(_halves(sizes[letter], sizes['D_rope']), axis=self.letters.index(letter))
        in_order = split.transpose([self.letters.index(letter) for letter in self._split(ours)])
        return in_order.reshape([sizes[letter] for letter in ours])

    def to_theirs(self, array: np.ndarray, ours: tuple[str, ...], sizes: Mapping[str, int]) -> np.ndarray:
        """Converts the pretrax weight to the axes of the tensor."""
        letters = self._split(ours)
        split = array.reshape([_size(letter, sizes) for letter in letters])
        split = split.transpose([letters.index(letter) for letter in self.letters])
        for letter in self.paired:
            back = np.argsort(_halves(sizes[letter], sizes['D_rope']))
            split = split.take(back, axis=self.letters.index(letter))
        return split.reshape(self.shape(sizes))

    def _split(self, ours: tuple[str, ...]) -> tuple[str, ...]:
        """The letters of a pretrax weight, split as in the tensor."""
        return tuple(part for letter in ours for part in ((letter,) if letter in self.letters else PARTS[letter]))


# Letters that a tensor may split: a head into halves; the heads of states by the key head that they share
PARTS = {'D': ('two', 'half'), 'N_state': ('N_key', 'N_shared')}


def _size(letter: str, sizes: Mapping[str, int]) -> int:
    return {'two': 2, 'half': sizes['D'] // 2}.get(letter) or sizes[letter]


def _halves(size: int, rotated: int) -> list[int]:
    """Where the positions of an axis are in a file that has the pairs of its last `rotated` ones next to each other."""
    first = size - rotated
    return [*range(first), *range(first, size, 2), *range(first + 1, size, 2)]


@dataclass(frozen=True)
class TensorRow:
    """A parsed row of a table: a tensor's name and its parts, in order along `axis`."""

    name: str
    parts: tuple[TensorPart, ...]
    axis: int
    each: str | None

    def shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        shapes = [part.shape(sizes) for part in self.parts]
        return tuple(
            sum(shape[axis] for shape in shapes) if axis == self.axis else size for axis, size in enumerate(shapes[0])
        )

    def slices(self, part: TensorPart, sizes: Mapping[str, int]) -> list[tuple[slice, ...]]:
        """The slices of a part in the tensor, in their order along `axis`."""
        turns = 1 if self.each is None else sizes[self.each]
        lengths = [other.shape(sizes)[self.axis] // turns for other in self.parts]
        number = self.parts.index(part)
        if self.each is not None and set(lengths) == {1}:
            alternate = slice(number, None, len(lengths))
            return [tuple(alternate if axis == self.axis else slice(None) for axis in range(len(part.axes)))]
        starts = [turn * sum(lengths) + sum(lengths[:number]) for turn in range(turns)]
        return [
            tuple(
                slice(start, start + lengths[number]) if axis == self.axis else slice(None)
                for axis in range(len(part.axes))
            )
            for start in starts
        ]


def rows(table: NameTable) -> list[TensorRow]:
    """Parses the rows of a table."""
    found = []
    for name, row in table.rows.items():
        fused = Fused(0, row) if isinstance(row, str) else row
        found.append(TensorRow(name, tuple(map(TensorPart.parse, fused.parts)), fused.axis, fused.each))
    return found
