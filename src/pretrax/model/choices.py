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
from pretrax.model.families import FAMILIES, PRESET_NAMES, PRESETS
from pretrax.model.mup import apply_mup
from pretrax.model.option_names import dotted
from pretrax.model.options import DecoderOptions, ExecutionOptions, PublishedOptions
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


_DECLARED = TransformerOptions.declarations()
UNGATED = ('gelu', 'gelu_erf', 'relu2')  # activations without a gate
DROPOUT = ('attention.dropout', 'block.dropout', 'embedding.dropout')
# The options that neither the configuration nor the preset nor the family gives
DEFAULTS = {key: declared.choice for key, declared in _DECLARED.items() if declared.choice is not ...}
_ATTENTION, _EXPERTS, _RECURRENT = ('attention.', 'rope.'), ('experts.',), ('recurrent.',)
# The options that change no result
EXECUTION = {key for key, declared in _DECLARED.items() if declared.changes == 'nothing'}
# The options of a decoder in which no layer has attention, experts or a state
NO_ATTENTION = {name: value for name, value in DEFAULTS.items() if name.startswith(_ATTENTION)} | {
    **dict.fromkeys(('attention.n_heads', 'attention.n_kv_heads', 'attention.d_head', 'attention.dropout'), 0),
    **dict.fromkeys(('attention.qkv_bias', 'attention.o_bias'), False),
}
NO_EXPERTS = {name: value for name, value in DEFAULTS.items() if name.startswith(_EXPERTS)} | {
    'experts.router.balance_loss': 0.0
}
NO_STATES = dict.fromkeys((f'recurrent.{name}' for name in ('n_heads', 'n_key_heads', 'd_head', 'd_key')), 0) | {
    'recurrent.conv_bias': False
}


