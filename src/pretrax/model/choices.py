"""The options of a decoder, chosen from the configuration, its preset and its family. Imports no JAX.

Options have dotted keys. In every function, `chosen` has all options, and `said` those of the configuration.
"""

import difflib
import math
from collections.abc import Mapping
from typing import Any

from pretrax.errors import UserError
from pretrax.model.families import FAMILIES
from pretrax.model.family_checks import NO_EXPERTS, UNGATED, check_choices
from pretrax.model.presets import PRESETS
from pretrax.model.rope_scaling import RopeScaling

DROPOUT = ('attention.dropout', 'block.dropout', 'embedding.dropout')
_DEFAULTS: dict[str, Any] = {
    'norm.offset': 0.0, 'block.norms': 'pre', 'attention.qk_norm': 'none', 'rope.base': 10000.0, 'rope.local_base': None,
    'rope.scaling': None, 'rope.nope_every': 0, 'attention.window': 0, 'attention.window_type': 'sliding', 'attention.global_every': 0,
    'attention.temperature': 0.0, 'attention.temperature_length': 8192, 'attention.query_pre_attn_scalar': None,
    'attention.softcap': 0.0, 'head.softcap': 0.0, 'embedding.scale': False, 'layer_types': None,
    'attention.sinks': False, 'feed_forward.swiglu_limit': 7.0,
    'block.parallel': False, 'block.shared_norm': False, 'rope.fraction': 1.0, 'rope.nope_global': False, 'head.bias': False,
    'embedding.multiplier': 1.0, 'block.residual_multiplier': 1.0, 'head.multiplier': 1.0,
    'attention.latent.kv_rank': 0, 'attention.latent.q_rank': 0, 'attention.latent.d_rope': 0, 'attention.latent.d_nope': 0, 'multi_token.n_layers': 0, 'multi_token.loss': 0.3, 'init.kind': 'scaled', 'mup': None,
    'attention.gate': False, 'recurrent.d_head': 128, 'recurrent.d_key': 128, 'recurrent.conv_width': 4, 'recurrent.conv_bias': False,
}  # fmt: skip
_ATTENTION_SIZES = ('attention.n_heads', 'attention.n_kv_heads', 'attention.d_head')
# Options without effect if no layer has attention
OF_ATTENTION = (
    *_ATTENTION_SIZES, 'attention.dropout', 'attention.latent.kv_rank', 'attention.latent.q_rank', 'attention.latent.d_rope', 'attention.latent.d_nope', 'attention.qk_norm', 'attention.qkv_bias', 'attention.o_bias',
    'rope.base', 'rope.local_base', 'rope.scaling', 'rope.fraction', 'rope.nope_every', 'rope.nope_global', 'attention.window', 'attention.window_type',
    'attention.global_every', 'attention.query_pre_attn_scalar', 'attention.temperature', 'attention.temperature_length', 'attention.softcap',
    'attention.gate', 'attention.sinks',
)  # fmt: skip
_LINEAR_SIZES = ('recurrent.n_heads', 'recurrent.n_key_heads', 'recurrent.d_head', 'recurrent.d_key')


