"""Model families as rows of choices, and the options a configuration may write.

A family fixes the parts of the decoder. A preset (presets.py) is a family with published sizes. Every choice can be
overridden: `model: {preset: gpt2-124m, n_layers: 6}`. No JAX here, so that configurations are checked quickly.
docs/models.md has the table of families.
"""

import dataclasses
import difflib
import math
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from pretrax.errors import UserError
from pretrax.model.architecture import Architecture, RopeScaling
from pretrax.model.presets import PRESETS

# A choice that a family leaves out is that of 'llama', or the default in TransformerOptions.
_LLAMA = {
    'norm': 'rmsnorm', 'norm_eps': 1e-5, 'positions': 'rope', 'activation': 'swiglu', 'bias': False, 'tied': False,
}  # fmt: skip
_QWEN2 = _LLAMA | {'norm_eps': 1e-6, 'qkv_bias': True, 'rope_base': 1e6}
_QWEN3 = _LLAMA | {'norm_eps': 1e-6, 'qk_norm': 'head', 'rope_base': 1e6}
_GEMMA = _LLAMA | {
    'norm_eps': 1e-6, 'norm_offset': 1.0, 'activation': 'geglu', 'tied': True, 'scale_embedding': True,
}  # fmt: skip

FAMILIES: dict[str, dict[str, Any]] = {
    # Radford et al. 2019, "Language Models are Unsupervised Multitask Learners"; the released code's choices
    'gpt2': {
        'norm': 'layernorm', 'norm_eps': 1e-5, 'positions': 'learned', 'activation': 'gelu', 'bias': True, 'tied': True,
    },
    # Touvron et al. 2023, arXiv:2302.13971, section 2.2. SmolLM is of this family too.
    'llama': _LLAMA,
    # Jiang et al. 2023, arXiv:2310.06825, section 2. The window is its first release's; later ones have none.
    'mistral': _LLAMA,
    # Yang et al. 2024, arXiv:2407.10671, section 2.2.1, and the released configurations
    'qwen2': _QWEN2,
    # Qwen Team 2025, arXiv:2505.09388, section 2
    'qwen3': _QWEN3,
    # Gemma Team 2024, arXiv:2403.08295, section 2, and the released code
    'gemma': _GEMMA,
    # Gemma Team 2024, arXiv:2408.00118, section 2
    'gemma2': _GEMMA | {
        'block_norms': 'sandwich', 'window': 4096, 'global_every': 2, 'attention_softcap': 50.0, 'final_softcap': 30.0,
        'query_pre_attn_scalar': 256.0,
    },
    # Gemma Team 2025, arXiv:2503.19786, section 2.1
    'gemma3': _GEMMA | {
        'block_norms': 'sandwich', 'qk_norm': 'head', 'window': 1024, 'global_every': 6, 'rope_base': 1e6,
        'local_rope_base': 1e4, 'query_pre_attn_scalar': 256.0,
    },
    # OLMo Team 2025, arXiv:2501.00656, section 3
    'olmo2': _LLAMA | {'norm_eps': 1e-6, 'block_norms': 'post', 'qk_norm': 'full', 'rope_base': 500000.0},
    # HuggingFaceTB/SmolLM3-3B: every fourth layer without positions (Yang et al. 2025, arXiv:2501.18795)
    'smollm3': _LLAMA | {'norm_eps': 1e-6, 'tied': True, 'nope_every': 4, 'rope_base': 5e6},
    # Jiang et al. 2024, arXiv:2401.04088, section 2
    'mixtral': _LLAMA | {'rope_base': 1e6, 'n_experts': 8, 'experts_per_token': 2},
    # Yang et al. 2024, arXiv:2407.10671, section 2.2.2, and the released code
    'qwen2-moe': _QWEN2 | {
        'n_experts': 64, 'experts_per_token': 8, 'shared_gate': True, 'normalize_router': False,
    },
    # Qwen Team 2025, arXiv:2505.09388, section 2
    'qwen3-moe': _QWEN3 | {'n_experts': 128, 'experts_per_token': 8},
    # Abdin et al. 2024, arXiv:2404.14219, section 2: Llama's block. Phi-4 is of this family too.
    'phi3': _LLAMA,
}  # fmt: skip