def check_choices(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    """Checks the choices in the order in which they depend on each other. Changes `chosen`. Raises UserError."""
    if chosen['attention.n_heads'] and chosen['attention.n_heads'] % chosen['attention.n_kv_heads']:
        raise UserError(
            f'model.attention.n_heads = {chosen["attention.n_heads"]} is not divisible by model.attention.n_kv_heads '
            f'= {chosen["attention.n_kv_heads"]}'
        )
    _check_latents(chosen, said)
    _check_rotation(chosen)
    if not chosen['attention.window'] and not said.get('attention.global_every'):
        chosen['attention.global_every'] = 0  # of a family or preset whose windows were turned off
    if chosen['attention.global_every'] and not chosen['attention.window']:
        raise UserError(
            f'model.attention.global_every = {chosen["attention.global_every"]} exempts layers from a window, but '
            'there is none\n'
            'give model.attention.window, or use model.attention.global_every=0'
        )
    if chosen['layer_types'] is not None:
        _check_layer_types(chosen, said)
    _check_global_heads(chosen, said)
    _check_chunks_and_temperature(chosen, said)
    _check_norms(chosen, said)
    _check_experts(chosen, said)
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


def _check_rotation(chosen: dict[str, Any]) -> None:
    if chosen['positions'] != 'rope' or not chosen['attention.n_heads']:
        return
    d_head, fraction = (
        chosen['attention.latent.d_rope'] if chosen['attention.latent.kv_rank'] else chosen['attention.d_head'],
        chosen['rope.fraction'],
    )
    if d_head % 2:
        raise UserError(f'model.attention.d_head = {d_head} is odd, but rope rotates pairs\nuse an even d_head')
    rotated = int(d_head * fraction)
    if rotated % 2 or not rotated:
        raise UserError(
            f'model.rope.fraction = {fraction:g} rotates {rotated} of {d_head} dimensions of a head, but rope rotates '
            f'pairs\nuse model.rope.fraction={_fraction_of(rotated + 2 - rotated % 2, d_head):g}'
        )
    scaling = chosen['rope.scaling']
    if scaling is not None and scaling.kind == 'longrope' and len(scaling.short_factor) != rotated // 2:
        raise UserError(
            f'model.rope.scaling has {len(scaling.short_factor)} short factors, but rope rotates {rotated // 2} pairs\n'
            'give short_factor and long_factor one number for each pair'
        )


_NO_GLOBAL_HEADS = {
    name: value
    for name, value in DEFAULTS.items()
    if name.startswith('attention.global_') and name != 'attention.global_every'
}


def _check_global_heads(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    """Layers without a window have heads of their own only beside layers with one."""
    types = chosen['layer_types']
    mixed = chosen['attention.window'] > 0 and (
        'full' in types if types else 1 < chosen['attention.global_every'] <= chosen['n_layers']
    )
    if not mixed:
        for name in _NO_GLOBAL_HEADS:
            if said.get(name):
                raise UserError(
                    f'model.{name} = {said[name]} applies to layers without a window beside layers with one, but there '
                    'are none\ngive model.attention.window and model.attention.global_every, or leave it out'
                )
        chosen.update(_NO_GLOBAL_HEADS)
    if not any(chosen[name] for name in _NO_GLOBAL_HEADS):
        return
    d_head = chosen['attention.global_d_head'] = chosen['attention.global_d_head'] or chosen['attention.d_head']
    heads = chosen['attention.global_n_kv_heads'] = (
        chosen['attention.global_n_kv_heads'] or chosen['attention.n_kv_heads']
    )
    usual = chosen['attention.d_head'], chosen['attention.n_kv_heads'], False
    if (d_head, heads, chosen['attention.global_k_as_v']) == usual:
        chosen.update(_NO_GLOBAL_HEADS)
        return
    if chosen['attention.n_heads'] % heads:
        raise UserError(
            f'model.attention.n_heads = {chosen["attention.n_heads"]} is not divisible by '
            f'model.attention.global_n_kv_heads = {heads}'
        )
    if chosen['attention.global_d_head'] % 2:
        raise UserError(
            f'model.attention.global_d_head = {chosen["attention.global_d_head"]} is odd, but rope rotates pairs\n'
            'use an even global_d_head'
        )
    without = {
        'attention.qkv_bias': not chosen['attention.qkv_bias'], 'attention.o_bias': not chosen['attention.o_bias'],
        'attention.sinks': not chosen['attention.sinks'], 'attention.gate': not chosen['attention.gate'],
        'attention.qk_norm': chosen['attention.qk_norm'] in ('none', 'head', 'l2'),
        'mup': chosen['mup'] is None,
    }  # fmt: skip
    _refuse(
        chosen,
        without,
        f'layers without a window with heads of their own (model.attention.global_d_head = {d_head})\n'
        'leave it out, or leave out the options global_d_head, global_n_kv_heads and global_k_as_v',
    )


def _refuse(chosen: dict[str, Any], fits: dict[str, bool], part: str) -> None:
    """Refuses the first option that does not fit a part. `part` also says what to do."""
    for name, does_fit in fits.items():
        if not does_fit:
            raise UserError(f'model.{name} = {chosen[name]} does not fit {part}')


def _check_chunks_and_temperature(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    if not chosen['attention.window']:
        if said.get('attention.window_type') == 'chunked':
            raise UserError(
                'model.attention.window_type = chunked, but there is no window\n'
                'give model.attention.window, the tokens in a chunk'
            )
        chosen['attention.window_type'] = 'sliding'  # of a family whose windows were turned off
    everywhere = chosen['positions'] != 'rope' or not (
        0 < chosen['rope.nope_every'] <= chosen['n_layers'] or chosen['rope.nope_global']
    )
    if said.get('attention.temperature') and everywhere:
        raise UserError(
            f'model.attention.temperature = {said["attention.temperature"]:g} applies to layers without positions, '
            'and all '
            'have them\ngive model.rope.nope_every, or leave it out'
        )
    if everywhere:
        chosen['attention.temperature'] = 0.0
    if said.get('attention.temperature_length') and not chosen['attention.temperature']:
        raise UserError(
            f'model.attention.temperature_length = {said["attention.temperature_length"]}, but there is no '
            'temperature\n'
            'give model.attention.temperature'
        )


def _fraction_of(rotated: int, d_head: int) -> float:
    """A short number such that `int(d_head * number)` is `rotated`."""
    return math.ceil(rotated / d_head * 1e5) / 1e5


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


def _check_latents(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    if not chosen['attention.latent.kv_rank']:
        for name in ('attention.latent.q_rank', 'attention.latent.d_rope', 'attention.latent.d_nope'):
            if said.get(name):
                raise UserError(
                    f'model.{name} = {said[name]} belongs to latent attention, but there is none\n'
                    'give model.attention.latent.kv_rank, or leave it out'
                )
        chosen.update({f'attention.latent.{name}': 0 for name in ('q_rank', 'd_rope', 'd_nope')})  # of a preset
        return
    chosen['attention.latent.d_nope'], chosen['attention.latent.d_rope'] = (
        chosen['attention.latent.d_nope'] or chosen['attention.d_head'],
        chosen['attention.latent.d_rope'] or 64,
    )
    without = {
        'attention.n_kv_heads': chosen['attention.n_kv_heads'] == chosen['attention.n_heads'],
        'positions': chosen['positions'] == 'rope',
        'attention.qk_norm': chosen['attention.qk_norm'] == 'none', 'attention.window': not chosen['attention.window'],
        'bias': not chosen['bias'],
        'attention.temperature': not chosen['attention.temperature'],
        'attention.qkv_bias': not chosen['attention.qkv_bias'], 'rope.fraction': chosen['rope.fraction'] == 1,
    }  # fmt: skip
    _refuse(
        chosen,
        without,
        f'latent attention (model.attention.latent.kv_rank = {chosen["attention.latent.kv_rank"]}), which '
        'has rope, a key and a value for each query head, and no window or bias\n'
        'leave it out, or use model.attention.latent=null',
    )
    if chosen['attention.latent.d_rope'] % 2:
        raise UserError(
            f'model.attention.latent.d_rope = {chosen["attention.latent.d_rope"]} is odd, but rope rotates pairs\n'
            'use an even d_rope'
        )


def _check_layer_types(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    types, n_layers = chosen['layer_types'], chosen['n_layers']
    if not types or len(types) > n_layers:
        raise UserError(
            f'model.layer_types has {len(types)} entries for model.n_layers = {n_layers}\n'
            'give one for each layer, or fewer, which repeat'
        )
    if 'window' in types and not chosen['attention.window']:
        raise UserError('model.layer_types gives layers a window, but there is none\ngive model.attention.window')
    if 'window' not in types:
        if said.get('attention.window'):
            raise UserError(
                f'model.attention.window = {said["attention.window"]}, and model.layer_types gives no layer a window\n'
                "give model.layer_types a 'window', or leave out model.attention.window"
            )
        chosen['attention.window'] = 0  # of a family or preset whose layers with a window were replaced
    if said.get('attention.global_every'):
        raise UserError(
            'model.attention.global_every and model.layer_types both say which layers have a window\n'
            'leave out one of them'
        )
    chosen['attention.global_every'] = 0


def _check_experts(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    n_experts, per_token = chosen['experts.n_experts'], chosen['experts.experts_per_token']
    if not n_experts:
        for name in _options_in(said, _EXPERTS):
            if name != 'experts.n_experts' and said[name] and (name, said[name]) != ('experts.every', 1):
                raise UserError(
                    f'model.{name} = {said[name]} applies to experts, but there are none\n'
                    'set model.experts.n_experts, or leave it out'
                )
        chosen.update(NO_EXPERTS)  # a preset whose experts were turned off
        return
    if n_experts == 1 or per_token > n_experts:
        raise UserError(
            f'model.experts.n_experts = {n_experts} with model.experts.experts_per_token = {per_token}\n'
            'use at least 2 experts, and no more experts per token than experts; model.experts.n_experts=0 is one '
            'feed-forward'
        )
    if not chosen['feed_forward.d_ff']:
        raise UserError(
            f'model.experts.n_experts = {n_experts} with model.feed_forward.d_ff = 0: experts without a width\n'
            'give model.feed_forward.d_ff, the width of an expert, or use model.experts.n_experts=0'
        )
    if chosen['feed_forward.activation'] in UNGATED:
        raise UserError(
            f'model.feed_forward.activation = {chosen["feed_forward.activation"]}: experts always have a gate\n'
            'use model.feed_forward.activation=swiglu'
        )
    if chosen['feed_forward.bias'] and chosen['experts.router.weigh_inputs']:
        raise UserError(
            'model.feed_forward.bias = true: experts whose inputs are weighed have no biases here\n'
            'use model.feed_forward.bias=false or model.experts.router.weigh_inputs=false'
        )
    if chosen['feed_forward.bias'] and chosen['experts.d_shared']:
        raise UserError(
            'model.feed_forward.bias = true: a shared expert has no biases here\n'
            'use model.feed_forward.bias=false or model.experts.d_shared=0'
        )
    if chosen['experts.shared_gate'] and not chosen['experts.d_shared'] and said.get('experts.shared_gate'):
        raise UserError(
            'model.experts.shared_gate = True, but there is no shared expert\ngive model.experts.d_shared, its width'
        )
    chosen['experts.shared_gate'] = chosen['experts.shared_gate'] and chosen['experts.d_shared'] > 0
    if said.get('experts.router.bias_rate') and not chosen['experts.router.bias']:
        raise UserError(
            f'model.experts.router.bias_rate = {said["experts.router.bias_rate"]} moves the biases of routers, but '
            'there are none\n'
            'use model.experts.router.bias=true'
        )
    _check_groups(chosen)
    _check_dense_layers(chosen, said)


def _check_groups(chosen: dict[str, Any]) -> None:
    n_experts, groups, used = (
        chosen['experts.n_experts'],
        chosen['experts.router.n_groups'],
        chosen['experts.router.groups_per_token'],
    )
    if n_experts % groups:
        raise UserError(
            f'model.experts.n_experts = {n_experts} is not divisible by model.experts.router.n_groups = {groups}'
        )
    if used > groups:
        raise UserError(
            f'model.experts.router.groups_per_token = {used} of model.experts.router.n_groups = {groups}\n'
            f'use at most {groups}'
        )
    if chosen['experts.experts_per_token'] > used * n_experts // groups:
        raise UserError(
            f'model.experts.experts_per_token = {chosen["experts.experts_per_token"]}, but {used} of {groups} groups '
            'have '
            f'{used * n_experts // groups} experts\n'
            'use a larger model.experts.router.groups_per_token, or fewer experts per token'
        )
    if chosen['experts.router.group_scores'] == 'top2' and n_experts == groups:
        raise UserError(
            'model.experts.router.group_scores = top2: a group has one expert\n'
            'use fewer groups (model.experts.router.n_groups), or max'
        )


def _check_dense_layers(chosen: dict[str, Any], said: dict[str, Any]) -> None:
    n_layers, every, dense = chosen['n_layers'], chosen['experts.every'], chosen['experts.dense_layers']
    if isinstance(dense, tuple) and (wrong := [i for i in dense if i >= n_layers]):
        raise UserError(f'model.experts.dense_layers names layer {wrong[0]}, and the layers are 0 to {n_layers - 1}')
    dense = tuple(range(min(dense, n_layers))) if isinstance(dense, int) else tuple(sorted(set(dense)))
    chosen['experts.dense_layers'] = dense
    with_experts = [i for i in range(n_layers) if has_experts(i, dense, every)]
    if not with_experts:
        raise UserError(
            f'model.experts.dense_layers and model.experts.every leave none of the {n_layers} layers with experts\n'
            'use fewer dense layers, or model.experts.n_experts=0'
        )
    if len(with_experts) == n_layers:
        if said.get('experts.d_ff_dense'):
            raise UserError(
                'model.experts.d_ff_dense is the width of layers without experts, but there are none\n'
                'give model.experts.dense_layers'
            )
        chosen['experts.d_ff_dense'] = 0
    elif not chosen['experts.d_ff_dense']:
        chosen['experts.d_ff_dense'] = (
            chosen['experts.experts_per_token'] * chosen['feed_forward.d_ff'] + chosen['experts.d_shared']
        )


def has_experts(i: int, dense_layers: tuple[int, ...], expert_every: int) -> bool:
    """Whether layer i, from 0, of a decoder with experts has them."""
    return i not in dense_layers and (i + 1) % expert_every == 0


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
    chosen = {
        'attention.n_kv_heads': chosen.get('attention.n_heads'),
        **DEFAULTS,
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
            f'{chosen["recurrent.n_key_heads"]}'
        )
