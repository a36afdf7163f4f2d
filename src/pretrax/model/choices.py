"""The section `model:` of a decoder: its options, chosen from the configuration, preset and family. No JAX here.

Options have dotted keys. In every function, `chosen` has all options and `said` those of the configuration. An option
that the configuration says and that would have no effect raises a UserError; one of a family or preset is turned off.
"""

import difflib
import functools
import math
from collections.abc import Mapping
from typing import Any, Self

from pydantic import model_validator

from pretrax.errors import UserError
from pretrax.model.families import PRESET_NAMES, PRESETS, families
from pretrax.model.mup import apply_mup
from pretrax.model.option_names import dotted
from pretrax.model.options import attention, feed_forward
from pretrax.model.options.decoder import DecoderOptions, ExecutionOptions, PublishedOptions
from pretrax.model.options.feed_forward import UNGATED
from pretrax.model.rope_scaling import RopeScaling
from pretrax.tables import read_table


class TransformerOptions(ExecutionOptions, DecoderOptions, PublishedOptions):
    """The `model:` section of the decoder. Options that are left out come from the preset, then from the family."""

    def dotted(self) -> dict[str, Any]:
        """The options that are not None, by dotted key. `attention.latent: null` turns latent attention off."""
        off = {'attention.latent.kv_rank': 0} if self.attention.latent is None else {}
        return super().dotted() | off

    @model_validator(mode='after')
    def _fits_together(self) -> Self:
        if isinstance(self.save, dict) and self.save.get('input') == 'recompute':
            raise UserError('save: the rest of a layer is recomputed from its input\nuse input: keep or offload')
        choose(self.dotted())
        return self


DROPOUT = ('attention.dropout', 'block.dropout', 'embedding.dropout')
DEFAULTS = TransformerOptions.defaults()
_ATTENTION, _RECURRENT = ('attention.', 'rope.'), ('recurrent.',)
# The options that change no result
EXECUTION = {key for key, declared in TransformerOptions.declarations().items() if declared.changes == 'nothing'}
# The options of a decoder in which no layer has attention, or a state
NO_ATTENTION = {name: value for name, value in DEFAULTS.items() if name.startswith(_ATTENTION)} | {
    **dict.fromkeys(('attention.n_heads', 'attention.n_kv_heads', 'attention.d_head', 'attention.dropout'), 0),
    **dict.fromkeys(('attention.qkv_bias', 'attention.o_bias'), False),
}
NO_STATES = dict.fromkeys((f'recurrent.{name}' for name in ('n_heads', 'n_key_heads', 'd_head', 'd_key')), 0) | {
    'recurrent.conv_bias': False
}