FAMILY_NAMES = tuple(FAMILIES)
# Options that apply to experts only
EXPERT_OPTIONS = (
    'experts_per_token', 'd_shared', 'shared_gate', 'normalize_router', 'capacity', 'balance_loss', 'balance_over',
    'router_z_loss',
)  # fmt: skip
# Named activations of a layer, in the order in which they are computed. All of them can be recomputed from 'input', which is
# always kept, on the device or in host memory.
SAVED_NAMES = ('q', 'k', 'v', 'attention', 'attention_out', 'up', 'gate', 'mlp_out')
SAVE_PRESETS: dict[str, tuple[str, ...]] = {
    'none': (),
    'attention': (
        'q',
        'k',
        'v',
        'attention',
    ),  # the inputs of its backward pass, so that attention is not computed twice
    'dots': ('q', 'k', 'v', 'attention_out', 'up', 'gate', 'mlp_out'),  # results of products with weights
    'full': SAVED_NAMES,
}


class TransformerOptions(BaseModel):
    """The `model:` section of the decoder. Options that are left out come from the preset, then from the family."""

    model_config = ConfigDict(extra='forbid', frozen=True)

    preset: str | None = Field(None, description='a published model: ' + ', '.join(PRESETS))
    family: Literal[FAMILY_NAMES] | None = Field(None, description='a row of choices (default llama)')
    n_layers: int | None = Field(None, gt=0)
    d_model: int | None = Field(None, gt=0, description='width of the residual stream')
    n_heads: int | None = Field(None, gt=0, description='query heads')
    n_kv_heads: int | None = Field(None, gt=0, description='key and value heads (default n_heads)')
    d_head: int | None = Field(None, gt=0, description='width of a head (default d_model / n_heads)')
    d_ff: int | None = Field(None, gt=0, description='width of the feed-forward (default 4 d_model, or 8/3 if gated)')
    vocab_size: int | None = Field(None, gt=0, description="default: the data's")
    max_sequence_length: int | None = Field(None, gt=0, description='learned positions (default: the sequence length)')
    norm: Literal['rmsnorm', 'layernorm'] | None = None
    norm_eps: float | None = Field(None, gt=0)
    norm_offset: float | None = Field(None, description='added to the scales of norms: 1 if weights are stored minus 1')
    block_norms: Literal['pre', 'post', 'sandwich'] | None = Field(
        None, description='norms before attention and feed-forward (default), after them, or both'
    )
    qk_norm: Literal['none', 'head', 'full'] | None = Field(
        None, description='RMSNorm of queries and keys: of each head, or of all heads together (default none)'
    )
    positions: Literal['rope', 'learned'] | None = None
    rope_base: float | None = Field(None, gt=0, description='default 10000')
    local_rope_base: float | None = Field(
        None, gt=0, description='of layers with a window, unscaled (default: rope_base)'
    )
    rope_scaling: RopeScaling | None = Field(None, description='how frequencies are scaled for longer contexts')
    nope_every: int | None = Field(None, ge=0, description='every n-th layer has no positions (default 0: never)')
    window: int | None = Field(None, ge=0, description='tokens that a token sees, itself included (default 0: all)')
    global_every: int | None = Field(None, ge=0, description='every n-th layer has no window (default 0: never)')
    query_pre_attn_scalar: float | None = Field(
        None, gt=0, description='scores are divided by its square root (default d_head)'
    )
    attention_softcap: float | None = Field(None, ge=0, description='cap tanh(score / cap) (default 0: none)')
    final_softcap: float | None = Field(None, ge=0, description='the same, of the logits (default 0: none)')
    activation: Literal['swiglu', 'geglu', 'gelu'] | None = None
    bias: bool | None = Field(None, description='biases on every linear layer and norm')
    qkv_bias: bool | None = Field(None, description='biases on queries, keys and values (default: as bias)')
    scale_embedding: bool | None = Field(None, description='embeddings times sqrt(d_model)')
    tied: bool | None = Field(None, description='the unembedding is the embedding')
    n_experts: int | None = Field(
        None, ge=0, description='feed-forwards that a router chooses from (default 0: one feed-forward, no router)'
    )
    experts_per_token: int | None = Field(None, gt=0, description='experts per token (default 2)')
    d_shared: int | None = Field(
        None, ge=0, description='width of the shared expert, which every token uses (default 0: none)'
    )
    shared_gate: bool | None = Field(None, description="the shared expert's output is gated by the token")
    normalize_router: bool | None = Field(None, description="a token's weights on its experts sum to one")
    capacity: float | None = Field(
        None, gt=0, description='tokens per expert and sequence, relative to an even share; null: no limit'
    )
    balance_loss: float | None = Field(None, ge=0, description='weight of the load-balance loss (default 0.01)')
    balance_over: Literal['sequence', 'batch'] | None = Field(
        None, description='whether the load is balanced in each sequence (default) or over the batch'
    )
    router_z_loss: float | None = Field(None, ge=0, description="weight of mean(log(Z)^2) of the router's logits")
    init_std: float = Field(0.02, gt=0, description='standard deviation of the initial weights')
    z_loss: float = Field(0.0, ge=0, description='weight of mean(log(Z)^2), which keeps the logits from drifting')
    layers: Literal['auto', 'scan', 'unroll'] = Field(
        'auto', description='scan: one layer in a loop; unroll: all layers in the program'
    )
    save: (
        Literal['all', 'none', 'attention', 'dots', 'full']
        | dict[Literal['input', *SAVED_NAMES], Literal['keep', 'recompute', 'offload']]
    ) = Field(
        'all', description='activations for the backward pass: all, a list of names (none, attention, dots, full), or '
        'keep, recompute or offload by name (others: recompute)'
    )  # fmt: skip
    loss_chunks: int = Field(
        1,
        gt=0,
        description='chunks of a sequence whose logits exist one at a time; the backward pass recomputes them',
    )
    batch_parts: int = Field(
        1,
        gt=0,
        description="parts of a device's sequences in a layer; communication over t of one runs beside the products of another",
    )
    attention: Literal['auto', 'cudnn', 'splash', 'blockwise'] = Field('auto', description='kernel')
    pipeline_rounds: int = Field(
        1, gt=0, description='times a micro-batch goes around the stages of mesh.p; more rounds make the bubble smaller'
    )
    pipeline_schedule: Literal['auto', 'interleaved', '1f1b'] = Field(
        'auto',
        description='when stages of mesh.p run backward: after all micro-batches (interleaved), or after each (1f1b)',
    )
    context: Literal['auto', 'ring', 'all_to_all'] = Field(
        'auto', description='how attention treats sequences that are sharded over mesh.c'
    )

    @model_validator(mode='after')
    def _fits_together(self) -> Self:
        if isinstance(self.save, dict) and self.save.get('input') == 'recompute':
            raise UserError('save: the rest of a layer is recomputed from its input\nuse input: keep or offload')
        _choose(self)
        return self


