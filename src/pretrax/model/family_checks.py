"""Checks that the choices of a decoder fit together, and turns off what a family or preset has and another choice excludes.

In every function, `chosen` has all options and `said` those of the configuration. An option that the configuration says and
that would have no effect raises a UserError; one of a family or preset is turned off. Imports no JAX.
"""

import math
from typing import Any

from pretrax.errors import UserError
from pretrax.model.architecture import UNGATED, has_experts
from pretrax.model.mup import apply_mup
from pretrax.model.option_names import key_of

# Options that apply to experts only
EXPERT_OPTIONS = (
    'experts_per_token', 'dense_layers', 'expert_every', 'd_ff_dense', 'd_shared', 'shared_gate', 'router_scores',
    'router_bias', 'router_bias_rate', 'n_expert_groups', 'groups_per_token', 'group_scores', 'normalize_router',
    'router_scale', 'weigh_inputs', 'capacity', 'balance_loss', 'balance_over', 'router_z_loss',
)  # fmt: skip
NO_EXPERTS: dict[str, Any] = {
    'n_experts': 0, 'experts_per_token': 2, 'dense_layers': (), 'expert_every': 1, 'd_ff_dense': 0,
    'd_shared': 0, 'shared_gate': False, 'router_scores': 'softmax', 'router_bias': False, 'router_bias_rate': 0.001,
    'n_expert_groups': 1, 'groups_per_token': 1, 'group_scores': 'max', 'normalize_router': True, 'router_scale': 1.0,
    'weigh_inputs': False,
    'capacity': None, 'balance_loss': 0.01, 'balance_over': 'sequence', 'router_z_loss': 0.0,
}  # fmt: skip