def check_choices(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    """Checks the choices in the order in which they depend on each other. Changes `chosen`. Raises UserError."""
    attention.check(chosen, said)
    _check_norms(chosen, said)
    feed_forward.check(chosen, said)
    _check_multi_token(chosen, said)
    apply_mup(chosen, said)


def _check_multi_token(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    if said.get('multi_token.loss') is not None and not chosen['multi_token.n_layers']:
        raise UserError(
            f'model.multi_token.loss = {said["multi_token.loss"]:g} weights multi-token prediction, but there is none\n'
            'give model.multi_token.n_layers, or leave it out'
        )
    types = chosen['layer_types']
    if chosen['multi_token.n_layers'] and types and types[(chosen['n_layers'] - 1) % len(types)] in ('delta', 'mamba'):
        raise UserError(
            f'model.multi_token.n_layers = {chosen["multi_token.n_layers"]}: the layer of multi-token prediction is '
            'like the last one of the '
            'decoder, and has to have attention\nuse model.multi_token.n_layers=0, or other layer_types'
        )


def _check_norms(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    if chosen['norm.kind'] != 'layernorm':
        if said.get('norm.bias'):
            raise UserError(
                'model.norm.bias = true: rmsnorm has no bias\nuse model.norm.kind=layernorm, or leave it out'
            )
        chosen['norm.bias'] = False
    if chosen['norm.bias'] and chosen['block.norms'] != 'pre':
        raise UserError(
            f'model.block.norms = {chosen["block.norms"]}: norms after attention and feed-forward have no bias here\n'
            'use model.norm.kind=rmsnorm, or model.norm.bias=false'
        )
    if chosen['block.shared_norm'] and not chosen['block.parallel']:
        if said.get('block.shared_norm'):
            raise UserError(
                'model.block.shared_norm = true: attention and feed-forward share a norm only if they run in parallel\n'
                'use model.block.parallel=true'
            )
        chosen['block.shared_norm'] = False  # of a family whose parallel blocks were turned off


def choose(said: Mapping[str, Any]) -> dict[str, Any]:
    """The options, then the preset, then the family; and the sizes that follow from them without the data.

    Raises:
        UserError: unknown preset, a missing size, or choices that contradict each other.
    """
    preset = said.get('preset')
    if preset is not None and preset not in PRESET_NAMES:
        near = difflib.get_close_matches(preset, PRESET_NAMES, 1)
        hint = f'; did you mean {near[0]}?' if near else ''
        raise UserError(f"preset: there is no '{preset}'{hint}\nknown: {', '.join(PRESET_NAMES)}")
    chosen = {**(presets()[preset] if preset else {}), **said}
    family = chosen.get('family', 'llama')
    chosen = {'attention.n_kv_heads': chosen.get('attention.n_heads'), **DEFAULTS, **families()[family], **chosen}
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
        raise UserError(
            f'model: {", ".join(missing)} missing\ngive a preset, or n_layers, d_model and attention.n_heads'
        )
    _choose_mixers(chosen, said, has_attention)
    if 'attention.d_head' not in chosen:
        if chosen['d_model'] % chosen['attention.n_heads']:
            raise UserError(
                f'model.d_model = {chosen["d_model"]} is not divisible by model.attention.n_heads = '
                f'{chosen["attention.n_heads"]}\n'
                'give model.attention.d_head, or make model.d_model a multiple of model.attention.n_heads'
            )
        chosen['attention.d_head'] = chosen['d_model'] // chosen['attention.n_heads']
    if has_attention and not chosen.get('feed_forward.d_ff', 1) and 'feed_forward.d_ff' not in said:
        raise UserError(
            f'model.family = {family} has layers without a feed-forward, and model.layer_types gives some attention\n'
            'give model.feed_forward.d_ff; model.feed_forward.d_ff=0 leaves it out'
        )
    if 'feed_forward.d_ff' not in chosen:
        # Gated: 2/3 of 4 d_model, so that three matrices cost what two did (Shazeer 2020)
        gated = math.ceil(8 * chosen['d_model'] / 3 / 64) * 64
        chosen['feed_forward.d_ff'] = 4 * chosen['d_model'] if chosen['feed_forward.activation'] in UNGATED else gated
    if not chosen['feed_forward.d_ff']:
        needs_one = ('feed_forward.bias', 'block.parallel', *['bias'] * (not has_attention))
        if wrong := [name for name in needs_one if said.get(name)]:
            raise UserError(
                f'model.{wrong[0]} applies to the feed-forward, but layers have none (model.feed_forward.d_ff = 0)\n'
                'leave it out'
            )
        chosen['feed_forward.bias'] = False
    check_choices(chosen, said)
    return chosen


@functools.cache
def presets() -> dict[str, dict[str, Any]]:
    """The options of each published model, by dotted key."""
    return {name: dotted(section) for name, section in read_table(PRESETS).items()}


def _options_in(options: Mapping[str, Any], sections: tuple[str, ...]) -> list[str]:
    """The options of some sections that change results."""
    return [name for name in options if name.startswith(sections) and name not in EXECUTION]


def _choose_mixers(chosen: dict[str, Any], said: dict[str, Any], has_attention: bool) -> None:
    """The sizes of attention, of delta nets and of state-space models; 0: no layer has them."""
    if not has_attention:
        for name in _options_in(said, _ATTENTION):
            if said[name] and said[name] != DEFAULTS.get(name):
                raise UserError(
                    f'model.{name} = {said[name]} applies to attention, but no layer uses attention\n'
                    "leave it out, or give model.layer_types a 'full'"
                )
        chosen.update(NO_ATTENTION)
    if not set(chosen['layer_types'] or ()) & {'delta', 'mamba'}:
        for name in _options_in(said, _RECURRENT):
            if said[name]:
                raise UserError(
                    f'model.{name} = {said[name]} applies to delta nets and state-space models, but there are none\n'
                    "leave it out, or give model.layer_types a 'delta' or a 'mamba'"
                )
        chosen.update(NO_STATES)
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
            f'model.recurrent.n_heads = {heads} is not divisible by model.recurrent.n_key_heads = '
            f'{chosen["recurrent.n_key_heads"]}\n'
            f'use model.recurrent.n_key_heads={math.gcd(heads, chosen["recurrent.n_key_heads"])}'
        )