_DEFAULTS: dict[str, Any] = {
    'norm_offset': 0.0, 'block_norms': 'pre', 'qk_norm': 'none', 'rope_base': 10000.0, 'local_rope_base': None,
    'rope_scaling': None, 'nope_every': 0, 'window': 0, 'global_every': 0, 'query_pre_attn_scalar': None,
    'attention_softcap': 0.0, 'final_softcap': 0.0, 'scale_embedding': False,
}  # fmt: skip


_NO_EXPERTS = {
    'n_experts': 0, 'experts_per_token': 2, 'd_shared': 0, 'shared_gate': False, 'normalize_router': True,
    'capacity': None, 'balance_loss': 0.01, 'balance_over': 'sequence', 'router_z_loss': 0.0,
}  # fmt: skip


def _choose(options: TransformerOptions) -> dict[str, Any]:
    """The options, then the preset, then the family; and the sizes that follow from them without the data."""
    said = {key: value for key, value in options.model_dump().items() if value is not None}
    if options.preset is not None and options.preset not in PRESETS:
        near = difflib.get_close_matches(options.preset, PRESETS, 1)
        hint = f'; did you mean {near[0]}?' if near else ''
        raise UserError(f"preset: there is no '{options.preset}'{hint} known: {', '.join(PRESETS)}")
    chosen = {**PRESETS.get(options.preset or '', {}), **said}
    family = chosen.get('family', 'llama')
    chosen = {'n_kv_heads': chosen.get('n_heads'), **_DEFAULTS, **_NO_EXPERTS, **FAMILIES[family], **chosen}
    chosen.setdefault('qkv_bias', chosen['bias'])
    if chosen['rope_scaling'] is not None:
        scaling = RopeScaling.model_validate(chosen['rope_scaling'])
        chosen['rope_scaling'] = None if scaling.kind == 'none' else scaling
    missing = [name for name in ('n_layers', 'd_model', 'n_heads') if name not in chosen]
    if missing:
        raise UserError(f'model: {", ".join(missing)} missing\ngive a preset, or n_layers, d_model and n_heads')
    if 'd_head' not in chosen:
        if chosen['d_model'] % chosen['n_heads']:
            raise UserError(
                f'model.d_model = {chosen["d_model"]} is not divisible by model.n_heads = {chosen["n_heads"]}\n'
                f'give model.d_head, or make d_model a multiple of n_heads'
            )
        chosen['d_head'] = chosen['d_model'] // chosen['n_heads']
    if 'd_ff' not in chosen:  # gated: 2/3 of 4 d_model, so that three matrices cost what two did (Shazeer 2020)
        gated = math.ceil(8 * chosen['d_model'] / 3 / 64) * 64
        chosen['d_ff'] = gated if chosen['activation'] != 'gelu' else 4 * chosen['d_model']
    if chosen['n_heads'] % chosen['n_kv_heads']:
        raise UserError(
            f'model.n_heads = {chosen["n_heads"]} is not divisible by model.n_kv_heads = {chosen["n_kv_heads"]}'
        )
    if chosen['positions'] == 'rope' and chosen['d_head'] % 2:
        raise UserError(f'model.d_head = {chosen["d_head"]} is odd, and rope rotates pairs\nuse an even d_head')
    if chosen['global_every'] and not chosen['window']:
        raise UserError(
            f'model.global_every = {chosen["global_every"]} exempts layers from a window, and there is none\n'
            'give model.window, or use model.global_every=0'
        )
    if chosen['norm'] == 'layernorm' and chosen['bias'] and chosen['block_norms'] != 'pre':
        raise UserError(
            f'model.block_norms = {chosen["block_norms"]}: norms after attention and feed-forward have no bias here\n'
            'use model.norm=rmsnorm, or model.bias=false'
        )
    _check_experts(chosen, said)
    return chosen