def check_choices(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    """Checks the choices in the order in which they depend on each other. Changes `chosen`. Raises UserError."""
    if chosen['n_heads'] and chosen['n_heads'] % chosen['n_kv_heads']:
        raise UserError(
            f'model.attention.n_heads = {chosen["n_heads"]} is not divisible by model.attention.n_kv_heads = {chosen["n_kv_heads"]}'
        )
    _check_latents(chosen, said)
    _check_rotation(chosen)
    if not chosen['window'] and not said.get('global_every'):
        chosen['global_every'] = 0  # of a family or preset whose windows were turned off
    if chosen['global_every'] and not chosen['window']:
        raise UserError(
            f'model.attention.global_every = {chosen["global_every"]} exempts layers from a window, and there is none\n'
            'give model.attention.window, or use model.attention.global_every=0'
        )
    if chosen['layer_types'] is not None:
        _check_layer_types(chosen, said)
    _check_chunks_and_temperature(chosen, said)
    _check_norms(chosen, said)
    _check_experts(chosen, said)
    _check_multi_token(chosen, said)
    apply_mup(chosen, said)


def _check_multi_token(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    if said.get('mtp_loss') is not None and not chosen['mtp_layers']:
        raise UserError(
            f'model.multi_token.loss = {said["mtp_loss"]:g} weights multi-token prediction, and there is none\n'
            'give model.multi_token.n_layers, or leave it out'
        )
    types = chosen['layer_types']
    if chosen['mtp_layers'] and types and types[(chosen['n_layers'] - 1) % len(types)] in ('delta', 'mamba'):
        raise UserError(
            f'model.multi_token.n_layers = {chosen["mtp_layers"]}: the layer of multi-token prediction is like the last one of the '
            'decoder, and has to have attention\nuse model.multi_token.n_layers=0, or other layer_types'
        )


def _check_rotation(chosen: dict[str, Any]) -> None:
    if chosen['positions'] != 'rope' or not chosen['n_heads']:
        return
    d_head, fraction = chosen['d_rope'] if chosen['kv_rank'] else chosen['d_head'], chosen['rotary_fraction']
    if d_head % 2:
        raise UserError(f'model.attention.d_head = {d_head} is odd, and rope rotates pairs\nuse an even d_head')
    rotated = int(d_head * fraction)
    if rotated % 2 or not rotated:
        raise UserError(
            f'model.rope.fraction = {fraction:g} rotates {rotated} of {d_head} dimensions of a head, and rope rotates '
            f'pairs\nuse model.rope.fraction={_fraction_of(rotated + 2 - rotated % 2, d_head):g}'
        )
    scaling = chosen['rope_scaling']
    if scaling is not None and scaling.kind == 'longrope' and len(scaling.short_factor) != rotated // 2:
        raise UserError(
            f'model.rope.scaling has {len(scaling.short_factor)} short factors, and rope rotates {rotated // 2} pairs\n'
            'give short_factor and long_factor one number for each pair'
        )


def _check_chunks_and_temperature(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    if not chosen['window']:
        if said.get('window_type') == 'chunked':
            raise UserError(
                'model.attention.window_type = chunked, and there is no window\ngive model.attention.window, the tokens in a chunk'
            )
        chosen['window_type'] = 'sliding'  # of a family whose windows were turned off
    everywhere = chosen['positions'] != 'rope' or not (
        0 < chosen['nope_every'] <= chosen['n_layers'] or chosen['nope_global']
    )
    if said.get('attention_temperature') and everywhere:
        raise UserError(
            f'model.attention.temperature = {said["attention_temperature"]:g} applies to layers without positions, and all '
            'have them\ngive model.rope.nope_every, or leave it out'
        )
    if everywhere:
        chosen['attention_temperature'] = 0.0
    if said.get('temperature_length') and not chosen['attention_temperature']:
        raise UserError(
            f'model.attention.temperature_length = {said["temperature_length"]}, and there is no temperature\n'
            'give model.attention.temperature'
        )


def _fraction_of(rotated: int, d_head: int) -> float:
    """A short number such that `int(d_head * number)` is `rotated`."""
    return math.ceil(rotated / d_head * 1e5) / 1e5


def _check_norms(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    if chosen['norm'] != 'layernorm':
        if said.get('norm_bias'):
            raise UserError(
                'model.norm.bias = true: rmsnorm has no bias\nuse model.norm.kind=layernorm, or leave it out'
            )
        chosen['norm_bias'] = False
    if chosen['norm_bias'] and chosen['block_norms'] != 'pre':
        raise UserError(
            f'model.block.norms = {chosen["block_norms"]}: norms after attention and feed-forward have no bias here\n'
            'use model.norm.kind=rmsnorm, or model.norm.bias=false'
        )
    if chosen['shared_norm'] and not chosen['parallel_block']:
        if said.get('shared_norm'):
            raise UserError(
                'model.block.shared_norm = true: attention and feed-forward share a norm only if they run in parallel\n'
                'use model.block.parallel=true'
            )
        chosen['shared_norm'] = False  # of a family whose parallel blocks were turned off


def _check_latents(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    if not chosen['kv_rank']:
        for name in ('q_rank', 'd_rope', 'd_nope'):
            if said.get(name):
                raise UserError(
                    f'{key_of(name)} = {said[name]} belongs to latent attention, and there is none\n'
                    'give model.attention.latent.kv_rank, or leave it out'
                )
        chosen.update(q_rank=0, d_rope=0, d_nope=0)  # a preset whose latent attention was turned off
        return
    chosen['d_nope'], chosen['d_rope'] = chosen['d_nope'] or chosen['d_head'], chosen['d_rope'] or 64
    without = {
        'n_kv_heads': chosen['n_kv_heads'] == chosen['n_heads'], 'positions': chosen['positions'] == 'rope',
        'qk_norm': chosen['qk_norm'] == 'none', 'window': not chosen['window'], 'bias': not chosen['bias'],
        'attention_temperature': not chosen['attention_temperature'],
        'qkv_bias': not chosen['qkv_bias'], 'rotary_fraction': chosen['rotary_fraction'] == 1,
    }  # fmt: skip
    for name, fits in without.items():
        if not fits:
            raise UserError(
                f'{key_of(name)} = {chosen[name]} does not fit latent attention (model.attention.latent.kv_rank = {chosen["kv_rank"]}), which '
                'has rope, a key and a value for each query head, and no window or bias\nleave it out, or use model.attention.latent=null'
            )
    if chosen['d_rope'] % 2:
        raise UserError(
            f'model.attention.latent.d_rope = {chosen["d_rope"]} is odd, and rope rotates pairs\nuse an even d_rope'
        )


def _check_layer_types(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    types, n_layers = chosen['layer_types'], chosen['n_layers']
    if not types or len(types) > n_layers:
        raise UserError(
            f'model.layer_types has {len(types)} entries for model.n_layers = {n_layers}\n'
            'give one for each layer, or fewer, which repeat'
        )
    if 'window' in types and not chosen['window']:
        raise UserError('model.layer_types gives layers a window, and there is none\ngive model.attention.window')
    if 'window' not in types:
        if said.get('window'):
            raise UserError(
                f'model.attention.window = {said["window"]}, and model.layer_types gives no layer a window\n'
                "give model.layer_types a 'window', or leave out model.attention.window"
            )
        chosen['window'] = 0  # of a family or preset whose layers with a window were replaced
    if said.get('global_every'):
        raise UserError(
            'model.attention.global_every and model.layer_types both say which layers have a window\nleave out one of them'
        )
    chosen['global_every'] = 0


def _check_experts(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    n_experts, per_token = chosen['n_experts'], chosen['experts_per_token']
    if not n_experts:
        for name in EXPERT_OPTIONS:
            if said.get(name) and (name, said[name]) != ('expert_every', 1):
                raise UserError(
                    f'{key_of(name)} = {said[name]} applies to experts, and there are none\n'
                    'set model.experts.n_experts, or leave it out'
                )
        chosen.update(NO_EXPERTS, balance_loss=0.0)  # a preset whose experts were turned off
        return
    if n_experts == 1 or per_token > n_experts:
        raise UserError(
            f'model.experts.n_experts = {n_experts} with model.experts.experts_per_token = {per_token}\n'
            'use at least 2 experts, and no more experts per token than experts; model.experts.n_experts=0 is one feed-forward'
        )
    if not chosen['d_ff']:
        raise UserError(
            f'model.experts.n_experts = {n_experts} with model.feed_forward.d_ff = 0: experts without a width\n'
            'give model.feed_forward.d_ff, the width of an expert, or use model.experts.n_experts=0'
        )
    if chosen['activation'] in UNGATED:
        raise UserError(
            f'model.feed_forward.activation = {chosen["activation"]}: experts always have a gate\nuse model.feed_forward.activation=swiglu'
        )
    if chosen['mlp_bias'] and chosen['weigh_inputs']:
        raise UserError(
            'model.feed_forward.bias = true: experts whose inputs are weighed have no biases here\n'
            'use model.feed_forward.bias=false or model.experts.router.weigh_inputs=false'
        )
    if chosen['mlp_bias'] and chosen['d_shared']:
        raise UserError(
            'model.feed_forward.bias = true: a shared expert has no biases here\nuse model.feed_forward.bias=false or model.experts.d_shared=0'
        )
    if chosen['shared_gate'] and not chosen['d_shared'] and said.get('shared_gate'):
        raise UserError(
            'model.experts.shared_gate = True, and there is no shared expert\ngive model.experts.d_shared, its width'
        )
    chosen['shared_gate'] = chosen['shared_gate'] and chosen['d_shared'] > 0
    if said.get('router_bias_rate') and not chosen['router_bias']:
        raise UserError(
            f'model.experts.router.bias_rate = {said["router_bias_rate"]} moves the biases of routers, and there are none\n'
            'use model.experts.router.bias=true'
        )
    _check_groups(chosen)
    _check_dense_layers(chosen, said)


def _check_groups(chosen: dict[str, Any]) -> None:
    n_experts, groups, used = chosen['n_experts'], chosen['n_expert_groups'], chosen['groups_per_token']
    if n_experts % groups:
        raise UserError(
            f'model.experts.n_experts = {n_experts} is not divisible by model.experts.router.n_groups = {groups}'
        )
    if used > groups:
        raise UserError(
            f'model.experts.router.groups_per_token = {used} of model.experts.router.n_groups = {groups}\nuse at most {groups}'
        )
    if chosen['experts_per_token'] > used * n_experts // groups:
        raise UserError(
            f'model.experts.experts_per_token = {chosen["experts_per_token"]}, but {used} of {groups} groups have '
            f'{used * n_experts // groups} experts\nuse a larger model.experts.router.groups_per_token, or fewer experts per token'
        )
    if chosen['group_scores'] == 'top2' and n_experts == groups:
        raise UserError(
            'model.experts.router.group_scores = top2: a group has one expert\nuse fewer groups (model.experts.router.n_groups), or max'
        )


def _check_dense_layers(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    n_layers, every, dense = chosen['n_layers'], chosen['expert_every'], chosen['dense_layers']
    if isinstance(dense, tuple) and (wrong := [i for i in dense if i >= n_layers]):
        raise UserError(f'model.experts.dense_layers names layer {wrong[0]}, and the layers are 0 to {n_layers - 1}')
    dense = tuple(range(min(dense, n_layers))) if isinstance(dense, int) else tuple(sorted(set(dense)))
    chosen['dense_layers'] = dense
    with_experts = [i for i in range(n_layers) if has_experts(i, dense, every)]
    if not with_experts:
        raise UserError(
            f'model.experts.dense_layers and model.experts.every leave none of the {n_layers} layers with experts\n'
            'use fewer dense layers, or model.experts.n_experts=0'
        )
    if len(with_experts) == n_layers:
        if said.get('d_ff_dense'):
            raise UserError(
                'model.experts.d_ff_dense is the width of layers without experts, and there are none\ngive model.experts.dense_layers'
            )
        chosen['d_ff_dense'] = 0
    elif not chosen['d_ff_dense']:
        chosen['d_ff_dense'] = chosen['experts_per_token'] * chosen['d_ff'] + chosen['d_shared']