def choose(said: Mapping[str, Any]) -> dict[str, Any]:
    """The options, then the preset, then the family; and the sizes that follow from them without the data.

    Raises:
        UserError: unknown preset, a missing size, or choices that contradict each other.
    """
    preset = said.get('preset')
    if preset is not None and preset not in PRESETS:
        near = difflib.get_close_matches(preset, PRESETS, 1)
        hint = f'; did you mean {near[0]}?' if near else ''
        raise UserError(f"preset: there is no '{preset}'{hint}\nknown: {', '.join(PRESETS)}")
    chosen = {**PRESETS.get(preset or '', {}), **said}
    family = chosen.get('family', 'llama')
    chosen = {
        'attention.n_kv_heads': chosen.get('attention.n_heads'),
        **_DEFAULTS,
        **NO_EXPERTS,
        **FAMILIES[family],
        **chosen,
    }
    for name in ('attention.qkv_bias', 'attention.o_bias', 'feed_forward.bias', 'norm.bias'):
        chosen.setdefault(name, chosen['bias'])
    for name in DROPOUT:
        chosen.setdefault(name, chosen['dropout'])
    if chosen['rope.scaling'] is not None:
        scaling = RopeScaling.model_validate(chosen['rope.scaling'])
        chosen['rope.scaling'] = None if scaling.kind == 'none' else scaling
    if chosen['layer_types'] and not said.get('layer_types'):
        chosen['layer_types'] = chosen['layer_types'][: chosen.get('n_layers')]
    has_attention = any(mixer in ('full', 'window') for mixer in chosen['layer_types'] or ('full',))
    needed = 'n_layers', 'd_model', *['attention.n_heads'] * has_attention
    if missing := [name for name in needed if name not in chosen]:
        keys = ', '.join(missing)
        raise UserError(f'model: {keys} missing\ngive a preset, or n_layers, d_model and attention.n_heads')
    _choose_mixers(chosen, said, has_attention)
    if 'attention.d_head' not in chosen:
        if chosen['d_model'] % chosen['attention.n_heads']:
            raise UserError(
                f'model.d_model = {chosen["d_model"]} is not divisible by model.attention.n_heads = {chosen["n_heads"]}\n'
                'give model.attention.d_head, or make model.d_model a multiple of model.attention.n_heads'
            )
        chosen['attention.d_head'] = chosen['d_model'] // chosen['attention.n_heads']
    if has_attention and not chosen.get('feed_forward.d_ff', 1) and 'feed_forward.d_ff' not in said:
        raise UserError(
            f'model.family = {family} has layers without a feed-forward, and model.layer_types gives some attention\n'
            'give model.feed_forward.d_ff; model.feed_forward.d_ff=0 leaves it out'
        )
    if (
        'feed_forward.d_ff' not in chosen
    ):  # gated: 2/3 of 4 d_model, so that three matrices cost what two did (Shazeer 2020)
        gated = math.ceil(8 * chosen['d_model'] / 3 / 64) * 64
        chosen['feed_forward.d_ff'] = 4 * chosen['d_model'] if chosen['feed_forward.activation'] in UNGATED else gated
    if not chosen['feed_forward.d_ff']:
        of_none = (
            ('feed_forward.bias', 'block.parallel')
            if has_attention
            else ('feed_forward.bias', 'block.parallel', 'bias')
        )
        if wrong := [name for name in of_none if said.get(name)]:
            raise UserError(
                f'model.{wrong[0]} is of the feed-forward, and layers have none (model.feed_forward.d_ff = 0)\nleave it out'
            )
        chosen['feed_forward.bias'] = False
    check_choices(chosen, said)
    return chosen


def _choose_mixers(chosen: dict[str, Any], said: dict[str, Any], has_attention: bool) -> None:
    """The sizes of attention, of delta nets and of state-space models; 0: no layer has them."""
    if not has_attention:
        for name in OF_ATTENTION:
            if said.get(name) and said[name] != _DEFAULTS.get(name):
                raise UserError(
                    f'model.{name} = {said[name]} is of attention, and no layer has it\n'
                    "leave it out, or give model.layer_types a 'full'"
                )
        chosen.update({name: _DEFAULTS.get(name, 0) for name in OF_ATTENTION}, qkv_bias=False, o_bias=False)
    if not set(chosen['layer_types'] or ()) & {'delta', 'mamba'}:
        for name in (*_LINEAR_SIZES, 'recurrent.conv_width', 'recurrent.conv_bias'):
            if said.get(name):
                raise UserError(
                    f'model.{name} = {said[name]} is of delta nets and state-space models, and there are none\n'
                    "leave it out, or give model.layer_types a 'delta' or a 'mamba'"
                )
        chosen.update(dict.fromkeys(_LINEAR_SIZES, 0), conv_bias=False)
        return
    if 'recurrent.n_heads' not in chosen:
        heads, width = 2 * chosen['d_model'], chosen['recurrent.d_head']
        if heads % width:
            raise UserError(
                f'2 model.d_model = {heads} is not divisible by model.recurrent.d_head = {width}\n'
                'give model.recurrent.n_heads, or another model.recurrent.d_head'
            )
        chosen['recurrent.n_heads'] = heads // width
    heads = chosen['recurrent.n_heads']
    if heads % chosen.setdefault('recurrent.n_key_heads', heads):
        raise UserError(
            f'model.recurrent.n_heads = {heads} is not divisible by model.recurrent.n_key_heads = {chosen["linear_key_heads"]}'
        )