def _check_experts(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    n_experts, per_token = chosen['n_experts'], chosen['experts_per_token']
    if not n_experts:
        for name in EXPERT_OPTIONS:
            if said.get(name):
                raise UserError(
                    f'model.{name} = {said[name]} applies to experts, and there are none\n'
                    'set model.n_experts, or leave it out'
                )
        chosen.update(_NO_EXPERTS, balance_loss=0.0)  # a preset whose experts were turned off
        return
    if n_experts == 1 or per_token > n_experts:
        raise UserError(
            f'model.n_experts = {n_experts} with model.experts_per_token = {per_token}\n'
            'use at least 2 experts, and no more experts per token than experts; n_experts=0 is one feed-forward'
        )
    if chosen['activation'] == 'gelu' or chosen['bias']:
        what = 'activation = gelu' if chosen['activation'] == 'gelu' else 'bias = true'
        raise UserError(
            f'model.{what}: experts always have a gate and no biases\nuse model.activation=swiglu and model.bias=false'
        )
    if chosen['shared_gate'] and not chosen['d_shared'] and said.get('shared_gate'):
        raise UserError('model.shared_gate = True, and there is no shared expert\ngive model.d_shared, its width')
    chosen['shared_gate'] = chosen['shared_gate'] and chosen['d_shared'] > 0


def resolve(options: TransformerOptions, vocab_size: int, sequence_length: int) -> Architecture:
    """The architecture, from the options, their preset, their family and the data.

    Args:
        options: as configured.
        vocab_size: of the data's tokenizer.
        sequence_length: of the batches.

    Raises:
        UserError: unknown preset, a missing size, sizes that contradict each other or do not fit the data.
    """
    chosen = _choose(options)
    chosen.setdefault('vocab_size', vocab_size)
    chosen.setdefault('max_sequence_length', sequence_length)
    if chosen['vocab_size'] < vocab_size:
        raise UserError(
            f"model.vocab_size = {chosen['vocab_size']} is smaller than the tokenizer's {vocab_size}\n"
            f'leave it out, or use model.vocab_size={vocab_size}'
        )
    if chosen['positions'] == 'learned' and chosen['max_sequence_length'] < sequence_length:
        raise UserError(
            f'batch.sequence_length = {sequence_length} exceeds model.max_sequence_length = '
            f'{chosen["max_sequence_length"]}, the number of learned positions'
        )
    chosen['padded_vocab_size'] = math.ceil(chosen['vocab_size'] / 128) * 128
    return Architecture(**{field.name: chosen[field.name] for field in dataclasses.fields(Architecture)})
